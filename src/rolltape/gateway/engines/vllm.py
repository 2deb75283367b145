"""vLLM's `/v1/completions` with ids as prompt, streamed: ids and logprobs out as they are sampled.

Its `/inference/v1/generate` gives the same, but only on servers started for it. Streamed, because vLLM aborts a
request when its connection closes, and what had been sampled until then would else be lost.
"""

from contextlib import aclosing
from typing import Any

import msgspec

from rolltape.errors import EngineDied, EngineFault
from rolltape.gateway.engines.http import MODEL_CARDS, HttpEngine, PromptUsage, decoded, error_text
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs, sampling_fields
from rolltape.gateway.engines.structural_tags import structural_tag
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import Ability, Constraint
from rolltape.records.turn import Finish, LogprobKind

# vLLM writes this where it has no logprob, since JSON has no infinity.
_NO_LOGPROB = -9999.0


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _StreamChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _StreamEvent(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: PromptUsage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_StreamEvent)


class _SoFar:
    """A reply as it grows."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.cached_tokens: int | None = None

    def add(self, event: _StreamEvent, where: str) -> None:
        for choice in event.choices:
            if choice.token_ids is None:
                raise EngineFault(f"{where}: no token_ids in its events; vLLM gives them from 0.10.2 on")
            self.ids += choice.token_ids
            given = [] if choice.logprobs is None else choice.logprobs.token_logprobs
            self.logprobs += [None if value == _NO_LOGPROB else value for value in given]
            if choice.finish_reason is not None:
                self.finish, self.stop_reason = choice.finish_reason, choice.stop_reason
        if event.usage is not None:
            self.cached_tokens = event.usage.cached_tokens


class VllmEngine(HttpEngine):
    """One vLLM server. It reports no weight version.

    `logprob_kind`: raw, unless the server was started with another --logprobs-mode, which it does not say.
    `model`: as served; None takes the first that the server names.
    """

    token_faithful = True
    keeps_aborted = True  # `abort` gives what was sampled so far
    applies = frozenset(SamplingParams.__struct_fields__)
    # With a reasoning parser the server holds a constraint back until thinking has ended, without one it does not, and
    # it does not say which. So thinking that the prompt has begun, and that a reply ends, cannot be written for both.
    abilities = frozenset({Ability.JSON_SCHEMA, Ability.STRUCTURAL_TAGS})
    streams = False

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

    async def facts(self) -> EngineFacts:
        await self._http.get("/health")
        cards = decoded(await self._http.get("/v1/models"), MODEL_CARDS, f"{self.name} /v1/models").data
        card = next((card for card in cards if self._model in (None, card.id)), None)
        if card is None:
            served = ", ".join(card.id for card in cards)
            raise EngineFault(f"{self.name}: it serves {served or 'no model'}, not {self._model}")
        self._model = card.id
        return EngineFacts(model=card.id, context=card.max_model_len)

    async def generate(self, wanted: Generation) -> Generated:
        if self._model is None:
            await self.facts()
        so_far = _SoFar()
        where = f"{self.name}, generation {wanted.id}"
        try:
            if await self._run(wanted.id, self._read(wanted, so_far, where)) is None:
                so_far.finish = "abort"
        except EngineDied as error:
            so_far.finish = "abort"
            partial = self._generated(wanted, so_far, where) if so_far.ids else None
            raise EngineDied(str(error), partial) from None
        return self._generated(wanted, so_far, where)

    async def _read(self, wanted: Generation, so_far: _SoFar, where: str) -> bool:
        body = msgspec.json.encode(self._body(wanted))
        async with aclosing(self._http.events("/v1/completions", body)) as events:
            async for data in events:
                if data == b"[DONE]":
                    break
                event = decoded(data, _EVENT, where)
                if event.error is not None:
                    raise _event_error(event.error, where, begun=bool(so_far.ids))
                so_far.add(event, where)
        if so_far.finish is None:
            raise EngineDied(f"{where}: its events ended before the reply did")
        return True

    def _body(self, wanted: Generation) -> dict[str, Any]:
        return {
            "model": self._model,
            "request_id": wanted.id,
            "prompt": wanted.ids_json.encoded(wanted.prompt_ids),
            **sampling_fields(wanted.sampling),
            "stop_token_ids": wanted.stop_ids,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "logprobs": 0,  # of the sampled id alone
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_constraint_fields(wanted.constraint),
        }

    def _generated(self, wanted: Generation, so_far: _SoFar, where: str) -> Generated:
        finish = parse_finish(so_far.finish, FINISHES, where)
        stop_string = so_far.stop_reason if isinstance(so_far.stop_reason, str) and finish is Finish.STOP else None
        ids = sampled_ids(so_far.ids, where)
        return Generated(
            ids=ids,
            logprobs=sampled_logprobs(so_far.logprobs, ids, where),
            finish=finish if stop_string is None else Finish.STOP_STRING,
            stop_string=stop_string,
            logprob_kind=self._kind,
            cached_tokens=so_far.cached_tokens,
            constrained=wanted.constraint is not None,
        )


def _constraint_fields(constraint: Constraint | None) -> dict[str, Any]:
    if constraint is None:
        return {}
    if constraint.needs == {Ability.JSON_SCHEMA}:
        return {"structured_outputs": {"json": constraint.schema}}
    return {"structured_outputs": {"structural_tag": structural_tag(constraint)}}


def _event_error(error: Any, where: str, *, begun: bool) -> EngineDied | EngineFault:
    """The error of an event; one of the request itself, as a grammar that cannot be compiled, has a status."""
    text = f"{where}: {error_text(error)}"
    code = error.get("code") if isinstance(error, dict) else None
    refused = isinstance(code, int) and 400 <= code < 500
    return EngineDied(text) if begun else EngineFault(text, status=code if refused else None)
