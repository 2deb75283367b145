"""Samples → padded micro-batches, with the columns that the loss and the token export take."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltape.records.sample import Sample


class Batch(NamedTuple):
    """One micro-batch: a row for each sample, padded on the right."""

    samples: Sequence[Sample]
    ids_bl: Tensor
    trained_bl: Tensor
    inference_logprobs_bl: Tensor  # NaN where the engine gave none
    advantages_b: Tensor
    weights_b: Tensor  # of each sample among those of its rollout

    def columns(self) -> dict[str, Any]:
        """As the token exporter takes it."""
        lengths_b = torch.tensor([len(sample.ids) for sample in self.samples])
        return {
            "input_ids": self.ids_bl,
            "attention_mask": torch.arange(self.ids_bl.shape[1]) < lengths_b[:, None],
            "trained_mask": self.trained_bl,
            "inference_logprobs": self.inference_logprobs_bl,
            "advantages": self.advantages_b,
            "rewards": [sample.reward for sample in self.samples],
            "loss_weights": self.weights_b,
            "sample_ids": [sample.id for sample in self.samples],
            "rollout_ids": [sample.rollout for sample in self.samples],
            "groups": [sample.group for sample in self.samples],
            "weight_versions": [[first for first, _ in sample.versions] for sample in self.samples],
        }


def batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[Batch]:
    """Micro-batches of at most so many tokens, padding included; those of one length together."""
    rows: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: (len(sample.ids), sample.id)):
        if rows and (len(rows) + 1) * len(sample.ids) > max_tokens:
            yield _batch(rows)
            rows = []
        rows.append(sample)
    if rows:
        yield _batch(rows)


def _batch(samples: Sequence[Sample]) -> Batch:
    return Batch(
        samples=tuple(samples),
        ids_bl=_padded([sample.ids for sample in samples], 0).long(),
        trained_bl=_padded([sample.trained_mask for sample in samples], False),
        inference_logprobs_bl=_padded([sample.logprobs for sample in samples], np.nan).float(),
        advantages_b=torch.tensor([sample.advantage for sample in samples]),
        weights_b=torch.tensor([sample.loss_weight for sample in samples]),
    )


def _padded(rows: Sequence[npt.NDArray[Any]], filler: float) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.from_numpy(np.stack([np.pad(row, (0, longest - len(row)), constant_values=filler) for row in rows]))
