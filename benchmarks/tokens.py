"""What token export costs a trainer: a million tokens with all columns, against tensors to lists to json.dumps.

On a GPU the targets are times; without one, the same ratios to the straightforward exporter within a factor of two.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure, main, seconds
from rolltape.tokens import Dppo, TokenExporter, list_steps
from rolltape.tokens.micro_batch import parse_micro_batch
from rolltape.tokens.snapshot import plan_layout

TOKENS = 1 << 20
LENGTH = 4096
_VOCABULARY = 150_000
_GAP_S = 0.1  # between two micro-batches, as a trainer has
_STEP_TOKENS = 1 << 18
_STEP_S = 0.038
_STEPS = 100

Batch = dict[str, Any]


def figures() -> Iterator[Figure]:
    """Hold, throughput, size and memory."""
    on_gpu = torch.cuda.is_available()
    batch, outputs = micro_batch("cuda" if on_gpu else "cpu")
    plain_s, plain_bytes = straightforward(batch, outputs)
    yield Figure("straightforward: training thread held", plain_s * 1e3, "ms", note=f"{plain_bytes:.0f} bytes a token")
    with tempfile.TemporaryDirectory() as folder:
        yield from _hold(Path(folder) / "hold", batch, outputs, plain_s, on_gpu=on_gpu)
        yield from _rate(Path(folder) / "rate", batch, outputs, plain_s, on_gpu=on_gpu)
        size = _bytes_a_token(Path(folder) / "rate")
    yield Figure("on disk", size, "bytes a token", 40, note=f"{plain_bytes / size:.1f} times less")
    with tempfile.TemporaryDirectory() as folder:
        yield _primerl_size(Path(folder), batch, outputs)
    if on_gpu:
        yield _memory(batch, outputs)
        with tempfile.TemporaryDirectory() as folder:
            yield _slowdown(Path(folder))


def micro_batch(device: str, tokens: int = TOKENS) -> tuple[Batch, Batch]:
    """Sequences end to end, with every column that the record of prime-rl has, rewards and reference logprobs."""
    random = torch.Generator().manual_seed(0)
    sequences = tokens // LENGTH

    def per_sequence(values: Tensor) -> Tensor:
        return values.repeat_interleave(LENGTH)

    trainer = -torch.empty(tokens).exponential_(2.5, generator=random)
    inference = (trainer + 0.02 * torch.randn(tokens, generator=random)).clamp(max=0)
    frequent_first = torch.rand(tokens, generator=random) * torch.log(torch.tensor(float(_VOCABULARY)))
    columns = {
        "input_ids": frequent_first.exp().long(),
        "position_ids": torch.arange(LENGTH).repeat(sequences),
        "trained_mask": (torch.rand(tokens // 64, generator=random) < 0.6).repeat_interleave(64),
        "advantages": per_sequence(torch.randn(sequences, generator=random)),
        "rewards": per_sequence((torch.rand(sequences, generator=random) < 0.5).float()),
        "inference_logprobs": inference,
        "reference_logprobs": trainer + 0.1 * torch.randn(tokens, generator=random),
        "rl_weights": torch.ones(tokens),
        "ce_weights": torch.zeros(tokens),
        "ref_kl_weights": torch.zeros(tokens),
        "cu_seqlens": torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32),
    }
    outputs = {"logprobs": trainer, "entropy": torch.empty(tokens).exponential_(2, generator=random)}
    batch: Batch = {name: column.to(device) for name, column in columns.items()}
    names = {"sample_ids": [f"{number:032x}.0.0.7@exact-f85863f1" for number in range(sequences)]}
    return batch | names, {name: column.to(device) for name, column in outputs.items()}


def straightforward(batch: Batch, outputs: Batch) -> tuple[float, float]:
    """Tensors to lists to JSON on the calling thread: the seconds, and the bytes a token."""
    written = 0

    def export() -> None:
        nonlocal written
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and len(value) == TOKENS}
        trainer, inference = outputs["logprobs"], batch["inference_logprobs"]
        log_ratio = trainer - inference
        delta = trainer.exp() - inference.exp()
        rises = batch["advantages"] > 0
        high, low = rises & (delta > 0.2), ~rises & (delta < -0.2)
        derived = {
            "log_ratio": log_ratio,
            "ratio": log_ratio.exp(),
            "mismatch_kl": log_ratio.exp() - log_ratio - 1,
            "prob_delta": delta,
            "masked": high | low,
            "masked_high": high,
            "masked_low": low,
        }
        lists = {name: value.cpu().tolist() for name, value in {**tensors, **outputs, **derived}.items()}
        for start in range(0, TOKENS, LENGTH):
            row = {name: values[start : start + LENGTH] for name, values in lists.items()}
            written += len(json.dumps(row, separators=(",", ":")))

    return seconds(export), written / TOKENS


def _hold(run: Path, batch: Batch, outputs: Batch, plain_s: float, *, on_gpu: bool) -> Iterator[Figure]:
    """How long a call holds the training thread.

    On a GPU that is while earlier ones are encoded and written behind it; a trainer on a CPU needs its cores, and
    longer for a step than it takes to write it.
    """

    def held_s(exporter: TokenExporter, step: int) -> float:
        if on_gpu:
            time.sleep(_GAP_S)
            torch.cuda.synchronize()
        while not on_gpu and exporter.report().tokens < step * TOKENS:
            time.sleep(_GAP_S)
        took_s = seconds(lambda: exporter.export(step, 0, batch, outputs))
        exporter.mark_stable(step)
        return took_s

    with TokenExporter(run / "first", rank=0, world_size=1, loss=Dppo()) as exporter:
        first_s = held_s(exporter, 0)
    with TokenExporter(run, rank=0, world_size=1, loss=Dppo(), max_queued_bytes=4 << 30) as exporter:
        exporter.reserve(TOKENS, batch["input_ids"].device)
        # Python looks through all objects of a process now and then, which takes 100 ms in one that holds torch; it
        # may fall into any call, and is not what is measured here.
        gc.collect()
        gc.freeze()
        all_s = [held_s(exporter, step) for step in range(12)]
    assert exporter.report().complete, exporter.report()
    typical_s, longest_s = statistics.median(all_s), max(all_s)
    note = f"typically {typical_s * 1e3:.1f} ms; the first, with no memory reserved, {first_s * 1e3:.0f} ms"
    what = f"training thread held, at the longest of {len(all_s)} times"
    if on_gpu:
        yield Figure(what, longest_s * 1e3, "ms", 10, note=note)
    else:
        yield Figure(what, longest_s * 1e3, "ms", note=note)
        yield Figure("straightforward / held", plain_s / typical_s, "×", 250, at_most=False)


def _rate(run: Path, batch: Batch, outputs: Batch, plain_s: float, *, on_gpu: bool) -> Iterator[Figure]:
    """How many tokens a second the threads behind it encode and write."""
    count = 24 if on_gpu else 6
    exporter = TokenExporter(run, rank=0, world_size=1, loss=Dppo(), max_queued_bytes=8 << 30)
    exporter.reserve(TOKENS, batch["input_ids"].device)

    def all_written() -> None:
        for micro_step in range(count):
            exporter.export(0, micro_step, batch, outputs)
        exporter.mark_stable(0)
        exporter.close()

    tokens_a_second = TOKENS * count / seconds(all_written)
    assert exporter.report().complete, exporter.report()
    note = f"{count} times {TOKENS:,} tokens, 4 threads"
    if on_gpu:
        yield Figure("encoded and written", tokens_a_second / 1e6, "M tokens/s", 5, at_most=False, note=note)
    else:
        yield Figure("encoded and written", tokens_a_second / 1e6, "M tokens/s", note=note)
        gained = tokens_a_second * plain_s / TOKENS
        yield Figure("encoded and written / straightforward", gained, "×", 12.5, at_most=False)


def _bytes_a_token(run: Path) -> float:
    (step,) = list_steps(run)
    files = [file for done in step.ranks for file in done.files]
    return sum(file.size for file in files) / sum(file.tokens or 0 for file in files)


def _primerl_size(run: Path, batch: Batch, outputs: Batch) -> Figure:
    """The size with the columns of prime-rl's record alone."""
    with TokenExporter(run, rank=0, world_size=1, loss=Dppo()) as exporter:
        exporter.export(0, 0, {**batch, "reference_logprobs": None}, outputs)
        exporter.mark_stable(0)
    return Figure("on disk, without reference logprobs", _bytes_a_token(run), "bytes a token", 24)


