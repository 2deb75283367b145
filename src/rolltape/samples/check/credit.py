"""Compares the advantages, rewards and loss weights in a step's token records with what the tape's rewards give.

The kind that the trainer uses is inferred from its records: the kind of `Credit` that most of them agree with.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from rolltape.records.policy import Advantage, Credit, LossWeight, RewardShare
from rolltape.records.rollout import RolloutHead
from rolltape.records.sample import Span
from rolltape.records.token_record import TokenRecord
from rolltape.records.wording import number
from rolltape.samples.check.records import TokenDifference, TokenRule, agree
from rolltape.samples.credit import RewardedRollout, advantages_of

Key = tuple[str, int]  # a rollout and a try of it
Advantages = Mapping[Key, float | None]
Siblings = tuple[int, Sequence[int]] | None  # a sample's place in its rollout, and the trained tokens of all there
K = TypeVar("K", "_Formula", RewardShare, LossWeight)

_JOINED_WRONGLY = "check how the trainer joins rewards"


class CheckedAdvantage(enum.StrEnum):
    """What a trainer's advantages are compared with."""

    AUTO = "auto"  # the one of the next three that most records agree with
    CENTERED = "centered"
    NORMALIZED = "normalized"  # by either standard deviation, with what trainers add to it
    LEAVE_ONE_OUT = "leave-one-out"  # the reward minus the mean of the others
    ORDERED = "ordered"  # the trainer computes its own: they rise with the reward within a group
    NONE = "none"  # they are not checked


class _Formula(NamedTuple):
    """One way in which trainers scale a group's centered rewards."""

    kind: CheckedAdvantage
    ddof: int = 0  # the standard deviation divides by n - ddof
    epsilon: float = 0.0  # is added to it

    def factor(self, centered: Sequence[float]) -> float:
        """What the group's centered rewards are multiplied by."""
        count, length = len(centered), math.hypot(*centered)
        if self.kind is CheckedAdvantage.CENTERED or not length:
            return 1.0
        if self.kind is CheckedAdvantage.LEAVE_ONE_OUT:
            return count / (count - 1)
        deviation = length / math.sqrt(count - self.ddof) + self.epsilon
        return 1 / deviation if deviation else 1.0


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
    groups = {group: advantages_of(rows[group], Advantage.CENTERED) for group in {one.group for one in credited}}
    formulas = [formula for formula in _FORMULAS if asked in (CheckedAdvantage.AUTO, formula.kind)]
    by_formula = {formula: _scaled(groups.values(), formula) for formula in formulas}
    formula = _chosen_formula(credited, by_formula)
    expected = by_formula[formula]
    imported = {row.head.key for group in rows.values() for row in group if "imported" in row.head.extra}
    early = _advantages_of_the_seen(credited, rows, formula, expected)
    for one in credited:
        if one.key in imported:
            continue
        if _advantage_agrees(one, expected) is not False or _advantage_agrees(one, early):
            continue
        held = expected.get(one.key)
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


def _chosen_formula(credited: Sequence[CreditedRecord], by_formula: Mapping[_Formula, Advantages]) -> _Formula:
    """The formula that most records agree with; one that `Credit` does not have only if it explains most of them."""

    def agrees(one: CreditedRecord, formula: _Formula) -> bool | None:
        return _advantage_agrees(one, by_formula[formula])

    formulas = list(by_formula)
    telling = [one for one in credited if one.advantages and by_formula[formulas[0]].get(one.key)]  # 0 is 0 in all
    found = _most_agreed(formulas, telling, agrees)
    if 2 * sum(agrees(one, found) is True for one in telling) > len(telling):
        return found
    return _most_agreed([one for one in formulas if one in _OURS] or formulas, telling, agrees)


def _scaled(groups: Iterable[Advantages], formula: _Formula) -> Advantages:
    """The advantages by a formula, of rollouts whose centered ones are given by group."""
    found: dict[Key, float | None] = {}
    for centered in groups:
        factor = formula.factor([held for held in centered.values() if held is not None])
        found |= {key: held and held * factor for key, held in centered.items()}
    return found


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


def _advantages_of_the_seen(
    credited: Sequence[CreditedRecord],
    rows: Mapping[str, Sequence[RewardedRollout]],
    formula: _Formula,
    expected: Advantages,
) -> Advantages:
    """Advantages over the rollouts that the step saw, of groups whose records all agree with them.

    A group may have been handed over before its last attempts ended.
    """
    by_group: dict[str, list[CreditedRecord]] = {}
    for one in credited:
        by_group.setdefault(one.group, []).append(one)
    found: dict[Key, float | None] = {}
    for group, members in by_group.items():
        if all(_advantage_agrees(one, expected) is not False for one in members):
            continue
        keys = {one.key for one in members}
        centered = advantages_of([row for row in rows[group] if row.head.key in keys], Advantage.CENTERED)
        own = _scaled([centered], formula)
        if all(_advantage_agrees(one, own) is not False for one in members):
            found |= own
    return found


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


def _advantage_agrees(one: CreditedRecord, expected: Advantages) -> bool | None:
    """None: the record has no advantage to compare."""
    if not one.advantages:
        return None
    held = expected.get(one.key)
    return held is not None and len(one.advantages) == 1 and agree(one.advantages[0], held)


def _odd_advantage(record: TokenRecord, held: float | None) -> tuple[int | None, float]:
    """The place of the unexpected advantage, or None if all tokens have the same one, and the advantage."""
    assert record.advantages is not None
    trained = np.flatnonzero(record.trained_mask)
    values = record.advantages[trained]
    if (values == values[0]).all():
        return None, float(values[0])
    odd = next((place for place, value in enumerate(values.tolist()) if held is None or not agree(value, held)), 0)
    return int(trained[odd]), float(values[odd])
