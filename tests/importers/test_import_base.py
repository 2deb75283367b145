"""What holds for every kind of import: once, named problems, nothing made up."""

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rolltape
from importing import ANSWER, QUESTION, imported, write_lines
from rolltape.cli import run as rolltape_command
from rolltape.errors import ImportFileError
from rolltape.importers import ImportReport, guess, import_run
from rolltape.importers.imported import BrokenEntry, ImportedRollout, ImportedSession, token_turns
from rolltape.importers.recording import record_imported
from rolltape.records.rollout import Status
from rolltape.records.sample import Fate
from rolltape.records.turn import TurnFlag


def test_the_same_import_twice_adds_nothing_and_a_longer_file_adds_what_is_new(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sft.jsonl", [{"messages": [QUESTION, ANSWER]}] * 3)
    assert imported("messages", file, tmp_path / "run").imported == 3
    again = imported("messages", file.rename(tmp_path / "renamed.jsonl"), tmp_path / "run")
    assert (again.imported, again.known) == (0, 3)
    longer = write_lines(tmp_path / "longer.jsonl", [{"messages": [QUESTION, ANSWER]}] * 4)
    assert imported("messages", longer, tmp_path / "run").imported == 1
    rows = rolltape.read(tmp_path / "run").index()
    assert sorted(row.attempt for row in rows) == [0, 1, 2, 3]
    assert len({row.group for row in rows}) == 1


def test_a_broken_line_ends_an_import_by_name_and_importing_again_goes_on_from_there(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, ANSWER]}, "{not json", {"messages": [QUESTION, {**ANSWER, "content": "5"}]}]
    file = write_lines(tmp_path / "sft.jsonl", rows)
    with pytest.raises(ImportFileError, match=r"sft\.jsonl, line 2: not valid JSON.*1 rollouts before it"):
        imported("messages", file, tmp_path / "run")
    report = imported("messages", file, tmp_path / "run", skip_broken=True)
    assert (report.imported, report.known) == (1, 1)
    assert [entry.where for entry in report.broken] == [f"{file}, line 2"]


@pytest.mark.parametrize("row", ["{not json", {"messages": 3}], ids=["no JSON", "no messages"])
def test_a_first_entry_that_is_broken_leaves_no_run_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: object
) -> None:
    file = write_lines(tmp_path / "sft.jsonl", [row, {"messages": [QUESTION, ANSWER]}])
    assert rolltape_command(["import", "messages", str(file), str(tmp_path / "run")]) == 2
    assert f"{file}, line 1: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert rolltape_command(["import", "messages", str(file), str(tmp_path / "run"), "--skip-broken"]) == 0
    assert len(rolltape.read(tmp_path / "run").index()) == 1


def test_a_rollout_whose_turns_are_refused_is_recorded_as_failed_and_replaced_by_the_next_import(
    tmp_path: Path,
) -> None:
    good = ImportedRollout(where="one", key="one", task_id="t", sessions=[ImportedSession(turns=ids_turns([1, 2]))])
    bad = ImportedRollout(where="one", key="one", task_id="t", sessions=[ImportedSession(turns=ids_turns([-1, 2]))])
    with rolltape.open(tmp_path / "run") as tape:
        report = record_imported(tape, "made-up", [bad], skip_broken=True)
        assert "lies in" in report.broken[0].problem
        assert record_imported(tape, "made-up", [good]).imported == 1
        assert record_imported(tape, "made-up", [good]).known == 1
    run = rolltape.read(tmp_path / "run")
    assert [(row.attempt, row.try_index, row.status) for row in run.index()] == [(0, 0, "failed"), (0, 1, "finished")]


def test_an_id_of_its_own_that_stands_twice_in_a_source_is_named(tmp_path: Path) -> None:
    one = ImportedRollout(where="line 1", key="x", task_id="t", sessions=[ImportedSession(turns=ids_turns([1]))])
    with rolltape.open(tmp_path / "run") as tape, pytest.raises(ImportFileError, match="the id x appears twice"):
        record_imported(tape, "made-up", [one, one])


