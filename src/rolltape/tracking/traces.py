"""What every tracker shows of a rollout: its messages, a span per step and tool call, metadata, and its page.

Each tracker's module only converts this to the tracker's types.
"""

import enum
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from rolltape.records.ids import page_name
from rolltape.records.jsonable import encode_numbers
from rolltape.records.messages import call_parts, message_calls, reasoning_text
from rolltape.records.trace import Fields, Trace, TraceStep
from rolltape.records.turn import Finish
from rolltape.tracking.summary import ShownStep

_STEP_METADATA = (
    *("reward", "done", "stop_reason", "finish", "turns", "turn_rewards"),
    *("reward_data", "env_state", "extra", "metrics", "logs", "unrecorded"),
)


class SpanKind(enum.StrEnum):
    """What happened in a span."""

    GENERATION = "generation"  # a step with a reply
    STEP = "span"  # a step without one
    TOOL = "tool"  # a call that a reply makes


class RolloutSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a rollout, or a tool call of its reply. A field is None where it is not known."""

    id: str
    parent_id: str | None = None  # None: it is directly under the rollout
    name: str
    kind: SpanKind
    failed: bool = False
    error: str | None = None
    input: Any = None  # new messages of the prompt, or the arguments of a call
    output: Any = None  # the reply, or the result of a call
    call_id: str | None = None  # of a tool call
    finish: Finish | None = None
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    started_at: float | None = None  # seconds since the epoch; a tape has no times of tool calls
    ended_at: float | None = None
    metadata: Fields = {}


def trace_messages(trace: Trace) -> list[Fields]:
    """Every message once, in the order of the steps. A note marks a step that does not continue the one before it."""
    messages: list[Fields] = []
    for before, step in zip((None, *trace.steps), trace.steps, strict=False):
        if before is not None and step.messages_from != before.index:
            messages.append({"role": "note", "content": _fork_note(step)})
        messages += _prompt_messages(step)
        if step.policy_response is not None:
            messages.append(_message(step.policy_response, "assistant"))
    return messages


def trace_spans(trace: Trace) -> list[RolloutSpan]:
    """A span per step, and under it one per tool that its reply calls."""
    spans: list[RolloutSpan] = []
    for step, later in zip(trace.steps, (*trace.steps[1:], None), strict=False):  # a trace may have no step
        spans.append(_step_span(step))
        spans += _tool_spans(step, later)
    return spans


def trace_text(trace: Trace) -> str:
    """The conversation as text, each message under its role."""
    return "\n\n".join(f"{message['role']}: {_message_text(message)}" for message in trace_messages(trace))


def trace_page(shown: ShownStep, trace: Trace) -> str | None:
    """The address of a rollout in the viewer, or None if the viewer's address is not known.

    A key in the viewer's address is left out, because other people may read the tracker.
    """
    if shown.view_url is None:
        return None
    host = urlsplit(shown.view_url)
    path = f"{host.path.rstrip('/')}/{quote(page_name(trace.run))}/rollout/{quote(trace.rollout, safe='')}"
    return urlunsplit((host.scheme, host.netloc, path, f"try={trace.try_index}", ""))


def trace_metadata(shown: ShownStep, trace: Trace) -> Fields:
    """Identity, outcome and lengths of a trace, without unknown fields."""
    return without_empty(
        split=shown.split,
        step=trace.step,
        reward=trace.total_reward,
        reward_terms=trace.reward_terms,
        status=trace.status,
        stop_reason=trace.stop_reason,
        reason=trace.reason,
        filtered=trace.filtered,
        task_id=trace.task_id,
        attempt=trace.attempt,
        turns=sum(step.policy_response is not None for step in trace.steps),
        **_lengths(trace),
        first_version=trace.versions[0] if trace.versions else None,
        last_version=trace.versions[-1] if trace.versions else None,
        versions=list(trace.versions) if len(trace.versions) > 2 else None,
        model=trace.model,
        agent=trace.agent,
        source=trace.source,
        tags=list(trace.tags),
        pruned=list(trace.pruned),
        reward_data=trace.reward_data,
        env_state=trace.env_state,
        metrics=trace.metrics,
        extra=trace.extra,
        page=trace_page(shown, trace),
        rollout=trace.rollout,
        **{"try": trace.try_index},
        group=trace.group,
        run=trace.run,
    )


def trace_scores(trace: Trace) -> dict[str, float]:
    """The reward and its terms by name; empty without a reward."""
    return {} if trace.total_reward is None else {"reward": trace.total_reward, **trace.reward_terms}


def _lengths(trace: Trace) -> Fields:
    """The tokens before the first reply, those of all replies, and those of the longest prompt with its reply."""
    known = [(step.prompt_tokens, step.sampled_tokens or 0) for step in trace.steps if step.prompt_tokens is not None]
    if not known:
        return {}
    return {
        "prompt_tokens": known[0][0],
        "sampled_tokens": sum(sampled for _, sampled in known),
        "tokens": max((prompt or 0) + sampled for prompt, sampled in known),
    }


def _fork_note(step: TraceStep) -> str:
    if step.messages_from is None:
        return f"step {step.index} starts a conversation of its own"
    return f"step {step.index} continues from the first {step.kept_messages} messages up to step {step.messages_from}"


def _prompt_messages(step: TraceStep) -> list[Fields]:
    """The new messages of a step's prompt; a prompt that is not a list of messages becomes one."""
    if step.prompt is None:
        return []
    prompt = step.prompt if isinstance(step.prompt, list) else [step.prompt]
    return [_message(value, "user") for value in prompt]


