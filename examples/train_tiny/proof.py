"""What must hold at the first update of a step, before a weight has changed.

The trainer then has the very weights that sampled. If every trained token has the same probability with both, the ids
before it, its logprob, the temperature and the weight version are right. Which tokens must train, with which advantage
and weight, is recomputed from the raw turns by `expected.py`, and compared with what the loss is given.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from examples.train_tiny.expected import Expected, TrainedRow
from rolltape.integrations.torch import SampleBatch
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample

TOLERANCE = 1e-3

LogprobsBy = Callable[[SampleBatch, str], Tensor]  # the trainer's logprobs of a batch, by the weights of a version


class ProofError(Exception):
    """What is trained on is not what was sampled."""


class Proof:
    """Takes in the micro-batches of a first update; `check` raises if something does not hold.

    `version` is that of the weights which the trainer has; `rollouts` are those of all groups of the step, as recorded.
    """

    def __init__(self, step: int, version: str, rollouts: Sequence[Rollout]) -> None:
        self.trained = 0
        self.expected = Expected(rollouts)
        self.worst = 0.0  # the largest distance of a ratio from 1
        self._step = step
        self._version = version
        self._off = 0
        self._worst_at = ""

    def see(self, batch: SampleBatch, logprobs_bl: Tensor, logprobs_by: LogprobsBy) -> None:
        """Take in a micro-batch, and what the trainer makes of it with the weights that it has."""
        self.trained += int(batch.trained_bl.sum())
        for row in _rows(batch):
            self.expected.see(row)
        for version in sorted(_versions(batch.samples, self._version)):
            own_bl = logprobs_bl.detach() if version == self._version else logprobs_by(batch, version)
            self._compare(batch, version, own_bl)

    def check(self) -> None:
        """Raise ProofError if something did not hold."""
        wrong = []
        if self._off:
            wrong.append(f"{self._off} of {self.trained} trained tokens have a ratio that is not 1; {self._worst_at}")
        wrong += self.expected.problems()
        if wrong:
            raise ProofError(f"step {self._step}: {'; '.join(wrong)}")

    def _compare(self, batch: SampleBatch, version: str, logprobs_bl: Tensor) -> None:
        """Compare the tokens that a version sampled, by their word, with what its weights give them."""
        distance_bl = ((logprobs_bl - batch.inference_logprobs_bl).exp() - 1).abs()
        # A trained token without a logprob, which the engine never sampled, is as far off as can be.
        sampled_bl = _sampled_by(batch, version, self._version)
        distance_bl = distance_bl.nan_to_num(torch.inf).where(sampled_bl, torch.zeros(()))
        self._off += int((distance_bl > TOLERANCE).sum())
        if float(distance_bl.max()) > self.worst:
            self.worst = float(distance_bl.max())
            row, place = divmod(int(distance_bl.argmax()), distance_bl.shape[1])
            sample, inference = batch.samples[row], float(batch.inference_logprobs_bl[row, place])
            self._worst_at = (
                f"at worst token {place} of sample {sample.index} of rollout {sample.rollout[:8]}: "
                f"logprob {inference:.4f} by the engine, {float(logprobs_bl[row, place]):.4f} by weights {version}"
            )


def _versions(samples: Sequence[Sample], unnamed: str) -> set[str]:
    """The weight versions that samples name for their trained tokens; `unnamed` stands for none."""
    return {
        unnamed if index < 0 else sample.versions[index][0]
        for sample in samples
        for index in set(sample.version_index[sample.trained_mask].tolist())
    }


def _sampled_by(batch: SampleBatch, version: str, unnamed: str) -> Tensor:
    """Which trained tokens a version sampled, by their word."""
    sampled_bl = torch.zeros_like(batch.trained_bl)
    for row, sample in enumerate(batch.samples):
        names = np.array([first for first, _ in sample.versions] + [unnamed])  # -1 is the last one
        sampled_bl[row, : len(sample.ids)] = torch.from_numpy(names[sample.version_index] == version)
    return sampled_bl & batch.trained_bl


def _rows(batch: SampleBatch) -> Iterator[TrainedRow]:
    """The rows of a batch, from the tensors that the loss is given."""
    for row, sample in enumerate(batch.samples):
        yield TrainedRow(
            name=f"sample {sample.index} of rollout {sample.rollout[:8]}",
            rollout=sample.rollout,
            ids=batch.ids_bl[row].numpy(),
            trained=batch.trained_bl[row].numpy(),
            logprobs=batch.inference_logprobs_bl[row].numpy(),
            advantage=float(batch.advantages_b[row]),
            weight=float(batch.weights_b[row]),
        )
