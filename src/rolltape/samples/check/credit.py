"""Compares the advantages, rewards and loss weights in a step's token records with what the tape's rewards give.

The kind that the trainer uses is inferred from its records: the one that most of them agree with.
"""

import enum
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from rolltape.records.policy import Advantage, Credit, LossWeight, RewardShare
from rolltape.records.rollout import RolloutHead
from rolltape.records.sample import Span
from rolltape.records.token_record import TokenRecord
from rolltape.records.wording import number
from rolltape.samples.check.records import TokenDifference, TokenRule, agree
from rolltape.samples.credit import RewardedRollout, advantages_of, counted_tries

Key = tuple[str, int]  # a rollout and a try of it
Advantages = Mapping[Key, float | None]
Siblings = tuple[int, Sequence[int]] | None  # a sample's place in its rollout, and the trained tokens of all there
K = TypeVar("K", "_Formula", RewardShare, LossWeight)

_JOINED_WRONGLY = "check how the trainer joins rewards"
_MEAN_ERROR = 2.0**-22  # of the largest reward: how far a float32 mean may be off
_USUAL_EPSILON = 1e-6  # what scales that error up in a group of equal rewards


class CheckedAdvantage(enum.StrEnum):
    """What a trainer's advantages are compared with."""

    AUTO = "auto"  # the one of the next three that most records agree with
    CENTERED = "centered"
    NORMALIZED = "normalized"  # by either standard deviation, with what trainers add to it
    LEAVE_ONE_OUT = "leave-one-out"  # the reward minus the mean of the others
    ORDERED = "ordered"  # the trainer computes its own: they rise with the reward within a group
    NONE = "none"  # they are not checked


class _CenteredRewards(NamedTuple):
    """A group's rewards minus their mean."""

    values: Advantages
    attempts: int  # that the trainer averages over
    largest: float  # of the rewards themselves, without its sign

    @classmethod
    def of(cls, rows: Sequence[RewardedRollout]) -> "_CenteredRewards":
        values = advantages_of(rows, Advantage.CENTERED)
        rewards = [abs(row.outcome.reward or 0.0) for row in rows if values.get(row.head.key) is not None]
        return cls(values, len(rewards), max(rewards, default=0.0))


class _Expected(NamedTuple):
    """An advantage, and the error that float32 arithmetic on the rewards may leave in it."""

    value: float
    error: float


Expectations = Mapping[Key, _Expected | None]


class _Formula(NamedTuple):
    """One way in which trainers scale a group's centered rewards."""

    kind: CheckedAdvantage
    ddof: int = 0  # the standard deviation divides by n - ddof
    epsilon: float = 0.0  # is added to it

    def scaled(self, group: _CenteredRewards) -> Expectations:
        """The advantages of a group."""
        factor = self._factor(group)
        error = factor * _MEAN_ERROR * group.largest
        of_deviation = factor * error if self.kind is CheckedAdvantage.NORMALIZED else 0.0
        return {
            key: None if held is None else _Expected(held * factor, error + of_deviation * abs(held))
            for key, held in group.values.items()
        }

    def _factor(self, group: _CenteredRewards) -> float:
        if self.kind is CheckedAdvantage.CENTERED or group.attempts < 2:
            return 1.0
        if self.kind is CheckedAdvantage.LEAVE_ONE_OUT:
            return group.attempts / (group.attempts - 1)
        length = math.hypot(*(held for held in group.values.values() if held is not None))
        deviation = length / math.sqrt(group.attempts - self.ddof)
        return 1 / (deviation + self.epsilon if deviation else max(self.epsilon, _USUAL_EPSILON))


_OURS = (_Formula(CheckedAdvantage.CENTERED), _Formula(CheckedAdvantage.NORMALIZED))
_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4)
_NORMALIZED = (_Formula(CheckedAdvantage.NORMALIZED, ddof, epsilon) for ddof in (0, 1) for epsilon in _EPSILONS)
_FORMULAS = tuple(dict.fromkeys([*_OURS, *_NORMALIZED, _Formula(CheckedAdvantage.LEAVE_ONE_OUT)]))


class CreditedRecord(NamedTuple):
    """A record, and the numbers that the tape may give its sample, by kind."""

    record: TokenRecord
    key: Key
    group: str
    spans: Sequence[Span]
    rewards: Mapping[RewardShare, float | None]  # without SPLIT: how many samples its rollout has is not known
    weights: Mapping[LossWeight, float]  # empty for the same reason
    advantages: Sequence[float]  # the different ones of its trained tokens; empty if it has none to compare

    @classmethod
    def of(
        cls, record: TokenRecord, head: RolloutHead, spans: Sequence[Span], reward: float | None, siblings: Siblings
    ) -> "CreditedRecord":
        """A record with the numbers of its sample. `siblings` is None if the samples of its rollout are not known."""
        rewards: dict[RewardShare, float | None] = {RewardShare.FULL: reward}
        weights: dict[LossWeight, float] = {}
        if siblings is not None:
            at, trained = siblings
            rewards = {kind: Credit(reward_share=kind).shares(reward, len(trained))[at] for kind in RewardShare}
            weights = {kind: Credit(loss_weight=kind).weights(trained)[at] for kind in LossWeight}
        seen = record.advantages
        advantages: list[float] = [] if seen is None else np.unique(seen[record.trained_mask]).tolist()
        return cls(record, head.key, head.group, spans, rewards, weights, advantages)


