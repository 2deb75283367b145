"""`rolltape tokens` on a run whose samples were trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

import rolltape
from commands import Cli, rows
from rolltape.records.sample import Sample
from rolltape.tokens import Dppo, TokenExporter


def samples_in(run: Path) -> list[Sample]:
    tape = rolltape.read(run)
    return [sample for rollout in tape.rollouts() for sample in rolltape.linearize(rollout).samples(advantage=1.0)]


def trained_on(
    run: Path,
    step: int = 1,
    *,
    shift: float = 0.1,
    world_size: int = 1,
    entropy: torch.Tensor | None = None,
    **changes: Any,
) -> list[Sample]:
    """Export the run's samples as a trainer would that gives every token more than the engine did."""
    samples = samples_in(run)
    inference = torch.cat([torch.from_numpy(sample.logprobs) for sample in samples])
    batch = {
        "input_ids": torch.cat([torch.from_numpy(sample.ids) for sample in samples]),
        "trained_mask": torch.cat([torch.from_numpy(sample.trained_mask) for sample in samples]),
        "inference_logprobs": inference,
        "advantages": torch.ones(len(samples)),
        "rewards": [sample.reward for sample in samples],
        "lengths": [len(sample.ids) for sample in samples],
        "sample_ids": [sample.id for sample in samples],
        **changes,
    }
    moved = torch.full_like(inference, shift)
    moved[3] = float("nan")
    moved[-1] = 1.0
    with TokenExporter(run, rank=0, world_size=world_size, loss=Dppo(mask_high=0.3)) as exporter:
        entropy = torch.ones(len(inference)) if entropy is None else entropy
        exporter.export(step, 0, batch, {"logprobs": inference + moved, "entropy": entropy})
        exporter.mark_stable(step)
    return samples


def test_steps_are_listed_with_their_state(cli: Cli, run: Path) -> None:
    trained_on(run)
    trained_on(run, step=2, world_size=2)
    result = cli("tokens", run)
    assert result.code == 0
    header, first, second, count = result.out.splitlines()
    assert header.split() == ["step", "state", "records", "tokens", "size", "missing"]
    assert first.split()[:4] == ["1", "stable", "3", "15"]
    assert second.split()[:8] == ["2", "not", "stable,", "1", "of", "2", "ranks", "3"]
    assert count == "2 steps"
    assert [(row["step"], row["stable"], row["writers"]) for row in rows(cli("tokens", run, "--json"))] == [
        (1, True, 1),
        (2, False, 2),
    ]


def test_records_of_a_step_are_listed(cli: Cli, run: Path, rollout_id: str) -> None:
    first, *_ = trained_on(run)
    result = cli("tokens", run, "--step", 1)
    header, line, *_, count = result.out.splitlines()
    assert header.split()[:2] == ["record", "sample"]
    assert line.split()[:5] == ["1.0.0", f"{rollout_id[:8]}{first.id[len(rollout_id) :]}", "1", "5", "2"]
    assert count == "3 records"
    listed = rows(cli("tokens", run, "--step", 1, "--json"))
    assert [row["sample"] for row in listed] == [sample.id for sample in samples_in(run)]
    assert listed[0]["mismatch_kl"] == pytest.approx(0.00517, rel=0.01)


def test_a_step_is_summed_up_over_trained_tokens(cli: Cli, run: Path) -> None:
    trained_on(run)
    (figures,) = rows(cli("tokens", run, "summary", "--json"))
    assert (figures["records"], figures["tokens"], figures["trained_tokens"]) == (3, 15, 4)
    assert figures["masked"] == figures["masked_high"] == 0.25, "exp(0) - exp(-1) is above 0.3"
    assert figures["masked_low"] == 0
    assert figures["entropy"] == 1
    assert figures["ratio_quantiles"][1] == pytest.approx(1.105, rel=1e-3)
    assert figures["worst"][0]["place"] == "1.0.2"
    assert figures["not_finite"] == 0, "the token whose ratio is not a number does not train"
    shown = cli("tokens", run, "summary").out
    assert "mismatch KL" in shown
    assert "25.0%" in shown


