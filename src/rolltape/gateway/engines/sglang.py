"""SGLang's native `/generate`: ids in; ids, logprobs, weight version, routed experts and kept ids out.

It is streamed where somebody wants ids as they come. By default each of SGLang's events repeats the whole reply with
all logprobs. A server started with --incremental-streaming-output sends what is new, which is better.
"""

import asyncio
from typing import Any

import msgspec

from rolltape.errors import EngineError, EngineFault
from rolltape.gateway.engines.http import MODEL_CARDS, Contradiction, HttpEngine, decoded, event_error
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import (
    FINISHES,
    parse_finish,
    sampled_ids,
    sampled_logprobs,
    sampling_fields,
    top_side_arrays,
    truncates,
)
from rolltape.gateway.engines.sglang_arrays import RoutedExperts, kept_side_arrays
from rolltape.gateway.engines.structural_tags import structural_tag
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import Ability, Constraint
from rolltape.records.turn import Finish, LogprobKind, Segment

_Triple = tuple[float | None, int, Any]


class _FinishReason(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _MetaFields(msgspec.Struct, kw_only=True):
    output_token_logprobs: list[_Triple] | None = None
    output_top_logprobs: list[list[_Triple] | None] | None = None
    weight_version: str | None = None
    weight_versions: list[_VersionSpan] | None = None
    cached_tokens: int | None = None
    routed_experts: str | None = None
    top_p_token_ids: str | None = None
    top_p_token_offsets: str | None = None


class _MetaInfo(_MetaFields, kw_only=True):
    finish_reason: _FinishReason


class _GenerateAnswer(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


class _EventMetaInfo(_MetaFields, kw_only=True):
    finish_reason: _FinishReason | None = None  # None: it goes on
    completion_tokens: int | None = None  # so far, in either form of events


class _StreamEvent(msgspec.Struct):
    meta_info: _EventMetaInfo = msgspec.field(default_factory=_EventMetaInfo)
    output_ids: list[int] = []
    error: Any = None


class _ModelInfo(msgspec.Struct):
    model_path: str | None = None
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    served_model_name: str | None = None
    context_length: int | None = None
    enable_deterministic_inference: bool | None = None
    incremental_streaming_output: bool | None = None
    grammar_backend: str | None = None  # None: as from a router, which does not say
    logprob_kind: LogprobKind | None = None  # `rolltape engine` says it; SGLang does not


_ANSWER = msgspec.json.Decoder(_GenerateAnswer)
_EVENT = msgspec.json.Decoder(_StreamEvent)
_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)

_APPLIES = frozenset(SamplingParams.__struct_fields__) | {TOP_LOGPROBS}
# Those of xgrammar, which SGLang has by default. The other backends know structural tags in part, or not.
_ABILITIES = frozenset(Ability)
_ABILITIES_BY_BACKEND = {
    "none": frozenset[Ability](),
    "outlines": frozenset({Ability.JSON_SCHEMA}),
    "llguidance": frozenset({Ability.JSON_SCHEMA}),
}


# Events that repeat the reply took 40 bytes and 0.26 µs of processor time for every id in each of them, as measured.
# With an event per id, a reply of 32,768 ids would take 21 GB and over two minutes. So the interval grows with the
# reply's limit, and an id is sent at most 64 times on average: 84 MB and half a second. The first id comes at once.
_LEAST_INTERVAL = 16
_MOST_REPEATED_EVENTS = 128

_FLUSH_TIMEOUT_S = 30


class SglangEngine(HttpEngine):
    """One SGLang server, or a router in front of several.

    `logprob_kind`: None takes what the server says, and else SGLang's default, after temperature and before top-p;
    one started with SGLANG_RETURN_ORIGINAL_LOGPROB gives raw ones and does not say so.
    `routed_experts` needs a server started with --enable-return-routed-experts; `expert_shape` is (layers, experts
    per token), without which the rows are flat.
    `kept_ids`: ask for the ids that top-p, top-k and min-p kept at each place. It needs SGLang with slime's patch,
    whose logprobs are then those among the kept ids: after truncation.
    """

    token_faithful = True
    streams = True
    keeps_aborted = True  # `abort` gives what was sampled so far

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        logprob_kind: LogprobKind | None = None,
        routed_experts: bool = False,
        expert_shape: tuple[int, int] | None = None,
        kept_ids: bool = False,
    ) -> None:
        super().__init__("sglang", url, api_key)
        self.applies = _APPLIES
        self.abilities = _ABILITIES
        self._kind = logprob_kind
        self._has_said = False  # what follows
        self._said_kind: LogprobKind | None = None
        self._incremental = False  # events have what is new alone
        self._version: str | None = None  # as last reported
        self._experts = RoutedExperts(expert_shape) if routed_experts else None
        self._wants_kept_ids = kept_ids

    async def facts(self) -> EngineFacts:
        await self._http.get("/health")
        model = decoded(await self._http.get("/model_info", "/get_model_info"), _MODEL_INFO, f"{self.name} model_info")
        server = decoded(
            await self._http.get("/server_info", "/get_server_info"), _SERVER_INFO, f"{self.name} server_info"
        )
        cards = decoded(await self._http.get("/v1/models"), MODEL_CARDS, f"{self.name} /v1/models").data
        self._has_said, self._said_kind = True, server.logprob_kind
        self._incremental = server.incremental_streaming_output is True
        self.abilities = _ABILITIES_BY_BACKEND.get(server.grammar_backend or "", _ABILITIES)
        # SGLang heeds a request's seed only in its deterministic mode.
        self.applies = _APPLIES - {"seed"} if server.enable_deterministic_inference is False else _APPLIES
        if model.weight_version is not None:
            self._version = model.weight_version
        # context_length is null unless it was set at the start; the model card has the one that holds.
        context = next((card.max_model_len for card in cards if card.max_model_len is not None), server.context_length)
        return EngineFacts(
            model=server.served_model_name or model.model_path, context=context, version=model.weight_version
        )

    async def generate(self, wanted: Generation) -> Generated:
        if not self._has_said:
            await self.facts()  # so that the version at the beginning is known, if there is one
        version = self._version
        experts_from = 0 if self._experts is None else self._experts.first_wanted(wanted)
        body = msgspec.json.encode(self._body(wanted, experts_from))
        try:
            if wanted.on_sampled is None:
                answer = decoded(await self._http.post("/generate", body), _ANSWER, f"{self.name} /generate")
                return self._generated(wanted, answer, version, experts_from)
            reply = _SglangReply(wanted, f"{self.name}, generation {wanted.id}")

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
            await super().abort(generation_id)  # what was streamed so far is there without the server's help
            raise

    async def load_weights(self, folder: str, version: str) -> None:
        # The load waits for replies in flight, also for those of other clients.
        body = {"model_path": folder, "weight_version": version, "abort_all_requests": True, "flush_cache": False}
        await self._http.post("/update_weights_from_disk", msgspec.json.encode(body))
        # SGLang (0.5.23) may be at a reply for a moment after it has sent its end, and flushes nothing then.
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
        kind = self._kind or self._said_kind or LogprobKind.AFTER_TEMPERATURE
        is_cut = self._asks_for_kept_ids(wanted) and wanted.sampling.temperature != 0
        return LogprobKind.AFTER_TRUNCATION if is_cut and kind is LogprobKind.AFTER_TEMPERATURE else kind

    def _interval(self, wanted: Generation) -> dict[str, int]:
        """The sampling parameter for how many ids an event is to bring; an incremental server has its own."""
        if wanted.on_sampled is None or self._incremental:
            return {}
        assert wanted.sampling.max_tokens is not None
        return {"stream_interval": max(wanted.sampling.max_tokens // _MOST_REPEATED_EVENTS, _LEAST_INTERVAL)}

    def _generated(
        self, wanted: Generation, answer: _GenerateAnswer, version: str | None, experts_from: int
    ) -> Generated:
        where = f"{self.name}, generation {wanted.id}"
        meta = answer.meta_info
        triples = meta.output_token_logprobs
        finish, stop_string = _finish(meta.finish_reason, wanted, where)
        if triples is None and answer.output_ids:
            raise EngineFault(f"{where}: {len(answer.output_ids)} sampled ids but no output_token_logprobs")
        triples = triples or []  # an abort before the first token has none
        given_ids = [token for _, token, _ in triples]
        ids = sampled_ids(given_ids if answer.output_ids is None else answer.output_ids, where)
        logprobs = sampled_logprobs([value for value, _, _ in triples], ids, where)
        if ids.tolist() != given_ids:
            raise EngineFault(f"{where}: output_ids and the ids of output_token_logprobs differ")
        segments = _segments(meta.weight_versions, len(ids), where)
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
        """SGLang says the version of the time it answers; the last one seen before is where it began, or older."""
        if at_end is not None:
            self._version = at_end
        if segments:
            return segments[0].first_version, segments[-1].last_version
        return (None, None) if at_start is None or at_end is None else (at_start, at_end)


class _SglangReply:
    """A reply as it grows, whether events repeat what came before or not; without a finish it broke off."""

    def __init__(self, wanted: Generation, where: str) -> None:
        self._wanted = wanted
        self._where = where
        self._triples: list[_Triple] = []
        self._tops: list[list[_Triple] | None] = []  # the most likely ids beside them, if they are wanted
        self._meta = _EventMetaInfo()  # of the last event
        self._events = 0
        self.ids: list[int] = []

    @property
    def ended(self) -> bool:
        return self._meta.finish_reason is not None

    def answer(self, whole: bool) -> _GenerateAnswer:
        """The reply as if it had not been streamed, or what came of one that broke off, as if it had been aborted."""
        meta, spans = self._meta, self._meta.weight_versions
        covered = spans is not None and spans[-1:] and spans[-1].end == len(self.ids)
        finish = meta.finish_reason if whole else None
        fields = _MetaInfo(
            finish_reason=finish or _FinishReason("abort"),
            output_token_logprobs=self._triples,
            output_top_logprobs=self._tops,
            weight_version=meta.weight_version,
            weight_versions=spans if whole or covered else None,
            cached_tokens=meta.cached_tokens,
            routed_experts=meta.routed_experts if whole else None,
            top_p_token_ids=meta.top_p_token_ids if whole else None,
            top_p_token_offsets=meta.top_p_token_offsets if whole else None,
        )
        return _GenerateAnswer(fields, self.ids)

    def add(self, data: bytes) -> list[int]:
        event = decoded(data, _EVENT, self._where)
        if event.error is not None:
            raise event_error(event.error, self._where)
        self._events += 1
        assert self._wanted.sampling.max_tokens is not None
        if self._events > self._wanted.sampling.max_tokens + _MOST_REPEATED_EVENTS:
            raise EngineFault(f"{self._where}: {self._events} events for {len(self.ids)} ids")
        if event.meta_info.finish_reason is not None:
            _finish(event.meta_info.finish_reason, self._wanted, self._where)
        new = self._new_triples(event)
        ids = [token for _, token, _ in new]
        sampled_logprobs([value for value, _, _ in new], sampled_ids(ids, self._where), self._where)
        self._meta = event.meta_info
        self._triples += new
        if self._wanted.top_logprobs and new:  # they come as the logprobs do: of what is new, or of all
            self._tops += (event.meta_info.output_top_logprobs or [])[-len(new) :]
        self.ids += ids
        return ids

    def _new_triples(self, event: _StreamEvent) -> list[_Triple]:
        """What an event has beyond what is known.

        An abort of a request that waits, as after it was retracted, has all logprobs and the last id alone in either
        form. If it was joined to an event that had not been sent, it has them twice, and nothing of it is taken.
        """
        meta, known, total = event.meta_info, len(self.ids), event.meta_info.completion_tokens
        triples = meta.output_token_logprobs or []
        ids = [token for _, token, _ in triples]
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if event.output_ids == ids or (aborted and event.output_ids == ids[-1:]):
            if total == len(ids) and triples[:known] == self._triples:
                return triples[known:]
            if total == known + len(ids):
                return triples
            if total == len(ids):
                raise Contradiction(f"{self._where}: an event of {total} ids does not begin with the {known} before it")
        if aborted:
            return []
        if len(event.output_ids) != len(ids):
            raise EngineFault(f"{self._where}: {len(event.output_ids)} sampled ids but {len(ids)} logprobs")
        if event.output_ids != ids:
            raise EngineFault(f"{self._where}: output_ids and the ids of output_token_logprobs differ")
        raise EngineFault(f"{self._where}: {known} ids, then an event of {len(ids)}, but completion_tokens {total}")


def _constraint_fields(constraint: Constraint | None) -> dict[str, str]:
    """The sampling parameter for a constraint.

    It holds from the first token on: `require_reasoning`, without which a request has no thinking of its own to
    SGLang, is not sent, and thinking is part of the structural tag.
    """
    if constraint is None:
        return {}
    if constraint.needs == {Ability.JSON_SCHEMA}:
        return {"json_schema": msgspec.json.encode(constraint.schema).decode()}
    return {"structural_tag": structural_tag(constraint)}


def _finish(reason: _FinishReason, wanted: Generation, where: str) -> tuple[Finish, str | None]:
    finish = parse_finish(reason.type, FINISHES, where)
    if finish is Finish.ABORT and reason.status_code is not None:
        raise EngineFault(
            f"{where}: it was given up with status {reason.status_code}: {reason.message}", status=reason.status_code
        )
    if finish is not Finish.STOP or not isinstance(reason.matched, str):
        return finish, None
    if reason.matched not in (wanted.sampling.stop or ()):
        # So SGLang says that it met NaN and put a stop id where the sampled one should be.
        raise EngineFault(f"{where}: it ended on {reason.matched!r}, which is no stop string that was given")
    return Finish.STOP_STRING, reason.matched


def _segments(spans: list[_VersionSpan] | None, count: int, where: str) -> tuple[Segment, ...]:
    """Newer servers say which ids were sampled under which version."""
    if not spans:
        return ()
    starts = [span.start for span in spans]
    if starts != [0, *(span.end for span in spans[:-1])] or spans[-1].end != count:
        raise EngineFault(f"{where}: weight_versions cover {spans[-1].end} ids, not the {count} that were sampled")
    return tuple(Segment(span.start, span.end, span.version, span.version) for span in spans)