class CreditDifference(NamedTuple):
    """A record whose credit is not that of the tape."""

    credited: CreditedRecord
    difference: TokenDifference


def check_rewards(credited: Sequence[CreditedRecord]) -> Iterator[CreditDifference]:
    """Records whose reward is not their sample's."""
    share = _most_agreed(list(RewardShare), credited, _reward_agrees)
    for one in credited:
        if _reward_agrees(one, share) is False:
            what = f"reward {number(_reward(one.record))} in the record, {number(one.rewards[share])} on the tape"
            yield CreditDifference(one, TokenDifference(TokenRule.REWARD, None, what, _JOINED_WRONGLY))


def check_weights(credited: Sequence[CreditedRecord]) -> Iterator[CreditDifference]:
    """Records whose loss weight is not their sample's."""
    kind = _most_agreed(list(LossWeight), credited, _weight_agrees)
    seen_weights = _weights_of_the_seen(credited, kind)
    for one in credited:
        weight = one.record.loss_weight
        if _weight_agrees(one, kind) is False and not agree(weight or 0.0, seen_weights[id(one)]):
            seen, held = number(one.record.loss_weight), number(one.weights[kind])
            what = f"loss weight {seen} in the record, {held} by its share of its rollout's trained tokens"
            if kind is LossWeight.EVEN:
                what = f"loss weight {seen} in the record, {held} by the number of its rollout's samples"
            advice = "give each sample's loss_weight as loss_weights, and use it in the loss"
            yield CreditDifference(one, TokenDifference(TokenRule.LOSS_WEIGHT, None, what, advice))


def _weights_of_the_seen(credited: Sequence[CreditedRecord], kind: LossWeight) -> dict[int, float]:
    """The weight of each record, by its identity, among the records of its rollout in one epoch.

    It differs from the tape's if another sample of the rollout has tokens that train today, but were masked at that
    time because they were too stale.
    """
    siblings: dict[tuple[Key, int], list[CreditedRecord]] = {}
    for one in credited:
        if one.record.trained_tokens:
            siblings.setdefault((one.key, one.record.epoch), []).append(one)
    weights = dict.fromkeys(map(id, credited), 0.0)
    for ones in siblings.values():
        shares = Credit(loss_weight=kind).weights([one.record.trained_tokens for one in ones])
        weights.update(zip(map(id, ones), shares, strict=True))
    return weights


def check_advantages(
    credited: Sequence[CreditedRecord], rows: Mapping[str, Sequence[RewardedRollout]], asked: CheckedAdvantage
) -> Iterator[CreditDifference]:
    """Records whose advantage does not follow from the rewards of their group. Imported rollouts are left out.

    The source of an import need not hold a rollout's whole group, nor its rewards.
    """
    if asked is CheckedAdvantage.NONE:
        return
    if asked is CheckedAdvantage.ORDERED:
        yield from _check_order(credited)
        return
    imported = {row.head.key for group in rows.values() for row in group if "imported" in row.head.extra}
    by_group: dict[str, list[CreditedRecord]] = {}
    for one in credited:
        if one.key not in imported and one.advantages:
            by_group.setdefault(one.group, []).append(one)
    bases = [(ones, _bases_of(rows[group], {one.key for one in ones})) for group, ones in by_group.items()]
    formulas = [formula for formula in _FORMULAS if asked in (CheckedAdvantage.AUTO, formula.kind)]
    by_formula = {formula: _expected_by(formula, bases) for formula in formulas}
    compared = [one for ones, _ in bases for one in ones]
    formula = _chosen_formula(compared, by_formula)
    for one in compared:
        expected = by_formula[formula].get(one.key)
        if _advantage_agrees(one, expected):
            continue
        held = expected and expected.value
        token, value = _odd_advantage(one.record, held)
        by_tape = (
            "none on the tape, its rollout has no reward" if held is None else f"{number(held)} by its group's rewards"
        )
        yield CreditDifference(
            one,
            TokenDifference(
                TokenRule.ADVANTAGE,
                token,
                f"advantage {number(value)} in the record, {by_tape} ({formula.kind.value})",
                "check how the trainer groups samples; if it computes advantages in a way of its own, "
                "--advantage ordered compares only their order",
            ),
        )


