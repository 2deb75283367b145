"""Files as each program writes them become rollouts: what is in them arrives, and nothing else."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolltape
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


def trajectory(**fields: Any) -> dict[str, Any]:
    """A trajectory of ATIF 1.8: two calls of a model, one of which used a tool."""
    call = {"tool_call_id": "c1", "function_name": "run", "arguments": {"cmd": "ls"}}
    return {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": "t1",
        "session_id": "s1",
        "agent": {"name": "terminus-2", "version": "2", "model_name": "qwen3"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "List the files."},
            {
                "step_id": 2,
                "source": "agent",
                "timestamp": "2026-01-01T00:00:00Z",
                "message": "",
                "tool_calls": [call],
                "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}]},
                "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [10, 11], "logprobs": [-0.5, -0.25]},
            },
            {
                "step_id": 3,
                "source": "agent",
                "message": "There is a.txt.",
                "metrics": {"prompt_token_ids": [1, 2, 10, 11, 3], "completion_token_ids": [12], "logprobs": [-1.0]},
            },
        ],
        **fields,
    }


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


def trace() -> dict[str, Any]:
    """A trace of verifiers 0.4: two branches, the second after a compaction."""

    def node(parent: int | None, message: dict[str, Any], ids: list[int], sampled: int = 0) -> dict[str, Any]:
        mask = [False] * (len(ids) - sampled) + [True] * sampled
        logprobs = [-0.5] * sampled
        return {
            "parent": parent,
            "message": message,
            "sampled": sampled > 0,
            "token_ids": ids,
            "mask": mask,
            "logprobs": logprobs,
        }

    compacted, other = {"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Done."}
    return {
        "id": "trace-1",
        "task": {"type": "Sum", "data": {"idx": 0, "prompt": "2 + 2?"}, "key": "k"},
        "agent": {"name": "agent", "trainable": True},
        "nodes": [
            node(None, QUESTION, [1, 2]),
            node(0, ANSWER, [3, 10, 11], 2),
            node(None, compacted, [1, 4]),
            node(2, other, [3, 12, 11], 2),
        ],
        "calls": [{"node": 1, "model": "qwen3", "finish_reason": "stop"}],
        "rewards": {"correct": {"score": 1.0, "weight": 2.0}},
        "stop_condition": "agent_completed",
        "errors": [],
    }


def episode(**fields: Any) -> dict[str, Any]:
    return {"id": "episode-1", "env": {"id": "sums"}, "ok": True, "errors": [], "traces": [trace()], **fields}


def test_verifiers_episodes_give_a_turn_for_each_sampled_message(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "traces.jsonl", [episode()])
    assert guess(file) == {"verifiers": "traces of version 1"}
    imported("verifiers", file, tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout("trace-1")
    assert (rollout.reward, rollout.head.source, rollout.head.task_id) == (2.0, "sums", "0")
    assert sorted(trained(rollout)) == [[10, 11], [12, 11]]


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


def token_export() -> dict[str, Any]:
    return {
        "schema_version": 1,
        "step": 3,
        "rank": 0,
        "export_sequence_idx": 0,
        "env_name": "sums",
        "token_ids": [1, 2, 3, 10, 11],
        "loss_mask": [False, False, False, True, True],
        "inference_logprobs": [0.0, 0.0, 0.0, -0.5, -0.5],
        "advantages": [0.0, 0.0, 0.0, 0.25, 0.25],
    }


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
    names = "cursor run_id run_attempt split iteration group_idx traj_idx purpose policy_version created_at"
    columns = [*names.split(), "prompt_tokens", "sampled_tokens", "logprobs", "metadata"]
    connection = sqlite3.connect(tmp_path / "capture.db")
    connection.execute(f"CREATE TABLE wire_rows ({', '.join(columns)})")
    place = ("run", 0, "train", 4, 1, 2, None, "v4", 100.0)
    for cursor, prompt, sampled in ((1, "[1, 2]", "[10, 11]"), (2, "[1, 2, 10, 11, 3]", "[12]")):
        logprobs = json.dumps([-0.5] * len(json.loads(sampled)))
        marks = ", ".join("?" * len(columns))
        connection.execute(f"INSERT INTO wire_rows VALUES ({marks})", (cursor, *place, prompt, sampled, logprobs, None))
    connection.commit()
    connection.close()
    assert guess(tmp_path / "capture.db") == {"tinker": "a capture database"}
    imported("tinker", tmp_path / "capture.db", tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout("run-train-4-1-2")
    assert (trained(rollout), rollout.head.step, rollout.head.attempt) == ([[10, 11, 12]], 4, 2)
    assert rolltape.read(tmp_path / "run").index()[0].versions == ("v4",)


def test_tinker_rollout_summaries(tmp_path: Path) -> None:
    step = {
        "step_idx": 0,
        "ob_len": 9,
        "ac_len": 4,
        "reward": 0.5,
        "episode_done": True,
        "metrics": {},
        "logs": {"q": "?"},
    }
    row = {"schema_version": 1, "split": "train", "iteration": 4, "group_idx": 1, "traj_idx": 0, "tags": ["math"]}
    row |= {"total_reward": 1.5, "final_reward": 1.0, "trajectory_metrics": {}, "steps": [step], "final_ob_len": 13}
    file = write_lines(tmp_path / "train_rollout_summaries.jsonl", [row])
    assert guess(file) == {"tinker": "rollout summaries"}
    imported("tinker", file, tmp_path / "run")
    rollout = only(tmp_path / "run")
    assert (rollout.reward, rollout.turns[0].facts.reward, rollout.head.tags) == (1.5, 0.5, ("math",))


def span(name: str, start: int, **attributes: str) -> dict[str, Any]:
    values = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
    times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 10**9)}
    return {"traceId": "ab" * 16, "spanId": name, "name": name, **times, "attributes": values}


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


def test_a_source_of_another_kind_makes_no_run(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ImportFileError, match=r"t\.json: its schema_version is not ATIF-v1\.x"):
        imported("atif", tmp_path / "t.json", tmp_path / "run")
    with pytest.raises(ImportFileError, match="'sliem' is no kind of source; known are areal"):
        imported("sliem", tmp_path / "t.json", tmp_path / "run")
