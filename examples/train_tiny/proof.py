"""What must hold at the first update of a step, before a weight has changed.

The trainer then has the very weights that sampled. If every trained token has the same probability with both, the ids
before it, its mask, its logprob, the temperature and the weight version are what its sample says they are.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from examples.train_tiny.batch import Batch
from rolltape import Group
from rolltape.records.sample import Fate, Sample
from rolltape.records.turn import Finish

TOLERANCE = 1e-3

LogprobsBy = Callable[[Batch, str], Tensor]  # the trainer's logprobs of a batch, by the weights of a version


class ProofError(Exception):
    """What is trained on is not what was sampled."""


class Proof:
    """Takes in the micro-batches of a first update; `check` raises if something does not hold.

    `version` is that of the weights which the trainer has; `groups` are what the samples were made of.
    """

    def __init__(self, step: int, version: str, samples: Sequence[Sample], groups: Sequence[Group]) -> None:
        self.trained = 0
        self.promised = sum(sample.trained_tokens for sample in samples)
        self.stop_tokens = _stop_tokens(samples, groups)
        self.stopped_turns = _stopped_turns(samples, groups)
        self.worst = 0.0  # the largest distance of a ratio from 1
        self._step = step
        self._version = version
        self._off = 0
        self._worst_at = ""

    def see(self, batch: Batch, logprobs_bl: Tensor, logprobs_by: LogprobsBy) -> None:
        """Take in a micro-batch, and what the trainer makes of it with the weights that it has."""
        self.trained += int(batch.trained_bl.sum())
        for version in sorted(_versions(batch.samples, self._version)):
            own_bl = logprobs_bl.detach() if version == self._version else logprobs_by(batch, version)
            self._compare(batch, version, own_bl)

    def check(self) -> None:
        """Raise ProofError if something did not hold."""
        wrong = []
        if self._off:
            wrong.append(f"{self._off} of {self.trained} trained tokens have a ratio that is not 1; {self._worst_at}")
        if self.trained != self.promised:
            wrong.append(f"{self.promised} tokens of these samples are to train, the masks have {self.trained}")
        if self.stop_tokens != self.stopped_turns:
            wrong.append(f"{self.stopped_turns} trained turns ended on a stop token, {self.stop_tokens} of these train")
        if wrong:
            raise ProofError(f"step {self._step}: {'; '.join(wrong)}")

    def _compare(self, batch: Batch, version: str, logprobs_bl: Tensor) -> None:
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


def _sampled_by(batch: Batch, version: str, unnamed: str) -> Tensor:
    """Which trained tokens a version sampled, by their word."""
    sampled_bl = torch.zeros_like(batch.trained_bl)
    for row, sample in enumerate(batch.samples):
        names = np.array([first for first, _ in sample.versions] + [unnamed])  # -1 is the last one
        sampled_bl[row, : len(sample.ids)] = torch.from_numpy(names[sample.version_index] == version)
    return sampled_bl & batch.trained_bl


def _stop_tokens(samples: Sequence[Sample], groups: Sequence[Group]) -> int:
    """How many trained tokens end a turn."""
    sessions = (session for group in groups for rollout in group.rollouts for session in rollout.sessions)
    stop_ids = {stop for session in sessions for stop in session.head.stop_ids or ()}
    return sum(int(token) in stop_ids for sample in samples for token in sample.ids[sample.trained_mask])


def _stopped_turns(samples: Sequence[Sample], groups: Sequence[Group]) -> int:
    """How many of the turns that train have ended on a stop token."""
    trained = {span.turn for sample in samples for span in sample.spans if span.fate is Fate.TRAINED}
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    return sum(turn.facts.finish is Finish.STOP for turn in turns if turn.id in trained)
