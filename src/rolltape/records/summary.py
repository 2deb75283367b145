"""What the rollouts of a split come to at a step, in numbers; and what of them a tracker is given."""

import math
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from rolltape.records.fork import ForkCause
from rolltape.records.ledger import Fate
from rolltape.records.rollout import Status, StopReason
from rolltape.records.trace import Trace


class Spread(msgspec.Struct, frozen=True):
    """How numbers are spread; of finite ones alone."""

    count: int
    mean: float
    std: float
    minimum: float
    median: float
    maximum: float


class StepSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rollouts of one split at one step. What could not be known of them is absent or empty."""

    rollouts: int
    rejected: int = 0  # gone from the batch, and not among `rollouts`
    filtered: int = 0  # kept out of training
    statuses: dict[Status, int] = {}
    stop_reasons: dict[StopReason, int] = {}
    rewards: Spread | None = None
    rewards_not_finite: int = 0
    reward_terms: dict[str, float] = {}  # means
    turns: Spread | None = None  # per rollout, as are the next three
    sampled_tokens: Spread | None = None
    trained_tokens: Spread | None = None
    context_tokens: Spread | None = None  # the longest prompt with its reply
    fates: dict[Fate, int] = {}  # the ledger: sampled tokens by what became of them
    forks: dict[ForkCause, int] = {}
    staleness: dict[int, int] = {}  # trained tokens by how many versions they are behind the newest of the step


class ShownStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is given of one split at one step: some traces, and what all of its rollouts come to."""

    split: str
    step: int
    traces: tuple[Trace, ...] = ()
    summary: StepSummary | None = None  # None: only traces are given

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.traces)

    def __len__(self) -> int:
        return len(self.traces)


def spread_of(values: Iterable[float]) -> Spread | None:
    """The spread of those values that are finite; None: there are none."""
    finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not len(finite):
        return None
    # Scaled by a power of two, which changes no digit, so that neither the sum nor a square can overflow.
    unit = math.ldexp(0.5, math.frexp(float(np.abs(finite).max()))[1])
    scaled = finite / unit
    return Spread(
        count=len(finite),
        mean=math.fsum(scaled) / len(finite) * unit,
        std=float(scaled.std()) * unit,
        minimum=float(finite.min()),
        median=float(np.median(scaled)) * unit,
        maximum=float(finite.max()),
    )
