"""Cut policies, which decide how turns become samples, and credit, which assigns numbers to those samples."""

import enum
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from rolltape.errors import PolicyError
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import canonical_json, shown

# Raised when a change gives the same cut policy other samples; part of every policy key.
LINEARIZER_VERSION = 2


class OnRewrite(enum.StrEnum):
    """What to do when the next prompt departs inside the most recent reply."""

    NEW_SAMPLE = "new_sample"
    KEEP_HEAD = "keep_head"  # continue the sample; tokens before the departure stay trained
    REPLACE_REPLY = "replace_reply"  # continue the sample; the whole reply stops training (slime)


class Branches(enum.StrEnum):
    """Which branches of a tree become samples."""

    ALL = "all"
    MAIN = "main"  # the one that holds the session's last turn
    LONGEST = "longest"  # the one with the most sampled tokens; the earliest of equals


class RewardShare(enum.StrEnum):
    """How much of a rollout's reward each of its samples gets."""

    FULL = "full"
    SPLIT = "split"  # even shares that sum to the reward


class Advantage(enum.StrEnum):
    """How a rollout's advantage comes from the rewards of its group."""

    NONE = "none"
    CENTERED = "centered"  # reward minus the group's mean
    NORMALIZED = "normalized"  # the same, divided by the group's standard deviation
    CENTRED = "centered"  # the spelling of 0.1.0

    @classmethod
    def _missing_(cls, value: object) -> "Advantage | None":
        return cls.CENTERED if value == "centred" else None


class LossWeight(enum.StrEnum):
    """How a rollout's weight of 1 is shared among its samples."""

    TOKENS = "tokens"  # by trained tokens: the weighted sum of sample means is the mean over the rollout's tokens
    EVEN = "even"


def _coerce(record: msgspec.Struct, where: str, **kinds: type[enum.StrEnum]) -> None:
    """Convert choices that were given as text to members of their enums."""
    for field, kind in kinds.items():
        given = getattr(record, field)
        try:
            msgspec.structs.force_setattr(record, field, kind(given))
        except ValueError:
            raise PolicyError(f"{where}: {field} is {given!r}; known are {', '.join(kind)}") from None


class CutPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tokens form which samples, and which of them train. The presets are `exact`, `keep-head` and `slime`.

    Example:

        rolltape.linearize(rollout, rolltape.cut_policy("exact", branches="main"))
    """

    name: str = "exact"  # The preset.
    on_rewrite: OnRewrite = OnRewrite.NEW_SAMPLE  # What happens where the next prompt changes the last reply.
    max_given_up_tokens: int = 0  # KEEP_HEAD continues the sample if at most this many tokens stop training.
    max_reply_tokens: int = 0  # REPLACE_REPLY continues the sample if the next reply is shorter than this.
    absorb_rewritten_messages: bool = False  # A reply whose message came back changed continues its branch.
    claim_before_cut: bool = False  # The first branch claims a shared reply even if it then gives it up, as in slime.
    train_abandoned: bool = False  # Train replies that the agent threw away.
    train_without_logprobs: bool = False  # Train tokens that have no logprob.
    train_constrained: bool = False  # Train tokens that were sampled under a grammar, a schema or a list of choices.
    branches: Branches = Branches.ALL  # Which branches become samples.
    max_sample_tokens: int | None = None  # The longest sample.
    max_staleness: int | None = None  # How many weight versions a trained token may be behind.

    def __post_init__(self) -> None:
        where = f"policy {self.name}"
        _coerce(self, where, on_rewrite=OnRewrite, branches=Branches)
        limits = {"max_given_up_tokens": 0, "max_reply_tokens": 0, "max_sample_tokens": 1, "max_staleness": 0}
        for field, least in limits.items():
            given = getattr(self, field)
            if given is not None and given < least:
                raise PolicyError(f"{where}: {field} is {given}; give {least} or more")

    @property
    def key(self) -> str:
        """Names the policy with all its choices and the linearizer's version."""
        return _key(self)


@lru_cache(maxsize=64)
def _key(policy: CutPolicy) -> str:
    choices = {name: getattr(policy, name) for name in CutPolicy.__struct_fields__}
    digest = digest_of(canonical_json({**choices, "linearizer": LINEARIZER_VERSION}))
    return f"{policy.name}-{digest.hex()[:8]}"


