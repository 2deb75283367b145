"""A trace → the messages and spans that a tracker's page shows: every message once, a span per step and tool call."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rolltape.records.jsonable import encode_numbers
from rolltape.records.trace import Trace, TraceStep
from rolltape.records.turn import Finish

Fields = dict[str, Any]

_REMARKS = (
    *("reward", "done", "stop_reason", "finish", "turns", "turn_rewards"),
    *("reward_data", "env_state", "extra", "metrics", "logs", "unrecorded"),
)


def messages_of(trace: Trace) -> list[Fields]:
    """What was said, in the order of the steps. A note marks a step that does not go on from the one before it."""
    messages: list[Fields] = []
    for before, step in zip((None, *trace.steps), trace.steps, strict=False):
        if before is not None and step.messages_from != before.index:
            messages.append({"role": "note", "content": _departure(step)})
        messages += _asked(step)
        if step.policy_response is not None:
            messages.append(_message(step.policy_response, "assistant"))
    return messages


def spans_of(trace: Trace) -> list[Fields]:
    """What was done: each step, and under it the tools that its reply calls."""
    spans: list[Fields] = []
    for step, later in zip(trace.steps, (*trace.steps[1:], None), strict=False):  # a trace may have no step
        spans.append(_step_span(trace, step))
        spans += _tool_spans(step, later)
    return spans


def _departure(step: TraceStep) -> str:
    if step.messages_from is None:
        return f"step {step.index} starts a conversation of its own"
    return f"step {step.index} goes on from the first {step.kept_messages} messages up to step {step.messages_from}"


def _asked(step: TraceStep) -> list[Fields]:
    """The new messages of a step's prompt; a prompt that is no list of messages is one."""
    if step.prompt is None:
        return []
    prompt = step.prompt if isinstance(step.prompt, list) else [step.prompt]
    return [_message(value, "user") for value in prompt]


def _message(value: Any, role: str) -> Fields:
    if isinstance(value, dict) and "role" in value:
        return value
    return {"role": role, "content": value if isinstance(value, str) else _spelled(value)}


def _step_span(trace: Trace, step: TraceStep) -> Fields:
    failed = step.error is not None or step.finish is Finish.ERROR
    span = {
        "id": f"step-{step.index}",
        "name": f"step {step.index}",
        "kind": "span" if step.policy_response is None else "generation",
        "status": "error" if failed else "success",
        "error": step.error,
        "input": step.prompt,
        "output": step.policy_response,
        "model": trace.model,
        "usage": _given(input_tokens=step.prompt_tokens, output_tokens=step.sampled_tokens),
        "start_time": _time(step.started_at),
        "end_time": _time(step.ended_at) if step.started_at is not None else None,
        "metadata": _given(**{name: getattr(step, name) for name in _REMARKS}),
    }
    return _given(**span)


def _tool_spans(step: TraceStep, later: TraceStep | None) -> Iterator[Fields]:
    calls = (step.policy_response or {}).get("tool_calls")
    answers = [one for one in (_asked(later) if later is not None else ()) if one.get("role") == "tool"]
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if not isinstance(call, dict):
            continue
        named = call.get("function")
        function = named if isinstance(named, dict) else call
        answer = _answer(answers, call.get("id"), place)
        yield _given(
            id=f"step-{step.index}-call-{place}",
            parent_id=f"step-{step.index}",
            name=str(function.get("name") or "tool"),
            kind="tool",
            input=_arguments(function.get("arguments")),
            output=None if answer is None else answer.get("content"),
        )


def _answer(answers: list[Fields], call: Any, place: int) -> Fields | None:
    """The result of a call: by its id, or by its place where results carry none."""
    by_id = [one for one in answers if call is not None and one.get("tool_call_id") == call]
    if by_id:
        return by_id[0]
    unnamed = [one for one in answers if one.get("tool_call_id") is None]
    return unnamed[place] if place < len(unnamed) else None


def _arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _time(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None  # no clock gave that


def _spelled(value: Any) -> str:
    return encode_numbers(value, "a trace").decode()


def _given(**fields: Any) -> Fields:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None and value not in ((), {}, "")}
