"""The table of tasks in a real browser, over a made-up run whose answers are known."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from rolltape.view.static import StaticPages
from viewed import page_over, serious_findings

# By task: the rewards at step 0, and at step 1.
REWARDS = {
    "always": ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
    "learned": ([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
    "lost": ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    "never": ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = tmp_path_factory.mktemp("tasks") / "exp"
    with rolltape.open(run) as tape:
        for task, steps in REWARDS.items():
            for step, rewards in enumerate(steps):
                for attempt, reward in enumerate(rewards):
                    with tape.rollout(task_id=task, step=step, attempt=attempt, source="made-up") as rollout:
                        rollout.finish(reward=reward)
    return run


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with page_over(run) as address:
        yield address


@pytest.fixture
def page(page: Page, address: str) -> Page:
    page.goto(f"{address}/exp")
    return page


def _tasks(page: Page) -> list[str]:
    return page.locator("tbody tr td.task").all_inner_texts()


def test_the_runs_page_says_which_tasks_are_solved_by_none_some_and_all(page: Page, address: str) -> None:
    outcomes = page.get_by_role("list", name="Tasks by outcome")
    expect(outcomes.get_by_role("listitem")).to_have_text(
        ["solved by all attempts 1 25.0%", "by some 2 50.0%", "by none 1 25.0%"]
    )
    panel = page.locator(".panel.tasks")
    expect(panel).to_contain_text("solved: reward ≥ 1")
    expect(panel.locator("dd")).to_have_text(["0.4688", "0.625"])
    # The last step: 100% of two tasks, none of the two others.
    expect(panel).to_contain_text("pass@1 50%")
    outcomes.get_by_role("link", name="by some").click()
    page.wait_for_url(f"{address}/exp/tasks?solved_by=some")
    expect(page.locator("tbody tr")).to_have_count(2)
    assert _tasks(page) == ["lost", "learned"]


def test_tasks_sort_by_what_changed_and_lead_to_their_rollouts(page: Page, address: str) -> None:
    page.get_by_role("link", name="all 4 tasks").click()
    expect(page.locator("tbody tr")).to_have_count(4)
    assert _tasks(page) == ["never", "lost", "learned", "always"]
    page.get_by_role("button", name="Change", exact=True).click()
    expect(page.get_by_role("columnheader", name="Change")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("tbody tr").first).to_contain_text("-0.5")
    assert _tasks(page) == ["lost", "always", "never", "learned"]
    page.get_by_role("button", name="Change", exact=True).click()
    expect(page.locator("tbody tr").first).to_contain_text("+0.75")
    page.get_by_role("link", name="learned").click()
    page.wait_for_url(f"{address}/exp/rollouts?source=made-up&task=learned")
    expect(page.locator(".row .reward")).to_have_count(8)


def test_a_step_a_limit_and_a_part_of_the_name_narrow_the_table(page: Page, address: str) -> None:
    page.goto(f"{address}/exp/tasks?step=0")
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("header dd")).to_have_text(["0.4375", "0.75"])
    page.get_by_label("solved: reward ≥").fill("0.5")
    page.keyboard.press("Enter")
    page.goto(f"{address}/exp/tasks?solved_at=0.5")
    expect(page.get_by_role("list", name="Tasks by outcome")).not_to_contain_text("by none")
    page.get_by_label("name contains").fill("LEA")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert _tasks(page) == ["learned"]
    # At one step a task is one group, which has its attempts side by side.
    page.goto(f"{address}/exp/tasks?step=1&name=never")
    page.get_by_role("link", name="never").click()
    expect(page.locator(".attempt .reward")).to_have_text(["0.5", "0", "0", "0"])


@pytest.mark.parametrize("width", [1400, 1024, 390])
def test_the_table_of_tasks_is_accessible_at_every_width(page: Page, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/exp/tasks")
    page.locator("tbody tr").first.wait_for()
    assert serious_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_an_exported_page_has_the_table_too(run: Path, tmp_path: Path) -> None:
    with StaticPages(str(run)) as pages:
        list(pages.write(tmp_path / "report", pages.chosen(())))
    with browser_page(width=1400, height=900) as page:
        page.goto((tmp_path / "report" / "index.html").as_uri())
        page.get_by_role("link", name="all 4 tasks").click()
        expect(page.locator("tbody tr")).to_have_count(4)
        assert _tasks(page) == ["never", "lost", "learned", "always"]
        page.get_by_label("solved by", exact=True).select_option("some")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.get_by_role("button", name="Solved").click()
        assert _tasks(page) == ["lost", "learned"]
