"""Samples for verl: the fields of a `DataProto`, as its agent loops leave them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import (
    VersionNumbers,
    advantages_or_zero,
    all_routed_experts,
    as_tensors,
    logprobs_or_zero,
    padded,
)
from rolltape.export.formats.fitting import Fact, Form, Need, Routing, fitted
from rolltape.records.sample import Sample

if TYPE_CHECKING:
    import torch

FORM = Form(
    framework="verl",
    needs=(Need.LOGPROBS, Need.REWARD),
    routing=Routing.ALL,
    optional_logprobs=True,
    leaves_out={
        Fact.FORKED: "verl's own baseline and its seq-mean losses count rows; use the advantages given, and token-mean",
        Fact.SEVERAL_VERSIONS: "min_global_steps and max_global_steps hold the first and the last",
        Fact.UNSURE_VERSION: "min_global_steps and max_global_steps hold the bounds",
    },
)


class DataProtoFields(NamedTuple):
    """The arguments of `DataProto.from_dict`."""

    tensors: dict[str, "torch.Tensor"]
    non_tensors: dict[str, npt.NDArray[Any]]
    meta_info: dict[str, Any]


def data_proto_fields(
    samples: Iterable[Sample],
    *,
    pad_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    logprobs: bool = True,
    versions: Sequence[str] = (),
) -> DataProtoFields:
    """The arguments of `DataProto.from_dict`: prompts padded on the left, responses on the right, a row per sample.

    `logprobs=False` leaves `rollout_log_probs` out. `versions` are the run's versions, needed if they are no integers.
    """
    chosen = fitted(samples, FORM.carrying(logprobs=logprobs))
    tensors = arrays(
        chosen, pad_id=pad_id, prompt_length=prompt_length, response_length=response_length, logprobs=logprobs
    )
    return DataProtoFields(
        as_tensors(tensors),
        {name: values.astype(object) for name, values in identities(chosen, versions).items()},
        {"reward_extra_keys": []},
    )


def arrays(
    samples: Sequence[Sample],
    *,
    pad_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    logprobs: bool = True,
) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a batch of samples that fit."""
    if not samples:
        raise ExportError("no samples: a DataProto holds at least one")
    batch = _ids(samples, pad_id, prompt_length, response_length)
    width = batch["responses"].shape[1]

    def of_responses(column: Callable[[Sample], npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return padded([column(sample)[sample.prompt_tokens :] for sample in samples], dtype, width=width)

    batch["response_mask"] = of_responses(lambda sample: sample.trained_mask, np.int64)
    batch["rm_scores"] = of_responses(_score, np.float32)
    if logprobs:
        batch["rollout_log_probs"] = of_responses(logprobs_or_zero, np.float32)
    if all(sample.advantage is not None for sample in samples):
        batch["advantages"] = of_responses(advantages_or_zero, np.float32)
        batch["returns"] = batch["advantages"].copy()
    experts = all_routed_experts(samples)
    if experts is not None:
        batch["routed_experts"] = np.zeros((*batch["input_ids"].shape, *experts[0].shape[1:]), np.int16)
        for line, sample, rows in zip(batch["routed_experts"], samples, experts, strict=True):
            start = batch["prompts"].shape[1] - sample.prompt_tokens
            line[start : start + len(rows)] = rows
    return batch


def _ids(
    samples: Sequence[Sample], pad_id: int, prompt_length: int | None, response_length: int | None
) -> dict[str, npt.NDArray[Any]]:
    """Ids, attention and positions: every prompt ends, and every response begins, at the same column."""
    prompts = [sample.ids[: sample.prompt_tokens] for sample in samples]
    responses = [sample.ids[sample.prompt_tokens :] for sample in samples]
    before = _width(prompts, prompt_length, "prompt_length", samples)
    after = _width(responses, response_length, "response_length", samples)
    padded_prompts = padded(prompts, np.int64, fill=pad_id, width=before, on_the_left=True)
    padded_responses = padded(responses, np.int64, fill=pad_id, width=after)
    attended_prompts = padded([np.ones(len(row)) for row in prompts], np.int64, width=before, on_the_left=True)
    attended_responses = padded([np.ones(len(row)) for row in responses], np.int64, width=after)
    attended = np.concatenate([attended_prompts, attended_responses], axis=1)
    return {
        "prompts": padded_prompts,
        "responses": padded_responses,
        "input_ids": np.concatenate([padded_prompts, padded_responses], axis=1),
        "attention_mask": attended,
        "position_ids": np.clip(np.cumsum(attended, axis=1) - 1, 0, None),
    }


def identities(samples: Sequence[Sample], versions: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """The columns beside the tensors: `uid` is the group, and there are steps if every sample has a version."""
    numbers = VersionNumbers(versions)
    bounds = [bound for bound in map(numbers.bounds, samples) if bound is not None]
    columns = {
        "uid": np.array([sample.group for sample in samples]),
        "rollout": np.array([sample.rollout for sample in samples]),
        "sample": np.array([sample.id for sample in samples]),
        "loss_weight": np.array([sample.loss_weight for sample in samples]),
    }
    if len(bounds) == len(samples):
        columns["min_global_steps"] = np.array([oldest for oldest, _ in bounds])
        columns["max_global_steps"] = np.array([newest for _, newest in bounds])
    return columns


def _score(sample: Sample) -> npt.NDArray[np.float32]:
    """The reward at the last trained token: verl's estimators over tokens skip what is not in the mask."""
    scores = np.zeros(len(sample.ids), dtype=np.float32)
    trained = np.flatnonzero(sample.trained_mask)
    scores[trained[-1] if len(trained) else -1] = sample.reward
    return scores


def blank_sample(reward: float | None) -> Sample:
    """A sample that trains nothing, with one token of prompt and one of response, for a row that verl needs."""
    value = 0.0 if reward is None else reward
    return Sample(
        id="",
        rollout="",
        try_index=0,
        group="",
        session="",
        policy="",
        step=0,
        index=0,
        siblings=1,
        ids=np.zeros(2, np.int32),
        trained_mask=np.zeros(2, np.bool_),
        sampled_mask=np.zeros(2, np.bool_),
        logprobs=np.full(2, np.nan, np.float32),
        version_index=np.full(2, -1, np.int32),
        versions=(),
        spans=(),
        prompt_tokens=1,
        trained_tokens=0,
        reward=value,
        rollout_reward=value,
        turn_rewards={},
        advantage=0.0,
        loss_weight=0.0,
        truncated=False,
        uses_tools=False,
        ill_formed=False,
        side={},
    )


def _width(rows: Sequence[npt.NDArray[Any]], asked: int | None, name: str, samples: Sequence[Sample]) -> int:
    lengths = [len(row) for row in rows]
    longest = int(np.argmax(lengths))
    if asked is not None and lengths[longest] > asked:
        raise ExportError(
            f"sample {samples[longest].id}: {lengths[longest]} tokens, but {name} is {asked}; "
            "make it longer, or cut samples with the policy's max_sample_tokens"
        )
    return lengths[longest] if asked is None else asked
