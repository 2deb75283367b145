"""Anthropic's Messages API, as Claude Code and Anthropic's SDKs speak it."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rolltape.gateway.request import Api, ChatRequest, Draft, Reply, Usage
from rolltape.gateway.wire.messages_request import read_counting, read_request, sign_thinking
from rolltape.gateway.wire.protocol import NO_HEADERS, event, with_headers
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",  # and no other: Claude Code (2.1) retries it even where `x-should-retry` is false
}
# Betas that are so here without being asked for, or that concern caching, speed and billing alone. What others ask for
# in a body is named by its fields.
_HARMLESS_BETAS = (
    "advanced-tool-use",
    "claude-code",
    "context-management",
    "effort",
    "extended-cache-ttl",
    "fine-grained-tool-streaming",
    "interleaved-thinking",
    "mid-conversation-system",
    "oauth",
    "prompt-caching",
    "structured-outputs",
    "thinking-token-count",
    "token-counting",
    "tool-search-tool",
)
_PIECE = 16_384  # characters in one event: some readers refuse lines of more than 64 KiB
_UNENDED = {"stop_reason": None, "stop_sequence": None}
_encode = msgspec.json.Encoder().encode


def _event(data: dict[str, Any]) -> bytes:
    return event(_encode(data), data["type"])


_PING = _event({"type": "ping"})
_IDLE_DELTA = _event({"type": "message_delta", "delta": _UNENDED, "usage": {"output_tokens": 0}})


class MessagesDialect:
    """`/v1/messages`."""

    api = Api.MESSAGES

    def read(self, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        return with_headers(read_request(body), headers, "anthropic-beta", _HARMLESS_BETAS)

    def keepalive(self, ask: ChatRequest) -> bytes:
        # Claude Code (2.1) gives a stream up after 300 s without an event, and pings do not count; a delta that changes
        # nothing does. For litellm (1.106) such a delta ends the reply.
        return _IDLE_DELTA if ask.client.startswith("claude-cli/") else _PING

    def whole(self, ask: ChatRequest, reply: Reply) -> bytes:
        message = _message(reply.draft, _usage(reply)) | _ending(reply)
        return _encode(message | {"content": _blocks(reply)})

    def opening(self, ask: ChatRequest, draft: Draft) -> bytes:
        return _event(
            {"type": "message_start", "message": _message(draft, _prompt_usage(draft) | {"output_tokens": 0})}
        )

    def closing(self, ask: ChatRequest, reply: Reply) -> Iterator[bytes]:
        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _in_pieces(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": empty})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        yield _event({"type": "message_delta", "delta": _ending(reply), "usage": _usage(reply)})
        yield _event({"type": "message_stop"})

    def error(self, status: int, message: str, code: str | None = None) -> bytes:
        return _encode(_error(status, message))

    def error_event(self, status: int, message: str, draft: Draft | None = None) -> bytes:
        return _event(_error(status, message))

    def counting(self, body: bytes) -> ChatRequest:
        """A body of `/v1/messages/count_tokens`: a request without limits, whose last message may be anyone's."""
        return read_counting(body)

    def counted(self, prompt_tokens: int) -> bytes:
        """The answer to `/v1/messages/count_tokens`."""
        return _encode({"input_tokens": prompt_tokens})


MESSAGES = MessagesDialect()


def _message(draft: Draft, usage: dict[str, Any]) -> dict[str, Any]:
    """A message that has no content yet. Claude Code merges replies of one id, so the id is unique."""
    return {
        "id": f"msg_{draft.id}",
        "type": "message",
        "role": "assistant",
        "model": draft.model,
        "content": [],
        **_UNENDED,
        "usage": usage,
    }


def _ending(reply: Reply) -> dict[str, Any]:
    return {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_string}


def _stop_reason(reply: Reply) -> str:
    if reply.over_budget:
        return "model_context_window_exceeded"
    match reply.finish:
        case Finish.STOP:
            return "tool_use" if reply.message.get("tool_calls") else "end_turn"
        case Finish.STOP_STRING:
            return "stop_sequence"
        case Finish.LENGTH | Finish.ABORT | Finish.ERROR:
            return "max_tokens"  # the only word for a reply that was cut off


def _prompt_usage(counts: Draft | Usage) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that were not read from a cache; the three add up to the prompt."""
    return {
        "input_tokens": counts.prompt_tokens - counts.held_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.held_tokens,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return _prompt_usage(reply.usage) | {
        "output_tokens": reply.usage.sampled_tokens,
        "output_tokens_details": {"thinking_tokens": reply.usage.reasoning_tokens},
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking := reply.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": _valid(thinking), "signature": sign_thinking(reply.draft.id)})
    if text := content_text(reply.message.get("content")):
        blocks.append({"type": "text", "text": _valid(text)})
    for call in reply.message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], _valid(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": _input(arguments)})
    return blocks


def _valid(text: str) -> str:
    """Text as it is on the tape: what is no valid Unicode is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _input(arguments: str) -> msgspec.Raw:
    """Arguments as the model wrote them. What is no JSON goes out as a text, and its echo is read as one."""
    if not arguments.strip():
        return msgspec.Raw(b"{}")
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(_encode(arguments))
    return msgspec.Raw(arguments)


def _in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and what is then added to it."""
    match block["type"]:
        case "thinking":
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return block | {"thinking": "", "signature": ""}, [*_deltas("thinking", block["thinking"]), signed]
        case "text":
            return block | {"text": ""}, _deltas("text", block["text"])
        case _:
            pieces = _deltas("partial_json", bytes(block["input"]).decode(), kind="input_json_delta")
            return block | {"input": {}}, pieces


def _deltas(field: str, text: str, kind: str | None = None) -> list[dict[str, Any]]:
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [{"type": kind or f"{field}_delta", field: piece} for piece in pieces]


def _error(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": _valid(message)}}
