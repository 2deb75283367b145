"""Where the trainer disagreed, by task and by turn: a planted mismatch is found, and one click from its token."""

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

import rolltape
from browser import browser_page
from rolltape.records.sample import Origin, Sample
from trained_runs import STEP, SeenRow, export_samples, record_groups, samples_of
from viewed import page_over, serious_findings
from viewing import Asking, asking


def mismatch(gap: float) -> float:
    """The KL of a token that is less likely under the trainer by a gap of logprobs; 0.01 of it every token has."""
    return math.exp(-gap - 0.01) + gap + 0.01 - 1


def reply(sample: Sample, turn: int) -> range:
    """The tokens of a sample that were sampled in a turn."""
    (span,) = (one for one in sample.spans if one.origin is Origin.SAMPLED and one.turn.endswith(f".{turn}"))
    return range(span.start, span.stop)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_groups(tmp_path_factory.mktemp("mismatches") / "run", groups=3)


@pytest.fixture(scope="module")
def samples(run: Path) -> list[Sample]:
    """Three tasks; in task-1 a token of turn 2 is off by 2, in task-0 one of turn 0 by 1."""
    samples = samples_of(run)
    far, near = (next(one for one in samples if one.rollout == _rollout(run, task)) for task in ("task-1", "task-0"))

    def plant(rows: list[SeenRow]) -> None:
        for sample, turn, gap in ((far, 2, 2.0), (near, 0, 1.0)):
            row = next(one for one in rows if one.sample == sample.id)
            row.gaps = np.zeros(len(row.ids))
            row.gaps[reply(sample, turn)[1]] = gap

    export_samples(run, samples, plant)
    return [far, near]


def _rollout(run: Path, task: str) -> str:
    return next(row.id for row in rolltape.read(run).index() if row.task_id == task and row.attempt == 0)


async def _found(ask: Asking) -> Any:
    while (answer := await ask.json(f"/api/exp/mismatches/{STEP}"))["mismatches"] is None:
        await asyncio.sleep(0.05)  # until the server has found the trainer's records
    return answer["mismatches"]


async def test_the_worst_token_of_each_task_and_turn_is_named(run: Path, samples: list[Sample]) -> None:
    far, near = samples
    async with asking(run) as ask:
        found = await _found(ask)
        assert (await ask.json(f"/api/exp/mismatches/{STEP + 1}"))["mismatches"] is None
    assert [one["task"] for one in found["by_task"]] == ["task-1", "task-0", "task-2"]
    assert [one["turn"] for one in found["by_turn"]] == [0, 1, 2]
    worst = {"rollout": far.rollout, "sample_id": far.id, "token": reply(far, 2)[1]}
    assert found["by_task"][0]["at"].items() >= worst.items()
    assert found["by_task"][0]["max"] == pytest.approx(mismatch(2.0), rel=1e-4)
    assert found["by_turn"][2]["at"].items() >= worst.items()
    assert found["by_turn"][0]["at"].items() >= {"rollout": near.rollout, "token": reply(near, 0)[1]}.items()
    assert found["by_turn"][0]["max"] == pytest.approx(mismatch(1.0), rel=1e-4)
    assert found["by_turn"][1]["max"] == pytest.approx(mismatch(0.0), rel=1e-2)
    # Every trained token is counted once by task, and once by turn.
    assert sum(one["tokens"] for one in found["by_task"]) == sum(one["tokens"] for one in found["by_turn"])
    assert found["rollouts"] == found["looked_at"] == 12


def test_the_page_of_a_step_leads_to_the_worst_token(run: Path, samples: list[Sample]) -> None:
    far, _ = samples
    with page_over(run) as address, browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp?step={STEP}")
        panel = page.get_by_role("region", name="Where the trainer disagreed")
        rows = panel.get_by_role("table", name="Mismatch by task").get_by_role("row")
        expect(rows).to_have_count(4)
        expect(rows.nth(1)).to_contain_text("task-1")
        turns = panel.get_by_role("table", name="Mismatch by turn").get_by_role("row")
        expect(turns).to_have_count(4)
        assert serious_findings(page) == []
        turns.nth(3).get_by_role("link").click()
        token = reply(far, 2)[1]
        expect(page).to_have_url(re.compile(rf"/rollout/{far.rollout}/tokens/\d+/{token}\?.*by=mismatch_kl"))
        expect(page.get_by_label("Token").get_by_text(f"{token} of")).to_be_visible()
