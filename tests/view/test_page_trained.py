"""The view of a step says where the trainer's records and the tape disagree, and leads to the token."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from browser import browser_page
from rolltape.records.sample import Sample
from trained_runs import STEP, SeenRow, export_samples, record_groups, samples_of
from viewed import page_over, serious_findings
from viewing import Asking, asking


def spoil(rows: list[SeenRow]) -> None:
    rows[0].ids[3] += 1
    rows[2].reward = 9.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_groups(tmp_path_factory.mktemp("trained") / "run", groups=2)


@pytest.fixture(scope="module")
def samples(run: Path) -> list[Sample]:
    samples = samples_of(run)
    export_samples(run, samples, spoil)
    return samples


@pytest.fixture
def page(run: Path, samples: list[Sample]) -> Iterator[Page]:
    with page_over(run) as address, browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp?step={STEP}")
        yield page


def test_each_disagreement_is_one_click_from_its_token(page: Page, samples: list[Sample]) -> None:
    panel = page.get_by_role("region", name="What the trainer saw")
    expect(panel).to_contain_text(f"2 of {len(samples)} records disagree", timeout=30_000)
    rows = panel.get_by_role("list").get_by_role("link")
    expect(rows).to_have_count(2)
    held = int(samples[0].ids[3])
    expect(rows.first).to_contain_text(f"id {held + 1} in the record, {held} on the tape")
    expect(rows.first).to_contain_text(f"{STEP}.0.0")
    expect(panel.get_by_label("Disagreements by task and turn")).to_contain_text("task-0")
    assert serious_findings(page) == []
    rows.first.click()
    expect(page).to_have_url(re.compile(rf"/rollout/{samples[0].rollout}/tokens/0/3\?record={STEP}\.0\.0$"))


async def test_the_check_of_a_step_is_an_answer_and_follows_new_records(run: Path, samples: list[Sample]) -> None:
    async with asking(run) as ask:
        name = (await ask.json("/api/runs"))["runs"][0]["r"]
        spoiled = await _answer(ask, name)
        assert (spoiled["records"], spoiled["disagreeing"], spoiled["rules"]) == (
            len(samples),
            2,
            {"ids": 1, "reward": 1},
        )
        assert sum(spoiled["by_task"].values()) == 2
        assert set(spoiled["by_task"]) <= {"task-0", "task-1"}
        assert [one["findings"] for one in spoiled["by_turn"]] == [1]  # a reward is of no turn
        assert (await ask.json(f"/api/{name}/trained/{STEP + 1}")) == {"step": STEP + 1, "check": None}
    export_samples(run, samples)
    async with asking(run) as ask:
        clean = await _answer(ask, name)
    export_samples(run, samples, spoil)
    assert (clean["disagreeing"], clean["findings"]) == (0, [])


async def _answer(ask: Asking, name: str) -> Any:
    """The check, once the server has found the trainer's records."""
    while (answer := await ask.json(f"/api/{name}/trained/{STEP}"))["check"] is None:
        await asyncio.sleep(0.05)
    return answer["check"]
