"""A training with several ranks for tests: each writes down what it trained on."""

import json
import os
from pathlib import Path

import torch.distributed as dist

from live_jobs import SUMS, function_engine, job
from rolltape.integrations.torch import SampleLoader


def train(rank: int, folder: str, ranks: int) -> None:
    """Train on two steps as one of several ranks; the first one collects."""
    path = Path(folder)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous'}", rank=rank, world_size=ranks)
    live = job(path / "run", function_engine(lambda prompt, wanted: "2")) if rank == 0 else None
    loader = SampleLoader(live, lambda step: SUMS[step:], steps=2, max_tokens=64, every_sample=True)
    seen = []
    for step in loader:
        seen.append(
            {
                "step": step.step,
                "batches": [[sample.id for sample in batch.samples] for batch in step.batches],
                "rollouts": step.rollouts,
                "rewards": step.rewards,
            }
        )
        step.done()
    (path / f"rank-{rank}.json").write_text(json.dumps(seen))
    if live is not None:
        live.close()
    dist.destroy_process_group()
