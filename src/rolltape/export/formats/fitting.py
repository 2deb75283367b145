"""Checks that samples have what a format needs, and counts and reports what the format cannot carry."""

import enum
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import KEPT_IDS, ROUTED_EXPERTS, places_without_kept_ids, routed_experts
from rolltape.records.sample import Sample
from rolltape.records.turn import LogprobKind


class LeftOutWarning(UserWarning):
    """A format cannot carry something that the samples hold."""


class Need(enum.StrEnum):
    """What a training step needs of a sample."""

    LOGPROBS = "a logprob for each trained token"
    REWARD = "a reward"
    ADVANTAGE = "an advantage"


class Fact(enum.StrEnum):
    """What a sample may hold that not every format can carry. Reports put the text after "samples"."""

    FORKED = "of rollouts that forked"
    WEIGHTS = "that weigh otherwise in their rollout than by their trained tokens"
    SEVERAL_VERSIONS = "sampled by several weight versions"
    UNSURE_VERSION = "with tokens whose weight version is only known to lie between two"
    AFTER_TRUNCATION = "whose logprobs are after truncation, as by top-p"
    SOME_KEPT_IDS = "with kept ids for a part of their tokens"
    SEVERAL_TEMPERATURES = "sampled at several temperatures"
    SEVERAL_LOGPROB_KINDS = "with logprobs of several kinds"
    MISSING_LOGPROBS = "with trained tokens that have no logprob"
    NO_REWARD = "without a reward"
    TURN_REWARDS = "with rewards of single turns"
    SIDE_ARRAYS = "with side arrays"


class Routing(enum.Enum):
    """Whether a format carries complete routed experts."""

    NONE = enum.auto()
    EACH = enum.auto()  # of those samples that have them
    OF_ONE_SHAPE = enum.auto()  # of those samples that have them, if all have one shape
    ALL = enum.auto()  # if all samples have them, in one shape


# Fields of a span for which most formats have one value, and what to report if a sample has several.
_ONE_VALUE = {"temperature": Fact.SEVERAL_TEMPERATURES, "logprob_kind": Fact.SEVERAL_LOGPROB_KINDS}
_IN_EVERY_FORMAT = {
    Fact.AFTER_TRUNCATION: "carried as they are; a trainer's own are over all tokens, so ratios to these are not 1",
    Fact.SEVERAL_TEMPERATURES: "tokens unlike most of their sample are masked: the format has one value for all",
    Fact.SEVERAL_LOGPROB_KINDS: "tokens unlike most of their sample are masked: the format has one value for all",
    Fact.TURN_REWARDS: "not carried",
    Fact.SIDE_ARRAYS: "not carried",
}
_OF_LOGPROBS = (Fact.AFTER_TRUNCATION, Fact.SEVERAL_LOGPROB_KINDS)


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's format: what it needs, and what happens to each fact that it cannot carry."""

    framework: str
    needs: tuple[Need, ...]
    leaves_out: dict[Fact, str]
    routing: Routing = Routing.NONE
    kept_ids: bool = False  # whether it carries the ids that top-p kept, so that ratios to such logprobs can be 1
    one_value: tuple[str, ...] = tuple(_ONE_VALUE)  # fields of a span for which it has one value
    optional_logprobs: bool = False  # whether logprobs are optional
    logprobs: bool = True  # whether it carries logprobs

    def carrying(self, *, logprobs: bool) -> "Form":
        """The same format, without logprobs if they are not wanted and optional."""
        if logprobs or not self.optional_logprobs:
            return self
        needs = tuple(need for need in self.needs if need is not Need.LOGPROBS)
        return msgspec.structs.replace(self, needs=needs, one_value=("temperature",), logprobs=False)

    def without(self, fact: Fact) -> "Form":
        """The same format, for a caller that carries this fact."""
        kept = {other: report for other, report in self.leaves_out.items() if other is not fact}
        return msgspec.structs.replace(self, leaves_out=kept)

    @property
    def reports(self) -> dict[Fact, str]:
        common = {
            fact: report for fact, report in _IN_EVERY_FORMAT.items() if self.logprobs or fact not in _OF_LOGPROBS
        }
        return {**self.leaves_out, **common}


