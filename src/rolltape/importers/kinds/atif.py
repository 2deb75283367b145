"""Harbor's trajectories (ATIF): steps with messages, tool calls and observations, and ids where they are recorded.

Sub-agents' trajectories are further sessions. The reward is that of the trial, from the `result.json` beside it.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rolltape.errors import ImportFileError
from rolltape.importers.files import first_object, json_document, of_each_file
from rolltape.importers.imported import BrokenEntry, Found, ImportedRollout, ImportedSession, ImportOptions, or_broken

_SCHEMA = "ATIF-v1"


def recognize(path: Path) -> str | None:
    """A document whose `schema_version` is ATIF's."""
    file = next(iter(sorted(path.rglob("trajectory*.json"))), None) if path.is_dir() else path
    document = first_object(file) if file is not None and file.suffix == ".json" else None
    version = document.get("schema_version") if document else None
    return f"a trajectory of {version}" if isinstance(version, str) and version.startswith(_SCHEMA) else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per trajectory file. Of a folder, all JSON files that are trajectories."""

    def read(file: Path) -> Found:
        document = json_document(file)
        if isinstance(document, dict) and str(document.get("schema_version", "")).startswith(_SCHEMA):
            yield or_broken(file.name, partial(_rollout, document, file, options))
        elif file == path:
            yield BrokenEntry(file.name, f"its schema_version is not {_SCHEMA}.x")

    return of_each_file(path, ".json", read=read)


def _rollout(document: dict[str, Any], file: Path, options: ImportOptions) -> ImportedRollout:
    agents = [document, *(document.get("subagent_trajectories") or ())]
    sessions = [_session(one, file.name, options) for one in agents]
    turns = [turn for session in sessions for turn in session.turns]
    absent = ["weight versions"]
    if not all("sampled_ids" in turn for turn in turns):
        absent.append("token ids")
    if not all(turn.get("logprobs") for turn in turns):
        absent.append("logprobs")
    trial = _trial(file)
    rewards = (trial.get("verifier_result") or {}).get("rewards") or {}
    reward = rewards.get("reward") if "reward" in rewards else next(iter(rewards.values()), None)
    own = (document.get("trajectory_id"), document.get("session_id"), trial.get("id"), trial.get("trial_name"))
    first = next((step["message"] for step in document["steps"] if step["source"] == "user"), None)
    agent = document["agent"]
    return ImportedRollout(
        where=file.name,
        sessions=sessions,
        key=document.get("trajectory_id") or trial.get("id"),
        foreign_ids=tuple(dict.fromkeys(str(one) for one in own if one)),
        task_id=trial.get("task_name"),
        task=None if trial.get("task_name") else {"prompt": first},
        source=options.source or trial.get("source"),
        split=options.split,
        step=options.step or 0,
        model=options.model or agent.get("model_name"),
        agent=agent["name"],
        extra={name: document[name] for name in ("notes", "final_metrics", "extra") if document.get(name)},
        reward=None if reward is None else float(reward),
        reward_terms={name: float(value) for name, value in rewards.items()},
        failed=(trial.get("exception_info") or {}).get("exception_message") if not rewards else None,
        absent=tuple(sorted(absent)),
    )


def _session(document: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedSession:
    messages: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for step in document["steps"]:
        if step["source"] != "agent":
            messages.append({"role": step["source"], "content": step["message"]})
            continue
        reply = _reply(step)
        # Copied context was sampled in another trajectory, and a step without a model call by nobody.
        if not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            turns.append(_turn(step, list(messages), reply))
        messages.append(reply)
        for result in (step.get("observation") or {}).get("results", ()):
            call = result.get("source_call_id")
            content = result.get("content") or ""
            messages.append(
                {"role": "tool", "tool_call_id": call, "content": content}
                if call
                else {"role": "user", "content": content}
            )
    if not turns:
        raise ImportFileError(f"{where}: no step of it is an agent's")
    extra = {name: document[name] for name in ("trajectory_id", "session_id") if document.get(name)}
    tools = document["agent"].get("tool_definitions")
    return ImportedSession(turns=turns, tools=tools, tokenizer=options.tokenizer, extra=extra)


def _reply(step: Mapping[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": step["message"]}
    if step.get("reasoning_content"):
        reply["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        reply["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {"name": call["function_name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in step["tool_calls"]
        ]
    return reply


def _turn(step: Mapping[str, Any], messages: list[dict[str, Any]], reply: dict[str, Any]) -> dict[str, Any]:
    metrics = step.get("metrics") or {}
    turn: dict[str, Any] = {"prompt_messages": messages, "reply": reply, "finish": "stop"}
    if step.get("model_name"):
        turn["model"] = step["model_name"]
    if step.get("timestamp"):
        turn["ended_at"] = datetime.fromisoformat(step["timestamp"].replace("Z", "+00:00")).timestamp()
    ids, prompt = metrics.get("completion_token_ids"), metrics.get("prompt_token_ids")
    # Of several calls in one step the numbers are sums, and their ids are not one reply's.
    if ids and prompt is not None and (step.get("llm_call_count") or 1) == 1:
        logprobs = metrics.get("logprobs")
        turn |= {"prompt_ids": prompt, "sampled_ids": ids, "logprobs": logprobs or [None] * len(ids)}
        return turn
    return {**turn, "token_faithful": False}


def _trial(file: Path) -> dict[str, Any]:
    """What Harbor wrote about the trial: in the trial's folder, of which the trajectory lies in `agent/`."""
    for folder in (file.parent, file.parent.parent):
        result = folder / "result.json"
        if result.is_file():
            document = json_document(result)
            if isinstance(document, dict) and "trial_name" in document:
                return document
    return {}
