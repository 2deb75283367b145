"""While the index is catching up, the page says how much is indexed and claims nothing about the rest."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

import rolltape
from taped import first_turn
from viewed import ask, page_over

_HALF_WAY = {"indexed": 8_000, "total": 20_000, "summarized": 0, "searchable": 0}
_INDEXED = {"indexed": 20_000, "total": 20_000, "summarized": 5_000, "searchable": 5_000}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with rolltape.open(tmp_path / "exp", name="exp") as tape, tape.rollout(task_id="task") as rollout:
        first_turn(rollout.session())
        rollout.finish()
    with page_over(tmp_path / "exp") as address:
        yield address


def catching_up(page: Page, progress: dict[str, int], **changed: Any) -> None:
    """Let overview and list state this progress."""

    def answer(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, body=json.dumps({**response.json(), **changed, "progress": progress}))

    page.route("**/api/exp/overview*", answer)
    page.route("**/api/exp/rollouts?*", answer)
    page.route("**/live", lambda route: route.abort())


def test_the_overview_claims_nothing_about_rollouts_that_are_not_indexed(page: Page, address: str) -> None:
    catching_up(page, _HALF_WAY, statuses={"lost": 8_000}, fork_causes={}, ledger={}, stop_reasons={})
    page.goto(f"{address}/exp")
    expect(page.locator(".title")).to_contain_text("indexed 8,000 of 20,000")
    page.locator(".figures").wait_for()
    text = page.locator("main").inner_text()
    assert "lost" not in text.lower()
    for claim in (
        "No rewards\n",
        "No forks:",
        "None recorded",
        "No sampled token ids are recorded",
        "has a reward",
        "no token records",
    ):
        assert claim not in text
    assert "No rewards so far: indexed 8,000 of 20,000" in text
    assert "No forks so far: indexed 8,000 of 20,000" in text


def test_forks_and_ledger_say_how_many_rollouts_are_summarized(page: Page, address: str) -> None:
    catching_up(page, _INDEXED, fork_causes={}, ledger={})
    page.goto(f"{address}/exp")
    expect(page.locator(".title")).to_contain_text("summarized 5,000 of 20,000")
    expect(page.get_by_text("No forks so far: summarized 5,000 of 20,000.")).to_be_visible()
    expect(page.get_by_text("No rewards", exact=True).first).to_be_visible()


def test_a_run_of_which_nothing_is_indexed_yet_is_not_called_empty(page: Page, address: str) -> None:
    catching_up(page, {**_HALF_WAY, "indexed": 0}, statuses={}, matched=0, total=0, rows=[])
    page.goto(f"{address}/exp")
    expect(page.get_by_role("heading", name="Reading the run")).to_be_visible()
    page.goto(f"{address}/exp/rollouts")
    expect(page.get_by_role("heading", name="No rollouts match so far")).to_be_visible()
    expect(page.locator("main")).to_contain_text("indexed 0 of 20,000")


def test_the_table_says_how_much_is_indexed_and_how_much_is_searched(page: Page, address: str) -> None:
    catching_up(page, _HALF_WAY, search={"searched": 0, "total": 20_000})
    page.goto(f"{address}/exp/rollouts?q=word")
    expect(page.locator("main header").first).to_contain_text("search covers 0 of 20,000")
    expect(page.locator("main header").first).to_contain_text("indexed 8,000 of 20,000")


def test_no_row_is_called_lost_before_the_run_is_indexed(page: Page, address: str) -> None:
    rows = [{**row, "status": "lost"} for row in ask(address, "/api/exp/rollouts")["rows"]]
    catching_up(page, _HALF_WAY, rows=rows)
    page.goto(f"{address}/exp/rollouts")
    expect(page.locator(".row a")).to_have_text("task")
    expect(page.locator(".row .status")).to_have_count(0)
    catching_up(page, _INDEXED, rows=rows)
    page.reload()
    expect(page.locator(".row .status")).to_have_text("lost")
