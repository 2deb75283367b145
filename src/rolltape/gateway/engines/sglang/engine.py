"""One SGLang server as an engine.

Replies are streamed if a client wants ids while they are sampled. By default each of SGLang's events repeats the whole
reply with all logprobs. A server started with --incremental-streaming-output sends only new ids, which is better.
"""

import asyncio
from typing import Any

import msgspec

from rolltape.errors import EngineError, EngineFault
from rolltape.gateway.engines.http import MODEL_CARDS, HttpEngine, decoded
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import sampled_ids, sampled_logprobs, sampling_fields, top_side_arrays, truncates
from rolltape.gateway.engines.sglang.answers import (
    ANSWER,
    MOST_REPEATED_EVENTS,
    GenerateAnswer,
    GrowingAnswer,
    RoutedExperts,
    kept_side_arrays,
    parse_reason,
    parse_segments,
)
from rolltape.gateway.engines.structural_tags import structural_tag
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import Ability, Constraint
from rolltape.records.turn import LogprobKind, Segment


class _ModelInfo(msgspec.Struct):
    model_path: str | None = None
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    served_model_name: str | None = None
    context_length: int | None = None
    enable_deterministic_inference: bool | None = None
    incremental_streaming_output: bool | None = None
    grammar_backend: str | None = None  # None from a router
    logprob_kind: LogprobKind | None = None  # reported by `rolltape engine`, not by SGLang


_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)

_APPLIES = frozenset(SamplingParams.__struct_fields__) | {TOP_LOGPROBS}
# Of xgrammar, SGLang's default. The other backends support structural tags only in part, or not at all.
_ABILITIES = frozenset(Ability)
_ABILITIES_BY_BACKEND = {
    "none": frozenset[Ability](),
    "outlines": frozenset({Ability.JSON_SCHEMA}),
    "llguidance": frozenset({Ability.JSON_SCHEMA}),
}

_LEAST_INTERVAL = 16  # ids per event, if events repeat the reply
_FLUSH_TIMEOUT_S = 30