def test_a_broken_entry_counts_also_between_good_ones(tmp_path: Path) -> None:
    one = ImportedRollout(where="line 1", task_id="t", sessions=[ImportedSession(turns=ids_turns([1]))])
    with rolltape.open(tmp_path / "run") as tape:
        report = record_imported(tape, "made-up", [BrokenEntry("line 0", "odd"), one], skip_broken=True)
    assert (report.imported, report.broken) == (1, [BrokenEntry("line 0", "odd")])


def test_a_masked_sequence_becomes_turns_that_train_just_what_the_mask_trains(tmp_path: Path) -> None:
    turns = token_turns([1, 2, 10, 11, 3, 12], [1, 1, 0, 1], where="here", logprobs=[-1.0, -2.0, 0.0, -3.0])
    one = ImportedRollout(where="here", task_id="t", sessions=[ImportedSession(turns=turns)], reward=1.0)
    with rolltape.open(tmp_path / "run") as tape:
        record_imported(tape, "made-up", [one])
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    (sample,) = rolltape.linearize(rollout, "exact").samples()
    assert sample.ids.tolist() == [1, 2, 10, 11, 3, 12]
    assert sample.trained_mask.tolist() == [False, False, True, True, False, True]
    assert sample.logprobs[sample.trained_mask].tolist() == [-1, -2, -3]


def test_what_the_source_lacks_is_absent_and_does_not_train(tmp_path: Path) -> None:
    turns = token_turns([1, 2, 10], [1], where="here")
    one = ImportedRollout(where="here", task_id="t", sessions=[ImportedSession(turns=turns)], absent=("logprobs",))
    with rolltape.open(tmp_path / "run") as tape:
        assert record_imported(tape, "made-up", [one]).absent == {"logprobs": 1}
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    assert rollout.head.extra["imported"]["absent"] == ["logprobs"]
    assert Fate.TRAINED not in rolltape.linearize(rollout, "exact").ledger.totals()
    assert rollout.status is Status.FINISHED


def test_text_without_ids_is_marked_as_such(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sft.jsonl", [{"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}])
    imported("messages", file, tmp_path / "run")
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    assert [turn.facts.flags for turn in rollout.turns] == [(TurnFlag.NOT_TOKEN_FAITHFUL,)] * 2
    assert [message.text for message in rollout.turns[1].messages.to_list()] == ["2 + 2?", "4", "2 + 2?", "4"]


def test_no_command_states_how_many_tokens_a_text_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported("messages", write_lines(tmp_path / "sft.jsonl", [{"messages": [QUESTION, ANSWER]}]), tmp_path / "run")
    for command in ("ls", "tree", "trace"):
        assert rolltape_command([command, str(tmp_path / "run")]) == 0
        shown = capsys.readouterr().out
        assert "sampled 0" not in shown
        assert "0 sampled" not in shown
    assert rolltape_command(["ledger", str(tmp_path / "run")]) == 0
    assert "1 turn without token ids: not trainable" in capsys.readouterr().out


def test_a_guess_names_the_kind_and_the_reason(tmp_path: Path) -> None:
    assert guess(write_lines(tmp_path / "a.jsonl", [{"messages": [QUESTION]}])) == {"messages": "rows with 'messages'"}
    assert guess(write_lines(tmp_path / "b.jsonl", [{"tokens": [1], "response_length": 1}])) == {
        "slime": "rows with tokens and response_length"
    }
    assert guess(write_lines(tmp_path / "c.jsonl", [{"x": 1}])) == {}
    with pytest.raises(ImportFileError, match="no such file"):
        guess(tmp_path / "missing.jsonl")


def ids_turns(ids: list[int]) -> list[dict[str, Any]]:
    return [{"prompt_messages": [], "prompt_ids": ids, "sampled_ids": [7], "logprobs": [-1.0], "finish": "stop"}]