class Credit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which reward, advantage and weight the samples of a rollout carry. It changes no sample and no sample id.

    Example:

        rolltape.samples_of_group(rollouts, "exact", credit=rolltape.Credit(advantage="normalized"))
    """

    reward_share: RewardShare = RewardShare.FULL  # Whether each sample has the rollout's whole reward, or a share.
    advantage: Advantage = Advantage.CENTERED  # How advantages are computed from the rewards of a group.
    loss_weight: LossWeight = LossWeight.TOKENS  # How samples share the rollout's weight of 1.

    def __post_init__(self) -> None:
        _coerce(self, "credit", reward_share=RewardShare, advantage=Advantage, loss_weight=LossWeight)

    def shares(self, reward: float | None, samples: int) -> list[float | None]:
        """Each sample's reward: the rollout's whole one, or even shares that sum to it."""
        if reward is None or self.reward_share is RewardShare.FULL or samples < 2 or not math.isfinite(reward):
            return [reward] * samples
        parts = [reward / samples] * (samples - 1)
        return [*parts, math.fsum([reward, *(-part for part in parts)])]

    def weights(self, trained_tokens: Sequence[int]) -> list[float]:
        """A rollout's weight of 1, shared among its samples."""
        if self.loss_weight is LossWeight.EVEN:
            return [1 / len(trained_tokens) for _ in trained_tokens]
        total = sum(trained_tokens)
        return [tokens / total for tokens in trained_tokens]


P = TypeVar("P", bound=CutPolicy)

PRESETS: dict[str, CutPolicy] = {
    "exact": CutPolicy(),
    "keep-head": CutPolicy(
        name="keep-head", on_rewrite=OnRewrite.KEEP_HEAD, max_given_up_tokens=64, absorb_rewritten_messages=True
    ),
    "slime": CutPolicy(
        name="slime",
        on_rewrite=OnRewrite.REPLACE_REPLY,
        max_reply_tokens=1024,
        absorb_rewritten_messages=True,
        claim_before_cut=True,
        train_abandoned=True,
        train_without_logprobs=True,
        train_constrained=True,
    ),
}


def cut_policy(name: str | CutPolicy = "exact", **choices: Any) -> CutPolicy:
    """A preset by name, or a cut policy, with some of its choices replaced.

    Example:

        rolltape.cut_policy("keep-head", max_given_up_tokens=8)
    """
    base = _base(name)
    for choice in choices:
        if choice in Credit.__struct_fields__:
            raise PolicyError(
                f"policy {base.name}: {choice} is credit; give credit=Credit({choice}=…) beside the policy"
            )
    fields = {field: getattr(base, field) for field in CutPolicy.__struct_fields__}
    return _converted({**fields, **choices}, CutPolicy, base.name)


def cut_and_credit(policy: str | CutPolicy, credit: Credit | None = None) -> tuple[CutPolicy, Credit]:
    """Resolve the arguments `policy` and `credit` of a function. A given credit overrules that of a `Policy`."""
    if credit is not None and not isinstance(credit, Credit):
        raise PolicyError(f"the credit is {shown(credit)}, a {type(credit).__name__}; give rolltape.Credit(…)")
    inner = policy.credit if isinstance(policy, Policy) else Credit()
    return cut_policy(policy), inner if credit is None else credit


class Policy(CutPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deprecated: a cut policy and a credit in one. Use `CutPolicy` and `Credit`."""

    reward_share: RewardShare = RewardShare.FULL
    advantage: Advantage = Advantage.CENTERED
    loss_weight: LossWeight = LossWeight.TOKENS

    @property
    def credit(self) -> Credit:
        """The credit that this policy includes."""
        return Credit(reward_share=self.reward_share, advantage=self.advantage, loss_weight=self.loss_weight)


def policy(name: str | CutPolicy = "exact", **choices: Any) -> Policy:
    """Deprecated: a preset with some of its choices replaced, also those of the credit. Use `cut_policy`."""
    warnings.warn(
        "rolltape.policy is deprecated; use rolltape.cut_policy, and give credit=rolltape.Credit(…) beside it",
        DeprecationWarning,
        stacklevel=2,
    )
    base = _base(name)
    return _converted({**msgspec.structs.asdict(base), **choices}, Policy, base.name)


def _base(name: object) -> CutPolicy:
    """The preset of a name, or the policy that was given."""
    if isinstance(name, CutPolicy):
        return name
    if not isinstance(name, str):
        raise PolicyError(f"the policy is {shown(name)}, a {type(name).__name__}; give a preset's name or a CutPolicy")
    if name not in PRESETS:
        raise PolicyError(f"there is no policy {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


def _converted(fields: dict[str, Any], kind: type[P], name: str) -> P:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise PolicyError(f"policy {name}: {error}") from None
