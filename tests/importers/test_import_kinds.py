"""Files as each program writes them become rollouts: what is in them arrives, and nothing else."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolltape
from import_sources import capture_database, episode, rollout_summary, span, token_export, trace, trajectory
from importing import ANSWER, QUESTION, imported, write_lines
from rolltape.errors import ImportFileError
from rolltape.importers import guess
from rolltape.records.rollout import Rollout


def only(run: Path) -> Rollout:
    (rollout,) = rolltape.read(run).rollouts()
    return rollout


def texts(rollout: Rollout) -> list[tuple[str, str]]:
    return [(message.role.value, message.text) for message in rollout.turns[-1].messages.to_list()]


def trained(rollout: Rollout) -> list[list[int]]:
    """The ids that train, by sample."""
    return [sample.ids[sample.trained_mask].tolist() for sample in rolltape.linearize(rollout, "exact").samples()]


def test_verl(tmp_path: Path) -> None:
    row = {"input": "user\n2 + 2?", "output": "4", "gts": "4", "score": 1.0, "step": 7, "acc": True}
    file = write_lines(tmp_path / "7.jsonl", [row, {**row, "output": "5", "score": 0.0}])
    assert guess(file) == {"verl": "rows with input, output, and score"}
    imported("verl", tmp_path, tmp_path / "run")
    rows = rolltape.read(tmp_path / "run").index()
    assert [(one.step, one.attempt, one.reward) for one in rows] == [(7, 0, 1.0), (7, 1, 0.0)]
    assert rows[0].head.extra["acc"] is True


def test_a_row_without_its_step_says_that_the_step_is_absent(tmp_path: Path) -> None:
    row = {"input": "2 + 2?", "output": "4", "score": 1.0}
    (tmp_path / "dump").mkdir()
    write_lines(tmp_path / "dump" / "0.jsonl", [row, {**row, "step": 0}])
    report = imported("verl", tmp_path / "dump", tmp_path / "run")
    assert [one.step for one in rolltape.read(tmp_path / "run").index()] == [0, 0]
    assert (report.absent["steps"], report.absent["token ids"]) == (1, 2)


def test_areal(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "task_id": 3,
        "sample_idx": 0,
        "seqlen": 9,
        "prompt_len": 5,
        "head_version": 1,
        "tail_version": 2,
    }
    row |= {"reward": 0.5, "prompt": "2 + 2?", "completion": "4"}
    (tmp_path / "dump" / "2").mkdir(parents=True)
    write_lines(tmp_path / "dump" / "2" / "3.jsonl", [row])
    assert "areal" in guess(tmp_path / "dump")
    imported("areal", tmp_path / "dump", tmp_path / "run")
    rollout = only(tmp_path / "run")
    assert (rollout.head.step, rollout.reward, texts(rollout)) == (2, 0.5, [("user", "2 + 2?"), ("assistant", "4")])


@pytest.mark.parametrize(("functions", "reward"), [({"accuracy": 1.0}, 1.0), ({"accuracy": 1.0, "format": 0.5}, None)])
def test_trl(tmp_path: Path, functions: dict[str, float], reward: float | None) -> None:
    row = {"step": 4, "prompt": [QUESTION], "completion": [ANSWER], **functions, "advantage": 0.25}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "completions_00004.parquet")
    assert "trl" in guess(tmp_path / "completions_00004.parquet")
    imported("trl", tmp_path, tmp_path / "run")
    rollout = only(tmp_path / "run")
    assert (rollout.head.step, rollout.reward, rollout.head.extra["advantage"]) == (4, reward, 0.25)


def test_atif_with_ids_trains_and_has_the_reward_of_its_trial(tmp_path: Path) -> None:
    (tmp_path / "trial" / "agent").mkdir(parents=True)
    (tmp_path / "trial" / "agent" / "trajectory.json").write_text(json.dumps(trajectory()))
    result = {"id": "u1", "trial_name": "ls__1", "task_name": "ls", "verifier_result": {"rewards": {"reward": 1.0}}}
    (tmp_path / "trial" / "result.json").write_text(json.dumps(result))
    assert guess(tmp_path / "trial") == {"atif": "a trajectory of ATIF-v1.8"}
    imported("atif", tmp_path / "trial", tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout("ls__1")
    assert trained(rollout) == [[10, 11, 12]]
    assert (rollout.reward, rollout.head.task_id, rollout.head.agent) == (1.0, "ls", "terminus-2")
    assert texts(rollout) == [
        ("user", "List the files."),
        ("assistant", ""),
        ("tool", "a.txt"),
        ("assistant", "There is a.txt."),
    ]


def test_atif_sub_agents_are_sessions_and_copied_context_is_no_turn(tmp_path: Path) -> None:
    helper = trajectory(trajectory_id="t2")
    helper["steps"][1]["is_copied_context"] = True
    (tmp_path / "t.json").write_text(json.dumps(trajectory(subagent_trajectories=[helper])))
    imported("atif", tmp_path / "t.json", tmp_path / "run")
    assert [len(session.turns) for session in only(tmp_path / "run").sessions] == [2, 1]


def test_verifiers_episodes_give_a_turn_for_each_sampled_message(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "traces.jsonl", [episode()])
    assert guess(file) == {"verifiers": "traces of version 1"}
    imported("verifiers", file, tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout("trace-1")
    assert (rollout.reward, rollout.head.source, rollout.head.task_id) == (2.0, "sums", "0")
    assert sorted(trained(rollout)) == [[10, 11], [12, 11]]


def test_rewards_of_one_name_in_several_verifiers_traces_add_up(tmp_path: Path) -> None:
    traces = [trace(), {**trace(), "id": "trace-2", "rewards": {"correct": {"score": 0.5, "weight": 1.0}}}]
    imported("verifiers", write_lines(tmp_path / "traces.jsonl", [episode(traces=traces)]), tmp_path / "run")
    outcome = only(tmp_path / "run").outcome
    assert (outcome.reward, outcome.reward_terms) == (2.5, {"correct": 2.5})


def test_a_verifiers_episode_that_broke_is_failed_with_its_error(tmp_path: Path) -> None:
    error = {"type": "ProviderError", "message": "no route"}
    imported("verifiers", write_lines(tmp_path / "t.jsonl", [episode(ok=False, errors=[error])]), tmp_path / "run")
    rollout = only(tmp_path / "run")
    assert (rollout.status.value, rollout.outcome.reason, rollout.reward) == ("failed", "ProviderError: no route", None)


@pytest.mark.parametrize("parent", [-1, 0, 1])
def test_a_verifiers_trace_in_a_circle_is_a_broken_entry(tmp_path: Path, parent: int) -> None:
    broken = trace()
    broken["nodes"][0]["parent"] = parent
    file = write_lines(tmp_path / "t.jsonl", [episode(traces=[broken])])
    with pytest.raises(ImportFileError, match="does not stand before it"):
        imported("verifiers", file, tmp_path / "run")


def test_verifiers_results_of_earlier_versions(tmp_path: Path) -> None:
    row = {"example_id": 5, "prompt": [QUESTION], "completion": [ANSWER], "reward": 1.0, "metrics": {"exact": 1.0}}
    file = write_lines(tmp_path / "results.jsonl", [row, row])
    assert guess(file)["verifiers"] == "results with example_id and completion"
    imported("verifiers", file, tmp_path / "run")
    rows = rolltape.read(tmp_path / "run").index()
    assert [(one.task_id, one.attempt, one.outcome.reward_terms) for one in rows] == [
        ("5", 0, {"exact": 1.0}),
        ("5", 1, {"exact": 1.0}),
    ]


def test_prime_rl_token_exports_alone_and_joined_with_traces(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rank_0.jsonl", [token_export()])
    assert "prime-rl" in guess(file)
    imported("prime-rl", file, tmp_path / "alone")
    alone = only(tmp_path / "alone")
    assert (trained(alone), alone.head.step, alone.head.extra["advantage"], alone.reward) == ([[10, 11]], 3, 0.25, None)
    traces = write_lines(tmp_path / "traces.jsonl", [episode()])
    imported("prime-rl", file, tmp_path / "joined", traces=str(traces))
    joined = rolltape.read(tmp_path / "joined").rollout("prime-rl-3-0-0")
    assert (trained(joined), joined.reward, texts(joined)[-1]) == ([[10, 11]], 2.0, ("assistant", "4"))


def test_tinker_capture_databases(tmp_path: Path) -> None:
    capture_database(tmp_path / "capture.db")
    assert guess(tmp_path / "capture.db") == {"tinker": "a capture database"}
    imported("tinker", tmp_path / "capture.db", tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout("run-train-4-1-2")
    assert (trained(rollout), rollout.head.step, rollout.head.attempt) == ([[10, 11, 12]], 4, 2)
    assert rolltape.read(tmp_path / "run").index()[0].versions == ("v4",)


@pytest.mark.parametrize("name", ["capture 100%25 #1?.db", "ü.db"])
def test_a_capture_database_with_a_log_in_a_folder_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    file = capture_database(tmp_path / "from" / name)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    file.parent.chmod(0o555)  # root may write there all the same
    try:
        assert guess(file) == {"tinker": "a capture database"}
        assert imported("tinker", file, tmp_path / "run").imported == 1
    finally:
        file.parent.chmod(0o755)


def test_tinker_rollout_summaries(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "train_rollout_summaries.jsonl", [rollout_summary()])
    assert guess(file) == {"tinker": "rollout summaries"}
    imported("tinker", file, tmp_path / "run")
    rollout = only(tmp_path / "run")
    assert (rollout.reward, rollout.turns[0].facts.reward, rollout.head.tags) == (1.5, 0.5, ("math",))


def test_otel_spans_with_messages(tmp_path: Path) -> None:
    asked = [{"role": "user", "parts": [{"type": "text", "content": "2 + 2?"}]}]
    calls = {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 2, "b": 2}}
    reply = [{"role": "assistant", "parts": [calls], "finish_reason": "tool_call"}]
    result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "4"}]}
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "stop"}]
    first = {"gen_ai__operation__name": "chat", "gen_ai__request__model": "qwen3"}
    spans = [
        span("agent", 1, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="adder"),
        span(
            "two",
            3,
            **first,
            gen_ai__input__messages=json.dumps([*asked, *reply, result]),
            gen_ai__output__messages=json.dumps(answer),
        ),
        span("one", 2, **first, gen_ai__input__messages=json.dumps(asked), gen_ai__output__messages=json.dumps(reply)),
    ]
    file = tmp_path / "spans.json"
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))
    assert guess(file) == {"otel": "documents with resourceSpans"}
    imported("otel", file, tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout("ab" * 16)
    assert (rollout.head.agent, rollout.head.model, len(rollout.turns)) == ("adder", "qwen3", 2)
    assert texts(rollout) == [("user", "2 + 2?"), ("assistant", ""), ("tool", "4"), ("assistant", "4")]


def test_a_folder_of_spans_is_recognized_whatever_else_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(b"")
    (tmp_path / "spans.json").write_text(json.dumps({"resourceSpans": []}))
    assert guess(tmp_path) == {"otel": "documents with resourceSpans"}


def test_a_source_of_another_kind_makes_no_run(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ImportFileError, match=r"t\.json: its schema_version is not ATIF-v1\.x"):
        imported("atif", tmp_path / "t.json", tmp_path / "run")
    with pytest.raises(ImportFileError, match="'sliem' is not a kind of source; known are areal"):
        imported("sliem", tmp_path / "t.json", tmp_path / "run")