_REMEDIES = {
    Need.LOGPROBS: "choose a policy that masks such tokens, as exact does, or leave logprobs out where the format can",
    Need.REWARD: "score their rollouts, or filter them",
    Need.ADVANTAGE: "score their rollouts, or filter them, and give credit with advantages",
}


class Fitting:
    """Passes samples on to a format, and raises at the end if some lacked what it needs."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._reports = form.reports
        self._samples = 0
        self._held: Counter[Fact] = Counter()
        self._sides: set[str] = set()
        self._weights: dict[tuple[str, int], float] = {}  # of a trained token, by the first sample of each rollout
        self._routings: Counter[tuple[int, ...]] = Counter()  # samples by the shape of their routed experts
        self._lacking: Counter[Need] = Counter()
        self._first: dict[Need, str] = {}

    def passing(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The samples that fit, as they come, with tokens masked that differ in what the format cannot distinguish.

        Raises after the last sample if some did not fit.
        """
        for sample in samples:
            self._samples += 1
            lacking = [need for need in self._form.needs if _lacks(sample, need)]
            for need in lacking:
                self._lacking[need] += 1
                self._first.setdefault(need, sample.id)
            alike = self._with_kept_ids(self._of_one_value(sample))
            self._held.update(fact for fact in self._reports if self._holds(alike, fact))
            if not lacking:
                yield alike
        if self._lacking:
            raise ExportError("; ".join(map(self._refusal, self._lacking)))

    def left_out(self, *, counted: bool = True) -> list[str]:
        """A sentence for each thing that the format cannot carry and that the samples so far hold."""
        reports = []
        for fact in self._reports:
            if not (count := self._held[fact]):
                continue
            samples = f"{count:,} of {self._samples:,} samples" if counted else "samples"
            sides = f" ({', '.join(sorted(self._sides))})" if fact is Fact.SIDE_ARRAYS else ""
            reports.append(f"{self._form.framework}: {samples} {fact}{sides}: {self._reports[fact]}")
        if self._routing_is_uneven():
            reports.append(
                f"{self._form.framework}: routed experts are not whole in all samples, or not alike: not carried"
            )
        return reports

    def _of_one_value(self, sample: Sample) -> Sample:
        """The sample with trained tokens masked that differ from most, in fields with one value in the format."""
        for name in self._form.one_value:
            alike = sample.trained_mask & ~_unlike_most(sample, name)
            kept = int(alike.sum())
            if kept < sample.trained_tokens:
                self._held[_ONE_VALUE[name]] += 1
                sample = msgspec.structs.replace(sample, trained_mask=alike, trained_tokens=kept)
        return sample

    def _with_kept_ids(self, sample: Sample) -> Sample:
        """The sample with trained tokens masked whose kept ids are unknown, if the format carries kept ids."""
        if not self._form.kept_ids or KEPT_IDS not in sample.side:
            return sample
        known = sample.trained_mask & ~(places_without_kept_ids(sample) & _after_truncation(sample))
        count = int(known.sum())
        if count == sample.trained_tokens:
            return sample
        self._held[Fact.SOME_KEPT_IDS] += 1
        return msgspec.structs.replace(sample, trained_mask=known, trained_tokens=count)

    def _holds(self, sample: Sample, fact: Fact) -> bool:
        match fact:
            case Fact.WEIGHTS:
                weight = sample.loss_weight / max(sample.trained_tokens, 1)
                return not math.isclose(weight, self._weights.setdefault((sample.rollout, sample.try_index), weight))
            case Fact.SIDE_ARRAYS:
                return self._loses_sides(sample)
            case Fact.SEVERAL_TEMPERATURES | Fact.SEVERAL_LOGPROB_KINDS | Fact.SOME_KEPT_IDS:
                return False  # counted where their tokens are masked
            case Fact.AFTER_TRUNCATION:
                carries = self._form.kept_ids and KEPT_IDS in sample.side
                return not carries and bool(_after_truncation(sample)[sample.trained_mask].any())
            case _:
                return _HELD_BY_ITSELF[fact](sample)

    def _loses_sides(self, sample: Sample) -> bool:
        experts = routed_experts(sample) if self._form.routing is not Routing.NONE else None
        if experts is not None:
            self._routings[experts.shape[1:]] += 1
        carried = {*((ROUTED_EXPERTS,) if experts is not None else ()), *((KEPT_IDS,) if self._form.kept_ids else ())}
        lost = sample.side.keys() - carried
        self._sides |= lost
        return bool(lost)

    def _routing_is_uneven(self) -> bool:
        some = 0 < self._routings.total() < self._samples
        several = len(self._routings) > 1 and self._form.routing is not Routing.EACH
        return several or (some and self._form.routing is Routing.ALL)

    def _refusal(self, need: Need) -> str:
        return (
            f"{self._form.framework} needs {need}, but {self._lacking[need]:,} of {self._samples:,} samples have none, "
            f"{self._first[need]} first; {_REMEDIES[need]}"
        )


