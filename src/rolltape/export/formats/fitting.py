"""What a framework's format needs of samples, and what of them it leaves out: checked, counted and said."""

import enum
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from rolltape.errors import ExportError
from rolltape.export.formats.routing import ROUTED_EXPERTS, routed_experts
from rolltape.records.sample import Sample
from rolltape.records.turn import LogprobKind


class LeftOutWarning(UserWarning):
    """A format cannot carry something that the samples hold."""


class Need(enum.StrEnum):
    """What a training step cannot do without."""

    LOGPROBS = "a logprob for each trained token"
    REWARD = "a reward"
    ADVANTAGE = "an advantage"


class Fact(enum.StrEnum):
    """What a sample may hold that not every format can carry; said of it after "samples"."""

    FORKED = "of rollouts that forked"
    WEIGHTS = "that weigh otherwise in their rollout than by their trained tokens"
    SEVERAL_VERSIONS = "sampled by several weight versions"
    UNSURE_VERSION = "with tokens whose weight version is only known to lie between two"
    AFTER_TRUNCATION = "whose logprobs are after truncation, as by top-p"
    MISSING_LOGPROBS = "with trained tokens that have no logprob"
    NO_REWARD = "without a reward"
    TURN_REWARDS = "with rewards of single turns"
    SIDE_ARRAYS = "with side arrays"


class Routing(enum.Enum):
    """Whether a format carries routed experts that are whole."""

    NONE = enum.auto()
    EACH = enum.auto()  # of those samples that have them
    OF_ONE_SHAPE = enum.auto()  # of those samples that have them, if they are of one shape
    ALL = enum.auto()  # if all samples have them, and of one shape


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's format: what it needs, and what becomes of each fact that it cannot carry."""

    framework: str
    needs: tuple[Need, ...]
    leaves_out: dict[Fact, str]
    routing: Routing = Routing.NONE

    def without_logprobs(self) -> "Form":
        """The same format where it carries none."""
        needs = tuple(need for need in self.needs if need is not Need.LOGPROBS)
        left_out = {fact: said for fact, said in self.leaves_out.items() if fact is not Fact.AFTER_TRUNCATION}
        return msgspec.structs.replace(self, needs=needs, leaves_out=left_out)


OF_ALL_TOKENS = "carried as they are; a trainer's own are over all tokens, so that ratios to these are not 1"

_REMEDIES = {
    Need.LOGPROBS: "choose a policy that masks such tokens, as exact does, or leave logprobs out where the format can",
    Need.REWARD: "score their rollouts, or filter them",
    Need.ADVANTAGE: "score their rollouts, or filter them, and let the policy compute advantages",
}


class Fitting:
    """Lets samples pass to a format, and refuses at the end if some lacked what it needs."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._samples = 0
        self._held: Counter[Fact] = Counter()
        self._sides: set[str] = set()
        self._weights: dict[tuple[str, int], float] = {}  # of a trained token, by the first sample of each rollout
        self._routings: Counter[tuple[int, ...]] = Counter()  # samples by the shape of their routed experts
        self._lacking: Counter[Need] = Counter()
        self._first: dict[Need, str] = {}

    def passing(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The samples that fit, as they come; raises after the last if others did not."""
        for sample in samples:
            self._samples += 1
            lacking = [need for need in self._form.needs if _lacks(sample, need)]
            for need in lacking:
                self._lacking[need] += 1
                self._first.setdefault(need, sample.id)
            self._held.update(fact for fact in self._form.leaves_out if self._holds(sample, fact))
            if not lacking:
                yield sample
        if self._lacking:
            raise ExportError("; ".join(map(self._refusal, self._lacking)))

    def left_out(self, *, counted: bool = True) -> list[str]:
        """A sentence for each thing that the format cannot carry and that the samples so far hold."""
        said = []
        for fact, count in self._held.items():
            samples = f"{count:,} of {self._samples:,} samples" if counted else "samples"
            sides = f" ({', '.join(sorted(self._sides))})" if fact is Fact.SIDE_ARRAYS else ""
            said.append(f"{self._form.framework}: {samples} {fact}{sides}: {self._form.leaves_out[fact]}")
        if self._routing_is_uneven():
            said.append(
                f"{self._form.framework}: routed experts are not whole in all samples, or not alike: not carried"
            )
        return said

    def _holds(self, sample: Sample, fact: Fact) -> bool:
        match fact:
            case Fact.WEIGHTS:
                return self._weighs_otherwise(sample)
            case Fact.SIDE_ARRAYS:
                return self._loses_sides(sample)
            case _:
                return _HELD_BY_ITSELF[fact](sample)

    def _weighs_otherwise(self, sample: Sample) -> bool:
        weight = sample.loss_weight / sample.trained_tokens
        return not math.isclose(weight, self._weights.setdefault((sample.rollout, sample.try_index), weight))

    def _loses_sides(self, sample: Sample) -> bool:
        experts = routed_experts(sample) if self._form.routing is not Routing.NONE else None
        if experts is not None:
            self._routings[experts.shape[1:]] += 1
        lost = sample.side.keys() - ({ROUTED_EXPERTS} if experts is not None else set())
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
    """All samples, if they have what the format needs; warns of what it leaves out, once for each place of the call."""
    fitting = Fitting(form)
    passed = list(fitting.passing(samples))
    for sentence in fitting.left_out(counted=False):
        warnings.warn(sentence, LeftOutWarning, stacklevel=3)
    return passed


def _lacks(sample: Sample, need: Need) -> bool:
    match need:
        case Need.LOGPROBS:
            return not np.isfinite(sample.logprobs[sample.trained_mask]).all()
        case Need.REWARD:
            return sample.reward is None or not math.isfinite(sample.reward)
        case Need.ADVANTAGE:
            return sample.advantage is None or not math.isfinite(sample.advantage)


def _trained_versions(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    indices = sample.version_index[sample.trained_mask]
    return indices[indices >= 0]


def _is_unsure(sample: Sample) -> bool:
    return any(len(set(sample.versions[index])) > 1 for index in np.unique(_trained_versions(sample)))


_HELD_BY_ITSELF: dict[Fact, Callable[[Sample], bool]] = {
    Fact.FORKED: lambda sample: sample.siblings > 1,
    Fact.SEVERAL_VERSIONS: lambda sample: len(np.unique(_trained_versions(sample))) > 1,
    Fact.UNSURE_VERSION: _is_unsure,
    Fact.AFTER_TRUNCATION: lambda sample: sample.logprob_kind is LogprobKind.AFTER_TRUNCATION,
    Fact.MISSING_LOGPROBS: lambda sample: _lacks(sample, Need.LOGPROBS),
    Fact.NO_REWARD: lambda sample: _lacks(sample, Need.REWARD),
    Fact.TURN_REWARDS: lambda sample: bool(sample.turn_rewards),
}
