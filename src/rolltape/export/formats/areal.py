"""Samples for AReaL: the padded tensor dict that its trainers accept."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import VersionNumbers, as_tensors, logprobs_or_zero, padded, routed_experts
from rolltape.export.formats.fitting import Fact, Form, Need, Routing, fitted
from rolltape.records.sample import Sample

if TYPE_CHECKING:
    import torch

FORM = Form(
    framework="areal",
    needs=(Need.LOGPROBS, Need.REWARD),
    routing=Routing.OF_ONE_SHAPE,
    leaves_out={
        Fact.FORKED: "AReaL's baseline counts rows; give it advantages for rewards, and turn its reward_norm off",
        Fact.UNSURE_VERSION: "-1 there, as on prompts",
    },
)
_FORM_WITH_ADVANTAGES = msgspec.structs.replace(FORM.without(Fact.FORKED), needs=(Need.LOGPROBS, Need.ADVANTAGE))


def tensor_dict(
    samples: Iterable[Sample], *, advantages_as_rewards: bool = False, versions: Sequence[str] = ()
) -> dict[str, "torch.Tensor"]:
    """A batch as AReaL's workflows return it, padded on the right, with a row per sample, not shifted yet.

    `advantages_as_rewards` puts our advantages in the place of rewards, for groups whose rollouts forked or that differ
    in size. `versions` are the run's versions, needed if they are no integers.
    """
    chosen = fitted(samples, _FORM_WITH_ADVANTAGES if advantages_as_rewards else FORM)
    batch = arrays(chosen, versions)
    if advantages_as_rewards:
        batch["rewards"] = np.array([sample.advantage for sample in chosen], np.float32)
    return as_tensors(batch)


def arrays(samples: Sequence[Sample], versions: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a batch of samples that fit."""
    if not samples:
        raise ExportError("no samples: a batch holds at least one")
    numbers = VersionNumbers(versions)

    def lines(column: Callable[[Sample], npt.NDArray[Any]], dtype: npt.DTypeLike, fill: int = 0) -> npt.NDArray[Any]:
        return padded([column(sample)[: _length(sample)] for sample in samples], dtype, fill=fill)

    batch = {
        "input_ids": lines(lambda sample: sample.ids, np.int32),
        "attention_mask": lines(lambda sample: np.ones(len(sample.ids)), np.bool_),
        "loss_mask": lines(lambda sample: sample.trained_mask, np.int32),
        "logprobs": lines(logprobs_or_zero, np.float32),
        "versions": lines(numbers.of_tokens, np.int32, fill=-1),
        "rewards": np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float32),
    }
    return {**batch, **_routing(samples)}


def _length(sample: Sample) -> int:
    """The length up to its last trained token. AReaL puts the reward at the last token, and loses it if masked."""
    return int(np.flatnonzero(sample.trained_mask)[-1]) + 1


def identities(samples: Sequence[Sample]) -> dict[str, npt.NDArray[Any]]:
    """Columns for the file that AReaL's batch has no place for."""
    return {
        "rolltape_advantage": np.array(
            [np.nan if sample.advantage is None else sample.advantage for sample in samples], np.float32
        ),
        "rolltape_loss_weight": np.array([sample.loss_weight for sample in samples]),
        "rolltape_group": np.array([sample.group for sample in samples]),
        "rolltape_rollout": np.array([sample.rollout for sample in samples]),
        "rolltape_sample": np.array([sample.id for sample in samples]),
    }


def _routing(samples: Sequence[Sample]) -> dict[str, npt.NDArray[Any]]:
    """Routed experts, if any sample has them, and which rows of the batch can be replayed."""
    experts = [routed_experts(sample) for sample in samples]
    shapes = {rows.shape[1:] for rows in experts if rows is not None}
    if len(shapes) != 1:
        return {}
    none = np.zeros((0, *shapes.pop()), np.int32)
    lengths = [_length(sample) for sample in samples]
    # The last token of a sample was never fed; AReaL repeats the row before it there.
    whole = [
        none if rows is None else np.concatenate([rows, rows[-1:]])[:length]
        for rows, length in zip(experts, lengths, strict=True)
    ]
    width = max(lengths)
    return {
        "routed_experts": padded(whole, np.int32, width=width),
        "r3_routing_valid": np.array([rows is not None for rows in experts]),
    }
