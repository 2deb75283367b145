"""Samples for SkyRL: the columns of its `GeneratorOutput`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import logprobs_or_zero
from rolltape.export.formats.fitting import Fact, Form, Need, fitted
from rolltape.records.sample import Sample

FORM = Form(
    framework="skyrl",
    needs=(Need.LOGPROBS, Need.REWARD),
    optional_logprobs=True,
    leaves_out={
        Fact.FORKED: "rows of one trajectory, for step_wise_trajectories; loss_weight is not carried, use token_mean",
        Fact.SEVERAL_VERSIONS: "no weight version is carried",
        Fact.UNSURE_VERSION: "no weight version is carried",
    },
)

_COLUMNS = {  # of `GeneratorOutput`, by their names in a row
    "prompt_token_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "reward": "rewards",
    "loss_mask": "loss_masks",
    "stop_reason": "stop_reasons",
    "rollout_logprobs": "rollout_logprobs",
    "trajectory_id": "trajectory_ids",
    "is_last_step": "is_last_step",
}


def generator_output(samples: Iterable[Sample], *, logprobs: bool = True) -> dict[str, list[Any] | None]:
    """The columns of a `GeneratorOutput`, in the form for step-wise training: a row for each sample.

    Samples of one rollout follow each other. `trajectory_ids` are dicts, the arguments of SkyRL's `TrajectoryID`.
    """
    chosen = fitted(samples, FORM.carrying(logprobs=logprobs))
    if not chosen:
        raise ExportError("no samples: SkyRL needs at least one")
    return columns(list(rows(chosen, logprobs=logprobs)))


def columns(given: Sequence[dict[str, Any]]) -> dict[str, list[Any] | None]:
    """Rows as columns. Logprobs are a column only if all rows have them."""
    found: dict[str, list[Any] | None] = {name: [row[key] for row in given] for key, name in _COLUMNS.items()}
    if any(row["rollout_logprobs"] is None for row in given):
        found["rollout_logprobs"] = None
    return found


def rows(samples: Sequence[Sample], *, logprobs: bool = True) -> Iterator[dict[str, Any]]:
    """A row for each sample that fits, those of one rollout together, with the rollout's place in its group."""
    by_rollout: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault((sample.rollout, sample.try_index), []).append(sample)
    places: dict[str, int] = {}
    for siblings in by_rollout.values():
        group = siblings[0].group
        place = places[group] = places.get(group, -1) + 1
        trajectory = {"instance_id": group, "repetition_id": place}
        for sample in siblings:
            yield row(sample, trajectory, is_last=sample is siblings[-1], logprobs=logprobs)


def row(sample: Sample, trajectory_id: Any, *, is_last: bool, logprobs: bool = True) -> dict[str, Any]:
    """A row: everything after the first prompt is the response, with a mask of 1 on trained tokens."""
    start = sample.prompt_tokens
    return {
        "prompt_token_ids": sample.ids[:start].tolist(),
        "response_ids": sample.ids[start:].tolist(),
        "reward": sample.reward,
        "loss_mask": sample.trained_mask[start:].astype(np.int8).tolist(),
        "stop_reason": "length" if sample.truncated else "stop",
        "rollout_logprobs": logprobs_or_zero(sample)[start:].tolist() if logprobs else None,
        "trajectory_id": trajectory_id,
        "is_last_step": is_last,
        "sample": sample.id,
        "rollout": sample.rollout,
        "advantage": sample.advantage,
        "loss_weight": sample.loss_weight,
    }
