"""OpenAI's older Completions, whose prompts are text or ids that stay unchanged; vLLM's tokenize routes.

Clients that render prompts themselves use it. Token ids have the fields that vLLM gives them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, GivenPrompt, SamplingParams, TokenDetails
from rolltape.gateway.wire.chat.request import read_prompt_parts
from rolltape.gateway.wire.fields import Fields, event, read_body
from rolltape.gateway.wire.openai import (
    HARMLESS,
    MOST_LIKELY,
    ChunkStream,
    OpenAIDialect,
    check_ids,
    read_ids,
    read_metadata,
    read_reply_options,
    read_token_details,
)
from rolltape.gateway.wire.protocol import Answers, Route
from rolltape.gateway.wire.reply_tokens import ReplyToken, prompt_ids, reply_ids, reply_logprobs, usage
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish, Ids

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn
    from rolltape.samples.spelling import Spell

_MAX_TOKENS = 16  # OpenAI's default
_FORMS = "give a text or a list of token ids"


def _read_request(raw: bytes) -> ChatRequest:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    _refuse_unservable(body)
    options = read_reply_options(body, body, "max_tokens")
    return ChatRequest(
        api="completions",
        model=body.name("model"),
        messages=[],
        prompt=_prompt(body),
        **options | {"sampling": options["sampling"].over(SamplingParams(max_tokens=_MAX_TOKENS))},
        token_details=_token_details(body),
        metadata=read_metadata(body),
        repaired=repaired,
        ignored_params=body.all_ignored(*HARMLESS),  # last, since it names the unread fields
    )


def _refuse_unservable(body: Fields) -> None:
    if body.maybe_flag("echo"):
        body.refuse("echo", "put the prompt before the reply yourself; return_token_ids gives its ids")
    if body.maybe_text("suffix"):
        body.refuse("suffix", "a prompt is continued only at its end; leave it out")
    if (best_of := body.maybe_whole("best_of", least=1)) is not None and best_of > (body.maybe_whole("n") or 1):
        body.refuse("best_of", "ask for n replies and choose among them")


def _prompt(body: Fields) -> GivenPrompt:
    given = body.get("prompt")
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise BadRequest(f"prompt has {len(given)} prompts; send one request for each")
        given = given[0]
    add_special_tokens = body.maybe_flag("add_special_tokens") is not False
    if isinstance(given, str) and given:
        return GivenPrompt(text=given, add_special_tokens=add_special_tokens)
    if isinstance(given, list) and given:
        return GivenPrompt(ids=check_ids(given, "prompt"), add_special_tokens=False)
    return body.refuse("prompt", _FORMS)


def _token_details(body: Fields) -> TokenDetails:
    # It is a number of alternatives. Proxies that serve chat as well send `true`.
    wanted = body.get("logprobs")
    is_flag = wanted is None or isinstance(wanted, bool)
    alternatives = None if is_flag else body.maybe_whole("logprobs", least=0, most=MOST_LIKELY)
    return read_token_details(body, logprobs=wanted is True or alternatives is not None, top_logprobs=alternatives)


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
        """The body of a request for the ids of a prompt, which is a text, or messages and tools."""
        fields, repaired = read_body(body)
        model = fields.maybe_text("model") or ""
        details = TokenDetails(ids=True, texts=fields.maybe_flag("return_token_strs") or False)
        if fields.get("messages") is None:
            prompt = GivenPrompt(
                text=fields.text("prompt") or fields.refuse("prompt", "give a text that is not empty"),
                add_special_tokens=fields.maybe_flag("add_special_tokens") is not False,
            )
            return ChatRequest(api="completions", model=model, messages=[], prompt=prompt, token_details=details)
        if fields.maybe_flag("continue_final_message"):
            fields.refuse("continue_final_message", "a reply follows the last message and does not continue it")
        if fields.maybe_flag("add_special_tokens"):
            fields.refuse("add_special_tokens", "the chat template adds those that the model needs")
        parts = read_prompt_parts(fields)
        opens_reply = fields.maybe_flag("add_generation_prompt") is not False
        return ChatRequest(
            api="chat", model=model, **parts, token_details=details, opens_reply=opens_reply, repaired=repaired
        )

    def tokenized(self, request: ChatRequest, ids: Ids, spell: "Spell", context: int | None) -> bytes:
        tokens = ids.tolist()
        texts = [spell(token).decode("utf-8", "replace") for token in tokens] if request.token_details.texts else None
        answer = {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts}
        return encode_json(answer, "an answer")[0]

    def read_detokenizing(self, body: bytes) -> ChatRequest:
        """The body of a request for the text of ids."""
        fields, _ = read_body(body)
        prompt = GivenPrompt(ids=read_ids(fields, "tokens"))
        return ChatRequest(api="completions", model=fields.maybe_text("model") or "", messages=[], prompt=prompt)

    def detokenized(self, text: str) -> bytes:
        return encode_json({"prompt": text}, "an answer")[0]


COMPLETIONS = CompletionsDialect(_read_request)


class CompletionsStream(ChunkStream):
    """A reply as chunks. Of several the first comes first. Ids and logprobs come with the chunk that ends a reply."""

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
    """What is known of a choice when it has ended."""
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
