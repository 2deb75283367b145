"""Rollouts as OpenTelemetry spans under its conventions for generative AI: rollout, then turns, then their tools.

A rollout is an `invoke_agent` span, a turn a `chat` span, a tool call an `execute_tool` span. Attributes that the
conventions do not define are under `rolltape.`. OpenTelemetry and MLflow both show these spans.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from rolltape.records import rollout
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import encode_numbers, valid_text
from rolltape.records.messages import call_parts, message_calls, reasoning_text
from rolltape.records.trace import Fields, Trace
from rolltape.records.turn import Finish
from rolltape.tracking.summary import ShownStep, step_metrics
from rolltape.tracking.traces import (
    RolloutSpan,
    trace_messages,
    trace_metadata,
    trace_scores,
    trace_spans,
)
from rolltape.tracking.traces import SpanKind as RolloutSpanKind

_LATEST_S = 2**33  # a span's nanoseconds have 64 bits
Attributes = dict[str, Any]


def rollout_spans(shown: ShownStep, trace: Trace, resource: Resource, name: str) -> list[ReadableSpan]:
    """The spans of a rollout, the rollout itself first.

    Ids follow from `name`, the run's name on the tracker, and the rollout's id. So spans that are sent again have the
    same ids.
    """
    spans = trace_spans(trace)
    times = _times(spans)
    ids = _SpanIds(name, trace)
    root = _span(
        ids.context(""),
        None,
        f"invoke_agent {trace.agent}" if trace.agent else "invoke_agent",
        times[""],
        resource,
        attributes={**_rollout_attributes(trace), **_metadata_attributes(trace_metadata(shown, trace))},
        status=Status(StatusCode.ERROR, trace.reason) if trace.status is rollout.Status.FAILED else None,
        events=_evaluations(trace, times[""][1]),
    )
    return [root, *(_child(trace, span, times[span.id], resource, ids) for span in spans)]


def step_span(shown: ShownStep, rollouts: Sequence[ReadableSpan], resource: Resource, name: str) -> ReadableSpan:
    """A span for a step, with its figures as attributes and a link to each rollout that is shown of it."""
    given = digest_of("step", name, shown.split, str(shown.step))
    context = _context(int.from_bytes(given[:16], "big"), int.from_bytes(given[-8:], "big"))
    starts, ends = [span.start_time or 0 for span in rollouts], [span.end_time or 0 for span in rollouts]
    now = time.time_ns()
    return _span(
        context,
        None,
        f"step {shown.step} {shown.split}",
        (min(starts, default=now), max(ends, default=now)),
        resource,
        attributes={"rolltape.split": shown.split, "rolltape.step": shown.step, **step_metrics(shown)},
        links=[Link(span.context) for span in rollouts if span.context is not None],
    )


class _SpanIds:
    """Ids of the spans of one rollout."""

    def __init__(self, name: str, trace: Trace) -> None:
        self._key = (name, trace.run, trace.rollout, str(trace.try_index))
        self._trace_id = int.from_bytes(digest_of("trace", *self._key)[:16], "big")

    def context(self, span_id: str) -> SpanContext:
        return _context(self._trace_id, int.from_bytes(digest_of("span", *self._key, span_id)[:8], "big"))


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id or 1, span_id or 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _child(trace: Trace, span: RolloutSpan, times: tuple[int, int], resource: Resource, ids: _SpanIds) -> ReadableSpan:
    if span.kind is RolloutSpanKind.TOOL:
        name, kind, attributes = f"execute_tool {span.name}", SpanKind.INTERNAL, _tool_attributes(span)
    elif span.kind is RolloutSpanKind.GENERATION:
        name = f"chat {trace.model}" if trace.model else "chat"
        kind, attributes = SpanKind.CLIENT, _chat_attributes(trace, span)
    else:
        name, kind, attributes = span.name, SpanKind.INTERNAL, _messages_attributes(span)
    return _span(
        ids.context(span.id),
        ids.context(span.parent_id or ""),
        name,
        times,
        resource,
        kind=kind,
        attributes={**attributes, **_metadata_attributes(span.metadata)},
        status=Status(StatusCode.ERROR, span.error) if span.failed else None,
    )


def _span(
    context: SpanContext,
    parent: SpanContext | None,
    name: str,
    times: tuple[int, int],
    resource: Resource,
    *,
    attributes: Attributes,
    kind: SpanKind = SpanKind.INTERNAL,
    status: Status | None = None,
    events: Sequence[Event] = (),
    links: Sequence[Link] = (),
) -> ReadableSpan:
    return ReadableSpan(
        name,
        context=context,
        parent=parent,
        resource=resource,
        attributes={key: _attribute(value) for key, value in attributes.items()},
        kind=kind,
        status=status or Status(StatusCode.UNSET),
        start_time=times[0],
        end_time=times[1],
        events=events,
        links=links,
        instrumentation_scope=InstrumentationScope("rolltape"),
    )


def _rollout_attributes(trace: Trace) -> Attributes:
    messages = trace_messages(trace)
    question, answer = messages[:1], [one for one in messages[-1:] if one.get("role") == "assistant"]
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "rolltape",
        "gen_ai.conversation.id": f"{trace.rollout}.{trace.try_index}",
        **({"gen_ai.agent.name": trace.agent} if trace.agent else {}),
        **({"gen_ai.request.model": trace.model} if trace.model else {}),
        **({"gen_ai.input.messages": _json([_message(one) for one in question])} if question else {}),
        **({"gen_ai.output.messages": _json([_message(one) for one in answer])} if answer else {}),
    }


def _chat_attributes(trace: Trace, span: RolloutSpan) -> Attributes:
    usage = {"input_tokens": span.prompt_tokens, "output_tokens": span.sampled_tokens}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rolltape",
        **({"gen_ai.request.model": trace.model} if trace.model else {}),
        **({"gen_ai.response.finish_reasons": [_finish_reason(span)]} if span.finish else {}),
        **{f"gen_ai.usage.{name}": count for name, count in usage.items() if count is not None},
        **_messages_attributes(span),
    }


def _messages_attributes(span: RolloutSpan) -> Attributes:
    """The new messages of a prompt, and the reply."""
    prompt = span.input if isinstance(span.input, list) else [] if span.input is None else [span.input]
    found: Attributes = {}
    if prompt:
        found["gen_ai.input.messages"] = _json([_message(one) for one in prompt])
    if span.output is not None:
        reply = {**_message(span.output, "assistant"), "finish_reason": _finish_reason(span)}
        found["gen_ai.output.messages"] = _json([reply])
    return found


def _tool_attributes(span: RolloutSpan) -> Attributes:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": span.name,
        "gen_ai.tool.type": "function",
        **({"gen_ai.tool.call.id": span.call_id} if span.call_id is not None else {}),
        **({"gen_ai.tool.call.arguments": _json(span.input)} if span.input is not None else {}),
        **({"gen_ai.tool.call.result": _json(span.output)} if span.output is not None else {}),
    }


def _finish_reason(span: RolloutSpan) -> str:
    return "stop" if span.finish in (None, Finish.STOP_STRING) else str(span.finish)


def _message(given: Any, role: str = "user") -> Fields:
    """A chat message in the conventions' form: a role, and parts with a type each."""
    if not isinstance(given, Mapping) or "role" not in given:
        return {"role": role, "parts": [_text_part("text", given)]}
    role = str(given["role"])
    content = given.get("content")
    if role == "tool":
        result = {"type": "tool_call_response", "id": given.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [result]}
    thinking = reasoning_text(given)
    parts = [_text_part("reasoning", thinking)] if thinking else []
    parts += map(_content_part, content if isinstance(content, list) else [content] if content else [])
    parts += [
        {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}
        for call in message_calls(given)
        for name, arguments in [call_parts(call)]
    ]
    return {"role": role, "parts": parts}


