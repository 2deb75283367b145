"""vLLM's API for clients that render prompts and parse replies by themselves, as verifiers' training client does."""

from typing import TYPE_CHECKING, Any

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.generate.request import read_request
from rolltape.gateway.wire.openai import ChunkStream, OpenAIDialect
from rolltape.gateway.wire.protocol import Answers, Route
from rolltape.gateway.wire.reply_tokens import prompt_ids, reply_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn


class GenerateDialect(OpenAIDialect):
    """Ids in, ids and logprobs out."""

    name = "generate"
    routes: tuple[Route, ...] = (Route("/inference/v1/generate", Answers.TURN),)

    def whole(self, turn: "GatewayTurn") -> bytes:
        choices = [_choice(index, one) for index, one in enumerate(turn.choices)]
        head = {"model": turn.model, "created": int(turn.received_at)}
        return _encoded(turn, **head, choices=choices, usage=usage(turn), prompt_logprobs=None, **prompt_ids(turn))

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "GenerateStream":
        return GenerateStream(turn, request)


GENERATE = GenerateDialect(read_request)


class GenerateStream(ChunkStream):
    """A chunk for each reply, when all have ended: until then one may yet be cut."""

    def text(self, piece: str) -> bytes:
        return b""

    def closing(self) -> bytes:
        turn = self._turn
        chunks = [
            _encoded(turn, choices=[_choice(index, one)], **({} if index else prompt_ids(turn)))
            for index, one in enumerate(turn.choices)
        ]
        return self._closing(chunks, _encoded(turn, choices=[], usage=usage(turn)))


def _choice(index: int, turn: "GatewayTurn") -> dict[str, Any]:
    return {
        "index": index,
        "logprobs": _logprobs(turn),
        "finish_reason": "length" if turn.finish is Finish.LENGTH else "stop",
        "token_ids": turn.sampled[0].tolist(),
        "routed_experts": None,
    }


def _logprobs(turn: "GatewayTurn") -> dict[str, Any] | None:
    """As in Chat Completions, except that the sampled token always comes first among the most likely ones."""
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
