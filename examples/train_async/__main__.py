"""`python -m examples.train_async`: train while another process collects, and print how the reward went."""

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen

import torch

from examples.train_async.collector import Collecting
from examples.train_async.train import StepReport, training
from examples.train_tiny.__main__ import ends_of, print_ends
from examples.train_tiny.trainer import Recipe

_BATCH_TOKENS = 4096  # of a micro-batch: less memory, since the collector has its own

HEADING = "step  reward  rollouts  tokens  0 behind  1 behind  older  masked  continued  waited  trained"


def main(arguments: Sequence[str] | None = None) -> int:
    told = _told(arguments)
    torch.set_num_threads(told.threads)
    logging.getLogger("rolltape").setLevel(logging.ERROR)
    ends = [_trained(told, seed) for seed in told.seeds]
    print_ends(told.seeds, ends)
    return 0


def _trained(told: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Train with one seed; the mean reward of the first steps and of the last ones."""
    run = told.run / f"seed-{seed}"
    recipe = Recipe(steps=told.steps, tasks=told.tasks, group_size=told.group_size, batch_tokens=_BATCH_TOKENS)
    collecting = Collecting(
        seed, told.steps, told.tasks, told.group_size, recipe.temperature, told.max_ahead, told.max_concurrent
    )
    rewards: list[float] = []
    tokens, masked, replies = Counter[int](), 0, 0
    print(f"seed {seed}: {run}", flush=True)
    with training(run, recipe, collecting, told.max_staleness) as it, _page(run, told.page):
        print(HEADING, flush=True)
        began_s = time.monotonic()
        for step in range(told.steps):
            report = it.step(step)
            print(_line(report), flush=True)
            rewards.append(report.reward)
            tokens += report.tokens.by_staleness
            masked += report.masked
            replies += report.tokens.continued
        print(f"{time.monotonic() - began_s:.0f} s; {_summary(tokens, masked, replies)}\n", flush=True)
    return ends_of(rewards)


def _line(report: StepReport) -> str:
    tokens, behind = report.tokens, report.tokens.by_staleness
    return (
        f"{report.step:4}  {report.reward:6.3f}  {sum(len(group.rollouts) for group in report.groups):8}  "
        f"{tokens.total:6}  {behind[0]:8}  {behind[1]:8}  {tokens.older_than(1):5}  {report.masked:6}  "
        f"{tokens.continued:9}  {report.waiting_s:4.0f} s  {report.training_s:5.0f} s"
    )


def _summary(tokens: Counter[int], masked: int, replies: int) -> str:
    """Shares of the sampled tokens by staleness, those masked for it, and replies that went on under newer weights."""
    shares = ", ".join(f"{tokens[behind] / tokens.total():.1%} {behind} behind" for behind in sorted(tokens))
    return f"{tokens.total()} tokens: {shares}; {masked / tokens.total():.1%} masked; {replies} replies continued"


@contextmanager
def _page(run: Path, shown: bool) -> Iterator[None]:
    """The page over a run within the block, in a process of its own; at the end it stays for whoever looks at it."""
    if not shown:
        yield
        return
    command = [sys.executable, "-c", "from rolltape.cli import main; main()", "view", str(run), "--port", "0"]
    with Popen([*command, "--no-browser"], stdout=PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            print(f"Reward over steps, while it trains: {page.stdout.readline().strip()}", flush=True)
            yield
            if sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI"):
                print("The page stays until Ctrl-C.", flush=True)
                with suppress(KeyboardInterrupt):
                    page.wait()
        finally:
            page.terminate()


def _told(arguments: Sequence[str] | None) -> argparse.Namespace:
    usual = Collecting()
    parser = argparse.ArgumentParser(prog="python -m examples.train_async", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/train-async"), help="a folder for the runs, one a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--tasks", type=int, default=usual.tasks, help="of each step")
    parser.add_argument("--group-size", type=int, default=usual.group_size)
    parser.add_argument(
        "--max-ahead",
        type=int,
        default=usual.max_ahead,
        help="groups that may have begun without the trainer being done with them; no fewer than --tasks",
    )
    parser.add_argument(
        "--max-staleness", type=int, default=1, help="tokens of weights more versions behind do not train"
    )
    parser.add_argument("--max-concurrent", type=int, default=usual.max_concurrent, help="attempts at a time")
    parser.add_argument("--threads", type=int, default=1, help="that torch may use")
    parser.add_argument("--page", action="store_true", help="serve the page while it trains")
    told = parser.parse_args(arguments)
    if told.max_ahead < told.tasks:
        parser.error(
            f"--max-ahead {told.max_ahead}: the trainer holds {told.tasks} groups at a time; give at least that"
        )
    for seed in told.seeds:
        if (there := told.run / f"seed-{seed}").exists():
            parser.error(f"{there} is there already; remove it, or give another --run")
    return told


if __name__ == "__main__":
    sys.exit(main())
