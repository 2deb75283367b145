"""verifiers' saved rollouts: `traces.jsonl` of its version 1, and `results.jsonl` of earlier ones.

A trace of version 1 is a graph of messages with the ids that each adds. Each sampled message is a turn.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rolltape.errors import ImportFileError
from rolltape.importers.files import first_object, json_lines, of_each_file
from rolltape.importers.imported import (
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    conversation_turns,
    each_rollout,
)
from rolltape.importers.text_dumps import ABSENT_FROM_TEXT, as_messages, number
from rolltape.records.rollout import StopReason

_STOPS = {"length": "length", "stop": "stop", "tool_calls": "stop"}
_OWN_RESULT = {"prompt", "completion", "reward", "metrics", "example_id", "tool_defs", "error", "trajectory"}


def recognize(path: Path) -> str | None:
    """Episodes with `traces`, traces with `nodes`, or rows with `example_id` and `completion`."""
    if path.is_dir():
        file = next((one for name in ("traces.jsonl", "results.jsonl") for one in sorted(path.rglob(name))), None)
    else:
        file = path if path.suffix == ".jsonl" else None
    row = first_object(file) if file is not None else None
    if row is None:
        return None
    if isinstance(row.get("traces"), list) or {"nodes", "rewards", "task"} <= row.keys():
        return "traces of version 1"
    return "results with example_id and completion" if {"example_id", "completion", "reward"} <= row.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per episode, trace, or row; an episode's traces are its sessions."""
    return each_rollout(of_each_file(path, ".jsonl", read=json_lines), partial(_rollout, options=options))


def _rollout(row: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedRollout:
    return (_episode if "traces" in row or "nodes" in row else _result)(row, where, options)


def _episode(row: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedRollout:
    traces = row.get("traces", [row])
    made = [session_of(trace, where, options) for trace in traces if trace.get("nodes")]
    task = row.get("task") or (traces[0]["task"] if traces else {})
    errors = [*row.get("errors", ()), *(error for trace in traces for error in trace.get("errors", ()))]
    failed = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors and not row.get("ok") else None
    if not made and failed is None:
        raise ImportFileError(f"{where}: none of its traces has a message")
    terms: dict[str, float] = {}
    for trace in traces:
        if (trace.get("agent") or {}).get("trainable", True):
            for name, reward in (trace.get("rewards") or {}).items():
                if reward is not None:  # several traces may have a reward of one name
                    worth = float(reward["score"]) * float(reward.get("weight", 1.0))
                    terms[name] = terms.get(name, 0.0) + worth
    data = task.get("data") or {}
    work = ((row.get("run") or {}).get("work")) or {}
    own_task = next((data[name] for name in ("id", "name", "idx") if data.get(name) is not None), task.get("key"))
    stop = next((trace.get("stop_condition") for trace in traces if trace.get("stop_condition")), None)
    return ImportedRollout(
        where=where,
        sessions=made,
        key=row["id"],
        foreign_ids=tuple(dict.fromkeys([row["id"], *(trace["id"] for trace in traces)])),
        task_id=None if own_task is None else str(own_task),
        task=data,
        **options.origin(
            source=(row.get("env") or {}).get("id") or None,
            split="eval" if work.get("type") == "eval" else None,
            step=int(work.get("step", 0)),
            model=next((call.get("model") for trace in traces for call in trace.get("calls", ())), None),
        ),
        extra={name: row[name] for name in ("group", "run", "env") if row.get(name)},
        reward=sum(terms.values()) if terms and failed is None else None,
        reward_terms=terms if failed is None else {},
        stop_reason=StopReason.MAX_TURNS if stop and "max_turns" in stop else StopReason.COMPLETED,
        reason=stop,
        failed=failed,
        absent=_absent(made),
    )


def session_of(trace: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedSession:
    """The turns of one trace: one for each message that the model sampled."""
    nodes = trace["nodes"]
    calls = {call["node"]: call for call in trace.get("calls", ()) if call.get("node") is not None}
    turns = [_turn(nodes, at, calls.get(at, {})) for at, node in enumerate(nodes) if node.get("sampled")]
    if not turns:
        raise ImportFileError(f"{where}: no message of trace {trace.get('id')} was sampled")
    tools = [{"type": "function", "function": tool} for tool in trace.get("tools", ())] or None
    extra = {name: trace[name] for name in ("id", "metrics", "info", "timing") if trace.get(name)}
    return ImportedSession(turns=turns, tools=tools, tokenizer=options.tokenizer, extra=extra)


def _turn(nodes: list[dict[str, Any]], at: int, call: Mapping[str, Any]) -> dict[str, Any]:
    path = []
    child, parent = at, nodes[at].get("parent")
    while parent is not None:
        if not 0 <= parent < child:  # verifiers appends children after their parents; a circle has no end
            raise ImportFileError(f"node {child} has the parent {parent}, which does not stand before it")
        path.append(nodes[parent])
        child, parent = parent, nodes[parent].get("parent")
    node = nodes[at]
    turn: dict[str, Any] = {
        "prompt_messages": [one["message"] for one in reversed(path)],
        "reply": node["message"],
        "finish": _STOPS.get(str(call.get("finish_reason")), "stop"),
        "sampling": {name: value for name, value in (call.get("sampling") or {}).items() if value is not None},
    }
    if node.get("timestamp"):
        turn["ended_at"] = float(node["timestamp"])
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    if not any(mask):
        return {**turn, "token_faithful": False}
    first = mask.index(True)
    before = [token for one in reversed(path) for token in one.get("token_ids") or ()]
    sampled = ids[first:]
    logprobs = node.get("logprobs") or [None] * len(sampled)
    return {**turn, "prompt_ids": [*before, *ids[:first]], "sampled_ids": sampled, "logprobs": logprobs}


def _result(row: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedRollout:
    messages = [*as_messages(row.get("prompt"), "user"), *as_messages(row.get("completion"), "assistant")]
    error = row.get("error")
    turns, rest = conversation_turns(messages, where)
    tools = row.get("tool_defs")
    extra = {name: value for name, value in row.items() if name not in _OWN_RESULT}
    reward = number(row.get("reward"))
    metrics = {name: value for name, value in (row.get("metrics") or {}).items() if number(value) is not None}
    return ImportedRollout(
        where=where,
        sessions=[
            ImportedSession(turns=turns, tools=[{"type": "function", "function": one} for one in tools or ()] or None)
        ],
        foreign_ids=(row["trajectory_id"],) if isinstance(row.get("trajectory_id"), str) else (),
        task_id=str(row["example_id"]) if row.get("example_id") is not None else None,
        task={"prompt": row.get("prompt"), "answer": row.get("answer")},
        **options.origin(source=row.get("task")),
        extra={**extra, **rest},
        reward=None if error else reward,
        reward_terms={} if error or reward is None else metrics,
        stop_reason=StopReason.MAX_TOKENS if row.get("is_truncated") else StopReason.COMPLETED,
        reason=row.get("stop_condition"),
        failed=str(error) if error else None,
        absent=ABSENT_FROM_TEXT,
    )


def _absent(sessions: list[ImportedSession]) -> tuple[str, ...]:
    turns = [turn for session in sessions for turn in session.turns]
    if not all("sampled_ids" in turn for turn in turns):
        return ABSENT_FROM_TEXT
    known = all(value is not None for turn in turns for value in turn["logprobs"])
    return ("weight versions",) if known else ("logprobs", "weight versions")
