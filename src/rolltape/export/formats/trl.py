"""Samples for TRL: what the `rollout_func` of its `GRPOTrainer` returns."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import logprobs_or_zero
from rolltape.export.formats.fitting import Fact, Form, fitted
from rolltape.records.sample import Sample

FORM = Form(
    framework="trl",
    needs=(),
    leaves_out={
        Fact.FORKED: "TRL takes one completion for each prompt, and its baseline and its loss count completions",
        Fact.MISSING_LOGPROBS: "None there, which TRL takes as a ratio of 1",
        Fact.NO_REWARD: "None, which TRL leaves out of the baseline",
        Fact.SEVERAL_VERSIONS: "no weight version is carried",
        Fact.UNSURE_VERSION: "no weight version is carried",
    },
)


def rollout_result(samples: Iterable[Sample]) -> dict[str, list[Any]]:
    """The dict that a `rollout_func` returns: one sample for each prompt, in the order of the prompts.

    Besides TRL's own fields it has `reward`, `advantage`, `loss_weight` and ids, which TRL passes to reward functions.
    """
    chosen = fitted(samples, FORM)
    first: dict[tuple[str, int], str] = {}
    for sample in chosen:
        other = first.setdefault((sample.rollout, sample.try_index), sample.id)
        if other != sample.id:
            raise ExportError(
                f"rollout {sample.rollout}: {other} and {sample.id} are both of it, but TRL takes one completion for "
                "each prompt; choose one, or make samples with branches='longest'"
            )
    if not chosen:
        raise ExportError("no samples: TRL needs one for each prompt")
    rows = [row(sample) for sample in chosen]
    return {name: [row[name] for row in rows] for name in rows[0]}


def row(sample: Sample) -> dict[str, Any]:
    """One completion: everything after the first prompt, with `env_mask` 1 on trained tokens."""
    start = sample.prompt_tokens
    return {
        "prompt_ids": sample.ids[:start].tolist(),
        "completion_ids": sample.ids[start:].tolist(),
        "logprobs": _logprobs(sample)[start:],
        "env_mask": sample.trained_mask[start:].astype(np.int8).tolist(),
        # A reward that is not finite would spoil the baseline of its group.
        "reward": sample.reward if sample.reward is not None and math.isfinite(sample.reward) else None,
        "advantage": sample.advantage,
        "loss_weight": sample.loss_weight,
        "group": sample.group,
        "rollout": sample.rollout,
        "sample": sample.id,
    }


def _logprobs(sample: Sample) -> list[float | None]:
    """The engine's logprobs on trained tokens, or None if missing. Others have 0, as in TRL's tool results."""
    values: list[float | None] = logprobs_or_zero(sample).tolist()
    for at in np.flatnonzero(sample.trained_mask & ~np.isfinite(sample.logprobs)):
        values[at] = None
    return values