def _message(value: Any, role: str) -> Fields:
    if isinstance(value, dict) and "role" in value:
        return value
    return {"role": role, "content": _text(value)}


def _message_text(message: Fields) -> str:
    content = message.get("content")
    parts = [part for part in (reasoning_text(message), _text(content) if content else "") if part]
    calls = message.get("tool_calls")
    parts += [_text(call) for call in (calls if isinstance(calls, list) else ())]
    return "\n".join(parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else encode_numbers(value, "a trace").decode()


def _step_span(step: TraceStep) -> RolloutSpan:
    return RolloutSpan(
        id=f"step-{step.index}",
        name=f"step {step.index}",
        kind=SpanKind.STEP if step.policy_response is None else SpanKind.GENERATION,
        failed=step.error is not None or step.finish is Finish.ERROR,
        error=step.error,
        input=step.prompt,
        output=step.policy_response,
        finish=step.finish,
        prompt_tokens=step.prompt_tokens,
        sampled_tokens=step.sampled_tokens,
        started_at=step.started_at,
        ended_at=step.ended_at if step.started_at is not None else None,
        metadata=without_empty(**{name: getattr(step, name) for name in _STEP_METADATA}),
    )


def _tool_spans(step: TraceStep, later: TraceStep | None) -> Iterator[RolloutSpan]:
    results = [one for one in (_prompt_messages(later) if later is not None else ()) if one.get("role") == "tool"]
    for place, call in enumerate(message_calls(step.policy_response or {})):
        call_id, (name, arguments) = call.get("id"), call_parts(call)
        result = _call_result(results, call_id, place)
        yield RolloutSpan(
            id=f"step-{step.index}-call-{place}",
            parent_id=f"step-{step.index}",
            name=str(name or "tool"),
            kind=SpanKind.TOOL,
            input=_parse_arguments(arguments),
            output=None if result is None else result.get("content"),
            call_id=None if call_id is None else str(call_id),
        )


def _call_result(results: list[Fields], call_id: Any, place: int) -> Fields | None:
    """The result of a call, by its id, or by its place if results have no ids."""
    by_id = [one for one in results if call_id is not None and one.get("tool_call_id") == call_id]
    if by_id:
        return by_id[0]
    unnamed = [one for one in results if one.get("tool_call_id") is None]
    return unnamed[place] if place < len(unnamed) else None


def _parse_arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def without_empty(**fields: Any) -> Fields:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None and value not in ((), [], {}, "")}
