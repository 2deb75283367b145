"""Convert a trace to what trackers show: messages, spans per step and tool call, and metadata."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rolltape.records.jsonable import encode_numbers
from rolltape.records.trace import Trace, TraceStep
from rolltape.records.turn import Finish

Fields = dict[str, Any]

_STEP_METADATA = (
    *("reward", "done", "stop_reason", "finish", "turns", "turn_rewards"),
    *("reward_data", "env_state", "extra", "metrics", "logs", "unrecorded"),
)


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


def trace_spans(trace: Trace) -> list[Fields]:
    """A span per step, and under it one per tool that its reply calls."""
    spans: list[Fields] = []
    for step, later in zip(trace.steps, (*trace.steps[1:], None), strict=False):  # a trace may have no step
        spans.append(_step_span(trace, step))
        spans += _tool_spans(step, later)
    return spans


def trace_metadata(trace: Trace, split: str) -> Fields:
    """Identity, outcome and lengths of a trace; what is not known is left out."""
    return _without_empty(
        split=split,
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
        rollout=trace.rollout,
        **{"try": trace.try_index},
        group=trace.group,
        run=trace.run,
    )


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
    content = value if isinstance(value, str) else encode_numbers(value, "a trace").decode()
    return {"role": role, "content": content}


def _step_span(trace: Trace, step: TraceStep) -> Fields:
    failed = step.error is not None or step.finish is Finish.ERROR
    return _without_empty(
        id=f"step-{step.index}",
        name=f"step {step.index}",
        kind="span" if step.policy_response is None else "generation",
        status="error" if failed else "success",
        error=step.error,
        input=step.prompt,
        output=step.policy_response,
        model=trace.model,
        usage=_without_empty(input_tokens=step.prompt_tokens, output_tokens=step.sampled_tokens),
        start_time=_iso_time(step.started_at),
        end_time=_iso_time(step.ended_at) if step.started_at is not None else None,
        metadata=_without_empty(**{name: getattr(step, name) for name in _STEP_METADATA}),
    )


def _tool_spans(step: TraceStep, later: TraceStep | None) -> Iterator[Fields]:
    calls = (step.policy_response or {}).get("tool_calls")
    results = [one for one in (_prompt_messages(later) if later is not None else ()) if one.get("role") == "tool"]
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if not isinstance(call, dict):
            continue
        named = call.get("function")
        function = named if isinstance(named, dict) else call
        result = _call_result(results, call.get("id"), place)
        yield _without_empty(
            id=f"step-{step.index}-call-{place}",
            parent_id=f"step-{step.index}",
            name=str(function.get("name") or "tool"),
            kind="tool",
            input=_parse_arguments(function.get("arguments")),
            output=None if result is None else result.get("content"),
        )


def _call_result(results: list[Fields], call_id: Any, place: int) -> Fields | None:
    """The result of a call: by its id, or by its place where results carry none."""
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


def _iso_time(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None  # no clock gave that


def _without_empty(**fields: Any) -> Fields:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None and value not in ((), [], {}, "")}
