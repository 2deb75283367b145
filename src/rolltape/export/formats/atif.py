"""Rollouts as Harbor's trajectories (ATIF 1.8): steps with messages, calls, observations, token ids and logprobs.

A trajectory is a list of steps. The first conversation of a rollout is the trajectory itself. Other branches and
sessions are sub-agent trajectories in it; steps that they share with an earlier one are marked as copied context. Data
that ATIF has no field for is under `extra.rolltape`, where the importer finds it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import ExportError
from rolltape.export.conversations import Conversation, conversations_of
from rolltape.export.files import Destination, destination, local_path
from rolltape.records.jsonable import encode_numbers
from rolltape.records.messages import Message, content_text, reasoning_text
from rolltape.records.rollout import Rollout, Status
from rolltape.records.turn import Turn, TurnFlag

SCHEMA = "ATIF-v1.8"
_SOURCES = {"system": "system", "developer": "system", "user": "user", "tool": "user", "assistant": "agent"}
_UNKNOWN = "unknown"  # a trajectory must name an agent and its version; a rollout need not
_SESSION_FIELDS = ("tool_ids_matter", "stop_ids", "vocabulary", "tokenizer", "defaults", "extra")
_HEAD_FIELDS = (
    *("try_index", "step", "attempt", "source", "task_id", "task", "model", "agent"),
    *("tags", "foreign_ids", "extra"),
)
_OUTCOME_FIELDS = ("status", "stop_reason", "reason", "reward", "reward_terms", "filtered")


def write_trajectories(rollouts: Iterable[Rollout], folder: Destination, left_out: list[str] | None = None) -> int:
    """Write a file per rollout that has ended into a folder, and return how many were written.

    The ids of rollouts that have not ended, or have no turns, are appended to `left_out`.

    Example:

        rolltape.export.formats.write_trajectories(run.rollouts(), "trajectories")
    """
    place = local_path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{folder} cannot be made: {error.strerror or error}; name a folder") from None
    written = 0
    for rollout in rollouts:
        document = trajectory(rollout)
        if document is None:
            if left_out is not None:
                left_out.append(rollout.id)
            continue
        again = f".{rollout.head.try_index}" if rollout.head.try_index else ""
        with destination(place / f"trajectory-{rollout.id}{again}.json") as stream:
            stream.write(encode_numbers(document, f"rollout {rollout.id}") + b"\n")
        written += 1
    return written


def trajectory(rollout: Rollout) -> dict[str, Any] | None:
    """A rollout as a trajectory, or None if it has not ended or has no turns.

    Example:

        document = rolltape.export.formats.trajectory(rollout)
    """
    if rollout.status not in (Status.FINISHED, Status.FAILED) or not rollout.turns:
        return None
    first, *others = (_trajectory(one) for one in conversations_of(rollout, with_auxiliary=True))
    first["extra"]["rolltape"] |= {
        "rollout": rollout.id,
        **_given(rollout.head, _HEAD_FIELDS),
        **_given(rollout.outcome, _OUTCOME_FIELDS),
    }
    first["trajectory_id"] = f"{rollout.id}.{rollout.head.try_index}"
    return {**first, "subagent_trajectories": others} if others else first


def _trajectory(conversation: Conversation) -> dict[str, Any]:
    rollout, own = conversation.rollout, conversation.turns[conversation.copied :]
    agent = {"name": rollout.head.agent or _UNKNOWN, "version": _UNKNOWN, "model_name": conversation.last.facts.model}
    root = conversation.last.root
    session = conversation.session
    about: dict[str, Any] = {"session": {"ordinal": session.ordinal, **_given(session.head, _SESSION_FIELDS)}}
    if root.template_options:
        about["template_options"] = root.template_options
    document = {
        "schema_version": SCHEMA,
        "session_id": rollout.id,
        "trajectory_id": conversation.last.id,
        "agent": {**_present(agent), **({"tool_definitions": root.tools} if root.tools else {})},
        "steps": _steps(conversation),
        "extra": {"rolltape": about},
    }
    if all(_has_ids(turn) for turn in own):
        document["final_metrics"] = {
            "total_prompt_tokens": sum(len(turn.prompt_tokens) for turn in own),
            "total_completion_tokens": sum(len(turn.sampled_ids) for turn in own),
        }
    return document


def _steps(conversation: Conversation) -> list[dict[str, Any]]:
    own = {len(turn.prompt): turn for turn in conversation.turns[conversation.copied :]}
    steps: list[dict[str, Any]] = []
    recorded = conversation.recorded
    for at, one in enumerate(recorded):
        message = one.to_dict()
        before = steps[-1] if steps else None
        if message["role"] == "tool" and before is not None and before["source"] == "agent":
            before.setdefault("observation", {"results": []})["results"].append(_result(message, before))
        elif message["role"] == "assistant":
            step = _agent_step(message)
            steps.append(step)
            if at in own:
                _add_turn(step, own[at], recorded)
            else:  # from an earlier trajectory, or not sampled: an example in the prompt, or an edited reply
                step["is_copied_context"] = True
        else:
            steps.append({"source": _SOURCES[message["role"]], "message": content_text(message.get("content"))})
            if set(_present(message)) != {"role", "content"} or not _is_plain(message, ("user", "system")):
                _note(steps[-1], message=message)
    if conversation.last.reply is None:
        steps.append({"source": "agent", "message": ""})
        _add_turn(steps[-1], conversation.last, recorded)
        _note(steps[-1], message=None)
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _agent_step(message: Mapping[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": content_text(message.get("content"))}
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    if thinking := reasoning_text(message):
        step["reasoning_content"] = thinking
    read = [found for call in calls if (found := _call(call))] if isinstance(calls, list) else []
    if read:
        step["tool_calls"] = [call for call, _ in read]
    fields = set(_present(message)) - {"reasoning_content", "tool_calls", "content", "id"}
    whole = not calls or (isinstance(calls, list) and sum(is_whole for _, is_whole in read) == len(calls))
    whole = whole and isinstance(reasoning or "", str)
    if fields != {"role"} or not whole or not _is_plain(message, ("assistant",)):
        _note(step, message=dict(message))
    elif message.get("id") is not None:
        _note(step, id=message["id"])
    return step


def _call(call: Any) -> tuple[dict[str, Any], bool] | None:
    """A call in ATIF's form, and whether the form holds all of it; or None if the call names no function."""
    match call:
        case {"function": {"name": str(name)} as function}:
            given, text = call.get("id"), function.get("arguments")
            arguments = _object(text) if isinstance(text, str) else None
            found = {
                "tool_call_id": given if isinstance(given, str) else "",
                "function_name": name,
                "arguments": arguments or {},
            }
            if isinstance(text, str) and (arguments is None or json.dumps(arguments) != text):
                found["extra"] = {"arguments": text}
            fields = call.keys() == {"id", "type", "function"} and function.keys() == {"name", "arguments"}
            whole = fields and isinstance(given, str) and call["type"] == "function" and isinstance(text, str)
            return found, whole
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        encode_numbers(value, "arguments")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _result(message: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    result: dict[str, Any] = {"content": content_text(message.get("content"))}
    if message.get("tool_call_id") and message["tool_call_id"] in called:
        result["source_call_id"] = message["tool_call_id"]
    plain = set(_present(message)) == {"role", "content", "tool_call_id"} and _is_plain(message, ("tool",))
    if not plain or "source_call_id" not in result:
        _note(result, message=dict(message))
    return result


def _add_turn(step: dict[str, Any], turn: Turn, recorded: Sequence[Message]) -> None:
    """Add what the engine returned for a step: ids and logprobs in its metrics, and the turn's facts."""
    facts = msgspec.to_builtins(turn.facts)
    for name in ("message_starts", "unknown"):
        facts.pop(name, None)
    _note(step, turn=turn.sequence, facts=facts)
    prompt = turn.prompt.to_list()
    # Equal in meaning, but not in ids or marks of caching.
    others = [at for at, (own, later) in enumerate(zip(prompt, recorded, strict=False)) if own.digest != later.digest]
    if others:
        _note(step, prompt={str(at): prompt[at].to_dict() for at in others})
    step["llm_call_count"] = 1
    if turn.facts.model is not None:
        step["model_name"] = turn.facts.model
    if turn.facts.ended_at is not None and 0 <= turn.facts.ended_at < 253402300800:  # up to the year 9999
        step["timestamp"] = datetime.fromtimestamp(turn.facts.ended_at, UTC).isoformat()
    metrics: dict[str, Any] = {
        "prompt_tokens": len(turn.prompt_tokens),
        "completion_tokens": len(turn.sampled_ids),
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "completion_token_ids": turn.sampled_ids.tolist(),
    }
    if turn.logprobs is not None:
        logprobs = turn.logprobs.tolist()
        # ATIF needs a number for every token, or none at all.
        if np.isfinite(turn.logprobs).all():
            metrics["logprobs"] = logprobs
        else:
            _note(step, logprobs=[None if np.isnan(one) else one for one in logprobs])
    if _has_ids(turn):
        step["metrics"] = metrics
    elif len(turn.tokens):  # not in the step's own metrics: programs should not train on them
        _note(step, metrics=metrics)


def _has_ids(turn: Turn) -> bool:
    """Whether its ids are the engine's own."""
    return TurnFlag.NOT_TOKEN_FAITHFUL not in turn.facts.flags


def _given(record: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    fields = msgspec.to_builtins(record)
    return {name: fields[name] for name in names if fields.get(name) is not None and fields[name] not in ([], {})}


def _is_plain(message: Mapping[str, Any], roles: tuple[str, ...]) -> bool:
    return message["role"] in roles and isinstance(message.get("content") or "", str)


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _note(step: dict[str, Any], **fields: Any) -> None:
    """Store fields that ATIF does not have."""
    step.setdefault("extra", {}).setdefault("rolltape", {}).update(fields)
