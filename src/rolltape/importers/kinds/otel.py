"""OpenTelemetry spans as OTLP JSON, with the GenAI conventions. A trace is a rollout, and each model call a turn.

Spans without `gen_ai.input.messages` and `gen_ai.output.messages` show that a call was made, but not its messages.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.importers.files import first_file, first_object, json_document, json_lines, of_each_file
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    function_call,
    or_broken,
)
from rolltape.importers.text_dumps import ABSENT_FROM_TEXT

_CALLS = ("chat", "text_completion", "generate_content")
_FINISH = {"stop": "stop", "tool_call": "stop", "tool_calls": "stop", "length": "length", "error": "error"}
_ERROR = 2  # OTLP's status code


class _Span(msgspec.Struct):
    where: str
    trace: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


def recognize(path: Path) -> str | None:
    """Documents with `resourceSpans`."""
    file = first_file(path, ".json", ".jsonl")
    document = first_object(file) if file is not None else None
    return "documents with resourceSpans" if document and "resourceSpans" in document else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per trace that calls a model. Conversations with different ids are its sessions."""
    traces: dict[str, list[_Span]] = {}
    for item in _spans(path):
        if isinstance(item, BrokenEntry):
            yield item
        else:
            traces.setdefault(item.trace, []).append(item)
    for trace, spans in traces.items():
        calls = [span for span in spans if span.attributes.get("gen_ai.operation.name") in _CALLS]
        if not calls:
            continue
        in_order = sorted(calls, key=lambda span: span.start_ns)
        yield or_broken(calls[0].where, partial(_rollout, trace, spans, in_order, options))


def _rollout(trace: str, spans: list[_Span], calls: list[_Span], options: ImportOptions) -> ImportedRollout:
    sessions: dict[str, list[_Span]] = {}
    for call in calls:
        sessions.setdefault(str(call.attributes.get("gen_ai.conversation.id", "")), []).append(call)
    first = calls[0].attributes
    agent = next((one.attributes["gen_ai.agent.name"] for one in spans if "gen_ai.agent.name" in one.attributes), None)
    made = [_session(own) for own in sessions.values()]
    has_messages = all(turn["prompt_messages"] for session in made for turn in session.turns)
    return ImportedRollout(
        where=calls[0].where,
        sessions=made,
        key=trace,
        foreign_ids=(trace, *(one for one in sessions if one)),
        task={"messages": made[0].turns[0]["prompt_messages"]} if has_messages else {"trace": trace},
        **options.origin(model=first.get("gen_ai.response.model") or first.get("gen_ai.request.model")),
        agent=agent,
        absent=ABSENT_FROM_TEXT if has_messages else ("messages", *ABSENT_FROM_TEXT),
    )


def _session(calls: list[_Span]) -> ImportedSession:
    tools = _decoded(calls[0].attributes.get("gen_ai.tool.definitions"))
    return ImportedSession(turns=[_turn(call) for call in calls], tools=tools if isinstance(tools, list) else None)


def _turn(call: _Span) -> dict[str, Any]:
    given = call.attributes
    prompt = [message for one in _decoded(given.get("gen_ai.input.messages")) or () for message in _messages(one)]
    instructions = _decoded(given.get("gen_ai.system_instructions"))
    if instructions:
        prompt.insert(0, {"role": "system", "content": _text(instructions)})
    replies = _decoded(given.get("gen_ai.output.messages")) or []
    reply = next((message for one in replies for message in _messages(one)), None)
    reasons = [one.get("finish_reason") for one in replies] or given.get("gen_ai.response.finish_reasons") or ["stop"]
    usage = {name.rpartition(".")[2]: value for name, value in given.items() if name.startswith("gen_ai.usage.")}
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    sampling = {name: given[f"gen_ai.request.{name}"] for name in names if f"gen_ai.request.{name}" in given}
    return {
        "prompt_messages": prompt,
        "reply": reply,
        "finish": "error" if call.error else _FINISH.get(str(reasons[0]), "stop"),
        "error": call.error,
        "token_faithful": False,
        "sampling": sampling,
        "started_at": call.start_ns / 1e9,
        "ended_at": call.end_ns / 1e9,
        "extra": {"usage": usage} if usage else None,
    }


def _messages(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message of the conventions, in parts, as chat messages. Each tool result becomes a separate message."""
    parts = given.get("parts") or []
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    for part in results:
        answer = part.get("response", part.get("result", ""))
        text = answer if isinstance(answer, str) else json.dumps(answer)
        yield {"role": "tool", "tool_call_id": part.get("id"), "content": text}
    if results and len(results) == len(parts):
        return
    message: dict[str, Any] = {"role": given["role"], "content": _text(parts)}
    if thinking := "".join(str(part["content"]) for part in parts if part.get("type") == "reasoning"):
        message["reasoning_content"] = thinking
    calls = [part for part in parts if part.get("type") == "tool_call"]
    if calls:
        message["tool_calls"] = [function_call(part.get("id"), part["name"], part.get("arguments")) for part in calls]
    yield message


def _text(parts: list[Mapping[str, Any]]) -> str:
    return "".join(str(part.get("content", "")) for part in parts if part.get("type") == "text")


def _decoded(value: Any) -> Any:
    """A structured attribute; most exporters write it as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _spans(path: Path) -> Iterator[_Span | BrokenEntry]:
    for entry in of_each_file(path, ".json", ".jsonl", read=_documents):
        if isinstance(entry, BrokenEntry):
            yield entry
            continue
        where, document = entry
        if not isinstance(document, dict) or "resourceSpans" not in document:
            yield BrokenEntry(where, "no document with resourceSpans")
            continue
        spans = or_broken(where, partial(_spans_in, document))
        if isinstance(spans, BrokenEntry):
            yield spans
            continue
        for number, span in enumerate(spans, 1):
            place = f"{where}, span {number}"
            yield or_broken(place, partial(_span, span, place))


def _documents(file: Path) -> Iterator[tuple[str, Any] | BrokenEntry]:
    return json_lines(file) if file.suffix == ".jsonl" else iter([(str(file), json_document(file))])


def _spans_in(document: Mapping[str, Any]) -> list[Any]:
    scopes = (scope for resource in document["resourceSpans"] for scope in resource.get("scopeSpans", ()))
    return [span for scope in scopes for span in scope.get("spans", ())]


def _span(span: Mapping[str, Any], where: str) -> _Span:
    status = span.get("status") or {}
    return _Span(
        where=where,
        trace=str(span["traceId"]),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes={one["key"]: _value(one["value"]) for one in span.get("attributes", ())},
        error=(status.get("message") or "error") if status.get("code") in (_ERROR, "STATUS_CODE_ERROR") else None,
    )


def _value(given: Mapping[str, Any]) -> Any:
    """A value of OTLP's JSON: {"stringValue": …}, {"arrayValue": …}, {"kvlistValue": …}, and so on."""
    kind: str
    value: Any
    kind, value = next(iter(given.items()), ("", None))
    if kind == "intValue":
        return int(value)
    if kind == "arrayValue":
        return [_value(one) for one in value.get("values", ())]
    if kind == "kvlistValue":
        return {one["key"]: _value(one["value"]) for one in value.get("values", ())}
    return value
