"""The losses that a trainer may train with, as data: one object says both what trains and what is masked.

A token is masked if its policy-gradient term is zero. A loss drops it on one side of a trust region (`high`, `low`),
or it has nothing to pull with: no advantage, no weight, or a ratio that is zero. A KL term may remain on it.
"""

from collections.abc import Container
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from rolltape.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor


class Seen(NamedTuple):
    """What a loss looks at, token by token: float32, of one length, on one device. None: it cannot be known."""

    trainer_logprobs: "Tensor"
    ratio: "Tensor | None"  # of the trainer's probability to the inference engine's
    old_ratio: "Tensor | None"  # to the old policy's, where one was given; else the same
    prob_delta: "Tensor | None"
    advantages: "Tensor | None"
    reference_logprobs: "Tensor | None"


class Dropped(NamedTuple):
    """Which tokens a loss takes out, and those of them by the side on which they left the trust region."""

    all: "Tensor"
    high: "Tensor"
    low: "Tensor"


class LossSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A loss with its thresholds. `needs` names the columns that it reads besides the trainer's logprobs."""

    needs: ClassVar[tuple[str, ...]] = ("inference_logprobs", "advantages")
    weights: ClassVar[str] = "rl_weights"  # the component weights that scale its policy-gradient term

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            if not value >= 0:
                raise RecordError(f"{type(self).__name__}: {name} is {value}; give a number that is not negative")
            msgspec.structs.force_setattr(self, name, float(value))  # which may have been one of numpy or torch

    def missing(self, given: Container[str]) -> list[str]:
        """The columns that it reads and that are not among those given."""
        return [name for name in self.needs if name not in given]

    def dropped(self, seen: Seen) -> Dropped:
        """The tokens that leave the loss."""
        raise NotImplementedError

    def pull(self, seen: Seen) -> "Tensor":
        """What the gradient of a token's policy-gradient term is proportional to, if it is not dropped."""
        return _given(seen.advantages, "advantages") * _given(seen.ratio, "inference_logprobs")


class Dppo(LossSpec, frozen=True, tag="dppo"):
    """Drops a token whose probability moved too far in the direction in which its advantage pushes it."""

    mask_low: float = 0.2
    mask_high: float = 0.2

    def dropped(self, seen: Seen) -> Dropped:
        advantages, moved = _given(seen.advantages, "advantages"), _moved(seen)
        rises = advantages > 0
        too_high = moved > self.mask_high
        too_low = moved < -self.mask_low
        return Dropped(too_high.where(rises, too_low), rises & too_high, (advantages < 0) & too_low)


class Ipo(LossSpec, frozen=True, tag="ipo"):
    """Drops a token whose probability moved too far, whichever way."""

    threshold: float = 0.1

    def dropped(self, seen: Seen) -> Dropped:
        moved = _moved(seen)
        too_high, too_low = moved > self.threshold, moved < -self.threshold
        return Dropped(too_high | too_low, too_high, too_low)


class OnPolicyDistillation(LossSpec, frozen=True, tag="on_policy_distillation"):
    """Pulls towards a reference model; drops a token whose probability fell by more than 0.2, and none that rose."""

    needs: ClassVar[tuple[str, ...]] = ("inference_logprobs", "reference_logprobs")
    weights: ClassVar[str] = "ref_kl_weights"
    threshold: ClassVar[float] = 0.2

    def dropped(self, seen: Seen) -> Dropped:
        too_low = _moved(seen) < -self.threshold
        return Dropped(too_low, too_low.new_zeros(too_low.shape), too_low)

    def pull(self, seen: Seen) -> "Tensor":
        reference = _given(seen.reference_logprobs, "reference_logprobs")
        return (reference - seen.trainer_logprobs) * _given(seen.ratio, "inference_logprobs")


class PpoClip(LossSpec, frozen=True, tag="ppo_clip"):
    """Clips the ratio at 1 − `clip_low` and 1 + `clip_high`; a token is dropped where the clipped side counts.

    The ratio is to `old_logprobs` where the batch has them, else to the inference logprobs. `dual_clip`, if given,
    also bounds the ratio of tokens with a negative advantage.
    """

    needs: ClassVar[tuple[str, ...]] = ("advantages",)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def missing(self, given: Container[str]) -> list[str]:
        has_old = "old_logprobs" in given or "inference_logprobs" in given
        return super().missing(given) + ([] if has_old else ["inference_logprobs"])

    def dropped(self, seen: Seen) -> Dropped:
        advantages, ratio = _given(seen.advantages, "advantages"), _given(seen.old_ratio, "inference_logprobs")
        falls = advantages < 0
        high = (advantages > 0) & (ratio > 1 + self.clip_high)
        low = falls & (ratio < 1 - self.clip_low)
        if self.dual_clip is not None:
            high |= falls & (ratio > self.dual_clip)
        return Dropped(high | low, high, low)

    def pull(self, seen: Seen) -> "Tensor":
        return _given(seen.advantages, "advantages") * _given(seen.old_ratio, "inference_logprobs")


Loss = Dppo | Ipo | OnPolicyDistillation | PpoClip


def spelled(loss: LossSpec) -> str:
    """The specification as JSON."""
    return msgspec.json.encode(loss).decode()


def loss_of(text: str) -> Loss:
    """The specification that `spelled` wrote."""
    try:
        loss: Loss = msgspec.json.decode(text, type=Loss)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{text}: no loss specification: {error}") from None
    return loss


def _moved(seen: Seen) -> "Tensor":
    return _given(seen.prob_delta, "inference_logprobs")


def _given(column: "Tensor | None", name: str) -> "Tensor":
    if column is None:
        raise RecordError(f"the loss needs {name}, and the batch has none")
    return column
