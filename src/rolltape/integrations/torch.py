"""Samples for a training loop in PyTorch: padded or packed batches, step by step, on one rank or on several."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rolltape.collect.tasks import Task
from rolltape.errors import GroupsError
from rolltape.groups import Group
from rolltape.integrations.live import LiveGroups, first_rank_failed
from rolltape.records.sample import Sample

__all__ = ["SampleBatch", "SampleLoader", "StepBatches", "batches", "pack", "pad"]


class SampleBatch(NamedTuple):
    """One micro-batch. If padded, it has a row for each sample. If packed, samples follow each other in one row.

    Tensors whose names end with `_bl` have a value per token, those with `_b` one per sample. This is the loss of GRPO,
    a mean over rollouts whose samples share a weight of 1:

        logits_blv = model(**batch.model_inputs()).logits
        …                                    # logprobs_bl: of each id, from the logits before it
        ratio_bl = (logprobs_bl - batch.inference_logprobs_bl.nan_to_num()).exp()
        …
        gain_bl = torch.min(ratio_bl * advantages_bl, clipped_bl * advantages_bl)  # advantages_bl = batch.spread(…)
        loss = -(gain_bl * batch.token_weights_bl).sum() / step.rollouts
    """

    samples: tuple[Sample, ...]
    ids_bl: Tensor
    positions_bl: Tensor  # position of each token in its sample
    sequences_bl: Tensor  # the sample of each token; -1: padding
    trained_bl: Tensor
    inference_logprobs_bl: Tensor  # NaN where the engine gave none, as at prompts; a weight of 0 does not remove NaN
    advantages_b: Tensor  # NaN where the credit has none
    weights_b: Tensor  # of each sample among those of its rollout

    @property
    def attention_bl(self) -> Tensor:
        """True at tokens, False at padding."""
        return self.sequences_bl >= 0

    @property
    def token_weights_bl(self) -> Tensor:
        """The weight of each trained token. The weights in a sample add up to the sample's weight."""
        trained_b = torch.zeros_like(self.weights_b).index_add(
            0, self.sequences_bl[self.trained_bl], torch.ones_like(self.inference_logprobs_bl[self.trained_bl])
        )
        return self.spread(self.weights_b / trained_b.clamp(min=1)) * self.trained_bl

    def model_inputs(self) -> dict[str, Any]:
        """The arguments of a transformers model.

        Positions separate packed samples. Transformers uses them only without an attention mask and without a cache.
        With either, tokens would attend to earlier samples.
        """
        given = {"input_ids": self.ids_bl, "position_ids": self.positions_bl, "use_cache": False}
        return given if self.is_packed else {**given, "attention_mask": self.attention_bl.long()}

    @property
    def is_packed(self) -> bool:
        """Whether several samples share a row."""
        return len(self.ids_bl) < len(self.samples)

    def spread(self, values_b: Tensor) -> Tensor:
        """Each sample's value at each of its tokens, and 0 at padding."""
        return torch.cat([values_b, values_b.new_zeros(1)])[self.sequences_bl]

    def to(self, device: torch.device | str) -> "SampleBatch":
        """The same on another device."""
        return self._replace(**{name: value.to(device) for name, value in self._asdict().items() if name != "samples"})

    def columns(self) -> dict[str, Any]:
        """The batch in the form for `TokenExporter.export`. It is empty without samples."""
        if not self.samples:
            return {}
        lengths = torch.tensor([len(sample.ids) for sample in self.samples])
        return {
            "input_ids": self.ids_bl,
            **({"lengths": lengths} if self.is_packed else {"attention_mask": self.attention_bl}),
            "trained_mask": self.trained_bl,
            "inference_logprobs": self.inference_logprobs_bl,
            "advantages": self.advantages_b,
            "loss_weights": self.weights_b,
            "rewards": [sample.reward for sample in self.samples],
            "sample_ids": [sample.id for sample in self.samples],
            "rollout_ids": [sample.rollout for sample in self.samples],
            "groups": [sample.group for sample in self.samples],
            "weight_versions": [[first for first, _ in sample.versions] for sample in self.samples],
        }