def test_a_number_that_is_none_and_half_a_character_are_read_as_python_writes_them(tmp_path: Path) -> None:
    rows = ['{"input": "q", "output": "\\ud800", "score": NaN, "big": 1' + "0" * 30 + "}"]
    assert imported("verl", write_lines(tmp_path / "1.jsonl", rows), tmp_path / "run").imported == 1
    assert imported("verl", tmp_path / "1.jsonl", tmp_path / "run").known == 1
    (row,) = rolltape.read(tmp_path / "run").index()
    assert row.reward is not None
    assert math.isnan(row.reward)
    assert row.head.extra["big"] == 10**30


@pytest.mark.parametrize(
    ("kind", "name", "row"),
    [
        ("verl", "1.jsonl", {"input": "q", "output": "a", "score": 1.0, "step": "first"}),
        ("verl", "1.jsonl", {"input": "q", "output": "a", "score": 1.0, "gts": float("nan")}),
        ("slime", "1.jsonl", {"tokens": [1, None], "response_length": 1}),
        ("slime", "1.jsonl", {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": 3, "rollout_id": []}),
        ("prime-rl", "1.jsonl", {"step": "", "token_ids": [1], "loss_mask": [], "advantages": [0]}),
        (
            "tinker",
            "1.jsonl",
            {"split": 1, "iteration": 0, "group_idx": 0, "traj_idx": 0, "steps": [], "total_reward": 0},
        ),
        ("verifiers", "1.jsonl", {"id": "e", "traces": [{"id": "t", "nodes": [1]}]}),
        (
            "atif",
            "1.json",
            {"schema_version": "ATIF-v1.8", "agent": None, "steps": [{"source": "agent", "message": ""}]},
        ),
        ("otel", "1.json", {"resourceSpans": [{"scopeSpans": [{"spans": [3]}]}]}),
        ("messages", "1.jsonl", {"messages": [], "deep": "DEEP"}),
    ],
)
def test_any_value_in_any_place_is_a_broken_entry(tmp_path: Path, kind: str, name: str, row: dict[str, Any]) -> None:
    text = json.dumps(row).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    report = imported(kind, write_lines(tmp_path / name, [text]), tmp_path / "run", skip_broken=True)
    assert (report.imported, len(report.broken)) == (0, 1)


def test_a_file_that_cannot_be_read_is_skipped_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "1.json").write_text("{")
    (tmp_path / "dump" / "2.parquet").write_text("no table")
    write_lines(tmp_path / "dump" / "3.jsonl", [{"messages": [QUESTION, ANSWER]}])
    report = imported("messages", tmp_path / "dump", tmp_path / "run", skip_broken=True)
    broken = [str(tmp_path / "dump" / name) for name in ("1.json", "2.parquet")]
    assert (report.imported, [entry.where for entry in report.broken]) == (1, broken)
    with pytest.raises(ImportFileError, match="not a readable Parquet file"):
        imported("messages", tmp_path / "dump" / "2.parquet", tmp_path / "run", skip_broken=True)


def test_problems_name_the_path_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump" / "deep").mkdir(parents=True)
    write_lines(tmp_path / "dump" / "deep" / "1.jsonl", ["{"])
    monkeypatch.chdir(tmp_path)
    report = imported("messages", Path("dump"), Path("run"), skip_broken=True)
    assert [entry.where for entry in report.broken] == ["dump/deep/1.jsonl, line 1"]


def test_two_imports_at_once_record_each_rollout_once(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "m.jsonl", [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, QUESTION, ANSWER]}]
    )
    with (
        rolltape.open(tmp_path / "run") as tape,
        rolltape.open(tmp_path / "run") as other,
        ThreadPoolExecutor() as pool,
    ):
        second: list[Future[ImportReport]] = []

        def begin_the_other(report: ImportReport) -> None:
            if not second:
                second.append(pool.submit(import_run, "messages", file, other))

        first = import_run("messages", file, tape, progress=begin_the_other)
        assert (first.imported, second[0].result().known) == (2, 2)
