"""JSON lines as prime-rl writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Cli, rows
from rolltape.errors import DamagedTapeError
from rolltape.records.token_record import TOKEN_COLUMNS
from rolltape.tokens import Dppo, Format, list_steps, read_tokens
from rolltape.tokens.primerl import _FIELDS, _OWN_FIELDS
from token_batches import exported, packed, sequence_columns

# The fields of prime-rl's records, schema version 1, in its order.
PRIMERL_FACTS = (
    "schema_version",
    "step",
    "export_step",
    "rank",
    "micro_step",
    "micro_sequence_idx",
    "export_sequence_idx",
    "run_id",
    "env_name",
)
PRIMERL_COLUMNS = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "advantages",
    "rewards",
    "inference_logprobs",
    "trainer_logprobs",
    "entropy",
    "mismatch_kl",
    "log_importance_ratio",
    "importance_ratio",
    "prob_delta",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)


def lines(run: Path, *batches: Any, **options: Any) -> list[dict[str, Any]]:
    exported(run, *batches, file_format=Format.JSONL, **options)
    text = (run / "token_exports" / "step_7" / "rank_0.jsonl").read_text()
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in text.splitlines()
    ]


def test_lines_have_prime_rls_fields_first(tmp_path: Path) -> None:
    sequences = [sequence_columns(length, trained=[True] * length) for length in (4, 2)]
    rows = lines(tmp_path, packed(sequences, env_names=["math", "code"], sample_ids=["a", "b"]), loss=Dppo())
    for place, row in enumerate(rows):
        assert tuple(row)[: len(PRIMERL_FACTS) + len(PRIMERL_COLUMNS)] == PRIMERL_FACTS + PRIMERL_COLUMNS
        assert {len(row[name]) for name in PRIMERL_COLUMNS} == {len(sequences[place]["ids"])}
        assert row["token_ids"] == sequences[place]["ids"].tolist()
        assert row["importance_ratio"] == pytest.approx(
            (sequences[place]["trainer_logprobs"] - sequences[place]["inference_logprobs"]).exp().tolist()
        )
    assert [row["export_sequence_idx"] for row in rows] == [0, 1]
    assert [(row["env_name"], row["sample_id"]) for row in rows] == [("math", "a"), ("code", "b")]
    assert (tmp_path / "token_exports" / "step_7" / "STABLE").exists()


def test_what_is_not_finite_or_not_there_is_null(tmp_path: Path) -> None:
    columns = sequence_columns(3, trained=[True] * 3)
    columns["inference_logprobs"] = torch.tensor([float("-inf"), float("nan"), -0.5])
    batch, outputs = packed([{name: columns[name] for name in columns if name != "ref_kl_weights"}], rewards=[2.0])
    del outputs["entropy"]
    (row,) = lines(tmp_path, (batch, outputs))
    assert row["inference_logprobs"] == [None, None, -0.5]
    assert row["importance_ratio"][:2] == [None, None]
    assert row["entropy"] == row["ref_kl_weights"] == row["is_masked"] == [None] * 3
    assert row["rewards"] == [2.0] * 3


def test_a_trainer_without_a_finite_logprob_is_read_back(tmp_path: Path) -> None:
    columns = {**sequence_columns(3, trained=[True] * 3), "trainer_logprobs": torch.full((3,), float("nan"))}
    (record,) = exported(tmp_path, packed([columns]), file_format=Format.JSONL)
    assert str(record.trainer_logprobs.tolist()) == "[nan, nan, nan]"


def test_every_column_has_a_field() -> None:
    assert {*_FIELDS.values(), *_OWN_FIELDS.values()} == set(TOKEN_COLUMNS)


def test_parts_become_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.tokens.pipeline.PART_TOKENS", 10)
    rows = lines(tmp_path, *[packed([sequence_columns(8, trained=[True] * 8)] * 3) for _ in range(4)], threads=3)
    assert [row["export_sequence_idx"] for row in rows] == list(range(12))
    assert [path.name for path in (tmp_path / "token_exports" / "step_7").glob(".rank*")] == []


def test_what_prime_rl_wrote_can_be_read(tmp_path: Path) -> None:
    (row,) = lines(tmp_path / "ours", packed([sequence_columns(4, trained=[True] * 4)]), loss=Dppo())
    folder = tmp_path / "theirs" / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    theirs = {name: row[name] for name in PRIMERL_FACTS + PRIMERL_COLUMNS if name != "rewards"}
    (folder / "rank_2.jsonl").write_text(json.dumps({**theirs, "step": 40, "export_step": 3, "rank": 2}) + "\n")
    (step,) = list_steps(tmp_path / "theirs")
    assert not step.stable
    (folder / "STABLE").touch()
    (step,) = list_steps(tmp_path / "theirs")
    assert step.stable
    (record,) = read_tokens(tmp_path / "theirs")
    assert record.place == "3.2.0"
    assert record.rewards is None
    assert record.ids.tolist() == row["token_ids"]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    (folder / "rank_0.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(DamagedTapeError, match=r"rank_0\.jsonl, line 1: not a token record"):
        list(read_tokens(tmp_path))


@pytest.mark.parametrize("change", [{"trainer_logprobs": None}, {"loss_mask": None}, {"token_ids": [2**40] * 4}])
def test_a_line_without_what_every_record_has_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    (row,) = lines(tmp_path, packed([sequence_columns(4, trained=[True] * 4)]))
    folder = tmp_path / "theirs" / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    (folder / "rank_0.jsonl").write_text(json.dumps({**row, **change}) + "\n")
    with pytest.raises(DamagedTapeError, match="line 1: not a token record"):
        list(read_tokens(tmp_path / "theirs"))


def test_how_many_tokens_are_in_prime_rls_own_files_is_not_made_up(tmp_path: Path, cli: Cli) -> None:
    lines(tmp_path, packed([sequence_columns(4, trained=[True] * 4)]), loss=Dppo())
    for marker in (tmp_path / "token_exports" / "step_7").glob("*.done"):
        marker.unlink()  # which prime-rl does not write
    (row,) = rows(cli("tokens", tmp_path, "--json"))
    assert (row["records"], row["tokens"]) == (1, None)
    assert cli("tokens", tmp_path).out.splitlines()[1].split()[:4] == ["7", "stable", "1", "0.0"]
