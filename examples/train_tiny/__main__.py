"""`python -m examples.train_tiny`: train with one seed or several, and print how the reward went."""

import argparse
import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.train_tiny.faults import Fault
from examples.train_tiny.proof import ProofError
from examples.train_tiny.train import StepReport, train
from examples.train_tiny.trainer import Recipe

HEADING = "step  reward  rollouts  forked  samples  trained  worst ratio  stop tokens  stopped turns  collect  train"


def main(arguments: Sequence[str] | None = None) -> int:
    told = _told(arguments)
    torch.set_num_threads(told.threads)
    logging.getLogger("rolltape").setLevel(logging.ERROR)
    recipe = Recipe(steps=told.steps, tasks=told.tasks, group_size=told.group_size, learning_rate=told.learning_rate)
    ends: list[tuple[float, float]] = []
    for seed in told.seeds:
        try:
            ends.append(asyncio.run(_trained(told.run / f"seed-{seed}", seed, recipe, told.fault)))
        except ProofError as error:
            print(f"train_tiny: {error}", file=sys.stderr)
            return 1
    print_ends(told.seeds, ends)
    return 0


async def _trained(run: Path, seed: int, recipe: Recipe, fault: Fault | None) -> tuple[float, float]:
    """Train with one seed; the mean reward of the first steps and of the last ones."""
    print(f"seed {seed}: {run}\n{HEADING}", flush=True)
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    rewards: list[float] = []
    async for report in train(run, seed, recipe, fault):
        print(_line(report), flush=True)
        rewards.append(report.reward)
    print(f"{time.monotonic() - began_s:.0f} s, {time.process_time() - cpu_began_s:.0f} s of CPU\n", flush=True)
    return ends_of(rewards)


def _line(report: StepReport) -> str:
    proof = report.proof
    return (
        f"{report.step:4}  {report.reward:6.3f}  {report.rollouts:8}  {report.forked:6}  {report.samples:7}  "
        f"{proof.trained:7}  {proof.worst:11.1e}  {proof.expected.stop_tokens:11}  {proof.expected.stopped_turns:13}  "
        f"{report.collecting_s:5.0f} s  {report.training_s:3.0f} s"
    )


def ends_of(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean reward of the first steps and of the last ones, three of each where there are as many."""
    few = max(1, min(3, len(rewards) // 2))
    return statistics.mean(rewards[:few]), statistics.mean(rewards[-few:])


def print_ends(seeds: list[int], ends: list[tuple[float, float]]) -> None:
    """Print how far the reward rose with each seed, and on average."""
    print("seed  first steps  last steps   rise")
    for seed, (first, last) in zip(seeds, ends, strict=True):
        print(f"{seed:4}  {first:11.3f}  {last:10.3f}  {last - first:+.3f}")
    if len(ends) > 1:
        rises = [last - first for first, last in ends]
        print(f"rise over {len(ends)} seeds: mean {statistics.mean(rises):+.3f}, spread {statistics.stdev(rises):.3f}")


def _told(arguments: Sequence[str] | None) -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m examples.train_tiny", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/train-tiny"), help="a folder for the runs, one a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--tasks", type=int, default=recipe.tasks, help="of each step")
    parser.add_argument("--group-size", type=int, default=recipe.group_size)
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate)
    parser.add_argument("--threads", type=int, default=2, help="that torch may use")
    parser.add_argument("--fault", type=Fault, choices=list(Fault), help="spoil the samples, and see it found out")
    told = parser.parse_args(arguments)
    for seed in told.seeds:
        if (there := told.run / f"seed-{seed}").exists():
            parser.error(f"{there} is there already; remove it, or give another --run")
    return told


if __name__ == "__main__":
    sys.exit(main())