def _content_part(part: Any) -> Fields:
    """A part of a message's content, or all of it. What is no text is sent as it is."""
    if not isinstance(part, Mapping):
        return _text_part("text", part)
    return _text_part("text", part["text"]) if "text" in part else dict(part)


def _text_part(kind: str, content: Any) -> Fields:
    return {"type": kind, "content": content if isinstance(content, str) else _json(content)}


def _evaluations(trace: Trace, at: int) -> list[Event]:
    """The reward and its terms as results of evaluations."""
    return [
        Event(
            "gen_ai.evaluation.result",
            {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": float(score)},
            timestamp=at,
        )
        for name, score in trace_scores(trace).items()
    ]


def _metadata_attributes(metadata: Mapping[str, Any]) -> Attributes:
    return {f"rolltape.{name}": value for name, value in metadata.items()}


def _attribute(value: Any) -> Any:
    """A value that an attribute can hold: text, a number, or texts; anything else as JSON."""
    if isinstance(value, bool | float):
        return value
    if isinstance(value, str):  # an enum too
        return valid_text(str(value))
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(valid_text(str(one)) for one in value)
    return _json(value)


def _json(value: Any) -> str:
    return encode_numbers(value, "a trace").decode()


def _times(spans: Sequence[RolloutSpan]) -> dict[str, tuple[int, int]]:
    """Start and end of each span in nanoseconds, with "" for the rollout. Every span needs them.

    A tool has the time from the reply that calls it to the next request. A span without any time gets that of the span
    before it, or the current time.
    """
    turns = [span for span in spans if span.kind is not RolloutSpanKind.TOOL]
    following = dict(zip((span.id for span in turns), turns[1:], strict=False))
    first = next((span.started_at for span in turns if _is_time(span.started_at)), None)
    reached = time.time_ns() if first is None else _nanoseconds(first)
    found: dict[str, tuple[int, int]] = {"": (reached, reached)}
    for span in spans:
        begin, end = span.started_at, span.ended_at
        if span.parent_id is not None:
            later = following.get(span.parent_id)
            begin, end = None, later.started_at if later is not None else None
        start = _nanoseconds(begin) if begin is not None and _is_time(begin) else found[span.parent_id or ""][1]
        stop = _nanoseconds(end) if end is not None and _is_time(end) else start
        found[span.id] = (start, max(start, stop))
        found[""] = (min(found[""][0], start), max(found[""][1], start, stop))
    return found


def _nanoseconds(seconds: float) -> int:
    """Seconds as a span's nanoseconds. A float of seconds is exact to about a microsecond."""
    return round(seconds * 1e6) * 1000


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and 0 <= seconds < _LATEST_S
