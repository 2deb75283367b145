"""OpenAI's Chat Completions API."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.chat.request import read_request
from rolltape.gateway.wire.fields import event
from rolltape.gateway.wire.openai import ChunkStream, OpenAIDialect, custom_call_input
from rolltape.gateway.wire.protocol import Answers, Route
from rolltape.gateway.wire.reply_tokens import prompt_ids, reply_ids, token_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

_CHUNK = "chat.completion.chunk"
_WRITTEN = frozenset({"role", "content", "refusal", "reasoning_content", "tool_calls", "id"})  # fields of a message
_OF_ENDPOINT = ("system_fingerprint", "service_tier")


class ChatDialect(OpenAIDialect):
    """Chat Completions, with `reasoning_content` for thinking, as in DeepSeek, vLLM and SGLang."""

    name = "chat"
    # Anthropic's clients list models on the same routes, and read the same answers.
    routes: tuple[Route, ...] = (
        Route("/v1/chat/completions", Answers.TURN),
        Route("/v1/models", Answers.MODELS),
        Route("/v1/models/{model:.+}", Answers.MODEL),
    )

    def models(self, names: Collection[str]) -> bytes:
        models = [_model(name) for name in names]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
        return encode_json({"object": "list", "data": models, "has_more": False, **ends}, "a list")[0]

    def model(self, name: str) -> bytes:
        return encode_json(_model(name), "a model")[0]

    def whole(self, turn: "GatewayTurn") -> bytes:
        choices = [
            {
                "index": index,
                "message": _message(one),
                "logprobs": _logprobs(one),
                "finish_reason": _finish_reason(one),
                **reply_ids(one),
            }
            for index, one in enumerate(turn.choices)
        ]
        return _encoded(turn, "chat.completion", choices=choices, usage=_usage(turn), **prompt_ids(turn))

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "ChatStream":
        return ChatStream(turn, request)


CHAT = ChatDialect(read_request)


class ChatStream(ChunkStream):
    """A reply as chunks. The first of several replies is streamed; the others follow when all have ended.

    Ids and logprobs come with the chunk that has the finish reason, since a reply may be cut until then.
    """

    def __init__(self, turn: "GatewayTurn", request: ChatRequest) -> None:
        super().__init__(turn, request)
        self._prompt_sent = turn.token_details.ids

    def opening(self) -> bytes:
        return event(self._chunk({"role": "assistant", "content": None}, **prompt_ids(self._turn)))

    def reasoning(self, piece: str) -> bytes:
        return event(self._chunk({_reasoning_field(self._turn): piece}))

    def text(self, piece: str) -> bytes:
        return event(self._chunk({"content": piece}))

    def closing(self) -> bytes:
        chunks = self._end(0, self._turn)
        if not self._prompt_sent and (late := prompt_ids(self._turn)):  # a hosted endpoint returns them with its reply
            chunks.insert(0, self._chunk({}, **late))
        for index, turn in enumerate(self._turn.choices[1:], 1):
            chunks.append(self._chunk({"role": "assistant", "content": None}, index))
            if turn.shown.reasoning:
                chunks.append(self._chunk({_reasoning_field(turn): turn.shown.reasoning}, index))
            if turn.shown.text:
                chunks.append(self._chunk({"content": turn.shown.text}, index))
            chunks += self._end(index, turn)
        return self._closing(chunks, _encoded(self._turn, _CHUNK, choices=[], usage=_usage(self._turn)))

    def _end(self, index: int, turn: "GatewayTurn") -> list[bytes]:
        """The chunks after a choice's text."""
        message, chunks = _message(turn), []
        if message["content"] == "":
            chunks.append(self._chunk({"content": ""}, index))
        if refusal := turn.message.get("refusal"):
            chunks.append(self._chunk({"refusal": refusal}, index))
        if own := _own_fields(turn):
            chunks.append(self._chunk(own, index))
        if "tool_calls" in message:
            calls = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
            # llama-index (its OpenAI part, 0.8.3) reads one call per chunk. Codex (0.29) sends no User-Agent, and reads
            # only the calls of one chunk.
            parts = [[call] for call in calls] if self._request.client else [calls]
            chunks += [self._chunk({"tool_calls": some}, index) for some in parts]
        last = {"logprobs": _logprobs(turn), "finish_reason": _finish_reason(turn), **reply_ids(turn)}
        return [*chunks, self._chunk({}, index, last)]

    def _chunk(self, delta: dict[str, Any], index: int = 0, ended: Mapping[str, Any] = {}, **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **ended}
        return _encoded(self._turn, _CHUNK, choices=[choice], **fields)


def _message(turn: "GatewayTurn") -> dict[str, Any]:
    """The reply's message; its content is null if there are only calls."""
    calls = [_call(turn.request, call) for call in turn.message.get("tool_calls") or ()]
    text = content_text(turn.message.get("content"))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": turn.message.get("refusal"),
    }
    if reasoning := turn.message.get("reasoning_content"):
        message[_reasoning_field(turn)] = reasoning
    message |= _own_fields(turn)
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning_field(turn: "GatewayTurn") -> str:
    """The name of the reasoning, which is a hosted endpoint's own: it may refuse another name in an echo."""
    return turn.upstream.get("reasoning_field") or "reasoning_content"


def _own_fields(turn: "GatewayTurn") -> dict[str, Any]:
    """The fields that a hosted endpoint added to its message."""
    return {name: value for name, value in turn.message.items() if name not in _WRITTEN}


def _call(request: ChatRequest, call: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = custom_call_input(arguments) if name in request.custom_tools else None
    if text is not None:
        custom = {"type": "custom", "custom": {"name": name, "input": text}}
        return {field: value for field, value in call.items() if field != "function"} | custom
    return call


def _finish_reason(turn: "GatewayTurn") -> str:
    if turn.is_filtered:
        return "content_filter"
    if turn.finish is Finish.LENGTH:
        return "length"
    # The API has no finish reason for an aborted reply.
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _logprobs(turn: "GatewayTurn") -> dict[str, Any] | None:
    tokens = token_logprobs(turn)
    if tokens is None:
        reported: dict[str, Any] | None = turn.upstream.get("logprobs")
        return reported if turn.request.token_details.logprobs else None
    return {"content": tokens, "refusal": None}


def _usage(turn: "GatewayTurn") -> dict[str, Any]:
    thinking = sum(one.reasoning_tokens for one in turn.choices)
    counted = usage(turn) | {"completion_tokens_details": {"reasoning_tokens": thinking}}
    reported = turn.upstream.get("usage") if len(turn.choices) == 1 else None
    return counted | (reported or {})


def _encoded(turn: "GatewayTurn", kind: str, **fields: Any) -> bytes:
    head = {"id": f"chatcmpl-{turn.id}", "object": kind, "created": int(turn.received_at), "model": turn.model}
    of_endpoint = {name: turn.upstream[name] for name in _OF_ENDPOINT if name in turn.upstream}
    return encode_json(head | of_endpoint | fields, "a reply")[0]


def _model(name: str) -> dict[str, object]:
    """A model in a form that both OpenAI's and Anthropic's clients read."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "rolltape",
    }