def pad(samples: Sequence[Sample], *, pad_id: int = 0) -> SampleBatch:
    """A row for each sample, padded on the right."""
    longest = max(len(sample.ids) for sample in samples)

    def rows(values: Iterable[npt.NDArray[Any]], filler: float) -> Tensor:
        return torch.from_numpy(
            np.stack([np.pad(row, (0, longest - len(row)), constant_values=filler) for row in values])
        )

    return _batch(samples, rows, pad_id)


def pack(samples: Sequence[Sample]) -> SampleBatch:
    """One row in which samples follow each other. `positions_bl` starts again at 0 with each."""

    def row(values: Iterable[npt.NDArray[Any]], _: float) -> Tensor:
        return torch.from_numpy(np.concatenate(list(values)))[None]

    return _batch(samples, row, 0)


def batches(
    samples: Iterable[Sample], max_tokens: int, *, packed: bool = False, pad_id: int = 0
) -> Iterator[SampleBatch]:
    """Micro-batches of at most `max_tokens` tokens, with padding. Samples of similar length are together."""
    for chosen in _split(samples, max_tokens, packed):
        yield pack(chosen) if packed else pad(chosen, pad_id=pad_id)


class StepBatches(NamedTuple):
    """What one rank trains on in one step."""

    step: int
    batches: list[SampleBatch]  # the same number on each rank; a blank one has no samples
    rollouts: int  # trained rollouts of all ranks: divide the sum over tokens by it
    rewards: list[float | None]  # of all rollouts, on all ranks
    groups: list[Group]  # all groups, on the rank that collects; empty on others

    def done(self) -> None:
        """Mark the groups as trained on. All ranks may call it."""
        for group in self.groups:
            group.done()


