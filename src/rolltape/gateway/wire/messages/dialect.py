"""Anthropic's Messages API, as used by Claude Code and Anthropic's SDKs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rolltape.errors import ReplyNotFound, ThreadUnsupported
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.fields import SIGNATURE, event, key_in, with_headers
from rolltape.gateway.wire.messages.request import MESSAGE_PREFIX, read_counting, read_request
from rolltape.gateway.wire.protocol import NO_HEADERS, Answers, Route
from rolltape.records.jsonable import valid_text
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

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
    529: "overloaded_error",  # no other status: Claude Code (2.1) retries this type even if `x-should-retry` is false
}
# Errors after which Anthropic's SDKs (2.10) send the whole conversation, by the gateway's codes.
_THREAD_ERRORS = {ReplyNotFound.code: "thread_not_found", ThreadUnsupported.code: ThreadUnsupported.code}
# Betas that apply here anyway, or that only concern caching, speed and billing. Fields that other betas add to a body
# are listed as unread fields.
_HARMLESS_BETAS = (
    "advanced-tool-use",
    "claude-code",
    "context-management",
    "effort",
    "extended-cache-ttl",
    "fine-grained-tool-streaming",
    "interleaved-thinking",
    "message-threads",
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

    name = "messages"
    sdk = "anthropic"
    variables = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL")
    routes: tuple[Route, ...] = (Route("/v1/messages", Answers.TURN), Route("/v1/messages/count_tokens", Answers.COUNT))

    def is_meant(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers

    def find_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return key_in(headers, "x-api-key")

    def base_url(self, root: str) -> str:
        return root

    def read(
        self, body: bytes, headers: Mapping[str, str] = NO_HEADERS, path: Mapping[str, str] = NO_HEADERS
    ) -> ChatRequest:
        return with_headers(read_request(body), headers, "anthropic-beta", _HARMLESS_BETAS)

    def read_counting(self, body: bytes, path: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        return read_counting(body)

    def counted(self, prompt_tokens: int) -> bytes:
        return _encode({"input_tokens": prompt_tokens})

    def whole(self, turn: "GatewayTurn") -> bytes:
        return _encode(_head(turn, _usage(turn)) | _ending(turn) | {"content": _blocks(turn)})

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "MessageStream":
        return MessageStream(turn, request)

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return _encode(_error(status, message, code))


MESSAGES = MessagesDialect()


class MessageStream:
    """A reply as blocks: thinking, text, then calls."""

    def __init__(self, turn: "GatewayTurn", request: ChatRequest) -> None:
        self._turn = turn
        self._request = request
        self._open: str | None = None  # the type of the open block, or None
        self._index = 0

    def opening(self) -> bytes:
        usage = _prompt_usage(self._turn) | {"output_tokens": 0}
        return _event({"type": "message_start", "message": _head(self._turn, usage)})

    def reasoning(self, piece: str) -> bytes:
        return self._filled("thinking", {"type": "thinking", "thinking": "", "signature": ""}, piece)

    def text(self, piece: str) -> bytes:
        return self._filled("text", {"type": "text", "text": ""}, piece)

    def keepalive(self) -> bytes:
        # Claude Code (2.1) gives up a stream after 300 s without an event. Pings do not count, but an empty delta does.
        # For litellm (1.106) such a delta ends the reply.
        return _IDLE_DELTA if self._request.client.startswith("claude-cli/") else _PING

    def closing(self) -> bytes:
        turn = self._turn
        events = [self._closed(), *(self._call(block) for block in _calls(turn))]
        events.append(_event({"type": "message_delta", "delta": _ending(turn), "usage": _usage(turn)}))
        return b"".join([*events, _event({"type": "message_stop"})])

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return _event(_error(status, message, code))

    def _filled(self, kind: str, empty: dict[str, Any], piece: str) -> bytes:
        events = []
        if self._open != kind:
            events = [self._closed(), self._started(empty)]
            self._open = kind
        return b"".join([*events, *self._deltas(f"{kind}_delta", kind, valid_text(piece))])

    def _call(self, block: dict[str, Any]) -> bytes:
        self._open = "tool_use"
        deltas = self._deltas("input_json_delta", "partial_json", bytes(block["input"]).decode())
        return b"".join([self._started(block | {"input": {}}), *deltas, self._closed()])

    def _started(self, empty: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_start", "index": self._index, "content_block": empty})

    def _deltas(self, kind: str, field: str, text: str) -> list[bytes]:
        pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
        return [self._delta({"type": kind, field: piece}) for piece in pieces]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _closed(self) -> bytes:
        """The end of the open block, if there is one."""
        if self._open is None:
            return b""
        signature = {"type": "signature_delta", "signature": SIGNATURE + self._turn.id}
        signed = self._delta(signature) if self._open == "thinking" else b""
        ended = signed + _event({"type": "content_block_stop", "index": self._index})
        self._open, self._index = None, self._index + 1
        return ended


def _head(turn: "GatewayTurn", usage: dict[str, Any]) -> dict[str, Any]:
    """A message without content. Claude Code merges replies with the same id, so the id is unique."""
    return {
        "id": f"{MESSAGE_PREFIX}{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": turn.model,
        "content": [],
        **_UNENDED,
        "usage": usage,
    }


def _ending(turn: "GatewayTurn") -> dict[str, Any]:
    return {"stop_reason": _stop_reason(turn), "stop_sequence": turn.stop_string}


def _stop_reason(turn: "GatewayTurn") -> str:
    if turn.is_filtered:
        return "refusal"
    if turn.over_budget:
        return "model_context_window_exceeded"
    match turn.finish:
        case Finish.STOP:
            return "tool_use" if turn.message.get("tool_calls") else "end_turn"
        case Finish.STOP_STRING:
            return "stop_sequence"
        case Finish.LENGTH | Finish.ABORT | Finish.ERROR:
            return "max_tokens"  # the only stop reason for an incomplete reply


def _prompt_usage(turn: "GatewayTurn") -> dict[str, Any]:
    """Anthropic's `input_tokens` exclude tokens from a cache; the three counts add up to the prompt."""
    return {
        "input_tokens": turn.prompt_tokens - turn.held_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": turn.held_tokens,
    }


def _usage(turn: "GatewayTurn") -> dict[str, Any]:
    return _prompt_usage(turn) | {
        "output_tokens": turn.sampled_tokens,
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
    }


def _blocks(turn: "GatewayTurn") -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking := turn.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": valid_text(thinking), "signature": SIGNATURE + turn.id})
    if text := content_text(turn.message.get("content")):
        blocks.append({"type": "text", "text": valid_text(text)})
    return blocks + _calls(turn)


def _calls(turn: "GatewayTurn") -> list[dict[str, Any]]:
    calls = turn.message.get("tool_calls") or ()
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _input(valid_text(call["function"]["arguments"])),
        }
        for call in calls
    ]


def _input(arguments: str) -> msgspec.Raw:
    """Arguments as the model wrote them. If they are not JSON, they are sent and read again as a JSON string."""
    if not arguments.strip():
        return msgspec.Raw(b"{}")
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(_encode(arguments))
    return msgspec.Raw(arguments)


def _error(status: int, message: str, code: str | None) -> dict[str, Any]:
    error: dict[str, Any] = {"type": _ERRORS.get(status, "api_error"), "message": valid_text(message)}
    if code in _THREAD_ERRORS:
        error["details"] = {"error_code": _THREAD_ERRORS[code]}
    return {"type": "error", "error": error}
