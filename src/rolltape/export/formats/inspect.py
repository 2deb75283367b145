"""Rollouts as Inspect's logs (`.eval`, `.json`), by Inspect's own writer: a sample per rollout, an epoch per attempt.

A sample holds one conversation, without token ids and tools. If a rollout has several, it is the one with most turns.
"""

import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from rolltape.errors import ExportError, MissingFormat
from rolltape.export.conversations import Conversation, conversations_of
from rolltape.export.files import Destination, local_path
from rolltape.extras import import_extra
from rolltape.records.jsonable import encode_numbers
from rolltape.records.messages import call_parts, content_text, message_calls, reasoning_text
from rolltape.records.rollout import Rollout, Status, StopReason

_UNKNOWN = "unknown"  # a log must name a task and a model; a rollout need not
_LIMITS = {
    StopReason.MAX_TURNS: "message",
    StopReason.MAX_TOKENS: "token",
    StopReason.TIMEOUT: "time",
    StopReason.CONTEXT_OVERFLOW: "context",
}


def write_inspect_log(rollouts: Iterable[Rollout], out: Destination, left_out: list[str] | None = None) -> int:
    """Write the rollouts that have ended as one log, and return how many were written.

    A log is of one source, one model and one step. The ids of rollouts that have not ended, or have no reply, are
    appended to `left_out`.

    Example:

        rolltape.export.formats.write_inspect_log(run.rollouts(step=3), "step-3.eval")
    """
    log, model, scorer = _inspect()
    path = local_path(out)
    samples: list[Any] = []
    about: set[tuple[str | None, str | None, int]] = set()
    for rollout in rollouts:
        conversation = _main_conversation(rollout)
        if conversation is None:
            if left_out is not None:
                left_out.append(rollout.id)
            continue
        about.add((rollout.head.source, rollout.head.model, rollout.head.step))
        samples.append(_sample(conversation, log, model, scorer))
    if len(about) > 1:
        known = "; ".join(
            f"source {source}, model {name}, step {step}" for source, name, step in sorted(about, key=str)
        )
        raise ExportError(
            f"{os.fspath(out)}: a log is of one source, model and step, and these are of {len(about)} ({known}); "
            "choose with --step, --task or --group"
        )
    if not samples:
        raise ExportError(f"{os.fspath(out)}: no rollout has ended with a reply, and a log has at least one sample")
    source, name, step = about.pop()
    ids = list(dict.fromkeys(sample.id for sample in samples))
    made = log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=samples[0].started_at,
            task=source or _UNKNOWN,
            model=name or _UNKNOWN,
            dataset=log.EvalDataset(name=source, samples=len(ids), sample_ids=ids),
            config=log.EvalConfig(epochs=max(sample.epoch for sample in samples)),
            metadata={"rolltape": {"step": step}},
        ),
        samples=samples,
    )
    partial = path.with_name(f".{os.getpid()}.partial.{path.name}")
    try:
        log.write_eval_log(made, str(partial), format=path.suffix.removeprefix("."))
        partial.replace(path)
    except OSError as error:
        raise ExportError(f"{os.fspath(out)} cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return len(samples)


def _main_conversation(rollout: Rollout) -> Conversation | None:
    if rollout.status not in (Status.FINISHED, Status.FAILED):
        return None
    found = [one for one in conversations_of(rollout) if one.replies]
    return max(found, key=lambda one: len(one.replies), default=None)


def _sample(conversation: Conversation, log: Any, model: Any, scorer: Any) -> Any:
    rollout = conversation.rollout
    head, outcome = rollout.head, rollout.outcome
    limit = _LIMITS.get(outcome.stop_reason) if outcome.stop_reason is not None else None
    scores = {"reward": outcome.reward, **outcome.reward_terms} if outcome.reward is not None else {}
    first = conversation.turns[0]
    error = log.EvalError(message=outcome.reason or "failed", traceback="", traceback_ansi="")
    return log.EvalSample(
        id=(head.task_id or head.group).replace("\0", "\ufffd"),  # a name in the log's archive, which ends at a NUL
        epoch=head.attempt + 1,
        input=[_message(message.to_dict(), model) for message in first.prompt.to_list()] or "",
        target="",
        messages=[_message(message.to_dict(), model) for message in conversation.recorded],
        scores={name: scorer.Score(value=value) for name, value in scores.items()} or None,
        metadata={"rolltape": json.loads(encode_numbers(_about(rollout, conversation), f"rollout {rollout.id}"))},
        uuid=f"{rollout.id}.{head.try_index}",
        started_at=datetime.fromtimestamp(head.started_at_ns / 1e9, UTC).isoformat(),
        error=None if rollout.status is Status.FINISHED else error,
        limit=None if limit is None else log.EvalSampleLimit(type=limit, limit=0),
    )


def _about(rollout: Rollout, conversation: Conversation) -> dict[str, Any]:
    """Data that Inspect has no field for. The importer reads it."""
    head, outcome = rollout.head, rollout.outcome
    return {
        "rollout": rollout.id,
        "step": head.step,
        "source": head.source,
        "model": head.model,
        "task_id": head.task_id,
        "task": head.task,
        "agent": head.agent,
        "tags": list(head.tags),
        "reward": outcome.reward,
        "reward_terms": outcome.reward_terms,
        "stop_reason": outcome.stop_reason,
        "reason": outcome.reason,
        "filtered": outcome.filtered,
        "replies": [at for at, _ in conversation.replies],
        "conversations": sum(1 for _ in conversations_of(rollout)),
    }


def _message(message: Mapping[str, Any], model: Any) -> Any:
    """A chat message as an Inspect message."""
    role, content = message["role"], content_text(message.get("content"))
    if role in ("system", "developer"):
        return model.ChatMessageSystem(content=content)
    if role == "user":
        return model.ChatMessageUser(content=content)
    if role == "tool":
        call_id = message.get("tool_call_id")
        return model.ChatMessageTool(content=content, tool_call_id=None if call_id is None else str(call_id))
    thinking = reasoning_text(message)
    parts = [model.ContentReasoning(reasoning=thinking), model.ContentText(text=content)] if thinking else content
    return model.ChatMessageAssistant(content=parts, tool_calls=_calls(message) or None)


def _calls(message: Mapping[str, Any]) -> list[Any]:
    call_of = import_module("inspect_ai.tool").ToolCall
    found = []
    for call in message_calls(message):
        (name, text), problem = call_parts(call), None
        try:
            arguments = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            arguments, problem = {}, str(error)
        if not isinstance(arguments, dict):
            arguments, problem = {}, f"no object: {text}"
        found.append(
            call_of(id=str(call.get("id") or ""), function=str(name or ""), arguments=arguments, parse_error=problem)
        )
    return found


def _inspect() -> tuple[Any, Any, Any]:
    names = ("inspect_ai.log", "inspect_ai.model", "inspect_ai.scorer")
    log, model, scorer = (
        import_extra(name, "inspect", what="--format inspect", missing=MissingFormat) for name in names
    )
    return log, model, scorer
