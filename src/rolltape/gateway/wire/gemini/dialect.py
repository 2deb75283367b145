"""Google's Gemini API, as used by the google-genai SDKs and gemini-cli."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.fields import event, key_in, parse_arguments
from rolltape.gateway.wire.gemini.contents import ARGUMENTS_AS_TEXT, sign_reply
from rolltape.gateway.wire.gemini.request import STREAMING, read_counting, read_request
from rolltape.gateway.wire.protocol import NO_HEADERS, Answers, Route
from rolltape.gateway.wire.reply_tokens import ReplyToken, reply_logprobs
from rolltape.records.jsonable import encode_json, is_deep
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

_KEY = "x-goog-api-key"
_MODELS = "/{version:v1|v1beta|v1alpha}/models"
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    529: "UNAVAILABLE",
}
# The statuses of a session that has ended, or has used up its turns. gemini-cli (0.61) ignores `x-should-retry` and
# retries ten times within minutes, unless the error has this reason. An error that a retry may solve must not have it.
_FINAL = (429, 503)
_EXHAUSTED = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "MODEL_CAPACITY_EXHAUSTED"}
_DEEPEST_ARGUMENTS = 100  # levels: the echo is nested in a body, whose own limit is 150
# The Python SDK (3.1) and the JavaScript SDK reject comments as broken events. Both ignore empty lines.
_BLANK = b"\n"


class GeminiDialect:
    """`/v1beta/models/MODEL:generateContent`, and similar. The Python SDK (3.1) uses `/v1`, as OpenAI's clients do."""

    name = "gemini"
    sdk = "google"
    variables = ("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", "GEMINI_MODEL")
    routes: tuple[Route, ...] = (
        Route(f"{_MODELS}/{{model:.+}}:{{method:generateContent|{STREAMING}}}", Answers.TURN),
        Route(f"{_MODELS}/{{model:.+}}:countTokens", Answers.COUNT),
        Route("/v1/models", Answers.MODELS),
        Route("/v1/models/{model:.+}", Answers.MODEL),
        Route(_MODELS, Answers.MODELS),
        Route(f"{_MODELS}/{{model:.+}}", Answers.MODEL),
    )

    def is_meant(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        return _KEY in headers or "key" in query

    def find_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return key_in(headers, _KEY) or query.get("key")

    def base_url(self, root: str) -> str:
        return root

    def read(
        self, body: bytes, headers: Mapping[str, str] = NO_HEADERS, path: Mapping[str, str] = NO_HEADERS
    ) -> ChatRequest:
        return msgspec.structs.replace(read_request(body, path), client=headers.get("User-Agent", ""))

    def read_counting(self, body: bytes, path: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        return read_counting(body, path)

    def counted(self, prompt_tokens: int) -> bytes:
        return _encode({"totalTokens": prompt_tokens})

    def models(self, names: Collection[str]) -> bytes:
        return _encode({"models": [_model(name) for name in names]})

    def model(self, name: str) -> bytes:
        return _encode(_model(name))

    def whole(self, turn: "GatewayTurn") -> bytes:
        candidates = [_whole_candidate(one, index) for index, one in enumerate(turn.choices)]
        return _encode(_response(turn, candidates, usageMetadata=_usage(turn)))

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "GeminiStream":
        return GeminiArray(turn) if request.in_array else GeminiStream(turn)

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        word = _STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        details = {"details": [_EXHAUSTED]} if final and status in _FINAL else {}
        return _encode({"error": {"code": status, "message": message, "status": word, **details}})


GEMINI = GeminiDialect()


class GeminiStream:
    """A reply as responses, each with only new parts. All replies but the first come with the last response.

    The first text and the first call have the signature. gemini-cli (0.61) joins texts, and keeps the first signature.
    """

    def __init__(self, turn: "GatewayTurn") -> None:
        self._turn = turn
        self._signed = False

    def opening(self) -> bytes:
        return _BLANK

    def reasoning(self, piece: str) -> bytes:
        return self._part(_candidate([{"text": piece, "thought": True}]))

    def text(self, piece: str) -> bytes:
        return self._part(_candidate([self._text(piece)]))

    def keepalive(self) -> bytes:
        return _BLANK

    def closing(self) -> bytes:
        # A chat of the Python SDK (3.1) drops a reply that has an event without parts.
        turn, others = self._turn, self._turn.choices[1:]
        last = _candidate(_calls(turn) or [self._text("")]) | _ending(turn)
        candidates = [last, *(_whole_candidate(one, index) for index, one in enumerate(others, 1))]
        return self._part(*candidates, usageMetadata=_usage(turn))

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        # Without `data:`, as the JavaScript SDK expects it.
        return GEMINI.error(status, message, code, final=final) + b"\n\n"

    def _text(self, piece: str) -> dict[str, Any]:
        signature = {} if self._signed else {"thoughtSignature": sign_reply(self._turn.id)}
        self._signed = True
        return {"text": piece, **signature}

    def _part(self, *candidates: dict[str, Any], **fields: Any) -> bytes:
        return self._framed(_encode(_response(self._turn, candidates, **fields)))

    def _framed(self, response: bytes) -> bytes:
        return event(response)


class GeminiArray(GeminiStream):
    """The responses as the items of one JSON array, which the API sends to clients that do not ask for `alt=sse`."""

    def __init__(self, turn: "GatewayTurn") -> None:
        super().__init__(turn)
        self._has_items = False

    def opening(self) -> bytes:
        return b"["

    def closing(self) -> bytes:
        return super().closing() + b"]"

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return self._framed(GEMINI.error(status, message, code, final=final)) + b"]"

    def _framed(self, response: bytes) -> bytes:
        item = b",\n" + response if self._has_items else response
        self._has_items = True
        return item


def _response(turn: "GatewayTurn", candidates: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"candidates": candidates, **fields, "modelVersion": turn.model, "responseId": turn.id}


def _candidate(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    return {"content": {"parts": parts, "role": "model"}, "index": index}


def _whole_candidate(turn: "GatewayTurn", index: int) -> dict[str, Any]:
    text, calls = content_text(turn.message.get("content")), _calls(turn)
    parts: list[dict[str, Any]] = []
    if thoughts := turn.message.get("reasoning_content"):
        parts.append({"text": thoughts, "thought": True})
    if text or not calls:
        parts.append({"text": text, "thoughtSignature": sign_reply(turn.id)})
    return _candidate(parts + calls, index) | _ending(turn)


def _calls(turn: "GatewayTurn") -> list[dict[str, Any]]:
    """A part for each call; the first one has the signature."""
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": call["id"], "name": call["function"]["name"], "args": _args(call)}}
        for call in turn.message.get("tool_calls") or ()
    ]
    if parts:
        parts[0]["thoughtSignature"] = sign_reply(turn.id)
    return parts


def _args(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object. If the model wrote no object, its text is sent in a field, and read from there again."""
    arguments = call["function"]["arguments"]
    if not arguments.strip():
        return {}
    value = parse_arguments(arguments)
    return {ARGUMENTS_AS_TEXT: arguments} if value is None or is_deep(value, _DEEPEST_ARGUMENTS) else value


def _ending(turn: "GatewayTurn") -> dict[str, Any]:
    """How a reply ended, and its logprobs if requested."""
    ended: dict[str, Any] = {"finishReason": _finish_reason(turn)}
    if tokens := reply_logprobs(turn):
        result: dict[str, Any] = {"chosenCandidates": [_likely(one) for one in tokens]}
        if turn.token_details.top_logprobs:
            result["topCandidates"] = [{"candidates": [_likely(top) for top in one.top]} for one in tokens]
        ended["logprobsResult"] = result
    return ended


def _likely(token: ReplyToken) -> dict[str, Any]:
    return {"token": token.text, "tokenId": token.id, "logProbability": token.logprob}


def _finish_reason(turn: "GatewayTurn") -> str:
    if turn.is_filtered:
        return "SAFETY"
    match turn.finish:
        case Finish.STOP | Finish.STOP_STRING:
            return "STOP"
        case Finish.LENGTH:
            return "MAX_TOKENS"
        case Finish.ABORT | Finish.ERROR:
            return "OTHER"


def _usage(turn: "GatewayTurn") -> dict[str, Any]:
    sampled = sum(one.sampled_tokens for one in turn.choices)
    thoughts = sum(one.reasoning_tokens for one in turn.choices)
    return {
        "promptTokenCount": turn.prompt_tokens,
        "cachedContentTokenCount": turn.held_tokens,
        "candidatesTokenCount": sampled - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": turn.prompt_tokens + sampled,
    }


def _model(name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "version": name,
        "displayName": name,
        "supportedGenerationMethods": ["generateContent", STREAMING, "countTokens"],
    }


def _encode(value: dict[str, Any]) -> bytes:
    return encode_json(value, "a reply")[0]