def _bases_of(rows: Sequence[RewardedRollout], seen: Collection[Key]) -> list[_CenteredRewards]:
    """What a trainer may have scaled in a group. The first is all attempts with a reward."""
    every = _CenteredRewards.of(rows)
    bases = [
        every,
        every._replace(attempts=len(counted_tries(rows))),  # attempts without a reward were given the mean
        _CenteredRewards.of([row for row in rows if row.head.key in seen]),  # the group was handed over early
    ]
    if every.attempts == 1:  # verl takes the reward of a lone attempt as it is
        alone = {row.head.key: row.outcome.reward for row in rows if every.values.get(row.head.key) is not None}
        bases.append(every._replace(values=alone))
    return bases


def _expected_by(
    formula: _Formula, bases: Sequence[tuple[Sequence[CreditedRecord], Sequence[_CenteredRewards]]]
) -> Expectations:
    """Advantages by a formula: of each group by the first basis that all its records agree with, else by its first."""
    found: dict[Key, _Expected | None] = {}
    for ones, groups in bases:
        scaled = map(formula.scaled, groups)
        first = next(scaled)
        agreeing = (by for by in chain([first], scaled) if all(_advantage_agrees(one, by.get(one.key)) for one in ones))
        found |= next(agreeing, first)
    return found


def _chosen_formula(compared: Sequence[CreditedRecord], by_formula: Mapping[_Formula, Expectations]) -> _Formula:
    """The formula that most records agree with; one that `Credit` does not have only if it explains most of them."""

    def agrees(one: CreditedRecord, formula: _Formula) -> bool:
        return _advantage_agrees(one, by_formula[formula].get(one.key))

    formulas = list(by_formula)
    # An advantage of 0 is 0 by all of them.
    centered = by_formula[formulas[0]]
    telling = [one for one in compared if (held := centered.get(one.key)) and abs(held.value) > held.error] or compared
    found = _most_agreed(formulas, telling, agrees)
    if 2 * sum(agrees(one, found) for one in telling) > len(telling):
        return found
    return _most_agreed([one for one in formulas if one in _OURS] or formulas, telling, agrees)


def _check_order(credited: Sequence[CreditedRecord]) -> Iterator[CreditDifference]:
    """Records whose advantage does not rise with the reward within their group."""
    by_group: dict[str, list[tuple[float, float, CreditedRecord]]] = {}
    for one in credited:
        reward = one.rewards[RewardShare.FULL]
        if reward is not None and one.advantages:
            by_group.setdefault(one.group, []).append((reward, one.advantages[0], one))
    for members in by_group.values():
        members.sort(key=lambda one: one[0])
        for (low, less, before), (high, more, one) in pairwise(members):
            if agree(more, less) or (low < high and less < more):
                continue
            what = (
                f"advantage {number(more)} for reward {number(high)} in the record, {number(less)} for reward "
                f"{number(low)} in record {before.record.place} of the same group"
            )
            yield CreditDifference(
                one, TokenDifference(TokenRule.ADVANTAGE, None, what, "check how the trainer groups samples")
            )


def _most_agreed(
    kinds: Sequence[K], credited: Sequence[CreditedRecord], agrees: Callable[[CreditedRecord, K], bool | None]
) -> K:
    """The kind that most records agree with, the first of equals."""
    return max(kinds, key=lambda kind: sum(agrees(one, kind) is True for one in credited))


def _reward(record: TokenRecord) -> float | None:
    """A record's reward, also if given per token, or None if it has none or tokens have different ones."""
    if record.reward is not None or record.rewards is None:
        return record.reward
    values = record.rewards[record.trained_mask]
    return float(values[0]) if len(values) and (values == values[0]).all() else None


def _reward_agrees(one: CreditedRecord, share: RewardShare) -> bool | None:
    """Whether the rewards agree, or None if the record has no reward or the tape has none of this kind."""
    seen = _reward(one.record)
    if seen is None or share not in one.rewards:
        return None
    held = one.rewards[share]
    return held is not None and agree(seen, held)


def _weight_agrees(one: CreditedRecord, kind: LossWeight) -> bool | None:
    if one.record.loss_weight is None or kind not in one.weights:
        return None
    return agree(one.record.loss_weight, one.weights[kind])


def _advantage_agrees(one: CreditedRecord, expected: _Expected | None) -> bool:
    return expected is not None and len(one.advantages) == 1 and agree(one.advantages[0], *expected)


def _odd_advantage(record: TokenRecord, held: float | None) -> tuple[int | None, float]:
    """The place of the unexpected advantage, or None if all tokens have the same one, and the advantage."""
    assert record.advantages is not None
    trained = np.flatnonzero(record.trained_mask)
    values = record.advantages[trained]
    if (values == values[0]).all():
        return None, float(values[0])
    odd = next((place for place, value in enumerate(values.tolist()) if held is None or not agree(value, held)), 0)
    return int(trained[odd]), float(values[odd])
