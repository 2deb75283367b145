"""SGLang's native `/generate`: ids in; ids, logprobs, weight version and routed experts out."""

import asyncio
import base64
import binascii
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.engines.http import MODEL_CARDS, HttpEngine, decoded
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs, sampling_fields
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


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    output_token_logprobs: list[_Triple] | None = None
    weight_version: str | None = None
    weight_versions: list[_VersionSpan] | None = None
    cached_tokens: int | None = None
    routed_experts: str | None = None


class _GenerateAnswer(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


class _ModelInfo(msgspec.Struct):
    model_path: str | None = None
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    served_model_name: str | None = None
    context_length: int | None = None
    enable_deterministic_inference: bool | None = None
    grammar_backend: str | None = None  # None: as from a router, which does not say
    logprob_kind: LogprobKind | None = None  # `rolltape engine` says it; SGLang does not


_ANSWER = msgspec.json.Decoder(_GenerateAnswer)
_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)

_APPLIES = frozenset(SamplingParams.__struct_fields__)
# Those of xgrammar, which SGLang has by default. The other backends know structural tags in part, or not.
_ABILITIES = frozenset(Ability)
_ABILITIES_BY_BACKEND = {
    "none": frozenset[Ability](),
    "outlines": frozenset({Ability.JSON_SCHEMA}),
    "llguidance": frozenset({Ability.JSON_SCHEMA}),
}


class SglangEngine(HttpEngine):
    """One SGLang server, or a router in front of several.

    `logprob_kind`: None takes what the server says, and else SGLang's default, after temperature and before top-p;
    one started with SGLANG_RETURN_ORIGINAL_LOGPROB gives raw ones and does not say so.
    `routed_experts` needs a server started with --enable-return-routed-experts; `expert_shape` is (layers, experts
    per token), without which the rows are flat.
    """

    token_faithful = True
    streams = False
    keeps_aborted = True  # `abort` gives what was sampled so far

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        logprob_kind: LogprobKind | None = None,
        routed_experts: bool = False,
        expert_shape: tuple[int, int] | None = None,
    ) -> None:
        super().__init__("sglang", url, api_key)
        self.applies = _APPLIES
        self.abilities = _ABILITIES
        self._kind = logprob_kind
        self._has_said = False  # what follows
        self._said_kind: LogprobKind | None = None
        self._version: str | None = None  # as last reported
        self._experts = RoutedExperts(expert_shape) if routed_experts else None

    async def facts(self) -> EngineFacts:
        await self._http.get("/health")
        model = decoded(await self._http.get("/model_info", "/get_model_info"), _MODEL_INFO, f"{self.name} model_info")
        server = decoded(
            await self._http.get("/server_info", "/get_server_info"), _SERVER_INFO, f"{self.name} server_info"
        )
        cards = decoded(await self._http.get("/v1/models"), MODEL_CARDS, f"{self.name} /v1/models").data
        self._has_said, self._said_kind = True, server.logprob_kind
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
            data = await self._http.post("/generate", body)
        except asyncio.CancelledError:
            self._http.post_later("/abort_request", msgspec.json.encode({"rid": wanted.id}))
            raise
        answer = decoded(data, _ANSWER, f"{self.name} /generate")
        return self._generated(wanted, answer, version, experts_from)

    async def abort(self, generation_id: str) -> None:
        await self._http.post("/abort_request", msgspec.json.encode({"rid": generation_id}))

    def _body(self, wanted: Generation, experts_from: int) -> dict[str, Any]:
        params = {
            **sampling_fields(wanted.sampling, max_tokens="max_new_tokens", seed="sampling_seed"),
            "stop_token_ids": wanted.stop_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **_constraint_fields(wanted.constraint),
        }
        body: dict[str, Any] = {
            "rid": wanted.id,
            "input_ids": wanted.ids_json.encoded(wanted.prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # of the reply only
        }
        if self._experts is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        return body

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
        side_arrays = {}
        if self._experts is not None and meta.routed_experts is not None:
            rows = self._experts.side_array(meta.routed_experts, wanted, len(ids), experts_from, where)
            side_arrays["routed_experts"] = rows
        first, last = self._versions(version, meta.weight_version, segments)
        return Generated(
            ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop_string=stop_string,
            first_version=first,
            last_version=last,
            segments=segments,
            logprob_kind=self._kind or self._said_kind or LogprobKind.AFTER_TEMPERATURE,
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


class RoutedExperts:
    """Asks for rows of new tokens only, once a whole answer has shown how wide a row is.

    `shape` is (layers, experts per token); None: it is not known, and rows are kept flat.
    """

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        self._shape = shape
        self._width = None if shape is None else shape[0] * shape[1]

    def first_wanted(self, wanted: Generation) -> int:
        """From which token on rows are to be sent."""
        return 0 if self._width is None else wanted.held_tokens

    def side_array(self, encoded: str, wanted: Generation, sampled: int, first: int, where: str) -> dict[str, Any]:
        """The rows from the first token that is not held yet, as a side array."""
        # The last token was sampled but never fed, so that no experts saw it.
        fed = len(wanted.prompt_ids) + sampled - 1
        values = _int32s(encoded, where)
        if self._width is None and fed > 0 and len(values) and len(values) % fed == 0:
            self._width = len(values) // fed
        width = self._width or 1
        rows = len(values) // width
        if rows == fed:
            first = 0  # all of them, as from a server that does not know routed_experts_start_len
        if rows * width != len(values) or rows != fed - first:
            raise EngineFault(
                f"{where}: {len(values)} routed experts, {width} a token, but {fed - first} tokens were fed"
            )
        shape = (rows, width) if self._shape is None else (rows, *self._shape)
        start = max(wanted.held_tokens, first)
        return {"start": start, "values": values.reshape(shape)[start - first :]}


def _int32s(encoded: str, where: str) -> npt.NDArray[np.int32]:
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        raise EngineFault(f"{where}: routed_experts are no int32 in base64: {error}") from None
