"""What a trainer that holds the weights in bfloat16 makes of samples, next to what the engine gave when it sampled.

It stands in for a trainer where there is none: the tiny engine reads each sample with rounded weights, and
what it finds is written as token records.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

import rolltape
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord
from rolltape.tiny import Sampling, TinyEngine, shipped_model
from rolltape.tokens import score_sample, write_tokens


def rescore(run: Path) -> int:
    """Write token records for all samples of a run; gives how many."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rolltape.read(run).rollouts():
        groups.setdefault(rollout.head.group, []).append(rollout)
    samples = [sample for group in groups.values() for sample in rolltape.samples_of_group(group)]
    with tempfile.TemporaryDirectory() as folder:
        records = asyncio.run(_scored(rounded_model(Path(folder) / "bfloat16"), samples))
    records.sort(key=attrgetter("step"))
    return sum(write_tokens(run, step, of_step) for step, of_step in groupby(records, attrgetter("step")))


async def _scored(model: Path, samples: Sequence[Sample]) -> list[TokenRecord]:
    async with TinyEngine(model) as engine:

        async def one(sample: Sample) -> TokenRecord:
            reply = await engine.generate(sample.ids.tolist(), Sampling(max_tokens=0, prompt_logprobs_from=0))
            return score_sample(sample, np.array(reply.prompt_logprobs, np.float32))

        return await asyncio.gather(*map(one, samples))


def rounded_model(folder: Path) -> Path:
    """The shipped model, its float16 weights rounded to bfloat16, in a folder of its own."""
    shutil.copytree(shipped_model(), folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")  # a header of JSON, and how long it is before it
    header = json.loads(whole[8:begin])
    for name, tensor in header.items():
        if name != "__metadata__":
            tensor["dtype"] = "BF16"
    named = json.dumps(header).encode()
    weights = _bfloat16(np.frombuffer(whole, np.float16, offset=begin))
    file.write_bytes(len(named).to_bytes(8, "little") + named + weights.tobytes())
    return folder


def _bfloat16(weights: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    """The upper halves of the numbers as float32, rounded to the nearest, and to even where two are as near."""
    bits = weights.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
