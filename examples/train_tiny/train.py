"""The loop: collect, train on what was collected, hand the weights over, collect again."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import rolltape
from examples.train_tiny.faults import Fault, spoiled, spoiled_rollouts, spoiled_temperature
from examples.train_tiny.proof import Proof
from examples.train_tiny.tasks import make_tasks
from examples.train_tiny.trainer import Recipe, Trainer
from examples.train_tiny.weights import hand_over, load_model
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.request import SamplingParams
from rolltape.integrations import LiveGroups
from rolltape.records.policy import Advantage
from rolltape.records.sample import Sample
from rolltape.tiny import TinyEngine, shipped_model
from rolltape.tokens import TokenExporter

CREDIT = rolltape.Credit(advantage=Advantage.NORMALIZED)


class StepReport(NamedTuple):
    """What came of a step."""

    step: int
    reward: float  # the mean over its rollouts
    rollouts: int
    forked: int  # rollouts that became several samples
    samples: int  # those that train
    proof: Proof
    collecting_s: float
    training_s: float


async def train(run: Path, seed: int, recipe: Recipe, fault: Fault | None = None) -> AsyncIterator[StepReport]:
    """Train, and report after each step; ProofError as soon as what is trained on is not what was sampled."""
    async with training(run, seed, recipe) as it:
        for step in range(recipe.steps):
            began_s = time.monotonic()
            groups = await it.collect(step)
            collected_s = time.monotonic()
            proof = await it.learn(step, groups, fault)
            for group in groups:
                group.done()
            yield _report(step, groups, proof, collected_s - began_s, time.monotonic() - collected_s)


class Training:
    """A trainer, what collects for it, and the thread in which it learns."""

    def __init__(self, seed: int, live: LiveGroups, trainer: Trainer, thread: ThreadPoolExecutor) -> None:
        self.trainer = trainer
        self._seed = seed
        self._live = live
        self._thread = thread

    async def collect(self, step: int) -> list[rolltape.Group]:
        """The groups of a step."""
        return await self._live.request(make_tasks(self._seed, step, self.trainer.recipe.tasks), step=step)

    async def learn(self, step: int, groups: Sequence[rolltape.Group], fault: Fault | None = None) -> Proof:
        """Train on groups, and hand the new weights over; with a fault in the samples a ProofError, and no change."""
        recipe = self.trainer.recipe
        samples = spoiled(trained_on(groups), fault, self.trainer.versions)
        temperature = spoiled_temperature(recipe.temperature, fault)
        rollouts = spoiled_rollouts([one for group in groups for one in group.rollouts], fault)
        proof = Proof(step, str(step), rollouts)
        learning = partial(self.trainer.update, step, samples, temperature, proof)
        await asyncio.get_running_loop().run_in_executor(self._thread, learning)
        self.trainer.keep(str(step + 1))
        weights = self._live.tape.directory.path / "weights"
        await asyncio.to_thread(hand_over, self.trainer.model, self._live, weights, str(step + 1))
        return proof


@asynccontextmanager
async def training(run: Path, seed: int, recipe: Recipe) -> AsyncIterator[Training]:
    """Everything that a training needs, on a run of its own."""
    settings = CollectSettings(
        source="tasks",
        model=str(shipped_model()),
        group_size=recipe.group_size,
        sampling=SamplingParams(temperature=recipe.temperature, max_tokens=96),
        thinking=True,
        max_turns=12,
    )
    engine = InProcessEngine(TinyEngine(shipped_model(), version="0"), model="tiny")
    with (
        rolltape.open(run, name=f"train-tiny-{seed}") as tape,
        LiveGroups(tape, collect=settings, engine=engine, credit=CREDIT) as live,
        TokenExporter(run, rank=0, world_size=1, loss=recipe.clip) as exporter,
        # One thread learns throughout: what a thread has freed, the allocator keeps for that thread.
        ThreadPoolExecutor(1) as thread,
    ):
        trainer = Trainer(load_model(), recipe, exporter)
        trainer.keep("0")
        yield Training(seed, live, trainer, thread)


def trained_on(groups: Sequence[rolltape.Group]) -> list[Sample]:
    """The samples of groups, less those whose attempts were all worth the same: they say nothing about where to go."""
    return [sample for group in groups for sample in group.samples if sample.advantage]


def _report(
    step: int, groups: Sequence[rolltape.Group], proof: Proof, collecting_s: float, training_s: float
) -> StepReport:
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    every = [sample for group in groups for sample in group.samples]
    return StepReport(
        step=step,
        reward=sum(rewards) / len(rewards),
        rollouts=len(rewards),
        forked=len({sample.rollout for sample in every if sample.siblings > 1}),
        samples=len(trained_on(groups)),
        proof=proof,
        collecting_s=collecting_s,
        training_s=training_s,
    )
