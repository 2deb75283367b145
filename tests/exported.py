"""Exports as tests write them, and records in a form that compares bit for bit."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.export import (
    rollouts_to_jsonl,
    rollouts_to_parquet,
    samples_to_jsonl,
    samples_to_parquet,
    turns_to_jsonl,
    turns_to_parquet,
)
from rolltape.records.sample import Fate, Origin, Sample, SampleSide, Span
from rolltape.records.turn import LogprobKind, Turn

FORMATS = ["jsonl", "parquet"]
SAMPLE_WRITERS = {"jsonl": samples_to_jsonl, "parquet": samples_to_parquet}
TURN_WRITERS = {"jsonl": turns_to_jsonl, "parquet": turns_to_parquet}
ROLLOUT_WRITERS = {"jsonl": rollouts_to_jsonl, "parquet": rollouts_to_parquet}


def a_sample(**changes: Any) -> Sample:
    """A sample that holds something odd in every field."""
    how = {
        "temperature": changes.pop("temperature", 1.0),
        "logprob_kind": changes.pop("logprob_kind", LogprobKind.RAW),
    }
    fields: dict[str, Any] = {
        "id": "r.0.0.1@0badf00d0bad",
        "rollout": "r",
        "try_index": 0,
        "group": "g",
        "session": "r.0.0",
        "policy": "exact-1",
        "step": 3,
        "index": 0,
        "siblings": 1,
        "ids": np.array([5, 6, 7, 2**31 - 1], np.int32),
        "trained_mask": np.array([False, False, True, False]),
        "sampled_mask": np.array([False, False, True, True]),
        "logprobs": np.array([np.nan, np.nan, -0.1, -np.inf], np.float32),
        "version_index": np.array([-1, -1, 0, 1], np.int32),
        "versions": (("7", "7"), ("7", "8")),
        "spans": (
            Span(0, 2, Origin.PROMPT, "r.0.0.0", 0, (0, 2), None),
            Span(2, 3, Origin.SAMPLED, "r.0.0.0", 0, (2, 3), Fate.TRAINED, **how),
            Span(3, 4, Origin.SAMPLED, "r.0.0.0", 1, (2, 3), Fate.MASKED_REWRITTEN_AFTER, **how),
        ),
        "prompt_tokens": 2,
        "trained_tokens": 1,
        "reward": math.nan,
        "rollout_reward": -math.inf,
        "turn_rewards": {"r.0.0.0": math.nan, "r.0.0.1": 0.5},
        "advantage": None,
        "loss_weight": 1.0,
        "truncated": False,
        "uses_tools": True,
        "ill_formed": False,
        "side": {
            "experts": SampleSide(np.arange(16, dtype=np.int16).reshape(4, 2, 2), None, ((0, 2),)),
            "kept": SampleSide(np.array([1.5, np.nan, np.inf], np.float16), np.array([0, 1, 0, 2], np.int32), ()),
        },
    }
    return Sample(**(fields | changes))


def bits(array: npt.NDArray[Any] | None) -> tuple[object, ...]:
    return () if array is None else (array.dtype.str, array.shape, array.tobytes())


def comparable(sample: Sample) -> dict[str, object]:
    """A sample's fields with arrays as their bytes and numbers as their spelling, since NaN is not itself."""
    fields: dict[str, object] = {}
    for name in sample.__struct_fields__:
        value = getattr(sample, name)
        if isinstance(value, np.ndarray):
            fields[name] = bits(value)
        elif name == "side":
            fields[name] = {key: (bits(side.values), bits(side.counts), side.missing) for key, side in value.items()}
        else:
            fields[name] = repr(value)
    return fields


def turn_facts(turn: Turn) -> dict[str, object]:
    return {
        "id": turn.id,
        "root": turn.root.raw,
        "prompt": [message.raw for message in turn.prompt.to_list()],
        "prompt_ids": bits(turn.prompt_ids),
        "reply": turn.reply and turn.reply.raw,
        "sampled_ids": bits(turn.sampled_ids),
        "logprobs": bits(turn.logprobs),
        "facts": repr(turn.facts),
        "side": {name: (side.start, bits(side.values), bits(side.counts)) for name, side in turn.side.items()},
    }
