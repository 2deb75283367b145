"""Exports as tests write them, and records in a form that compares bit for bit."""

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
from rolltape.records.sample import Sample
from rolltape.records.turn import Turn

FORMATS = ["jsonl", "parquet"]
SAMPLE_WRITERS = {"jsonl": samples_to_jsonl, "parquet": samples_to_parquet}
TURN_WRITERS = {"jsonl": turns_to_jsonl, "parquet": turns_to_parquet}
ROLLOUT_WRITERS = {"jsonl": rollouts_to_jsonl, "parquet": rollouts_to_parquet}


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
