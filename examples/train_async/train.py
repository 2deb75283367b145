"""The trainer's loop: take groups as they complete, learn from them, and hand the weights over meanwhile."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import rolltape
from examples.train_async.collector import Collecting, collector
from examples.train_async.staleness import SampledTokens, sampled_tokens
from examples.train_tiny.train import CREDIT, trained_on
from examples.train_tiny.trainer import Recipe, Trainer
from examples.train_tiny.weights import hand_over, load_model
from rolltape.integrations import LiveGroups
from rolltape.tokens import TokenExporter


class StepReport(NamedTuple):
    """What came of a step."""

    step: int
    groups: list[rolltape.Group]
    tokens: SampledTokens
    masked: int  # of those, since they are older than the limit
    interrupted: int  # replies in flight when the new weights were handed over
    waiting_s: float
    training_s: float

    @property
    def reward(self) -> float:
        """The mean over its rollouts."""
        rewards = [reward for group in self.groups for reward in group.rewards if reward is not None]
        return sum(rewards) / len(rewards)


class AsyncTraining:
    """A trainer, and the run that another process fills for it."""

    def __init__(self, live: LiveGroups, trainer: Trainer, max_staleness: int) -> None:
        self.live = live
        self.trainer = trainer
        self._max_staleness = max_staleness

    def step(self, step: int) -> StepReport:
        """Learn from the next groups, of whichever step they were collected for."""
        recipe = self.trainer.recipe
        began_s = time.monotonic()
        groups = list(self.live.request(limit=recipe.tasks))
        tokens = sampled_tokens((rollout for group in groups for rollout in group.rollouts), newest=step)
        taken_s = time.monotonic()
        self.trainer.update(step, trained_on(groups), recipe.temperature)
        for group in groups:
            group.done()  # the collector may begin as many others
        weights = self.live.tape.directory.path / "weights"
        interrupted = hand_over(self.trainer.model, self.live, weights, str(step + 1))
        return StepReport(
            step=step,
            groups=groups,
            tokens=tokens,
            masked=tokens.older_than(self._max_staleness),
            interrupted=interrupted,
            waiting_s=taken_s - began_s,
            training_s=time.monotonic() - taken_s,
        )


@contextmanager
def training(run: Path, recipe: Recipe, collecting: Collecting, max_staleness: int) -> Iterator[AsyncTraining]:
    """The trainer here, and the collector in a process of its own, within the block."""
    policy = rolltape.cut_policy("exact", max_staleness=max_staleness)  # tokens that are older do not train
    with (
        rolltape.open(run, name=f"train-async-{collecting.seed}") as tape,
        collector(run, collecting),
        LiveGroups(tape, policy=policy, credit=CREDIT) as live,
        TokenExporter(run, rank=0, world_size=1, loss=recipe.clip) as exporter,
    ):
        yield AsyncTraining(live, Trainer(load_model(), recipe, exporter), max_staleness)
