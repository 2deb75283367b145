"""What each program that rolltape imports from writes: one small source of every kind."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from importing import ANSWER, QUESTION


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


def span(name: str, start: int, **attributes: str) -> dict[str, Any]:
    values = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
    times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 10**9)}
    return {"traceId": "ab" * 16, "spanId": name, "name": name, **times, "attributes": values}


def capture_database(path: Path) -> Path:
    """A capture database of tinker-cookbook: one trajectory of two samples."""
    names = "cursor run_id run_attempt split iteration group_idx traj_idx purpose policy_version created_at"
    path.parent.mkdir(exist_ok=True)
    columns = [*names.split(), "prompt_tokens", "sampled_tokens", "logprobs", "metadata"]
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE wire_rows ({', '.join(columns)})")
    place = ("run", 0, "train", 4, 1, 2, None, "v4", 100.0)
    for cursor, prompt, sampled in ((1, "[1, 2]", "[10, 11]"), (2, "[1, 2, 10, 11, 3]", "[12]")):
        logprobs = json.dumps([-0.5] * len(json.loads(sampled)))
        marks = ", ".join("?" * len(columns))
        connection.execute(f"INSERT INTO wire_rows VALUES ({marks})", (cursor, *place, prompt, sampled, logprobs, None))
    connection.commit()
    connection.close()
    return path


def rollout_summary() -> dict[str, Any]:
    """A line of tinker-cookbook's rollout summaries."""
    step = {
        "step_idx": 0,
        "ob_len": 9,
        "ac_len": 4,
        "reward": 0.5,
        "episode_done": True,
        "metrics": {},
        "logs": {"q": "?"},
    }
    row: dict[str, Any] = {
        "schema_version": 1,
        "split": "train",
        "iteration": 4,
        "group_idx": 1,
        "traj_idx": 0,
        "tags": ["math"],
    }
    return row | {
        "total_reward": 1.5,
        "final_reward": 1.0,
        "trajectory_metrics": {},
        "steps": [step],
        "final_ob_len": 13,
    }


def slime_sample(index: int, **fields: Any) -> dict[str, Any]:
    """A sample as `Sample.to_dict` of slime gives it (August 2026), as far as it is filled."""
    return {
        "group_index": index // 2,
        "index": index,
        "rollout_id": None,
        "prompt": [{"role": "user", "content": f"question {index // 2}"}],
        "tokens": [1, 2, 3, 10, 11, 4, 12],
        "response": "a reply",
        "response_length": 4,
        "label": "4",
        "reward": float(index % 2),
        "loss_mask": [1, 1, 0, 1],
        "weight_versions": ["7"],
        "rollout_log_probs": [-0.5, -0.25, 0.0, -0.125],
        "status": "completed",
        "metadata": {"level": 3},
        "remove_sample": False,
        **fields,
    }


def inspect_log(path: Path) -> Path:
    """A log with one sample, by Inspect's own writer."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec, write_eval_log
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser
    from inspect_ai.scorer import Score

    messages: list[Any] = [
        ChatMessageUser(content=QUESTION["content"]),
        ChatMessageAssistant(content=ANSWER["content"]),
    ]
    sample = EvalSample(
        id="sum", epoch=1, input="2 + 2?", target="4", messages=messages, scores={"match": Score(value="C")}, uuid="u1"
    )
    dataset, config = EvalDataset(name="sums", samples=1, sample_ids=["sum"]), EvalConfig()
    about = EvalSpec(created="2026-01-01T00:00:00+00:00", task="sums", dataset=dataset, model="qwen3", config=config)
    write_eval_log(EvalLog(status="success", eval=about, samples=[sample]), str(path))
    return path


def otlp_document() -> dict[str, Any]:
    """A trace of one model call."""
    said = {"gen_ai__input__messages": [("user", "2 + 2?")], "gen_ai__output__messages": [("assistant", "4")]}
    attributes = {
        name: json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in messages])
        for name, messages in said.items()
    }
    return {
        "resourceSpans": [{"scopeSpans": [{"spans": [span("one", 2, gen_ai__operation__name="chat", **attributes)]}]}]
    }


def write_source(kind: str, folder: Path) -> Path:
    """A small source of a kind, as its program writes it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "areal": ("3.jsonl", {"prompt": "2 + 2?", "completion": "4", "tail_version": 2, "reward": 0.5}),
        "messages": ("sft.jsonl", {"messages": [QUESTION, ANSWER]}),
        "prime-rl": ("rank_0.jsonl", token_export()),
        "tinker summaries": ("train_rollout_summaries.jsonl", rollout_summary()),
        "verifiers": ("traces.jsonl", episode()),
        "verl": ("7.jsonl", {"input": "2 + 2?", "output": "4", "score": 1.0, "step": 7}),
        "atif": ("trajectory.json", trajectory()),
        "otel": ("spans.json", otlp_document()),
        "slime lines": ("rows.jsonl", slime_sample(0)),
        "trl": ("completions_4.parquet", {"step": 4, "prompt": [QUESTION], "completion": [ANSWER], "advantage": 0.25}),
        "messages table": ("sft.parquet", {"messages": [QUESTION, ANSWER]}),
    }
    if kind == "inspect":
        return inspect_log(folder / "log.eval")
    if kind == "inspect json":
        return inspect_log(folder / "log.json")
    if kind == "tinker":
        return capture_database(folder / "capture.db")
    if kind == "slime":
        import torch

        torch.save({"rollout_id": 5, "samples": [slime_sample(0)]}, folder / "5.pt")
        return folder / "5.pt"
    name, row = rows[kind]
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    return path
