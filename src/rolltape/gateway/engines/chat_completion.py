"""Read a hosted endpoint's chat completion, in OpenAI's form or in other servers' variants of it.

Only this module handles their differences: arguments that are not text, content in parts, counts that are null,
finish reasons that OpenAI does not have. Its results are in one form, which other modules need not check again.
"""

import json
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault, NotJsonError
from rolltape.gateway.engines.http import decoded
from rolltape.gateway.engines.protocol import Generated
from rolltape.gateway.engines.sampled import sampled_ids, sampled_logprobs
from rolltape.gateway.wire.openai import custom_call_arguments
from rolltape.records.jsonable import encode_json, is_deep
from rolltape.records.turn import NO_IDS, Finish, Ids, LogprobKind, TurnFlag

_WORDS = ("id", "model", "system_fingerprint", "service_tier")
_CUT_SHORT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
_BROKEN_OFF = frozenset({"abort", "error"})  # reasons of SGLang and OpenRouter for a failed reply
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_DETAILS = {"prompt_tokens_details": "cached_tokens", "completion_tokens_details": "reasoning_tokens"}
_TEXTS = ("text", "content", "thinking", "reasoning", "summary", "refusal")  # keys under which objects have their text
_THOUGHTS = frozenset({"thinking", "reasoning"})
_DEEPEST = 8  # levels, of usage and of texts
_DEEPEST_FIELD = 100  # levels: the echo is nested in a body, whose own limit is 150
# The fields of a message and of a call that are brought into one form; the others are kept as they are.
_FORMED = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "id"}
    | {"audio"}  # left out: no client can ask for it, nor send it back
)
_FORMED_OF_CALL = frozenset({"id", "type", "function", "custom", "index", "name", "arguments"})
_LARGEST = 2**53
_NULL = msgspec.Raw(b"null")


