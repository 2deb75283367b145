"""OpenAI's Completions API, for clients that render prompts themselves, with vLLM's fields for token ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.completions.request import read_detokenizing, read_request, read_tokenizing
from rolltape.gateway.wire.fields import event
from rolltape.gateway.wire.openai import ChunkStream, OpenAIDialect
from rolltape.gateway.wire.protocol import Answers, Route
from rolltape.gateway.wire.reply_tokens import ReplyToken, prompt_ids, reply_ids, reply_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish, Ids

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn
    from rolltape.samples.spelling import Spell


class CompletionsDialect(OpenAIDialect):
    """Completions: a prompt of text or ids in, text or ids out. No chat template is applied."""

    name = "completions"
    routes: tuple[Route, ...] = (
        Route("/v1/completions", Answers.TURN),
        Route("/tokenize", Answers.TOKENS),
        Route("/detokenize", Answers.TEXT),
    )

    def whole(self, turn: "GatewayTurn") -> bytes:
        choices = [_choice(index, one, one.shown.text) | _end(one) for index, one in enumerate(turn.choices)]
        return _encoded(turn, choices=choices, usage=usage(turn))

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "CompletionsStream":
        return CompletionsStream(turn, request)

    def read_tokenizing(self, body: bytes) -> ChatRequest:
        return read_tokenizing(body)

    def tokenized(self, request: ChatRequest, ids: Ids, spell: "Spell", context: int | None) -> bytes:
        tokens = ids.tolist()
        texts = [spell(token).decode("utf-8", "replace") for token in tokens] if request.token_details.texts else None
        answer = {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts}
        return encode_json(answer, "an answer")[0]

    def read_detokenizing(self, body: bytes) -> ChatRequest:
        return read_detokenizing(body)

    def detokenized(self, text: str) -> bytes:
        return encode_json({"prompt": text}, "an answer")[0]


COMPLETIONS = CompletionsDialect(read_request)


class CompletionsStream(ChunkStream):
    """A reply as chunks. The first of several replies is streamed. Ids and logprobs are in a reply's last chunk."""

    def opening(self) -> bytes:
        ids_wanted = self._turn.token_details.ids
        return event(self._chunk(_choice(0, self._turn, ""))) if ids_wanted else super().opening()

    def text(self, piece: str) -> bytes:
        return event(self._chunk({"index": 0, "text": piece, "logprobs": None, "finish_reason": None}))

    def closing(self) -> bytes:
        chunks = [self._chunk({"index": 0, "text": "", **_end(self._turn)})]
        for index, turn in enumerate(self._turn.choices[1:], 1):
            chunks.append(self._chunk(_choice(index, turn, turn.shown.text) | _end(turn)))
        return self._closing(chunks, _encoded(self._turn, choices=[], usage=usage(self._turn)))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _encoded(self._turn, choices=[choice])


def _choice(index: int, turn: "GatewayTurn", text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **prompt_ids(turn)}


def _end(turn: "GatewayTurn") -> dict[str, Any]:
    """The fields of a choice that are known when it has ended."""
    finish_reason = "length" if turn.finish is Finish.LENGTH else "stop"
    return {"logprobs": _logprobs(turn), "finish_reason": finish_reason, **reply_ids(turn)}


def _logprobs(turn: "GatewayTurn") -> dict[str, Any] | None:
    tokens = reply_logprobs(turn)
    if tokens is None:
        return None
    offsets, at = [], 0
    for one in tokens:
        offsets.append(at)
        at += len(one.text)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_likely((one, *one.top)) or None for one in tokens],
        "text_offset": offsets,
    }


def _likely(tokens: Sequence[ReplyToken]) -> dict[str, float]:
    """The logprobs of a sampled token and of the most likely ones, by their texts."""
    return {one.text: one.logprob for one in tokens if one.logprob is not None}


def _encoded(turn: "GatewayTurn", **fields: Any) -> bytes:
    head = {"id": f"cmpl-{turn.id}", "object": "text_completion", "created": int(turn.received_at)}
    return encode_json(head | {"model": turn.request.model} | fields, "a reply")[0]
