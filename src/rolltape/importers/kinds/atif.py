"""Harbor's trajectories (ATIF): steps with messages, tool calls and observations, and ids where they are recorded.

Sub-agents' trajectories are further sessions. The reward is that of the trial, from the `result.json` beside it. A
trajectory that Rolltape wrote has the data without an ATIF field under `extra.rolltape`, so the original rollout is
restored.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ImportFileError
from rolltape.importers.files import first_file, first_object, json_document, of_each_file
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    function_call,
    or_broken,
    restored,
)
from rolltape.records.jsonable import decode_numbers
from rolltape.records.rollout import Status

_SCHEMA = "ATIF-v1"
# Settings of a session that Rolltape exported: its own, and those that its turns share.
_SETTINGS, _DEFAULTS = (
    ("tool_ids_matter", "stop_ids", "vocabulary"),
    ("model", "renderer", "fingerprint", "logprob_kind"),
)


def recognize(path: Path) -> str | None:
    """A document whose `schema_version` is ATIF's."""
    # Harbor's folders have other JSON files beside the trajectories.
    file = (min(path.rglob("trajectory*.json"), default=None) if path.is_dir() else None) or first_file(path, ".json")
    document = first_object(file) if file is not None else None
    version = document.get("schema_version") if document else None
    return f"a trajectory of {version}" if isinstance(version, str) and version.startswith(_SCHEMA) else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per trajectory file. In a folder, all JSON files that are trajectories count."""

    def read(file: Path) -> Found:
        document = json_document(file)
        if isinstance(document, dict) and str(document.get("schema_version", "")).startswith(_SCHEMA):
            yield or_broken(str(file), partial(_rollout, document, file, options))
        elif file == path:
            yield BrokenEntry(str(file), f"its schema_version is not {_SCHEMA}.x")

    return of_each_file(path, ".json", read=read)


def _rollout(document: dict[str, Any], file: Path, options: ImportOptions) -> ImportedRollout:
    trajectories = [document, *(document.get("subagent_trajectories") or ())]
    sessions = _sessions(trajectories, str(file), options)
    turns = [turn for session in sessions for turn in session.turns]
    lacking = {what for turn in turns for what in _lacking(turn)}
    made = ImportedRollout(where=str(file), sessions=sessions, absent=tuple(sorted(lacking)))
    own = _own(document)
    if "rollout" not in own:
        return _of_trial(made, document, _trial(file), options)
    key = f"{own['rollout']}.{own.get('try_index', 0)}"
    failed = own.get("reason", "failed") if own["status"] == Status.FAILED else None
    made = msgspec.structs.replace(made, key=key, attempt=0, extra=own.get("extra", {}), failed=failed)
    return restored(made, own, options)


def _of_trial(
    made: ImportedRollout, document: Mapping[str, Any], trial: Mapping[str, Any], options: ImportOptions
) -> ImportedRollout:
    """A trajectory that Harbor wrote. Its task and rewards are in the trial's result."""
    rewards = (trial.get("verifier_result") or {}).get("rewards") or {}
    reward = rewards.get("reward") if "reward" in rewards else next(iter(rewards.values()), None)
    own = (document.get("trajectory_id"), document.get("session_id"), trial.get("id"), trial.get("trial_name"))
    first = next((step["message"] for step in document["steps"] if step["source"] == "user"), None)
    agent = document["agent"]
    return msgspec.structs.replace(
        made,
        key=document.get("trajectory_id") or trial.get("id"),
        foreign_ids=tuple(dict.fromkeys(str(one) for one in own if one)),
        task_id=trial.get("task_name"),
        task=None if trial.get("task_name") else {"prompt": first},
        **options.origin(source=trial.get("source"), model=agent.get("model_name")),
        agent=agent["name"],
        extra={name: document[name] for name in ("notes", "final_metrics", "extra") if document.get(name)},
        reward=None if reward is None else float(reward),
        reward_terms={name: float(value) for name, value in rewards.items()},
        failed=(trial.get("exception_info") or {}).get("exception_message") if not rewards else None,
    )


def _sessions(trajectories: list[Any], where: str, options: ImportOptions) -> list[ImportedSession]:
    """A session for each trajectory. If Rolltape wrote several for one session, their turns are joined."""
    sessions: dict[object, ImportedSession] = {}
    for number, document in enumerate(trajectories):
        about = _own(document).get("session")
        session = _session(document, options)
        if about is None:
            sessions["alone", number] = session
            continue
        opened = ImportedSession(
            turns=[],
            tools=session.tools,
            tokenizer=options.tokenizer or about.get("tokenizer"),
            extra=about.get("extra", {}),
            settings={name: about[name] for name in _SETTINGS if name in about}
            | {name: value for name, value in about.get("defaults", {}).items() if name in _DEFAULTS},
        )
        known = sessions.setdefault(about["ordinal"], opened)
        known.turns.extend(session.turns)
    for session in sessions.values():
        session.turns.sort(key=lambda turn: turn.pop("sequence", 0))
    if not all(session.turns for session in sessions.values()):
        raise ImportFileError(f"{where}: one of its trajectories has no step of an agent")
    return list(sessions.values())