class SampleLoader:
    """A data loader whose batches are collected during the training.

    Example:

        loader = SampleLoader(live, lambda step: tasks[step], steps=100, max_tokens=8192)
        for step in loader:
            for batch in step.batches:
                loss_of(model, batch, step.rollouts).backward()
            optimizer.step()
            step.done()
            …                      # hand the weights over: live.update_weights(folder, str(step.step + 1))

    With `torch.distributed`, give `live` on the first rank and None on the others. The first rank collects, and each
    rank gets its share, in the same number of batches. Save `state_dict()` of each rank with a checkpoint.
    `load_state_dict` continues after the last step that was done.
    """

    def __init__(
        self,
        live: LiveGroups | None,
        tasks: Callable[[int], Iterable[Mapping[str, Any] | Task]],
        *,
        steps: int,
        max_tokens: int,
        packed: bool = False,
        pad_id: int = 0,
        every_sample: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Nothing is collected yet.

        Arguments:
            live: The source of groups; None on ranks that get their share from the first.
            tasks: Returns the tasks of a step.
            steps: How many steps there are.
            max_tokens: The most tokens of one micro-batch, with padding.
            packed: Pack samples into one row, instead of padding one row for each.
            pad_id: The id at padding.
            every_sample: Also include samples whose advantage is 0, which do not affect a policy gradient.
            process_group: The ranks that share; by default all.
        """
        self._live = live
        self._tasks = tasks
        self._steps = steps
        self._max_tokens = max_tokens
        self._packed = packed
        self._pad_id = pad_id
        self._every_sample = every_sample
        self._group = process_group
        self._next = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[StepBatches]:
        while self._next < self._steps:
            given = self._share(self._next)
            self._next += 1
            yield given

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint. Call it when the step is done."""
        return {"next_step": self._next, "live": None if self._live is None else self._live.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint. What was done after it is given again, from the tape."""
        self._next = state["next_step"]
        if self._live is not None:
            self._live.load_state_dict(state["live"])

    def _share(self, step: int) -> StepBatches:
        ranks = dist.get_world_size(self._group) if dist.is_initialized() else 1
        rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        shares: list[Any] = [None] * ranks
        groups: list[Group] = []
        if rank == 0:
            try:
                groups = self._collect(step)
                shares = self._make_shares(groups, ranks)
            except Exception as error:
                if ranks > 1:  # the others wait for an answer
                    dist.scatter_object_list([None], [first_rank_failed(error)] * ranks, src=0, group=self._group)
                raise
        own: list[Any] = [shares[0]]
        if ranks > 1:
            dist.scatter_object_list(own, shares if rank == 0 else None, src=0, group=self._group)
        if isinstance(own[0], Exception):
            raise own[0]
        chosen, rollouts, rewards = own[0]
        return StepBatches(step, [self._collate(samples) for samples in chosen], rollouts, rewards, groups)

    def _collect(self, step: int) -> list[Group]:
        if self._live is None:
            raise GroupsError("the first rank collects for all; give it a LiveGroups")
        return self._live.request(self._tasks(step), step=step).wait()

    def _make_shares(self, groups: Sequence[Group], ranks: int) -> list[Any]:
        """For each rank its batches, as lists of samples. Some are empty, so that all ranks have the same number."""
        samples = [one for group in groups for one in group.samples if self._every_sample or one.advantage != 0]
        chosen = list(_split(samples, self._max_tokens, self._packed))
        chosen += [[] for _ in range(-len(chosen) % ranks)]
        rollouts = len({sample.rollout for sample in samples})
        rewards = [reward for group in groups for reward in group.rewards]
        return [(chosen[rank::ranks], rollouts, rewards) for rank in range(ranks)]

    def _collate(self, samples: Sequence[Sample]) -> SampleBatch:
        if not samples:
            return _blank(self._pad_id)
        return pack(samples) if self._packed else pad(samples, pad_id=self._pad_id)


def _split(samples: Iterable[Sample], max_tokens: int, packed: bool) -> Iterator[list[Sample]]:
    """Samples by length, as many together as fit into a batch. A sample that is too long is alone in its batch."""
    rows: list[Sample] = []
    tokens = 0
    for sample in sorted(samples, key=lambda sample: (len(sample.ids), sample.id)):
        tokens = tokens + len(sample.ids) if packed else (len(rows) + 1) * len(sample.ids)
        if rows and tokens > max_tokens:
            yield rows
            rows, tokens = [], len(sample.ids)
        rows.append(sample)
    if rows:
        yield rows


def _batch(
    samples: Sequence[Sample], join: Callable[[Iterable[npt.NDArray[Any]], float], Tensor], pad_id: int
) -> SampleBatch:
    return SampleBatch(
        samples=tuple(samples),
        ids_bl=join((sample.ids for sample in samples), pad_id).long(),
        positions_bl=join((np.arange(len(sample.ids)) for sample in samples), 0),
        sequences_bl=join((np.full(len(sample.ids), at) for at, sample in enumerate(samples)), -1),
        trained_bl=join((sample.trained_mask for sample in samples), False),
        inference_logprobs_bl=join((sample.logprobs for sample in samples), np.nan).float(),
        advantages_b=torch.tensor([math.nan if one.advantage is None else one.advantage for one in samples]),
        weights_b=torch.tensor([sample.loss_weight for sample in samples]),
    )


def _blank(pad_id: int) -> SampleBatch:
    """A batch that trains nothing, for a rank without samples while others train."""
    zeros_bl = torch.zeros(1, 2)
    return SampleBatch(
        samples=(),
        ids_bl=torch.full((1, 2), pad_id),
        positions_bl=torch.arange(2)[None],
        sequences_bl=torch.full((1, 2), -1),
        trained_bl=zeros_bl.bool(),
        inference_logprobs_bl=torch.full((1, 2), torch.nan),
        advantages_b=torch.zeros(0),
        weights_b=torch.zeros(0),
    )
