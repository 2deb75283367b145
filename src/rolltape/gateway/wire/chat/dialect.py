"""OpenAI's Chat Completions API."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.chat.request import read_request
from rolltape.gateway.wire.fields import COMMENT, event, with_headers
from rolltape.gateway.wire.openai import BETAS, OpenAIDialect, custom_call_input, error_body, model_list, model_object
from rolltape.gateway.wire.protocol import NO_HEADERS, Answers, Route
from rolltape.gateway.wire.reply_tokens import prompt_ids, reply_ids, reply_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn


class ChatDialect(OpenAIDialect):
    """Chat Completions, with `reasoning_content` for thinking as DeepSeek, vLLM and SGLang have it."""

    name = "chat"
    # Anthropic's clients ask for models on the same routes, and read the same answers.
    routes: tuple[Route, ...] = (
        Route("/v1/chat/completions", Answers.TURN),
        Route("/v1/models", Answers.MODELS),
        Route("/v1/models/{model:.+}", Answers.MODEL),
    )

    def read(
        self, body: bytes, headers: Mapping[str, str] = NO_HEADERS, path: Mapping[str, str] = NO_HEADERS
    ) -> ChatRequest:
        return with_headers(read_request(body), headers, *BETAS)

    def models(self, names: Collection[str]) -> bytes:
        return model_list(names)

    def model(self, name: str) -> bytes:
        return encode_json(model_object(name), "a model")[0]

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


CHAT = ChatDialect()


class ChatStream:
    """A reply as chunks. Of several the first comes as it grows, and the others follow when all have ended.

    Ids and logprobs come with the chunk that says how a reply ended: until then it may yet be cut.
    """

    def __init__(self, turn: "GatewayTurn", request: ChatRequest) -> None:
        self._turn = turn
        self._request = request
        self._prompt_told = turn.token_details.ids

    def opening(self) -> bytes:
        choice = _chunk_of(0, {"role": "assistant", "content": None})
        return event(_encoded(self._turn, "chat.completion.chunk", choices=[choice], **prompt_ids(self._turn)))

    def reasoning(self, piece: str) -> bytes:
        return self._chunk({"reasoning_content": piece})

    def text(self, piece: str) -> bytes:
        return self._chunk({"content": piece})

    def keepalive(self) -> bytes:
        return COMMENT

    def closing(self) -> bytes:
        events = self._end(0, self._turn)
        if not self._prompt_told and (late := prompt_ids(self._turn)):  # a hosted endpoint says them with its reply
            events.insert(0, event(_encoded(self._turn, "chat.completion.chunk", choices=[_chunk_of(0, {})], **late)))
        for index, turn in enumerate(self._turn.choices[1:], 1):
            events.append(self._chunk({"role": "assistant", "content": None}, index))
            if turn.shown.reasoning:
                events.append(self._chunk({"reasoning_content": turn.shown.reasoning}, index))
            if turn.shown.text:
                events.append(self._chunk({"content": turn.shown.text}, index))
            events += self._end(index, turn)
        if self._request.include_usage:
            events.append(event(_encoded(self._turn, "chat.completion.chunk", choices=[], usage=_usage(self._turn))))
        return b"".join([*events, event(b"[DONE]")])

    def _end(self, index: int, turn: "GatewayTurn") -> list[bytes]:
        """The chunks after a choice's text."""
        message, events = _message(turn), []
        if message["content"] == "":
            events.append(self._chunk({"content": ""}, index))
        if "tool_calls" in message:
            calls = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
            # llama-index (its OpenAI part, 0.8.3) takes one call of each chunk. Codex (0.29) sends no User-Agent, and
            # takes those of one chunk alone.
            chunks = [[call] for call in calls] if self._request.client else [calls]
            events += [self._chunk({"tool_calls": some}, index) for some in chunks]
        last = {"logprobs": _logprobs(turn), "finish_reason": _finish_reason(turn), **reply_ids(turn)}
        return [*events, self._chunk({}, index, **last)]

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return event(error_body(status, message, code))

    def _chunk(self, delta: dict[str, Any], index: int = 0, **fields: Any) -> bytes:
        choice = _chunk_of(index, delta, **fields)
        return event(_encoded(self._turn, "chat.completion.chunk", choices=[choice]))


def _chunk_of(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}


def _message(turn: "GatewayTurn") -> dict[str, Any]:
    """The reply's message; content is null where there are calls alone."""
    calls = [_call(turn.request, call) for call in turn.message.get("tool_calls") or ()]
    text = content_text(turn.message.get("content"))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": turn.message.get("refusal"),
    }
    if reasoning := turn.message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(request: ChatRequest, call: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = custom_call_input(arguments) if name in request.custom_tools else None
    if text is not None:
        return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(turn: "GatewayTurn") -> str:
    if turn.is_filtered:
        return "content_filter"
    if turn.finish is Finish.LENGTH:
        return "length"
    # The API has no word for a reply that was cut off from outside; it ends like any other.
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _logprobs(turn: "GatewayTurn") -> dict[str, Any] | None:
    tokens = reply_logprobs(turn)
    if tokens is None:
        return None
    content = [one.as_chat | {"top_logprobs": [top.as_chat for top in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _usage(turn: "GatewayTurn") -> dict[str, Any]:
    thinking = sum(one.reasoning_tokens for one in turn.choices)
    return usage(turn) | {"completion_tokens_details": {"reasoning_tokens": thinking}}


def _encoded(turn: "GatewayTurn", kind: str, **fields: Any) -> bytes:
    head = {"id": f"chatcmpl-{turn.id}", "object": kind, "created": int(turn.received_at), "model": turn.model}
    return encode_json(head | fields, "a reply")[0]
