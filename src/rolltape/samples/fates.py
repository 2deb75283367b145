"""Which sampled tokens may train at all, before any branch is looked at."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Outcome, Status
from rolltape.records.sample import Fate
from rolltape.records.turn import Delivery, Finish, Segment, Turn, TurnFlag
from rolltape.tree import Arrivals

NOBODY = -1


class Run(NamedTuple):
    """Sampled tokens `[start, stop)` of one turn that have one fate."""

    start: int
    stop: int
    fate: Fate | None  # None: some draft may still claim them
    draft: int = NOBODY  # the number of the draft that trains them


class Staleness:
    """How old a weight version is, by the run's versions in their order and the one that trains now."""

    def __init__(self, versions: Sequence[str] = (), current: str | None = None) -> None:
        self._order = {version: index for index, version in enumerate(versions)}
        self._now = len(versions) - 1 if current is None else self._order.get(current)

    def of(self, version: str | None) -> int | None:
        """How many versions lie between it and the current one; None: it, or the current one, is unknown."""
        index = None if version is None else self._order.get(version)
        return None if index is None or self._now is None else self._now - index


def rollout_fate(outcome: Outcome, *, as_if_finished: bool) -> Fate | None:
    """The fate that all tokens of a rollout share; None: each has its own."""
    if outcome.status in (Status.FAILED, Status.LOST):
        return Fate.DROPPED_ROLLOUT_FAILED
    if outcome.status is Status.RUNNING and not as_if_finished:
        return Fate.DROPPED_RUNNING
    return Fate.DROPPED_FILTERED if outcome.filtered is not None else None


def unlinked_fate(turn: Turn) -> Fate | None:
    """The fate of a turn that is no part of any branch; None: it is."""
    if turn.facts.auxiliary is not None:
        return Fate.DROPPED_AUXILIARY
    if TurnFlag.NOT_TOKEN_FAITHFUL in turn.facts.flags:
        return Fate.DROPPED_NOT_FAITHFUL
    return Fate.DROPPED_EMPTY_PROMPT if not len(turn.prompt_tokens) else None


def turn_fate(turn: Turn, arrivals: Arrivals, policy: CutPolicy) -> Fate | None:
    """The fate that all tokens of a turn share; None: they may train. What a later prompt shows did arrive."""
    facts, unproven = turn.facts, turn.sequence in arrivals.unproven
    if facts.finish is Finish.ERROR:
        return Fate.MASKED_ENGINE_ERROR
    if facts.finish is Finish.ABORT and unproven:
        return Fate.MASKED_ABORTED
    if facts.delivery is not Delivery.DELIVERED and unproven:
        return Fate.MASKED_UNDELIVERED
    if turn.sequence in arrivals.abandoned and not policy.train_abandoned:
        return Fate.MASKED_ABANDONED
    return Fate.MASKED_CONSTRAINED if facts.is_constrained and not policy.train_constrained else None


def token_runs(turn: Turn, shared: Fate | None, policy: CutPolicy, staleness: Staleness) -> list[Run]:
    """The fates of a turn's tokens: the shared one, or none yet, with single tokens masked."""
    count = len(turn.sampled_ids)
    if shared is None and turn.logprobs is None and not policy.train_without_logprobs:
        shared = Fate.MASKED_NO_LOGPROB
    if shared is not None or not count:
        return [Run(0, count, shared)] if count else []
    stale = [one for one in turn.facts.segments if _is_stale(one, policy, staleness)]
    missing = None if turn.logprobs is None or policy.train_without_logprobs else np.isnan(turn.logprobs)
    if not stale and (missing is None or not missing.any()):
        return [Run(0, count, None)]
    codes = np.zeros(count, dtype=np.uint8)
    for segment in stale:
        codes[segment.start : segment.stop] = 1
    if missing is not None:
        codes[missing] = 2
    fates = (None, Fate.MASKED_STALE, Fate.MASKED_NO_LOGPROB)
    return [Run(start, stop, fates[codes[start]]) for start, stop in equal_runs(codes)]


def _is_stale(segment: Segment, policy: CutPolicy, staleness: Staleness) -> bool:
    if policy.max_staleness is None:
        return False
    age = staleness.of(segment.first_version)
    return age is None or age > policy.max_staleness


def equal_runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """The ranges `[start, stop)` of equal values in an array, in order."""
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return list(pairwise(bounds)) if len(values) else []
