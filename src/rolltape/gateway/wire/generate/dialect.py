"""vLLM's API for clients that render prompts and parse replies by themselves, as verifiers' training client does."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.fields import COMMENT, event, with_headers
from rolltape.gateway.wire.generate.request import read_request
from rolltape.gateway.wire.openai import BETAS, OpenAIDialect, error_body
from rolltape.gateway.wire.protocol import NO_HEADERS, Answers, Route
from rolltape.gateway.wire.reply_tokens import prompt_ids, reply_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn


class GenerateDialect(OpenAIDialect):
    """Ids in, ids and logprobs out."""

    name = "generate"
    routes: tuple[Route, ...] = (Route("/inference/v1/generate", Answers.TURN),)

    def read(
        self, body: bytes, headers: Mapping[str, str] = NO_HEADERS, path: Mapping[str, str] = NO_HEADERS
    ) -> ChatRequest:
        return with_headers(read_request(body), headers, *BETAS)

    def whole(self, turn: "GatewayTurn") -> bytes:
        choices = [_choice(index, one) for index, one in enumerate(turn.choices)]
        head = {"model": turn.model, "created": int(turn.received_at)}
        return _encoded(turn, **head, choices=choices, usage=usage(turn), prompt_logprobs=None, **prompt_ids(turn))

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "GenerateStream":
        return GenerateStream(turn, request)


GENERATE = GenerateDialect()


class GenerateStream:
    """A chunk for each reply, when all have ended: until then one may yet be cut."""

    def __init__(self, turn: "GatewayTurn", request: ChatRequest) -> None:
        self._turn = turn
        self._request = request

    def opening(self) -> bytes:
        return COMMENT

    def reasoning(self, piece: str) -> bytes:
        return b""

    def text(self, piece: str) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return COMMENT

    def closing(self) -> bytes:
        turn = self._turn
        told = [
            _encoded(turn, choices=[_choice(index, one)], **({} if index else prompt_ids(turn)))
            for index, one in enumerate(turn.choices)
        ]
        if self._request.include_usage:
            told.append(_encoded(turn, choices=[], usage=usage(turn)))
        return b"".join(event(one) for one in [*told, b"[DONE]"])

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        return event(error_body(status, message, code))


def _choice(index: int, turn: "GatewayTurn") -> dict[str, Any]:
    return {
        "index": index,
        "logprobs": _logprobs(turn),
        "finish_reason": "length" if turn.finish is Finish.LENGTH else "stop",
        "token_ids": turn.sampled[0].tolist(),
        "routed_experts": None,
    }


def _logprobs(turn: "GatewayTurn") -> dict[str, Any] | None:
    """As in Chat Completions, but that the sampled token is the first of the most likely ones, whatever it is."""
    tokens = reply_logprobs(turn)
    if tokens is None:
        return None
    content = []
    for one in tokens:
        others = [top for top in one.top if top.id != one.id]
        listed = [one, *others][: max(turn.token_details.top_logprobs, 1)]
        content.append(one.as_chat | {"top_logprobs": [top.as_chat for top in listed]})
    return {"content": content}


def _encoded(turn: "GatewayTurn", **fields: Any) -> bytes:
    return encode_json({"request_id": f"generate-tokens-{turn.id}", **fields}, "a reply")[0]
