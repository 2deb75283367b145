"""Names and reasons that users give are shown as they are, however long they are and whatever is in them."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

import rolltape
from taped import first_turn
from viewed import ask, page_over

TAGS = tuple(f"tag_{number}" for number in range(100))
REASON = "it broke: \u202e" + "y" * 3000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("named") / "exp"
    with rolltape.open(run, name="exp \u202e") as tape:
        for step, (task, environment) in enumerate([("a", "swe_bench"), ("x" * 5000, "swe bench")]):
            with tape.rollout(task_id=task, step=step, extra={"environment": environment}, tags=TAGS) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=1.0, reward_terms={"is_right": 1.0, "is right": 0.0})
        tape.rollout(task_id="broken").fail(REASON)
    with page_over(run) as address:
        yield address


def _open(page: Page, address: str, task: str) -> None:
    (served,) = ask(address, "/api/runs")["runs"]
    rows = ask(address, f"/api/{served['r']}/rollouts")["rows"]
    (rollout,) = [row["id"] for row in rows if row["task"] == task]
    page.goto(f"{address}/{served['r']}/rollout/{rollout}")


def test_names_that_differ_in_an_underscore_are_two(page: Page, address: str) -> None:
    (served,) = ask(address, "/api/runs")["runs"]
    page.goto(f"{address}/{served['r']}")
    bars = page.get_by_role("list", name="Rollouts by environment").locator(".name")
    expect(bars).to_have_text(["swe_bench", "swe bench"])
    expect(page.get_by_role("heading", level=1)).to_have_text("exp U+202E")
    page.goto(f"{address}/{served['r']}/rollouts")
    expect(page.get_by_label("environment").locator("option")).to_have_text(["environment", "swe_bench", "swe bench"])
    _open(page, address, "a")
    expect(page.locator(".terms .name")).to_have_text(["is_right", "is right"])


def test_a_reason_of_one_long_word_is_wrapped_and_folded(page: Page, address: str) -> None:
    _open(page, address, "broken")
    empty = page.locator(".empty")
    expect(empty).to_contain_text("it broke: U+202E")
    expect(empty.get_by_role("button", name="Show more")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_neither_a_long_task_nor_many_tags_push_the_transcript_away(page: Page, address: str) -> None:
    _open(page, address, "x" * 5000)
    expect(page.locator(".talk")).to_be_in_viewport()
    marks = page.get_by_role("group", name="Tags and notes of the rollout")
    expect(marks.locator(".chip")).to_have_count(30)
    marks.get_by_role("button", name="70 more tags").click()
    expect(marks.locator(".chip")).to_have_count(len(TAGS))
