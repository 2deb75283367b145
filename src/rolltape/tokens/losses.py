"""Losses as data: one object holds the thresholds of a loss, and computes which tokens it masks.

A token is masked if no loss gives it a gradient: each loss that it trains with drops it on one side of a trust region
(`high`, `low`), or its advantage, weight or ratio is zero. A term that only keeps the policy close to the sampling
policy may still apply to it.

The losses of one micro-batch are chosen per token. `rl_weights`, `ref_kl_weights` and `ce_weights` are the weights of
three losses, as in prime-rl: the exporter's own, distillation and cross-entropy. A token trains with each loss whose
weight is not zero at that token.
"""

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from rolltape.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

# Per-token columns that a loss reads, by name: of one length, on one device, in the trainer's precision. They are the
# columns of a token record, and `old_ratio`: the ratio to the old policy if `old_logprobs` are given, otherwise the
# same as `ratio`.
Columns = Mapping[str, "Tensor"]


class DroppedTokens(NamedTuple):
    """Masks of the tokens that a loss drops: all, and those that left the trust region on either side."""

    all: "Tensor"
    high: "Tensor"
    low: "Tensor"


class LossSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A loss with its thresholds. `needs` names the columns that it reads in addition to the trainer's logprobs."""

    needs: ClassVar[tuple[str, ...]] = ("inference_logprobs", "advantages")
    weights: ClassVar[str] = "rl_weights"  # the column of its weights; without it the weight is 1 everywhere

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            if not value >= 0:
                raise RecordError(f"{type(self).__name__}: {name} is {value}; give a number that is not negative")
            msgspec.structs.force_setattr(self, name, float(value))  # it may be a scalar of numpy or torch

    def to_json(self) -> str:
        """The specification as JSON; `parse_loss` reads it back."""
        return msgspec.json.encode(self).decode()

    def missing(self, given: Container[str]) -> list[str]:
        """The columns that it reads and that are not in `given`."""
        return [name for name in self.needs if name not in given]

    def components(self, given: Container[str]) -> "list[LossSpec]":
        """The losses of a micro-batch with the columns `given`: this one, and others whose weights are in them."""
        others = (loss for loss in (OnPolicyDistillation(), CrossEntropy()) if loss.weights in given)
        return [self, *(loss for loss in others if loss.weights != self.weights)]

    def dropped(self, columns: Columns) -> DroppedTokens:
        """Compute which tokens the loss drops."""
        raise NotImplementedError

    def pull(self, columns: Columns) -> "Tensor":
        """A value proportional to a token's gradient, if the loss does not drop the token."""
        return columns["advantages"] * columns["ratio"]


class Dppo(LossSpec, frozen=True, tag="dppo"):
    """Drops a token whose probability moved too far in the direction in which its advantage pushes it."""

    mask_low: float = 0.2
    mask_high: float = 0.2

    def dropped(self, columns: Columns) -> DroppedTokens:
        advantages, moved = columns["advantages"], columns["prob_delta"]
        rises = advantages > 0
        too_high = moved > self.mask_high
        too_low = moved < -self.mask_low
        return DroppedTokens(too_high.where(rises, too_low), rises & too_high, (advantages < 0) & too_low)


class Ipo(LossSpec, frozen=True, tag="ipo"):
    """Drops a token whose probability moved too far in either direction."""

    threshold: float = 0.1

    def dropped(self, columns: Columns) -> DroppedTokens:
        moved = columns["prob_delta"]
        too_high, too_low = moved > self.threshold, moved < -self.threshold
        return DroppedTokens(too_high | too_low, too_high, too_low)


class OnPolicyDistillation(LossSpec, frozen=True, tag="on_policy_distillation"):
    """Pulls towards a reference model. It drops a token only if its probability fell by more than 0.2."""

    needs: ClassVar[tuple[str, ...]] = ("inference_logprobs", "reference_logprobs")
    weights: ClassVar[str] = "ref_kl_weights"
    threshold: ClassVar[float] = 0.2

    def dropped(self, columns: Columns) -> DroppedTokens:
        too_low = columns["prob_delta"] < -self.threshold
        return DroppedTokens(too_low, too_low.new_zeros(too_low.shape), too_low)

    def pull(self, columns: Columns) -> "Tensor":
        return (columns["reference_logprobs"] - columns["trainer_logprobs"]) * columns["ratio"]


class CrossEntropy(LossSpec, frozen=True, tag="cross_entropy"):
    """Raises the probability of each token, as supervised training does. It drops none."""

    needs: ClassVar[tuple[str, ...]] = ()
    weights: ClassVar[str] = "ce_weights"

    def dropped(self, columns: Columns) -> DroppedTokens:
        none = columns["trained_mask"].new_zeros(columns["trained_mask"].shape)
        return DroppedTokens(none, none, none)

    def pull(self, columns: Columns) -> "Tensor":
        return columns["trainer_logprobs"].new_ones(())


class PpoClip(LossSpec, frozen=True, tag="ppo_clip"):
    """Clips the ratio at 1 − `clip_low` and 1 + `clip_high`. A token is dropped if the clipped term counts.

    The ratio is to `old_logprobs` if the batch has them, else to the inference logprobs. `dual_clip`, if given,
    also bounds the ratio of tokens with a negative advantage.
    """

    needs: ClassVar[tuple[str, ...]] = ("advantages",)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def missing(self, given: Container[str]) -> list[str]:
        has_old = "old_logprobs" in given or "inference_logprobs" in given
        return super().missing(given) + ([] if has_old else ["inference_logprobs"])

    def dropped(self, columns: Columns) -> DroppedTokens:
        advantages, ratio = columns["advantages"], columns["old_ratio"]
        falls = advantages < 0
        # Terms are compared, not ratios: where rounding makes both terms equal, the trainer still has a gradient.
        free = ratio * advantages
        beyond = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages < free
        high = beyond & (advantages > 0)
        low = beyond & falls
        if self.dual_clip is not None:
            high |= falls & (self.dual_clip * advantages > free)
        return DroppedTokens(high | low, high, low)

    def pull(self, columns: Columns) -> "Tensor":
        return columns["advantages"] * columns["old_ratio"]


Loss = CrossEntropy | Dppo | Ipo | OnPolicyDistillation | PpoClip


def parse_loss(text: str) -> Loss:
    """Read a loss specification from JSON, such as a token record's `loss`."""
    try:
        loss: Loss = msgspec.json.decode(text, type=Loss)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{text}: not a loss specification: {error}") from None
    return loss