def _session(document: Mapping[str, Any], options: ImportOptions) -> ImportedSession:
    messages: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    tools, about = document["agent"].get("tool_definitions"), _own(document)
    shared = {"tools": tools or [], "template_options": about.get("template_options")} if about else {}
    for step in document["steps"]:
        message = _message(step)
        if step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            # Copied context was sampled in another trajectory, and a step without a model call was not sampled.
            turns.append({**_turn(step, list(messages), message), **shared})
        messages += [] if message is None else [message]
        messages += [_result(result) for result in (step.get("observation") or {}).get("results", ())]
    extra = {name: document[name] for name in ("trajectory_id", "session_id") if document.get(name)}
    return ImportedSession(turns=turns, tools=tools, tokenizer=options.tokenizer, extra=extra)


def _message(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """The message of a step, or None if Rolltape recorded a turn without one."""
    own = _own(step)
    if "message" in own:
        whole: dict[str, Any] | None = own["message"]
        return whole
    if step["source"] != "agent":
        return {"role": step["source"], "content": step["message"]}
    reply: dict[str, Any] = {"role": "assistant", "content": step["message"]}
    if "id" in own:
        reply["id"] = own["id"]
    if step.get("reasoning_content"):
        reply["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        reply["tool_calls"] = [
            function_call(call["tool_call_id"], call["function_name"], _arguments(call)) for call in step["tool_calls"]
        ]
    return reply


def _arguments(call: Mapping[str, Any]) -> Any:
    written = (call.get("extra") or {}).get("arguments")
    return written if isinstance(written, str) else call["arguments"]


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    if "message" in (own := _own(result)):
        whole: dict[str, Any] = own["message"]
        return whole
    content = result.get("content") or ""
    if call := result.get("source_call_id"):
        return {"role": "tool", "tool_call_id": call, "content": content}
    return {"role": "user", "content": content}


def _turn(step: Mapping[str, Any], messages: list[dict[str, Any]], reply: dict[str, Any] | None) -> dict[str, Any]:
    own = _own(step)
    metrics = step.get("metrics") or own.get("metrics") or {}
    for at, other in own.get("prompt", {}).items():  # in this prompt the message differed from the later one
        messages[int(at)] = other
    turn: dict[str, Any] = {"prompt_messages": messages, "reply": reply, "finish": "stop"}
    if step.get("model_name"):
        turn["model"] = step["model_name"]
    if step.get("timestamp"):
        turn["ended_at"] = datetime.fromisoformat(step["timestamp"].replace("Z", "+00:00")).timestamp()
    ids, prompt = metrics.get("completion_token_ids"), metrics.get("prompt_token_ids")
    logprobs = metrics.get("logprobs", own.get("logprobs"))
    if "facts" in own:
        return {
            **turn,
            **_facts(own, ids or [], logprobs),
            "prompt_ids": prompt or [],
            "token_faithful": bool(step.get("metrics")),
        }
    # If a step has several calls, numbers are sums, and the ids belong to several replies.
    if ids and prompt is not None and (step.get("llm_call_count") or 1) == 1:
        return {**turn, "prompt_ids": prompt, "sampled_ids": ids, "logprobs": logprobs or [None] * len(ids)}
    return {**turn, "token_faithful": False}


def _facts(own: Mapping[str, Any], ids: list[Any], logprobs: list[Any] | None) -> dict[str, Any]:
    """The facts of a turn that Rolltape exported, as `record_turn` takes them."""
    facts = dict(own["facts"])
    segments = [
        {
            "sampled_ids": ids[one["start"] : one["stop"]],
            "logprobs": None if logprobs is None else logprobs[one["start"] : one["stop"]],
            "weight_version": _version(one),
        }
        for one in facts.pop("segments")
    ]
    return {"sequence": own["turn"], **facts, "segments": segments}


def _version(segment: Mapping[str, Any]) -> Any:
    first = segment.get("first_version")
    return None if first is None else (first, segment.get("last_version"))


def _lacking(turn: Mapping[str, Any]) -> Iterator[str]:
    """What is not known of a turn."""
    parts = turn.get("segments", [turn])
    if not turn.get("token_faithful", True):
        yield "token ids"
    if not all(part.get("logprobs") for part in parts):
        yield "logprobs"
    if not all(part.get("weight_version") for part in parts):
        yield "weight versions"


def _own(part: Mapping[str, Any]) -> dict[str, Any]:
    """Rolltape's own data in a part of a trajectory, or an empty dict if another program wrote it."""
    noted = (part.get("extra") or {}).get("rolltape") or {}
    found: dict[str, Any] = decode_numbers(json.dumps(noted).encode()) if noted else {}
    return found


def _trial(file: Path) -> dict[str, Any]:
    """What Harbor wrote about the trial, in the trial's folder. The trajectory is in its subfolder `agent/`."""
    for folder in (file.parent, file.parent.parent):
        result = folder / "result.json"
        if result.is_file():
            document = json_document(result)
            if isinstance(document, dict) and "trial_name" in document:
                return document
    return {}