class _TokenLogprob(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _ChatChoice(msgspec.Struct):
    message: Any = None
    finish_reason: Any = None
    token_ids: list[int] | None = None
    logprobs: msgspec.Raw = _NULL  # read only if there are ids
    error: Any = None


class ChatCompletion(msgspec.Struct):
    """The body of an answer. Fields that endpoints may get wrong have any type, and are checked one by one."""

    choices: list[_ChatChoice] | None = None
    prompt_token_ids: list[int] | None = None
    usage: Any = None
    id: Any = None
    model: Any = None
    system_fingerprint: Any = None
    service_tier: Any = None
    error: Any = None

    @property
    def failure(self) -> Any:
        """The error that an answer of status 200 has instead of a reply, or None."""
        return self.error or (self.choices[0].error if self.choices else None)


_COMPLETION = msgspec.json.Decoder(ChatCompletion)
_LOGPROBS = msgspec.json.Decoder(_Logprobs | None)
_ANY = msgspec.json.Decoder()


def read_completion(data: bytes, where: str) -> tuple[ChatCompletion, bool]:
    """An answer's body, and whether invalid Unicode was repaired; raises EngineFault for an invalid body."""
    try:
        return _COMPLETION.decode(data), False
    except (msgspec.DecodeError, UnicodeDecodeError):
        valid, repaired = _strict_json(data, where)
        return decoded(valid, _COMPLETION, where), repaired


def _strict_json(data: bytes, where: str) -> tuple[bytes, bool]:
    """JSON without lone surrogates and with null for NaN and infinity, and whether text was repaired."""
    text = data.decode(errors="replace")
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        valid, repaired = encode_json(value, where)
    except (ValueError, RecursionError, NotJsonError):
        return data, False  # the caller's decoder reports what is wrong
    return valid, repaired or text.encode() != data


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def generated(completion: ChatCompletion, where: str, *, repaired: bool, refusal_as_text: bool) -> Generated:
    """The reply of an answer; raises EngineFault if there is none. Only Chat Completions has a field for a refusal."""
    if not completion.choices:
        raise EngineFault(f"{where}: an answer without choices")
    choice = completion.choices[0]
    finish, reason = _finish(choice.finish_reason, where)
    message, is_malformed = chat_form(choice.message)
    if refusal_as_text and (refusal := message.pop("refusal", None)):
        message["content"] = "\n".join(text for text in (message["content"], refusal) if text)
    usage = _usage(completion.usage)
    prompt_ids, ids, logprobs = _token_arrays(completion, choice, where)
    upstream = {name: _word(getattr(completion, name)) for name in _WORDS} | {"usage": usage, "finish_reason": reason}
    upstream["reasoning_field"] = _reasoning_field(choice.message)
    upstream["logprobs"] = _logprobs_of_texts(choice, where) if prompt_ids is None else None
    odd = {TurnFlag.REPAIRED_UNICODE: repaired, TurnFlag.MALFORMED_CALL: is_malformed}
    return Generated(
        ids=ids,
        logprobs=logprobs,
        prompt_ids=prompt_ids,
        logprob_kind=None if logprobs is None else LogprobKind.RAW,
        finish=finish,
        message=message,
        cached_tokens=_cached_tokens(usage),
        upstream={name: value for name, value in upstream.items() if value is not None},
        flags=tuple(flag for flag, is_set in odd.items() if is_set),
    )


def _token_arrays(
    completion: ChatCompletion, choice: _ChatChoice, where: str
) -> tuple[Ids | None, Ids, npt.NDArray[np.float64] | None]:
    """Ids of prompt and reply, and logprobs, if the endpoint returns them (vLLM, if the agent requested them)."""
    if completion.prompt_token_ids is None or choice.token_ids is None:
        return None, NO_IDS, None
    ids = sampled_ids(choice.token_ids, where)
    reported = decoded(bytes(choice.logprobs), _LOGPROBS, f"{where}, logprobs")
    given = None if reported is None or reported.content is None else [one.logprob for one in reported.content]
    logprobs = None if given is None else sampled_logprobs(given, ids, where)
    return sampled_ids(completion.prompt_token_ids, where), ids, logprobs


def _logprobs_of_texts(choice: _ChatChoice, where: str) -> dict[str, Any] | None:
    """The logprobs of an endpoint that returns no ids, as it wrote them, or None."""
    given = decoded(bytes(choice.logprobs), _ANY, f"{where}, logprobs")
    return given if isinstance(given, dict) and given.get("content") and not is_deep(given, _DEEPEST) else None


def _finish(reason: Any, where: str) -> tuple[Finish, str | None]:
    """How a reply ended, and the endpoint's own finish reason. An unknown reason counts as a normal end."""
    word = _word(reason)
    known = (word or "").lower()
    if known in _BROKEN_OFF:
        raise EngineFault(f"{where}: it ended for the reason {word!r}, so it is not a reply", status=503)
    return (Finish.LENGTH if known in _CUT_SHORT else Finish.STOP), word


def chat_form(message: Any) -> tuple[dict[str, Any], bool]:
    """A reply in chat form, without nulls and with one name for reasoning; and whether a call could not be read.

    Fields of the endpoint's own are kept: some endpoints refuse a conversation in which they are missing.

    Such a call becomes part of the text.
    """
    given: dict[str, Any] = message if isinstance(message, dict) else {}
    content = given.get("content")
    parts = content if isinstance(content, list) else [content]
    thoughts = [part for part in parts if isinstance(part, dict) and part.get("type") in _THOUGHTS]
    calls, unread = _calls(given)
    texts = ["".join(_text(part) for part in parts if part not in thoughts), *unread]
    text = "\n".join(text for text in texts if text)
    reply: dict[str, Any] = {"role": "assistant", "content": None if content is None and not text else text}
    reply |= _own_fields(given, _FORMED)
    if reasoning := _text(given.get("reasoning_content")) or _text(given.get("reasoning")) or _text(thoughts):
        reply["reasoning_content"] = reasoning
    if refusal := _text(given.get("refusal")):
        reply["refusal"] = refusal
    if calls:
        reply["tool_calls"] = calls
    return reply, bool(unread)


def _reasoning_field(message: Any) -> str | None:
    """The field with the reasoning, if it has another name than `reasoning_content`."""
    given: dict[str, Any] = message if isinstance(message, dict) else {}
    return "reasoning" if not _text(given.get("reasoning_content")) and _text(given.get("reasoning")) else None


def _own_fields(given: dict[str, Any], formed: frozenset[str]) -> dict[str, Any]:
    """The fields that an endpoint adds to OpenAI's form: details of reasoning, links, signatures of calls."""
    return {
        name: value
        for name, value in given.items()
        if name not in formed and value not in (None, "", []) and not is_deep(value, _DEEPEST_FIELD)
    }


def _calls(message: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The calls of a reply, and the JSON of those that cannot be read."""
    given = message.get("tool_calls") or message.get("function_call") or []
    calls, unread = [], []
    for one in given if isinstance(given, list) else [given]:
        call = _call(one) if isinstance(one, dict) else None
        if call is None:
            unread.append(json_text(one))
        else:
            calls.append(call)
    return calls, unread


def _call(call: dict[str, Any]) -> dict[str, Any] | None:
    """A call as a function call, also if it is of a custom tool; None if it names no tool."""
    custom = call.get("custom")
    inner = custom if isinstance(custom, dict) else call.get("function", call)  # OpenAI's oldest form has no wrapper
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = custom_call_arguments(_text(custom.get("input"))) if inner is custom else _arguments(inner)
    function = {"name": name, "arguments": arguments}
    return {"id": _word(call.get("id")) or "", "type": "function", "function": function} | _own_fields(
        call, _FORMED_OF_CALL
    )


def _arguments(function: dict[str, Any]) -> str:
    """A call's arguments as a JSON text; some endpoints send the object itself, or nothing for no arguments."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return "{}" if arguments is None else json_text(arguments)


def json_text(value: Any) -> str:
    """A value as JSON."""
    return encode_json(value, "a call")[0].decode()


def _text(value: Any, levels: int = _DEEPEST) -> str:
    """The text of a value. An object has it under one of the usual keys; the texts of a list are joined."""
    if isinstance(value, str):
        return value
    if not levels or value is None or isinstance(value, bool):
        return ""
    if isinstance(value, list):
        return "".join(_text(part, levels - 1) for part in value)
    if isinstance(value, dict):
        return next((text for name in _TEXTS if (text := _text(value.get(name), levels - 1))), "")
    return str(value)


def _word(value: Any) -> str | None:
    """A value as a name, or None if it is neither a text nor a number."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _usage(given: Any) -> dict[str, Any] | None:
    """The usage that an endpoint reports, without counts that are not numbers."""
    if not isinstance(given, dict) or is_deep(given, _DEEPEST):
        return None
    usage = dict(given)
    for name in _COUNTS:
        _keep_count(usage, name)
    for name, count in _DETAILS.items():
        details = usage.pop(name, None)
        if isinstance(details, dict):
            usage[name] = _keep_count(dict(details), count)
    return usage


def _keep_count(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Make a field a whole number, or leave it out."""
    value = fields.pop(name, None)
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST:
        fields[name] = value
    return fields


def _cached_tokens(usage: dict[str, Any] | None) -> int | None:
    """How many tokens of the prompt the endpoint had cached; at most all of them."""
    usage = usage or {}
    cached: int | None = usage.get("prompt_tokens_details", {}).get("cached_tokens")
    return cached if cached is None else min(cached, usage.get("prompt_tokens", cached))