def _memory(batch: Batch, outputs: Batch) -> Figure:
    """Memory on the device that an export takes on top of what there is."""
    exported = plan_layout(parse_micro_batch(0, 0, batch, outputs, Dppo())).device_bytes
    with tempfile.TemporaryDirectory() as folder, TokenExporter(folder, rank=0, world_size=1, loss=Dppo()) as exporter:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for micro_step in range(4):
            exporter.export(0, micro_step, batch, outputs)
        exporter.mark_stable(0)
        torch.cuda.synchronize()
        on_top = torch.cuda.max_memory_allocated() - before
    note = f"{on_top / 2**20:.0f} MiB for columns of {exported / 2**20:.0f} MiB"
    return Figure("GPU memory on top / exported columns", on_top / exported, "×", 1.5, note=note)


def _slowdown(run: Path) -> Figure:
    """How much longer a training loop takes whose every step exports, in percent: steps without and with in turn."""
    batch, outputs = micro_batch("cuda", _STEP_TOKENS)
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    products = 1

    def step_s(export: Callable[[], None]) -> float:
        def train() -> None:
            for _ in range(products):
                left @ left
            export()
            torch.cuda.synchronize()  # as a trainer does that reads its loss

        return seconds(train)

    def nothing() -> None:
        pass

    for _ in range(5):
        one_s = step_s(nothing)
    products = max(round(_STEP_S / one_s), 1)
    plain_s, exporting_s = [], []
    with TokenExporter(run, rank=0, world_size=1, loss=Dppo(), max_queued_bytes=4 << 30) as exporter:
        exporter.reserve(_STEP_TOKENS, "cuda")
        for step in range(2 * _STEPS):
            if step % 2:
                plain_s.append(step_s(nothing))
            else:
                exporting_s.append(step_s(partial(exporter.export, step, 0, batch, outputs)))
                exporter.mark_stable(step)
    assert exporter.report().complete, exporter.report()
    plain, exporting = sum(plain_s) / len(plain_s), sum(exporting_s) / len(exporting_s)
    note = f"steps of {plain * 1e3:.1f} ms, each with {_STEP_TOKENS:,} tokens to export"
    return Figure("training loop slower by", (exporting / plain - 1) * 100, "%", 5, note=note)


if __name__ == "__main__":
    main({"tokens": figures})
