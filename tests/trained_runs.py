"""Runs with groups of forked rollouts, and what a trainer exports of their samples: as they are, or spoiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rolltape
from rolltape.records.policy import Advantage, CutPolicy
from rolltape.records.sample import Sample
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tokens import TokenExporter
from taped import assistant, user

STEP = 7
Change = Callable[["list[SeenRow]"], object]


@dataclass
class SeenRow:
    """A sample as a trainer holds it, to be changed by a test."""

    sample: str | None
    rollout: str
    group: str
    ids: Any
    trained: Any
    logprobs: Any
    advantage: float | None
    reward: float | None
    weight: float
    versions: list[str]
    positions: Any
    epoch: int = 0
    gaps: Any = None  # by token: how much less likely it is under the trainer; None: alike for all


def record_groups(path: Path, groups: int = 5, attempts: int = 4, *, turns: int = 3, reply: int = 5) -> Path:
    """Groups of finished rollouts with different rewards; every second rollout forks inside a reply."""
    with rolltape.open(path, name="exp") as tape:
        for version in ("7", "8"):
            tape.announce_version(version)
        for group in range(groups):
            for attempt in range(attempts):
                with tape.rollout(task_id=f"task-{group}", step=STEP, attempt=attempt) as rollout:
                    _record_turns(rollout, group * attempts + attempt, turns, reply)
                    rollout.finish(reward=attempt / 4 + group / 8)
    return path


def _record_turns(rollout: RolloutRecorder, seed: int, turns: int, reply: int) -> None:
    random = np.random.default_rng(seed)
    session = rollout.session()
    messages, ids = [user("go")], random.integers(1, 900, 6).tolist()
    for number in range(turns):
        text = assistant(f"reply {number}")
        turn = session.record_turn(
            prompt_messages=messages,
            prompt_ids=ids,
            sampled_ids=random.integers(1, 900, reply).tolist(),
            logprobs=(-random.random(reply).astype(np.float32)).tolist(),
            reply=text,
            finish="length",
            weight_version="7" if number == 0 else "8",
        )
        messages = [*messages, text, user(f"more {number}")]
        ids = turn.tokens.to_numpy().tolist()
        if seed % 2 and number == turns - 2:
            ids = ids[:-2]  # the next prompt spells the end of the reply otherwise
        ids = [*ids, *random.integers(900, 999, 3).tolist()]


def samples_of(path: Path, policy: CutPolicy | str = "exact", advantage: str = "normalized") -> list[Sample]:
    """All samples of a run, with their credit."""
    run = rolltape.read(path)
    groups = dict.fromkeys(row.group for row in run.index())
    credit = rolltape.Credit(advantage=Advantage(advantage))
    return [
        sample
        for group in groups
        for sample in rolltape.samples_of_group(
            list(run.rollouts(group=group)), policy, credit=credit, versions=run.versions()
        )
    ]


def seen_row(sample: Sample) -> SeenRow:
    return SeenRow(
        sample=sample.id,
        rollout=sample.rollout,
        group=sample.group,
        ids=sample.ids.copy(),
        trained=sample.trained_mask.copy(),
        logprobs=sample.logprobs.copy(),
        advantage=sample.advantage,
        reward=sample.reward,
        weight=sample.loss_weight,
        versions=[first for first, _ in sample.versions],
        positions=np.arange(len(sample.ids)),
    )


def export_rows(path: Path, rows: Sequence[SeenRow], *, padded: bool = False, step: int = STEP, **options: Any) -> None:
    """What a trainer of one rank exports of these sequences, in micro-batches of four."""
    with TokenExporter(path, rank=0, world_size=1, **options) as exporter:
        for number, start in enumerate(range(0, len(rows), 4)):
            some = rows[start : start + 4]
            batch = _padded(some) if padded else _packed(some)
            logprobs = torch.nan_to_num(torch.as_tensor(batch["inference_logprobs"])) - 0.01
            if any(row.gaps is not None for row in some):
                gaps = [np.zeros(len(row.ids)) if row.gaps is None else row.gaps for row in some]
                logprobs -= torch.as_tensor(np.concatenate(gaps), dtype=logprobs.dtype)
            exporter.export(step, number, batch, {"logprobs": logprobs}, epoch=some[0].epoch)
        exporter.mark_stable(step)
    assert exporter.report().problems == ()


def export_samples(
    path: Path, samples: Sequence[Sample], change: Change | None = None, **options: Any
) -> list[SeenRow]:
    """What a trainer exports of samples that something has happened to."""
    rows = [seen_row(sample) for sample in samples]
    if change is not None:
        change(rows)
    export_rows(path, rows, **options)
    return rows


def _facts(rows: Sequence[SeenRow]) -> dict[str, Any]:
    advantages = [row.advantage for row in rows]
    return {
        "advantages": None if None in advantages else torch.tensor(advantages),
        "rewards": [row.reward for row in rows],
        "loss_weights": [row.weight for row in rows],
        "sample_ids": [row.sample for row in rows],
        "rollout_ids": [row.rollout for row in rows],
        "groups": [row.group for row in rows],
        "weight_versions": [row.versions for row in rows],
    }


def _packed(rows: Sequence[SeenRow]) -> dict[str, Any]:
    return {
        "input_ids": np.concatenate([row.ids for row in rows]),
        "lengths": [len(row.ids) for row in rows],
        "trained_mask": np.concatenate([row.trained for row in rows]),
        "inference_logprobs": np.concatenate([row.logprobs for row in rows]),
        "position_ids": np.concatenate([row.positions for row in rows]),
        **_facts(rows),
    }


def _padded(rows: Sequence[SeenRow]) -> dict[str, Any]:
    width = max(len(row.ids) for row in rows)

    def padded(values: Sequence[Any]) -> Any:
        return np.stack([np.pad(one, (width - len(one), 0)) for one in values])

    return {
        "input_ids": padded([row.ids for row in rows]),
        "attention_mask": padded([np.ones(len(row.ids), np.bool_) for row in rows]),
        "trained_mask": padded([row.trained for row in rows]),
        "inference_logprobs": padded([row.logprobs for row in rows]),
        **_facts(rows),
    }
