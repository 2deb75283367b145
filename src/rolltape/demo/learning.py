"""The demo's training: the shipped model attempts tasks, learns from its samples, and attempts them again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rolltape
from rolltape.collect.settings import CollectSettings
from rolltape.demo.trainer import OutputLayerTrainer
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.request import SamplingParams
from rolltape.integrations import LiveGroups
from rolltape.records.policy import Advantage
from rolltape.records.token_record import TokenRecord
from rolltape.tape.recording.tape import Tape
from rolltape.tiny import TinyEngine
from rolltape.tokens import Format, write_tokens

TASKS = Path(__file__).parent / "learning.jsonl"
_CREDIT = rolltape.Credit(advantage=Advantage.NORMALIZED)


class LearnedStep(NamedTuple):
    """The result of a training step."""

    step: int
    reward: float  # the mean over its rollouts
    rollouts: int
    samples: int  # number of samples that trained
    trained_tokens: int
    mismatch_kl: float | None  # the mean over trained tokens; None if nothing trained


def learn(tape: Tape, *, steps: int, group_size: int) -> Iterator[LearnedStep]:
    """Train on a run, and report each step when it has ended. The last weights stay in `RUN/weights`."""
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    trainer = OutputLayerTrainer()
    weights = tape.directory.path / "weights"
    trainer.save(weights)
    with _collecting(tape, weights, group_size) as live:
        for step in range(steps):
            groups = live.request(tasks, step=step).wait()
            # Groups whose attempts all have the same reward have no gradient.
            samples = [sample for group in groups for sample in group.samples if sample.advantage]
            records = trainer.update(samples) if samples else []
            write_tokens(tape.directory.path, step, records, file_format=Format.JSONL)
            for group in groups:
                group.done()
            trainer.save(weights)
            live.update_weights(weights, str(step + 1))
            rewards = [reward for group in groups for reward in group.rewards if reward is not None]
            yield LearnedStep(
                step=step,
                reward=sum(rewards) / len(rewards),
                rollouts=len(rewards),
                samples=len(samples),
                trained_tokens=sum(int(record.trained_mask.sum()) for record in records),
                mismatch_kl=_mean_mismatch(records),
            )


@contextmanager
def _collecting(tape: Tape, weights: Path, group_size: int) -> Iterator[LiveGroups]:
    settings = CollectSettings(
        source=TASKS.name,
        model=str(weights),
        group_size=group_size,
        sampling=SamplingParams(temperature=1.0, max_tokens=96),
        thinking=True,
        max_turns=12,
    )
    engine = InProcessEngine(TinyEngine(weights, version="0"), model="tiny")
    with LiveGroups(tape, collect=settings, engine=engine, credit=_CREDIT) as live:
        yield live


def _mean_mismatch(records: list[TokenRecord]) -> float | None:
    values: list[Any] = [
        record.mismatch_kl[record.trained_mask] for record in records if record.mismatch_kl is not None
    ]
    return float(np.concatenate(values).mean()) if values else None
