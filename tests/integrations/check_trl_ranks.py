"""TRL trains on two ranks, and together they train on every sample of a step once.

The first rank collects for both. It takes a minute on two cores. `make test-release` runs it, `make test` does not:

    python tests/integrations/check_trl_ranks.py
"""

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from subprocess import run
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rolltape.integrations.trl import SampleGRPOTrainer, TrlRollouts
from trl_jobs import arguments, live_groups, load_model, sample_row, samples_of_step, talks, tokenizer, trained_rows

RANKS, STEPS = 2, 2


class Watched(SampleGRPOTrainer):
    """Keeps the rows that its losses were computed from, and the losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        ratios = inputs["importance_sampling_ratio"][mask]
        off_by = float((ratios - 1).abs().max()) if len(ratios) else 0.0
        self.seen.append({"rows": trained_rows(inputs), "loss": loss.item(), "off_by": off_by})
        return loss


def train(folder: Path) -> None:
    """One rank of the training; it writes down what it saw."""
    torch.set_num_threads(1)
    model = load_model()
    live = live_groups(folder / "run", model)
    with live if os.environ["RANK"] == "0" else nullcontext():  # the other ranks start nothing
        rollouts = TrlRollouts(live, talks(4))
        given = {"max_steps": STEPS, "num_generations": 4, "per_device_train_batch_size": 4, "loss_type": "grpo"}
        trainer = Watched(
            model,
            rollouts=rollouts,
            args=arguments(folder / "out", **given),
            train_dataset=rollouts.dataset,
            processing_class=tokenizer(),
        )
        trainer.train()
        weights = sum(float(one.double().abs().sum()) for one in model.state_dict().values())
        told = {"ranks": trainer.accelerator.num_processes, "seen": trainer.seen, "weights": weights}
        (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))


def check(folder: Path) -> None:
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    assert [one["ranks"] for one in told] == [RANKS] * RANKS
    assert told[0]["weights"] == told[1]["weights"], "the ranks have different weights"
    trained = 0
    for step in range(STEPS):
        wanted = [sample_row(sample) for sample in samples_of_step(folder / "run", step) if sample.trained_tokens]
        rows = [row for one in told for row in one["seen"][step]["rows"]]
        assert sorted(row[:2] for row in rows) == sorted(list(row[:2]) for row in wanted)
        assert max(one["seen"][step]["off_by"] for one in told) < 1e-3
        by_hand = -sum((one.advantage or 0.0) * one.loss_weight for one in samples_of_step(folder / "run", step)) / 8
        assert abs(sum(one["seen"][step]["loss"] for one in told) / RANKS - by_hand) < 1e-3
        trained += len(rows)
    print(f"TRL, {RANKS} ranks, {STEPS} steps: {trained} samples trained once each, ratios 1 ± 1e-3, equal weights")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        run([*launch, __file__, folder], check=True, env=environment)
        check(Path(folder))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
