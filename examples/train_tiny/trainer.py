"""The trainer: a model, its optimizer, and the weights that sampled last, which the proof asks for."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.train_tiny.loss import grpo_loss, logprobs_of
from examples.train_tiny.proof import Proof, ProofError
from rolltape.integrations.torch import SampleBatch, batches
from rolltape.records.sample import Sample
from rolltape.tokens import PpoClip, TokenExporter


class Recipe(NamedTuple):
    """How much of everything."""

    steps: int = 14
    tasks: int = 8
    group_size: int = 8
    temperature: float = 0.7
    updates: int = 2  # of the weights, by each step's samples
    learning_rate: float = 2e-4
    clip: PpoClip = PpoClip(clip_low=0.2, clip_high=0.28)
    batch_tokens: int = 8192


class Trainer:
    """Changes a model by samples."""

    def __init__(self, model: Any, recipe: Recipe, exporter: TokenExporter) -> None:
        self.model = model
        self.recipe = recipe
        self._exporter = exporter
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        self._kept: dict[str, Mapping[str, Tensor]] = {}

    @property
    def versions(self) -> tuple[str, ...]:
        """The last two versions, or the only one; the last are the weights that it has."""
        return tuple(self._kept)

    def keep(self, version: str) -> None:
        """Keep the weights as they are now, and those from before, by the versions that the engine knows them by."""
        weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self._kept = {**dict(list(self._kept.items())[-1:]), version: weights}

    def update(self, step: int, samples: Sequence[Sample], temperature: float, proof: Proof | None = None) -> None:
        """Change the weights by what samples say, if the proof holds."""
        rollouts = len({sample.rollout for sample in samples})
        ready = list(batches(samples, self.recipe.batch_tokens))
        for number in range(self.recipe.updates):
            self._optimizer.zero_grad()
            seen = []
            for batch in ready:
                logprobs_bl, entropy_bl = logprobs_of(self.model, batch, temperature)
                if proof is not None and number == 0:
                    proof.see(batch, logprobs_bl, lambda batch, version: self.logprobs_by(batch, version, temperature))
                torch.autograd.backward(grpo_loss(self.recipe.clip, batch, logprobs_bl, rollouts))
                seen.append({"logprobs": logprobs_bl.detach(), "entropy": entropy_bl})
            if proof is not None and number == 0:
                proof.check()
            for place, (batch, outputs) in enumerate(zip(ready, seen, strict=True)):
                self._exporter.export(step, number * len(ready) + place, batch.columns(), outputs, epoch=number)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
        self._exporter.mark_stable(step)

    def logprobs_by(self, batch: SampleBatch, version: str, temperature: float) -> Tensor:
        """What weights that were kept make of a batch."""
        if version not in self._kept:
            raise ProofError(f"trained tokens name the weights {version!r}; the trainer had {', '.join(self._kept)}")
        model = copy.deepcopy(self.model)
        model.load_state_dict(self._kept[version])
        with torch.no_grad():
            return logprobs_of(model, batch, temperature)[0]
