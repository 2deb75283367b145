"""SGLang's answers and events, a reply that is built from events, and the arrays that come with it.

Routed experts of a mixture-of-experts model, and kept ids, come as int32 in base64.
"""

import base64
import binascii
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.engines.http import Contradiction, decoded, event_error
from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs
from rolltape.records.turn import Finish, Segment

# Measured: events that repeat the reply cost 40 bytes and 0.26 µs of processor time per id and event. With an event per
# id, a reply of 32,768 ids would take 21 GB and over two minutes. So the interval grows with the reply's limit, and an
# id is sent at most 64 times on average: 84 MB and half a second. The first id comes at once.
MOST_REPEATED_EVENTS = 128

_Triple = tuple[float | None, int, Any]


class FinishReason(msgspec.Struct):
    """How a reply ended."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class VersionSpan(msgspec.Struct):
    """The ids that were sampled under one weight version."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, kw_only=True):
    """What SGLang reports about a reply, or about the part of it so far."""

    finish_reason: FinishReason | None = None  # None while the reply continues
    output_token_logprobs: list[_Triple] | None = None
    output_top_logprobs: list[list[_Triple] | None] | None = None
    completion_tokens: int | None = None  # so far, in both forms of events
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: int | None = None
    routed_experts: str | None = None
    top_p_token_ids: str | None = None
    top_p_token_offsets: str | None = None


class GenerateAnswer(msgspec.Struct):
    """An answer of `/generate`, or one event of its stream."""

    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    output_ids: list[int] | None = None
    error: Any = None


ANSWER = msgspec.json.Decoder(GenerateAnswer)


class GrowingAnswer:
    """A growing reply, whether or not events repeat earlier ids; without a finish it was interrupted."""

    def __init__(self, wanted: Generation, where: str) -> None:
        self._wanted = wanted
        self._where = where
        self._triples: list[_Triple] = []
        self._tops: list[list[_Triple] | None] = []  # the most likely ids, if requested
        self._meta = MetaInfo()  # of the last event
        self._events = 0
        self.ids: list[int] = []

    @property
    def ended(self) -> bool:
        return self._meta.finish_reason is not None

    def answer(self, whole: bool) -> GenerateAnswer:
        """The reply as if it had not been streamed, or the received part of it as if it had been aborted."""
        meta, spans = self._meta, self._meta.weight_versions
        fields: dict[str, Any] = {"output_token_logprobs": self._triples, "output_top_logprobs": self._tops}
        if not whole:
            covered = spans and spans[-1].end == len(self.ids)
            fields |= {"finish_reason": FinishReason("abort"), "weight_versions": spans if covered else None}
            fields |= dict.fromkeys(("routed_experts", "top_p_token_ids", "top_p_token_offsets"))
        return GenerateAnswer(msgspec.structs.replace(meta, **fields), self.ids)

    def add(self, data: bytes) -> list[int]:
        event = decoded(data, ANSWER, self._where)
        if event.error is not None:
            raise event_error(event.error, self._where)
        self._events += 1
        assert self._wanted.sampling.max_tokens is not None
        if self._events > self._wanted.sampling.max_tokens + MOST_REPEATED_EVENTS:
            raise EngineFault(f"{self._where}: {self._events} events for {len(self.ids)} ids")
        if event.meta_info.finish_reason is not None:
            parse_reason(event.meta_info.finish_reason, self._wanted, self._where)
        new = self._new_triples(event.meta_info, event.output_ids or [])
        ids = [token for _, token, _ in new]
        sampled_logprobs([value for value, _, _ in new], sampled_ids(ids, self._where), self._where)
        self._meta = event.meta_info
        self._triples += new
        if self._wanted.top_logprobs and new:  # as the logprobs: of new ids only, or of all
            self._tops += (event.meta_info.output_top_logprobs or [])[-len(new) :]
        self.ids += ids
        return ids

    def _new_triples(self, meta: MetaInfo, output_ids: list[int]) -> list[_Triple]:
        """The new ids of an event, with their logprobs.

        The abort of a waiting request, for example a retracted one, has all logprobs but only the last id, in both
        forms of events. If it was joined to an event that had not been sent, it has them twice, and is ignored.
        """
        known, total = len(self.ids), meta.completion_tokens
        triples = meta.output_token_logprobs or []
        ids = [token for _, token, _ in triples]
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if output_ids == ids or (aborted and output_ids == ids[-1:]):
            if total == len(ids) and triples[:known] == self._triples:
                return triples[known:]
            if total == known + len(ids):
                return triples
            if total == len(ids):
                raise Contradiction(f"{self._where}: an event of {total} ids does not begin with the {known} before it")
        if aborted:
            return []
        if len(output_ids) != len(ids):
            raise EngineFault(f"{self._where}: {len(output_ids)} sampled ids but {len(ids)} logprobs")
        if output_ids != ids:
            raise EngineFault(f"{self._where}: output_ids and the ids of output_token_logprobs differ")
        raise EngineFault(f"{self._where}: {known} ids, then an event of {len(ids)}, but completion_tokens {total}")