def fitted(samples: Iterable[Sample], form: Form) -> list[Sample]:
    """All samples, if they have what the format needs. It warns about what is left out, once per place of the call."""
    fitting = Fitting(form)
    passed = list(fitting.passing(samples))
    for sentence in fitting.left_out(counted=False):
        warnings.warn(sentence, LeftOutWarning, stacklevel=3)
    return passed


def _trained_values(sample: Sample, name: str) -> Counter[object]:
    """How many trained tokens have each value of a span's field. Unknown values do not count."""
    counts: Counter[object] = Counter()
    for span in sample.spans:
        counts[getattr(span, name)] += int(np.count_nonzero(sample.trained_mask[span.start : span.stop]))
    return Counter({value: tokens for value, tokens in counts.items() if tokens and value is not None})


def _unlike_most(sample: Sample, name: str) -> npt.NDArray[np.bool_]:
    """The tokens whose span has another value of a field than most trained tokens. Among equals, the first counts."""
    unlike = np.zeros(len(sample.ids), np.bool_)
    counts = _trained_values(sample, name)
    if len(counts) > 1:
        most = counts.most_common(1)[0][0]
        for span in sample.spans:
            unlike[span.start : span.stop] = getattr(span, name) not in (None, most)
    return unlike


def _after_truncation(sample: Sample) -> npt.NDArray[np.bool_]:
    """The tokens whose logprobs are over the kept ids only, as with top-p."""
    found = np.zeros(len(sample.ids), np.bool_)
    for span in sample.spans:
        found[span.start : span.stop] = span.logprob_kind is LogprobKind.AFTER_TRUNCATION
    return found


def _lacks(sample: Sample, need: Need) -> bool:
    match need:
        case Need.LOGPROBS:
            return not np.isfinite(sample.logprobs[sample.trained_mask]).all()
        case Need.REWARD:
            return sample.reward is None or not math.isfinite(sample.reward)
        case Need.ADVANTAGE:
            return sample.advantage is None or not math.isfinite(sample.advantage)


def _trained_versions(sample: Sample) -> list[int]:
    return [index for index in np.unique(sample.version_index[sample.trained_mask]).tolist() if index >= 0]


_HELD_BY_ITSELF: dict[Fact, Callable[[Sample], bool]] = {
    Fact.FORKED: lambda sample: sample.siblings > 1,
    Fact.SEVERAL_VERSIONS: lambda sample: len(_trained_versions(sample)) > 1,
    Fact.UNSURE_VERSION: lambda sample: any(len(set(sample.versions[one])) > 1 for one in _trained_versions(sample)),
    Fact.MISSING_LOGPROBS: lambda sample: _lacks(sample, Need.LOGPROBS),
    Fact.NO_REWARD: lambda sample: _lacks(sample, Need.REWARD),
    Fact.TURN_REWARDS: lambda sample: bool(sample.turn_rewards),
}
