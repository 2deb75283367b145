"""A training with several ranks for tests: each writes down what it trained on."""

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from live_jobs import SUMS, function_engine, job
from rolltape.errors import GroupsError
from rolltape.integrations.torch import SampleLoader
from rolltape.tokens import TokenExporter


def meet(rank: int, path: Path, ranks: int) -> None:
    """Join the other ranks, and wait a minute for one that does not answer."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rendezvous, patience = f"file://{path / 'rendezvous'}", timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=patience)


def fail(rank: int, folder: str, ranks: int) -> None:
    """Train as one of several ranks, of which the first one fails with an error that cannot be pickled."""

    def tasks(step: int) -> list[dict[str, Any]]:
        error = ValueError("the dataset is gone")
        error.held = threading.Lock()  # type: ignore[attr-defined]
        raise error

    meet(rank, Path(folder), ranks)
    live = job(Path(folder) / "run", function_engine(lambda prompt, wanted: "2")) if rank == 0 else None
    try:
        next(iter(SampleLoader(live, tasks, steps=1, max_tokens=64)))
    except (ValueError, GroupsError) as error:
        (Path(folder) / f"rank-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def train(rank: int, folder: str, ranks: int) -> None:
    """Train on two steps as one of several ranks, and export it; the first one collects."""
    path = Path(folder)
    meet(rank, path, ranks)
    live = job(path / "run", function_engine(lambda prompt, wanted: "2")) if rank == 0 else None
    loader = SampleLoader(live, lambda step: SUMS[step:], steps=2, max_tokens=64, every_sample=True)
    exporter = TokenExporter(path / "run", rank=rank, world_size=ranks)
    seen = []
    for step in loader:
        for micro_step, batch in enumerate(step.batches):
            exporter.export(step.step, micro_step, batch.columns(), {"logprobs": batch.inference_logprobs_bl})
        exporter.mark_stable(step.step)
        seen.append(
            {
                "step": step.step,
                "batches": [[sample.id for sample in batch.samples] for batch in step.batches],
                "rollouts": step.rollouts,
                "rewards": step.rewards,
            }
        )
        step.done()
    assert exporter.close().complete
    (path / f"rank-{rank}.json").write_text(json.dumps(seen))
    if live is not None:
        live.close()
    dist.destroy_process_group()
