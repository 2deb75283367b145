"""Why reward changed, charts over steps and odd rollouts in a real browser, over a run whose answers are known."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from browser import browser_page
from stepped_runs import record_stepped
from viewed import page_over


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run: Path = record_stepped(tmp_path_factory.mktemp("steps") / "exp")
    with page_over(run) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page(width=1440, height=900) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.set_viewport_size({"width": 1440, "height": 900})
    return browser


def test_a_step_says_which_task_made_its_reward_fall_and_leads_to_its_rollouts(page: Page, address: str) -> None:
    page.goto(f"{address}/exp?step=1")
    panel = page.get_by_role("region", name="Why reward changed")
    expect(panel).to_contain_text("Mean reward is lower by 0.250")
    expect(panel).to_contain_text("may be chance")
    expect(panel).to_contain_text("4 tasks were attempted at both steps: 0 rose, 1 fell, 3 stayed")
    first = panel.get_by_role("table", name="Change by task").locator("tbody tr").first
    expect(first).to_contain_text("parse")
    expect(first.locator("b")).to_have_text("−0.250")
    expect(panel.get_by_role("table", name="Change by stop reason")).to_contain_text("max tokens")
    expect(panel).to_contain_text("they add up to the reward")
    panel.get_by_role("button", name="step 2").click()
    expect(panel).to_contain_text("No task was attempted at both steps (2 at step 2, 4 at step 1)")
    panel.get_by_role("button", name="step 0").click()
    first.get_by_role("link", name="parse").click()
    page.wait_for_url(f"{address}/exp/rollouts?step=1&task=parse&source=made-up")
    expect(page.locator(".row .reward")).to_have_text(["0.000"] * 4)


def test_charts_over_steps_say_what_the_rollouts_did(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    expect(page.get_by_role("figure", name="Truncations and tool errors by step")).to_contain_text(
        "rollouts truncated 0 %"
    )
    page.goto(f"{address}/exp?step=1")
    cut = page.get_by_role("figure", name="Truncations and tool errors by step")
    expect(cut).to_contain_text("rollouts truncated 31.3 %")
    expect(cut).to_contain_text("rollouts with tool errors 25 %")
    expect(page.get_by_role("figure", name="How rollouts ended by step")).to_contain_text("max tokens 25 %")
    expect(page.get_by_role("figure", name="Sampled tokens over steps")).to_contain_text("mean 188")
    # What is the same in all rollouts has no chart.
    expect(page.get_by_role("list", name="The same in all rollouts")).to_contain_text("finished")
    expect(page.get_by_role("list", name="Rollouts by status")).to_have_count(0)


def test_the_runs_page_counts_what_looks_like_reward_hacking_and_leads_there(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    odd = page.get_by_role("list", name="Rollouts worth a look").get_by_role("link")
    expect(odd).to_have_text(
        ["1 rewarded and truncated", "1 rewarded and very short", "1 edited tests", "1 reward far from its group"]
    )
    for index, task in enumerate(["dates", "dates", "dates", "hard-2"]):
        page.goto(f"{address}/exp")
        odd.nth(index).click()
        expect(page.locator(".row .reward")).to_have_text(["1.000"])
        expect(page.locator(".row a")).to_have_text([task])