class SglangEngine(HttpEngine):
    """One SGLang server, or a router in front of several.

    `logprob_kind`: None for what the server reports, else SGLang's default: after temperature, before top-p. A server
    started with SGLANG_RETURN_ORIGINAL_LOGPROB returns raw logprobs and does not report it.
    `routed_experts` needs a server started with --enable-return-routed-experts.
    `kept_ids`: request the ids that top-p, top-k and min-p kept at each place. It needs SGLang with slime's patch,
    whose logprobs are then after truncation.
    """

    token_faithful = True
    streams = True
    keeps_aborted = True  # after `abort`, `generate` returns the ids sampled so far

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        logprob_kind: LogprobKind | None = None,
        routed_experts: bool = False,
        kept_ids: bool = False,
    ) -> None:
        super().__init__("sglang", url, api_key)
        self.applies = _APPLIES
        self.abilities = _ABILITIES
        self._kind = logprob_kind
        self._has_reported = False  # the server has reported the next two
        self._reported_kind: LogprobKind | None = None
        self._incremental = False  # events have only new ids
        self._version: str | None = None  # as last reported
        self._experts = RoutedExperts() if routed_experts else None
        self._wants_kept_ids = kept_ids

    async def facts(self) -> EngineFacts:
        await self._http.check_health("SGLang")
        model = decoded(await self._http.get("/model_info", "/get_model_info"), _MODEL_INFO, f"{self.name} model_info")
        server = decoded(
            await self._http.get("/server_info", "/get_server_info"), _SERVER_INFO, f"{self.name} server_info"
        )
        cards = decoded(await self._http.get("/v1/models"), MODEL_CARDS, f"{self.name} /v1/models").data
        self._has_reported, self._reported_kind = True, server.logprob_kind
        self._incremental = server.incremental_streaming_output is True
        self.abilities = _ABILITIES_BY_BACKEND.get(server.grammar_backend or "", _ABILITIES)
        # SGLang applies a request's seed only in its deterministic mode.
        self.applies = _APPLIES - {"seed"} if server.enable_deterministic_inference is False else _APPLIES
        if model.weight_version is not None:
            self._version = model.weight_version
        # context_length is null unless it was set at the start; the model card has the effective one.
        context = next((card.max_model_len for card in cards if card.max_model_len is not None), server.context_length)
        return EngineFacts(
            model=server.served_model_name or model.model_path, context=context, version=model.weight_version
        )

    async def generate(self, wanted: Generation) -> Generated:
        if not self._has_reported:
            await self.facts()  # to know the weight version before the reply, if there is one
        version = self._version
        experts_from = 0 if self._experts is None else self._experts.first_wanted(wanted)
        body = msgspec.json.encode(self._body(wanted, experts_from))
        try:
            if wanted.on_sampled is None:
                answer = decoded(await self._http.post("/generate", body), ANSWER, f"{self.name} /generate")
                return self._generated(wanted, answer, version, experts_from)
            reply = GrowingAnswer(wanted, f"{self.name}, generation {wanted.id}")

            def generated(whole: bool) -> Generated:
                return self._generated(wanted, reply.answer(whole), version, experts_from)

            return await self._stream(wanted, "/generate", body, reply, generated)
        except asyncio.CancelledError:
            self._http.post_later("/abort_request", msgspec.json.encode({"rid": wanted.id}))
            raise

    async def abort(self, generation_id: str) -> None:
        try:
            await self._http.post("/abort_request", msgspec.json.encode({"rid": generation_id}))
        except (EngineError, asyncio.CancelledError):
            await super().abort(generation_id)  # the ids streamed so far are here already
            raise

    async def load_weights(self, folder: str, version: str) -> None:
        # The load waits for running replies, also of other clients.
        body = {"model_path": folder, "weight_version": version, "abort_all_requests": True, "flush_cache": False}
        await self._http.post("/update_weights_from_disk", msgspec.json.encode(body))
        # SGLang (0.5.23) may still process a reply for a moment after its end was sent, and then flushes nothing.
        await self._http.post(f"/flush_cache?timeout={_FLUSH_TIMEOUT_S}", b"")

    def _body(self, wanted: Generation, experts_from: int) -> dict[str, Any]:
        params = {
            **sampling_fields(wanted.sampling, max_tokens="max_new_tokens", seed="sampling_seed"),
            "stop_token_ids": wanted.stop_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **self._interval(wanted),
            **({"custom_params": {"return_top_p_token_ids": True}} if self._asks_for_kept_ids(wanted) else {}),
            **_constraint_fields(wanted.constraint),
        }
        body: dict[str, Any] = {
            "rid": wanted.id,
            "input_ids": wanted.ids_json.encoded(wanted.prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # of the reply only
        }
        if wanted.top_logprobs:
            body["top_logprobs_num"] = wanted.top_logprobs
        if wanted.on_sampled is not None:
            body["stream"] = True
        if self._experts is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        return body

    def _asks_for_kept_ids(self, wanted: Generation) -> bool:
        return self._wants_kept_ids and truncates(wanted.sampling)

    def _logprob_kind(self, wanted: Generation) -> LogprobKind:
        kind = self._kind or self._reported_kind or LogprobKind.AFTER_TEMPERATURE
        is_cut = self._asks_for_kept_ids(wanted) and wanted.sampling.temperature != 0
        return LogprobKind.AFTER_TRUNCATION if is_cut and kind is LogprobKind.AFTER_TEMPERATURE else kind

    def _interval(self, wanted: Generation) -> dict[str, int]:
        """The sampling parameter for the number of ids per event; an incremental server has its own setting."""
        if wanted.on_sampled is None or self._incremental:
            return {}
        assert wanted.sampling.max_tokens is not None
        return {"stream_interval": max(wanted.sampling.max_tokens // MOST_REPEATED_EVENTS, _LEAST_INTERVAL)}

    def _generated(
        self, wanted: Generation, answer: GenerateAnswer, version: str | None, experts_from: int
    ) -> Generated:
        where = f"{self.name}, generation {wanted.id}"
        meta = answer.meta_info
        triples = meta.output_token_logprobs
        finish, stop_string = parse_reason(meta.finish_reason, wanted, where)
        if triples is None and answer.output_ids:
            raise EngineFault(f"{where}: {len(answer.output_ids)} sampled ids but no output_token_logprobs")
        triples = triples or []  # an abort before the first token has none
        given_ids = [token for _, token, _ in triples]
        ids = sampled_ids(given_ids if answer.output_ids is None else answer.output_ids, where)
        logprobs = sampled_logprobs([value for value, _, _ in triples], ids, where)
        if ids.tolist() != given_ids:
            raise EngineFault(f"{where}: output_ids and the ids of output_token_logprobs differ")
        segments = parse_segments(meta.weight_versions, len(ids), where)
        tops = [[(token, value) for value, token, _ in top or ()] for top in meta.output_top_logprobs or ()]
        side_arrays = top_side_arrays(tops, ids, wanted, where)
        if self._experts is not None and meta.routed_experts is not None:
            rows = self._experts.side_array(meta.routed_experts, wanted, len(ids), experts_from, where)
            side_arrays["routed_experts"] = rows
        if self._asks_for_kept_ids(wanted):
            encoded = (meta.top_p_token_ids, meta.top_p_token_offsets)
            side_arrays |= kept_side_arrays(encoded, wanted, len(ids), finish, where)
        first, last = self._versions(version, meta.weight_version, segments)
        return Generated(
            ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop_string=stop_string,
            first_version=first,
            last_version=last,
            segments=segments,
            logprob_kind=self._logprob_kind(wanted),
            cached_tokens=meta.cached_tokens,
            side_arrays=side_arrays,
            constrained=wanted.constraint is not None,
        )

    def _versions(
        self, at_start: str | None, at_end: str | None, segments: tuple[Segment, ...]
    ) -> tuple[str | None, str | None]:
        """The versions at the start and the end of a reply. SGLang reports only the one at the end; the start is the
        version reported last before, or an older one."""
        if at_end is not None:
            self._version = at_end
        if segments:
            return segments[0].first_version, segments[-1].last_version
        return (None, None) if at_start is None or at_end is None else (at_start, at_end)


def _constraint_fields(constraint: Constraint | None) -> dict[str, str]:
    """The sampling parameter for a constraint.

    The constraint applies from the first token on: thinking is part of the structural tag, and `require_reasoning`,
    which would tell SGLang of the thinking, is not sent.
    """
    if constraint is None:
        return {}
    if constraint.needs == {Ability.JSON_SCHEMA}:
        return {"json_schema": msgspec.json.encode(constraint.schema).decode()}
    return {"structural_tag": structural_tag(constraint)}
