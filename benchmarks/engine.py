"""The tiny engine beside transformers on the same checkpoint: tokens a second, loading, memory.

`python -m benchmarks.engine ours|transformers FOLDER` is one measurement in a process of its own.
"""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from rolltape.errors import CheckpointError
from rolltape.tiny import EngineReply, Sampling, TinyEngine, shipped_model

PROMPT_TOKENS = 64
ALONE_TOKENS = 256
BATCH = 64
BATCH_TOKENS = 128
TURN_TOKENS = 1800, 64, 136  # of a dialogue: the first prompt, its reply, what the second prompt adds
TIMES = 3


def figures() -> Iterator[Figure]:
    """The shipped model if it is there, else random weights of its shape."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _folder(Path(scratch))
        ours = _measured("ours", folder)
        yield Figure("tokens a second, alone", ours["alone"], "", 300, at_most=False)
        yield Figure(f"tokens a second, {BATCH} at once", ours["batched"], "", 1500, at_most=False)
        yield Figure("loading", ours["load_s"], "s", 0.5)
        yield Figure(f"memory with {BATCH} at once", ours["peak_mb"], "MB", 200, note="resident, the whole process")
        note = f"{ours['cold_s']:.2f} s if all of it is read, {ours['warm_s']:.3f} s if only what is new"
        yield Figure(
            f"first token of a second turn, {sum(TURN_TOKENS):,} tokens",
            ours["cold_s"] / ours["warm_s"],
            "× sooner",
            5,
            at_most=False,
            note=note,
        )
        if find_spec("torch") is None or find_spec("transformers") is None:
            return
        theirs = _measured("transformers", folder)
        note = f"{theirs['alone']:,.0f} tokens a second there"
        yield Figure("alone, against transformers", ours["alone"] / theirs["alone"], "×", 1, at_most=False, note=note)
        note = f"{theirs['batched']:,.0f} tokens a second there"
        yield Figure(f"{BATCH} at once, against transformers", ours["batched"] / theirs["batched"], "×", note=note)


def _folder(scratch: Path) -> Path:
    try:
        return shipped_model()
    except CheckpointError:
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from tiny.checkpoints import LIKE_SHIPPED, write_checkpoint

        return write_checkpoint(scratch, **LIKE_SHIPPED)


def _measured(which: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.engine", which, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


async def _ours(folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    engine = TinyEngine(folder)
    load_s = time.perf_counter() - started
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.config.vocab_size, (BATCH, PROMPT_TOKENS)).tolist()

    def reply(index: int, tokens: int) -> "asyncio.Task[EngineReply]":
        sampling = Sampling(seed=index, max_tokens=tokens, stop_ids=())
        return asyncio.create_task(engine.generate(prompts[index], sampling))

    async with engine:
        await reply(0, 8)
        alone = batched = float("inf")
        for _ in range(TIMES):
            started = time.perf_counter()
            await reply(0, ALONE_TOKENS)
            alone = min(alone, time.perf_counter() - started)
            started = time.perf_counter()
            await asyncio.gather(*(reply(index, BATCH_TOKENS) for index in range(BATCH)))
            batched = min(batched, time.perf_counter() - started)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cold_s = min([await _second_turn_s(engine, warm=False) for _ in range(TIMES)])
        warm_s = min([await _second_turn_s(engine, warm=True) for _ in range(TIMES)])
    return {
        "load_s": load_s,
        "alone": ALONE_TOKENS / alone,
        "batched": BATCH * BATCH_TOKENS / batched,
        "cold_s": cold_s,
        "warm_s": warm_s,
        "peak_mb": peak_mb,
    }


async def _second_turn_s(engine: TinyEngine, *, warm: bool) -> float:
    """The seconds to the first token of a second turn, with or without what was read for the first."""
    before, replied, new = TURN_TOKENS
    rng = np.random.default_rng(1)
    said = rng.integers(0, engine.config.vocab_size, before).tolist()
    await engine.drop_prefixes()
    reply = await engine.generate(said, Sampling(seed=0, max_tokens=replied, stop_ids=()))
    said += [*reply.ids.tolist(), *rng.integers(0, engine.config.vocab_size, new).tolist()]
    if not warm:
        await engine.drop_prefixes()
    started = time.perf_counter()
    await engine.generate(said, Sampling(seed=0, max_tokens=1, stop_ids=()))
    return time.perf_counter() - started


def _transformers(folder: Path) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = torch.tensor(rng.integers(0, model.config.vocab_size, (BATCH, PROMPT_TOKENS)))

    def seconds(count: int, tokens: int) -> float:
        ids = prompts[:count]
        started = time.perf_counter()
        model.generate(  # type: ignore[misc, unused-ignore]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    seconds(1, 8)
    alone = min(seconds(1, ALONE_TOKENS) for _ in range(TIMES))
    batched = min(seconds(BATCH, BATCH_TOKENS) for _ in range(TIMES))
    return {"alone": ALONE_TOKENS / alone, "batched": BATCH * BATCH_TOKENS / batched}


if __name__ == "__main__":
    which, where = sys.argv[1:]
    print(json.dumps(asyncio.run(_ours(Path(where))) if which == "ours" else _transformers(Path(where))))