def parse_reason(reason: FinishReason | None, wanted: Generation, where: str) -> tuple[Finish, str | None]:
    """How a reply ended, and the stop string that ended it, if any; raises EngineFault if it is no reply."""
    if reason is None:
        raise EngineFault(f"{where}: it does not say how the reply ended (finish_reason)")
    finish = parse_finish(reason.type, FINISHES, where)
    if finish is Finish.ABORT and reason.status_code is not None:
        raise EngineFault(
            f"{where}: it was aborted with status {reason.status_code}: {reason.message}", status=reason.status_code
        )
    if finish is not Finish.STOP or not isinstance(reason.matched, str):
        return finish, None
    if reason.matched not in (wanted.sampling.stop or ()):
        # SGLang reports this if it met NaN, and put a stop id in place of a sampled one.
        raise EngineFault(f"{where}: it ended on {reason.matched!r}, which is not a stop string of the request")
    return Finish.STOP_STRING, reason.matched


def parse_segments(spans: list[VersionSpan] | None, count: int, where: str) -> tuple[Segment, ...]:
    """The segments of a reply; newer servers report which ids were sampled under which version."""
    if not spans:
        return ()
    starts = [span.start for span in spans]
    if starts != [0, *(span.end for span in spans[:-1])] or spans[-1].end != count:
        raise EngineFault(f"{where}: weight_versions cover {spans[-1].end} ids, not the {count} that were sampled")
    return tuple(Segment(span.start, span.end, span.version, span.version) for span in spans)


class RoutedExperts:
    """Asks for rows of new tokens only, once a whole answer has shown how wide a row is. Rows are kept flat."""

    def __init__(self) -> None:
        self._width: int | None = None  # None: not known yet

    def first_wanted(self, wanted: Generation) -> int:
        """From which token on rows are to be sent."""
        return 0 if self._width is None else wanted.held_tokens

    def side_array(self, encoded: str, wanted: Generation, sampled: int, first: int, where: str) -> dict[str, Any]:
        """The rows from the first token that is not held yet, as a side array."""
        # The last token was sampled but never fed, so that no experts saw it.
        fed = len(wanted.prompt_ids) + sampled - 1
        values = _int32s(encoded, "routed_experts", where)
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
        start = max(wanted.held_tokens, first)
        return {"start": start, "values": values.reshape(rows, width)[start - first :]}


def kept_side_arrays(
    encoded: tuple[str | None, str | None], wanted: Generation, sampled: int, finish: Finish, where: str
) -> dict[str, Any]:
    """The ids that top-p, top-k and min-p kept at each place, as a ragged side array.

    `encoded` are the ids of all places, and where those of each begin. A reply that broke off comes without them.
    """
    ids, offsets = encoded
    if ids is None or offsets is None:
        if finish is Finish.ABORT or not sampled:
            return {}
        raise EngineFault(
            f"{where}: no top_p_token_ids, though kept ids were asked for; use SGLang with slime's patch for top-p, or "
            "sample with top-p 1"
        )
    values, ends = _int32s(ids, "top_p_token_ids", where), _int32s(offsets, "top_p_token_offsets", where)
    counts = np.diff(ends)
    if not len(ends) or ends[0] != 0 or ends[-1] != len(values) or (counts < 0).any():
        raise EngineFault(f"{where}: top_p_token_offsets do not divide the {len(values)} top_p_token_ids")
    if len(counts) == sampled:
        return {"kept_ids": {"start": len(wanted.prompt_ids), "values": values, "counts": counts}}
    if finish is Finish.ABORT:
        return {}
    raise EngineFault(f"{where}: top_p_token_offsets are of {len(counts)} ids, but {sampled} were sampled")


def _int32s(encoded: str, name: str, where: str) -> npt.NDArray[np.int32]:
    """An array that an engine gave as int32 in base64."""
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        raise EngineFault(f"{where}: {name} are not int32 values in base64: {error}") from None