@pytest.mark.parametrize("by_sample", [False, True])
def test_a_record_is_shown_with_any_column(by_sample: bool, cli: Cli, run: Path) -> None:
    samples = trained_on(run)
    name = samples[1].id if by_sample else "1.0.1"
    result = cli("tokens", run, "show", name, "--column", "entropy", "--column", "position_ids")
    title, header, *tokens = result.out.splitlines()
    assert title == f"record 1.0.1: 7 tokens, 1 trained, reward 1, sample {samples[1].id}"
    assert header.split() == ["at", "turn", "token", "entropy", "position_ids"]
    assert tokens[0].split() == ["0", "0.1", "prompt", "1", "1", "0"]
    assert tokens[-1].split() == ["6", "0.1", "«20»", "1", "6"]
    (row,) = rows(cli("tokens", run, "show", name, "--column", "masked", "--json"))
    assert row["ids"] == samples[1].ids.tolist()
    assert row["masked"] == [False] * 7


def test_a_record_is_found_by_its_sample_as_lists_have_it(cli: Cli, run: Path) -> None:
    samples = trained_on(run)
    _, *listed = cli("tokens", run, "--step", 1).out.splitlines()
    for line, sample in zip(listed, samples, strict=False):
        name = line.split()[1]
        assert name != sample.id
        for spelled in (name, name.partition("@")[0], sample.id):
            assert cli("tokens", run, "show", spelled).out.splitlines()[0].endswith(f"sample {sample.id}")


def test_a_name_that_means_two_samples_is_refused(cli: Cli, run: Path, rollout_id: str) -> None:
    first, second, _ = trained_on(run)
    result = cli("tokens", run, "show", rollout_id[:8])
    assert result.code == 2
    assert f"RECORD {rollout_id[:8]}: matches {first.id} and {second.id}; give more of the id" in result.err


def test_of_a_sample_that_was_trained_on_twice_the_last_record_is_meant(cli: Cli, run: Path) -> None:
    trained_on(run, step=1)
    sample, *_ = trained_on(run, step=4)
    assert cli("tokens", run, "turns", sample.id).out.startswith("record 4.0.0: ")


def test_a_step_that_is_half_written_is_listed_as_such(cli: Cli, run: Path) -> None:
    trained_on(run)
    folder = run / "tokens" / "step_2"
    folder.mkdir()
    (folder / ".rank_3.abc.0.partial").touch()
    assert "not stable, 0 of ? ranks, 1 half-written" in cli("tokens", run).out
    assert rows(cli("tokens", run, "--json"))[1]["partial_ranks"] == [3]


def test_figures_of_a_turn_leave_out_what_is_not_finite(cli: Cli, run: Path) -> None:
    entropy = torch.ones(sum(len(sample.ids) for sample in samples_in(run)))
    first = samples_in(run)[0]
    entropy[int(first.trained_mask.nonzero()[0][0])] = float("nan")
    trained_on(run, entropy=entropy)
    (joined,) = rows(cli("tokens", run, "turns", "1.0.0", "--json"))
    assert [span["entropy"] for span in joined["spans"]] == [None, 1.0]


def test_every_column_can_be_asked_for(cli: Cli, run: Path) -> None:
    from rolltape.records.token_record import TOKEN_COLUMNS

    trained_on(run)
    for column in TOKEN_COLUMNS:
        assert cli("tokens", run, "show", "1.0.0", "--column", column).code == 0
        assert column in rows(cli("tokens", run, "show", "1.0.0", "--column", column, "--json"))[0]


def test_a_record_is_joined_to_its_turns_and_messages(cli: Cli, run: Path) -> None:
    trained_on(run)
    _, header, prompt, reply = cli("tokens", run, "turns", "1.0.0").out.splitlines()
    assert header.split() == ["turn", "tokens", "trained", "mismatch_kl", "masked", "entropy", "message"]
    assert prompt.split()[:4] == ["0.0", "prompt", "0-2", "0"]
    assert prompt.endswith('user: "fix it"')
    assert reply.endswith('assistant: "done  so"')
    (joined,) = rows(cli("tokens", run, "turns", "1.0.0", "--json"))
    asked, answered, *_ = joined["spans"]
    assert asked["messages"] == [{"role": "user", "content": "fix it"}]
    assert answered["turn"] == samples_in(run)[0].spans[-1].turn


