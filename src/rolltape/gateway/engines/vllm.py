"""vLLM's `/v1/completions` with ids as prompt: it streams ids and logprobs.

`/inference/v1/generate` returns the same, but only on servers started for it. Replies are streamed because vLLM aborts
a request when its connection is closed, and the ids sampled until then would otherwise be lost.
"""

from typing import Any

import msgspec

from rolltape.errors import EngineFault
from rolltape.gateway.engines.http import MODEL_CARDS, HttpEngine, decoded, event_error
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import (
    FINISHES,
    parse_finish,
    sampled_ids,
    sampled_logprobs,
    sampling_fields,
    top_side_arrays,
)
from rolltape.gateway.engines.structural_tags import structural_tag
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import Ability, Constraint
from rolltape.records.turn import Finish, LogprobKind

_NO_SUCH_ROUTE = frozenset({404, 405})  # from a server that is older, or not in development mode

# vLLM writes this for a missing logprob, since JSON has no infinity.
_NO_LOGPROB = -9999.0
_TOKEN_ID = "token_id:"  # before an id in place of a token's text


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None  # by `token_id:N`


class _StreamChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _PromptUsage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _StreamEvent(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _PromptUsage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_StreamEvent)
_WEIGHT_INFO = msgspec.json.Decoder(_WeightInfo)
_UNNAMED = "default"  # vLLM's version of weights without a version


class _VllmReply:
    """A growing reply; without a finish it was aborted or interrupted."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.tops: list[list[tuple[int, float]]] = []  # the most likely ids at each place
        self.finish: Finish | None = None
        self.stop_string: str | None = None
        self.cached_tokens: int | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def add(self, data: bytes) -> list[int]:
        event = decoded(data, _EVENT, self._where)
        if event.error is not None:
            raise event_error(event.error, self._where)
        if event.usage is not None:
            self.cached_tokens = event.usage.cached_tokens
        return self._take(event.choices[0]) if event.choices else []

    def _take(self, choice: _StreamChoice) -> list[int]:
        if choice.token_ids is None:
            raise EngineFault(f"{self._where}: no token_ids in its events; vLLM gives them from 0.10.2 on")
        finish = None if choice.finish_reason is None else parse_finish(choice.finish_reason, FINISHES, self._where)
        given = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        logprobs = [None if value == _NO_LOGPROB else value for value in given]
        sampled_logprobs(logprobs, sampled_ids(choice.token_ids, self._where), self._where)
        self.ids += choice.token_ids
        self.logprobs += logprobs
        if choice.logprobs is not None:
            self.tops += [_top(one or {}) for one in choice.logprobs.top_logprobs or ()]
        if finish is Finish.STOP and isinstance(choice.stop_reason, str):
            finish, self.stop_string = Finish.STOP_STRING, choice.stop_reason
        self.finish = finish or self.finish
        return choice.token_ids


class VllmEngine(HttpEngine):
    """One vLLM server. Replies have no weight version; a server in development mode reports its current one.

    `logprob_kind`: raw, unless the server was started with another --logprobs-mode, which it does not report.
    `model`: the served name; None for the first model that the server lists.
    """

    token_faithful = True
    keeps_aborted = True  # after `abort`, `generate` returns the ids sampled so far
    applies = frozenset(SamplingParams.__struct_fields__) | {TOP_LOGPROBS}
    # With a reasoning parser, the server applies a constraint only after thinking; without one, from the start. It does
    # not report which, so no constraint works for both if the prompt has begun the thinking.
    abilities = frozenset({Ability.JSON_SCHEMA, Ability.STRUCTURAL_TAGS})
    streams = True

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        logprob_kind: LogprobKind = LogprobKind.RAW,
    ) -> None:
        super().__init__("vllm", url, api_key)
        self._model = model
        self._kind = logprob_kind
        self._tells_version = True  # until the server answers that it has no such route

    async def facts(self) -> EngineFacts:
        await self._http.check_health("vLLM")
        cards = decoded(await self._http.get("/v1/models"), MODEL_CARDS, f"{self.name} /v1/models").data
        card = next((card for card in cards if self._model in (None, card.id)), None)
        if card is None:
            served = ", ".join(card.id for card in cards)
            raise EngineFault(f"{self.name}: it serves {served or 'no model'}, not {self._model}")
        self._model = card.id
        return EngineFacts(model=card.id, context=card.max_model_len, version=await self._weight_version())

    async def _weight_version(self) -> str | None:
        if not self._tells_version:
            return None
        try:
            info = decoded(await self._http.get("/weight_info"), _WEIGHT_INFO, f"{self.name} /weight_info")
        except EngineFault as error:
            if error.status not in _NO_SUCH_ROUTE:
                raise
            self._tells_version = False
            return None
        return None if info.weight_version == _UNNAMED else info.weight_version

    async def generate(self, wanted: Generation) -> Generated:
        if self._model is None:
            await self.facts()
        where = f"{self.name}, generation {wanted.id}"
        reply = _VllmReply(where)
        body = msgspec.json.encode(self._body(wanted))
        return await self._stream(
            wanted, "/v1/completions", body, reply, lambda _: self._generated(wanted, reply, where)
        )

    async def load_weights(self, folder: str, version: str) -> None:
        try:
            await self._http.post("/pause", b"")  # also ends replies of other clients, and drops the prefix cache
        except EngineFault as error:
            if error.status not in _NO_SUCH_ROUTE:
                raise
            raise EngineFault(f"{self.name}: it takes no weights; start it with VLLM_SERVER_DEV_MODE=1") from None
        try:
            load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            await self._http.post("/collective_rpc", msgspec.json.encode(load))
            if self._tells_version:
                await self._http.post("/update_weight_version", msgspec.json.encode({"new_version": version}))
        finally:
            await self._http.post("/resume", b"")

    def _body(self, wanted: Generation) -> dict[str, Any]:
        return {
            "model": self._model,
            "request_id": wanted.id,
            "prompt": wanted.ids_json.encoded(wanted.prompt_ids),
            **sampling_fields(wanted.sampling),
            "stop_token_ids": wanted.stop_ids,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "logprobs": wanted.top_logprobs,  # 0: only of the sampled id
            **({"return_tokens_as_token_ids": True} if wanted.top_logprobs else {}),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_constraint_fields(wanted.constraint),
        }

    def _generated(self, wanted: Generation, reply: _VllmReply, where: str) -> Generated:
        ids = sampled_ids(reply.ids, where)
        return Generated(
            ids=ids,
            logprobs=sampled_logprobs(reply.logprobs, ids, where),
            finish=reply.finish or Finish.ABORT,
            stop_string=reply.stop_string,
            logprob_kind=self._kind,
            cached_tokens=reply.cached_tokens,
            side_arrays=top_side_arrays(reply.tops, ids, wanted, where),
            constrained=wanted.constraint is not None,
        )


def _top(given: dict[str, float]) -> list[tuple[int, float]]:
    """The most likely ids, best first. The sampled id is always among them, even if it is less likely."""
    spelled = ((name.removeprefix(_TOKEN_ID), value) for name, value in given.items() if name.startswith(_TOKEN_ID))
    by_id = {int(digits): value for digits, value in spelled if digits.isdecimal()}
    return sorted(((token, value) for token, value in by_id.items()), key=lambda one: (-one[1], one[0]))


def _constraint_fields(constraint: Constraint | None) -> dict[str, Any]:
    if constraint is None:
        return {}
    if constraint.needs == {Ability.JSON_SCHEMA}:
        return {"structured_outputs": {"json": constraint.schema}}
    return {"structured_outputs": {"structural_tag": structural_tag(constraint)}}
