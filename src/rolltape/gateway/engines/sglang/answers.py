"""SGLang's answers and events, and a reply that is built from events."""

from typing import Any

import msgspec

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
        raise EngineFault(f"{where}: it ended on {reason.matched!r}, which is no stop string that was given")
    return Finish.STOP_STRING, reason.matched


def parse_segments(spans: list[VersionSpan] | None, count: int, where: str) -> tuple[Segment, ...]:
    """The segments of a reply; newer servers report which ids were sampled under which version."""
    if not spans:
        return ()
    starts = [span.start for span in spans]
    if starts != [0, *(span.end for span in spans[:-1])] or spans[-1].end != count:
        raise EngineFault(f"{where}: weight_versions cover {spans[-1].end} ids, not the {count} that were sampled")
    return tuple(Segment(span.start, span.end, span.version, span.version) for span in spans)