def test_the_worst_tokens_come_with_the_text_around_them(cli: Cli, run: Path, tmp_path: Path) -> None:
    trained_on(run)
    header, worst, *_ = cli("tokens", run, "worst", "--limit", 2).out.splitlines()
    assert header.split()[:6] == ["record", "at", "turn", "inference", "trainer", "mismatch_kl"]
    assert worst.split() == ["1.0.2", "2", "0.0", "0.3679", "1.0000", "0.7183", "1", "2", "«30»", "assistant:", '"no"']
    vocabulary = {"fix": 1, "␣it": 2, "no": 30}
    Tokenizer(models.WordLevel(vocabulary, unk_token="fix")).save(str(tmp_path / "tokenizer.json"))
    told = cli("tokens", run, "worst", "--limit", 1, "--tokenizer", tmp_path / "tokenizer.json").out
    assert "fix ␣it «no»" in told
    (row,) = rows(cli("tokens", run, "worst", "--limit", 1, "--json"))
    assert (row["at"], row["id"], row["ids_around"]) == (2, 30, [1, 2, 30])
    assert row["turn"] == samples_in(run)[2].spans[-1].turn


def test_the_worst_are_by_any_column(cli: Cli, run: Path) -> None:
    trained_on(run)
    (row,) = rows(cli("tokens", run, "worst", "--limit", 1, "--column", "inference_logprobs", "--json"))
    assert row["inference_logprobs"] == -0.25


def test_ids_that_are_not_the_samples_are_noticed(cli: Cli, run: Path) -> None:
    samples = samples_in(run)
    trained_on(run, sample_ids=[samples[0].id, samples[2].id, samples[1].id])
    result = cli("tokens", run, "turns", "1.0.1")
    assert result.code == 0
    assert "token record 1.0.1: differs from sample" in result.err
    assert "at token 2 of 7" in result.err


def test_a_sample_id_of_0_1_0_is_joined_by_its_last_turn_and_its_ids(cli: Cli, run: Path) -> None:
    others = [sample.id.partition("@")[0] + "@mine-00000000" for sample in samples_in(run)]
    trained_on(run, sample_ids=others)
    result = cli("tokens", run, "worst", "--limit", 1)
    assert (result.code, result.err) == (0, "")
    assert 'assistant: "no"' in result.out


def test_a_sample_that_ends_with_no_turn_of_a_sample_is_shown_without_its_turns(cli: Cli, run: Path) -> None:
    samples = samples_in(run)
    others = [sample.id.partition("@")[0] + "7@mine-00000000" for sample in samples]
    trained_on(run, sample_ids=others)
    result = cli("tokens", run, "show", "1.0.0")
    assert result.code == 0
    assert f"there is no sample {others[0]}" in result.err
    assert "«10»" in result.out


def test_records_without_a_tape_are_shown_as_they_are(cli: Cli, run: Path, tmp_path: Path) -> None:
    trained_on(run)
    alone = tmp_path / "alone"
    (run / "tokens").rename(alone.parent / "moved")
    alone.mkdir()
    (alone.parent / "moved").rename(alone / "tokens")
    result = cli("tokens", alone, "worst", "--limit", 1)
    assert result.code == 0
    assert "turns and messages are not shown" in result.err
    assert "1 2 «30»" in result.out


def test_what_is_missing_is_said(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rolltape.tokens.exporter.write_parquet", full)
    trained_on(run)
    assert "step 1: 3 records dropped or lost" in cli("tokens", run).err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["show"], 2, "RECORD: name a record"),
        (["show", "1.0.9"], 2, "RECORD 1.0.9: no such token record"),
        (["show", "1.0.0", "--column", "lobprobs"], 2, "--column lobprobs: unknown column; columns are ids, "),
        (["worst", "--column", "ratio", "--column", "entropy"], 2, "--column: worst takes only one column"),
        (["--step", "7"], 2, "--step 7: no token records; the run has those of step 1"),
        (["sum"], 2, "'sum' is not one of"),
    ],
)
def test_mistakes_are_named(arguments: list[str], code: int, said: str, cli: Cli, run: Path) -> None:
    trained_on(run)
    result = cli("tokens", run, *arguments)
    assert (result.code, result.out) == (code, "")
    assert said in result.err


def test_a_run_without_token_records_says_so(cli: Cli, run: Path) -> None:
    result = cli("tokens", run)
    assert (result.code, result.out) == (3, "")
    assert "no token records; a trainer writes them" in result.err
