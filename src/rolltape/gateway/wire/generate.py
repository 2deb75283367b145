"""vLLM's `/inference/v1/generate`: token ids in, token ids and logprobs out.

It is for clients that render prompts and parse replies themselves, such as verifiers' training client.
"""

from typing import TYPE_CHECKING, Any

from rolltape.gateway.request import ChatRequest, GivenPrompt, TokenDetails
from rolltape.gateway.wire.fields import Fields, read_body
from rolltape.gateway.wire.openai import (
    HARMLESS,
    MOST_LIKELY,
    ChunkStream,
    OpenAIDialect,
    read_ids,
    read_reply_options,
)
from rolltape.gateway.wire.protocol import Answers, Route
from rolltape.gateway.wire.reply_tokens import prompt_ids, reply_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

# Fields about the server's operation, and about text, which is not returned here.
_OF_THE_SERVER = ("request_id", "cache_salt", "priority", "assistant_tokens_mask", "token_offsets")
_OF_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize")


def _read_request(raw: bytes) -> ChatRequest:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    for media in ("features", "content_parts"):
        if body.get(media):
            body.refuse(media, "images, audio and video are not supported; send only token ids")
    params = body.object("sampling_params")
    return ChatRequest(
        api="generate",
        model=body.maybe_text("model") or "",
        messages=[],
        prompt=GivenPrompt(ids=read_ids(body, "token_ids"), add_special_tokens=False),
        **read_reply_options(body, params, "max_tokens"),
        token_details=_token_details(body, params),
        repaired=repaired,
        ignored_params=_ignored_params(body, params),  # last, since it names the unread fields
    )


def _token_details(body: Fields, params: Fields) -> TokenDetails:
    wanted = params.maybe_whole("logprobs", least=0, most=MOST_LIKELY)
    return TokenDetails(
        ids=body.maybe_flag("return_token_ids") or False,  # of the prompt; the reply's are always sent
        logprobs=wanted is not None,
        top_logprobs=0 if wanted in (None, 1) else wanted,  # the first returned token is the sampled one
        tokens_as_ids=True,
    )


def _ignored_params(body: Fields, params: Fields) -> tuple[str, ...]:
    params.skip(*_OF_TEXT, "routed_experts_prompt_start", "output_kind")
    params.ignore_unread()
    return body.all_ignored(*HARMLESS, *_OF_THE_SERVER)


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


GENERATE = GenerateDialect(_read_request)


class GenerateStream(ChunkStream):
    """A chunk for each reply, sent when all have ended, since a reply may be cut until then."""

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
    """As in Chat Completions, but the sampled token always comes first among the most likely ones."""
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
