"""A policy: the rules by which a tree becomes samples, as data."""

import enum
from typing import Any

import msgspec

from rolltape.errors import PolicyError
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import canonical_json

# Raised when the same policy would give other samples than before; part of every sample id.
LINEARIZER_VERSION = 1


class OnRewrite(enum.StrEnum):
    """What to do when the next prompt departs inside the most recent reply."""

    NEW_SAMPLE = "new_sample"
    KEEP_HEAD = "keep_head"  # go on; what was sampled before the departure stays trained
    REPLACE_REPLY = "replace_reply"  # go on; the whole reply stops training (slime)


class Branches(enum.StrEnum):
    """Which branches of a tree become samples."""

    ALL = "all"
    MAIN = "main"  # the one that holds the session's last turn
    LONGEST = "longest"  # the one with the most sampled tokens; the earliest of equals


class RewardShare(enum.StrEnum):
    FULL = "full"
    SPLIT = "split"


class Advantage(enum.StrEnum):
    """How a rollout's advantage comes from the rewards of its group."""

    NONE = "none"
    CENTRED = "centred"  # reward minus the group's mean
    NORMALIZED = "normalized"  # the same, divided by the group's standard deviation


class LossWeight(enum.StrEnum):
    """How a rollout's weight of 1 is shared among its samples."""

    TOKENS = "tokens"  # by trained tokens: the weighted sum of sample means is the mean over the rollout's tokens
    EVEN = "even"


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How turns become samples. The presets are `exact`, `keep-head` and `slime`."""

    name: str = "exact"
    on_rewrite: OnRewrite = OnRewrite.NEW_SAMPLE
    max_given_up_tokens: int = 0  # KEEP_HEAD goes on only if at most so many sampled tokens lose their training
    max_reply_tokens: int = 0  # REPLACE_REPLY goes on only if the incoming reply is shorter (slime's choice of turn)
    absorb_rewritten_messages: bool = False  # a reply whose message came back changed continues its branch
    claim_before_cut: bool = False  # slime: the first branch claims a shared reply even if it then gives it up
    train_abandoned: bool = False
    train_without_logprobs: bool = False
    branches: Branches = Branches.ALL
    max_sample_tokens: int | None = None  # None: no limit
    max_staleness: int | None = None  # None: no limit; else how many versions behind a token may be
    reward_share: RewardShare = RewardShare.FULL
    advantage: Advantage = Advantage.CENTRED
    loss_weight: LossWeight = LossWeight.TOKENS

    def __post_init__(self) -> None:
        for field in ("max_given_up_tokens", "max_reply_tokens"):
            if getattr(self, field) < 0:
                raise PolicyError(f"policy {self.name}: {field} is {getattr(self, field)}; give 0 or more")
        if self.max_sample_tokens is not None and self.max_sample_tokens < 1:
            raise PolicyError(f"policy {self.name}: max_sample_tokens is {self.max_sample_tokens}; give 1 or more")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise PolicyError(f"policy {self.name}: max_staleness is {self.max_staleness}; give 0 or more")

    @property
    def key(self) -> str:
        """Names the policy with all its choices and the linearizer's version."""
        choices = canonical_json({**msgspec.to_builtins(self), "linearizer": LINEARIZER_VERSION})
        return f"{self.name}-{digest_of(choices).hex()[:8]}"


PRESETS: dict[str, Policy] = {
    "exact": Policy(),
    "keep-head": Policy(
        name="keep-head", on_rewrite=OnRewrite.KEEP_HEAD, max_given_up_tokens=64, absorb_rewritten_messages=True
    ),
    "slime": Policy(
        name="slime",
        on_rewrite=OnRewrite.REPLACE_REPLY,
        max_reply_tokens=1024,
        absorb_rewritten_messages=True,
        claim_before_cut=True,
        train_abandoned=True,
        train_without_logprobs=True,
    ),
}


def policy(name: str | Policy = "exact", **choices: Any) -> Policy:
    """A preset by name, or a policy, with some of its choices replaced."""
    if isinstance(name, Policy):
        base = name
    elif name in PRESETS:
        base = PRESETS[name]
    else:
        raise PolicyError(f"there is no policy {name!r}; known are {', '.join(PRESETS)}")
    try:
        return msgspec.convert({**msgspec.to_builtins(base), **choices}, Policy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"policy {base.name}: {error}") from None
