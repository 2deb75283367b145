"""Which sampled tokens may train at all, before any branch is looked at."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolltape.records.ledger import Fate
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Outcome, Status
from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag
from rolltape.tree import PlacedTurn, is_version_of

Fates = npt.NDArray[np.uint8]

# Fates as numbers, for arrays; PENDING is a token that some sample may still claim.
CODES: tuple[Fate, ...] = tuple(Fate)
CODE_OF: dict[Fate, int] = {fate: code for code, fate in enumerate(CODES)}
PENDING = 255


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


def turn_fate(placed: PlacedTurn, *, is_abandoned: bool, policy: CutPolicy) -> Fate | None:
    """The fate that all tokens of a turn share; None: they may train. A later prompt proves that a reply arrived."""
    facts = placed.turn.facts
    if facts.finish is Finish.ERROR:
        return Fate.MASKED_ENGINE_ERROR
    arrived = bool(placed.children) or is_version_of(placed.turn.reply, placed.rewritten_as)
    if facts.finish is Finish.ABORT and not arrived:
        return Fate.MASKED_ABORTED
    if facts.delivery is not Delivery.DELIVERED and not arrived:
        return Fate.MASKED_UNDELIVERED
    return Fate.MASKED_ABANDONED if is_abandoned and not policy.train_abandoned else None


def token_fates(turn: Turn, shared: Fate | None, policy: CutPolicy, staleness: Staleness) -> Fates:
    """One fate per sampled token: the shared one, or PENDING with single tokens masked."""
    fates = np.full(len(turn.sampled_ids), PENDING if shared is None else CODE_OF[shared], dtype=np.uint8)
    if shared is not None:
        return fates
    if not policy.train_without_logprobs:
        missing = slice(None) if turn.logprobs is None else np.isnan(turn.logprobs)
        fates[missing] = CODE_OF[Fate.MASKED_NO_LOGPROB]
    if policy.max_staleness is not None:
        for segment in turn.facts.segments:
            age = staleness.of(segment.first_version)
            if age is None or age > policy.max_staleness:
                part = fates[segment.start : segment.stop]
                part[part == PENDING] = CODE_OF[Fate.MASKED_STALE]
    return fates
