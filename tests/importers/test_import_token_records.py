"""Token exports of prime-rl, imported with what its trainer computed for each token."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rolltape
from commands import Cli, rows
from rolltape.tokens import Format, read_tokens, write_tokens


def line(sequence: int, ids: list[int], trained: list[int], shift: float = 0.1, **others: Any) -> dict[str, Any]:
    """A line as prime-rl's exporter writes it: no sample, no rollout, every column as long as the ids."""
    ours = [-0.5 * flag for flag in trained]
    theirs = [value + shift * flag for value, flag in zip(ours, trained, strict=True)]
    absent: list[None] = [None] * len(ids)
    return {
        "schema_version": 1,
        "step": 3,
        "export_step": 3,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": sequence,
        "export_sequence_idx": sequence,
        "run_id": None,
        "env_name": "sums",
        "token_ids": ids,
        "position_ids": list(range(len(ids))),
        "loss_mask": [bool(flag) for flag in trained],
        "advantages": [0.25 * flag for flag in trained],
        "rewards": absent,
        "inference_logprobs": ours,
        "trainer_logprobs": theirs,
        **dict.fromkeys(("entropy", "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta"), absent),
        **dict.fromkeys(("is_masked", "is_masked_high", "is_masked_low"), absent),
        **dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights"), absent),
        **others,
    }


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.fixture
def export(tmp_path: Path) -> Path:
    twice = [1, 2, 10, 11, 3, 12]
    return written(
        tmp_path / "token_exports" / "step_3" / "rank_0.jsonl",
        line(0, twice, [0, 0, 1, 1, 0, 1]),
        line(1, [1, 4, 13], [0, 0, 1], shift=0.2),
        line(2, twice, [0, 0, 1, 1, 0, 1], shift=0.3),
    )


def test_token_records_are_kept_with_the_samples_of_the_same_ids(cli: Cli, export: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("import", "prime-rl", export, run)
    assert "3 token records of its trainer" in result.out
    samples = {
        sample.id: sample
        for rollout in rolltape.read(run).rollouts()
        for sample in rolltape.linearize(rollout).samples()
    }
    records = list(read_tokens(run, step=3))
    assert {record.sample for record in records} == samples.keys()
    for record in records:
        sample = samples[str(record.sample)]
        assert record.rollout == sample.rollout
        assert record.ids.tolist() == sample.ids.tolist()
        assert record.trained_mask.tolist() == sample.trained_mask.tolist()
    shifts = sorted(
        round(float((one.trainer_logprobs - one.inference_logprobs)[one.trained_mask].mean()), 3)
        for one in records
        if one.inference_logprobs is not None
    )
    assert shifts == [0.1, 0.2, 0.3]
    assert cli("tokens", run, "check").code == 0, "the source has no rewards to hold advantages against"
    assert cli("check", run).code == 0
    assert [row["sample"] for row in rows(cli("tokens", run, "--step", 3, "--json"))] == [one.sample for one in records]


def test_the_same_export_twice_and_another_of_the_step_add_up(cli: Cli, export: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli("import", "prime-rl", export, run)
    assert rows(cli("import", "prime-rl", export, run, "--json"))[0]["token_records"] == 3
    other = written(tmp_path / "other" / "rank_1.jsonl", line(0, [1, 9, 14], [0, 0, 1], rank=1))
    cli("import", "prime-rl", other, run)
    records = list(read_tokens(run, step=3))
    assert len({record.sample for record in records}) == len(records) == 4


def test_the_step_is_the_runs_where_a_trainer_of_several_runs_counts_its_own(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = written(tmp_path / "rank_0.jsonl", line(0, [1, 4, 13], [0, 0, 1], step=40, export_step=7))
    cli("import", "prime-rl", file, run)
    assert [one.head.step for one in rolltape.read(run).rollouts()] == [7]
    assert [one.step for one in read_tokens(run)] == [7]


def test_lines_without_what_the_trainer_computed_are_imported_without_token_records(cli: Cli, tmp_path: Path) -> None:
    bare = line(0, [1, 4, 13], [0, 0, 1])
    del bare["trainer_logprobs"]
    result = cli("import", "prime-rl", written(tmp_path / "rank_0.jsonl", bare), tmp_path / "run")
    assert result.code == 0
    assert "1 rollout imported" in result.out
    assert "token record" not in result.out
    assert list(read_tokens(tmp_path / "run")) == []


def test_a_mask_that_is_not_the_tapes_is_found(cli: Cli, export: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli("import", "prime-rl", export, run)
    first, *others = read_tokens(run, step=3)
    changed = msgspec.structs.replace(first, trained_mask=first.trained_mask & False)
    write_tokens(run, 3, [changed, *others], file_format=Format.JSONL)
    result = cli("tokens", run, "check")
    assert result.code == 1
    assert "trained" in result.out
