"""What a newcomer sees: words that explain themselves, units, charts that say something, numbers that are true."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

import rolltape
from browser import browser_page
from taped import first_turn
from viewed import page_over, serious_findings

_REWARDS = {"easy": (1.0, 1.0, 1.0), "hard": (0.0, 0.5, 0.0), "broken": (None, 0.25, 0.25)}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of one step: three tasks, three attempts each, one of which failed; no trainer exported anything."""
    run = tmp_path_factory.mktemp("new") / "exp"
    with rolltape.open(run, name="exp") as tape:
        for task, rewards in _REWARDS.items():
            for attempt, reward in enumerate(rewards):
                with tape.rollout(task_id=task, attempt=attempt, agent="chat") as rollout:
                    first_turn(rollout.session())
                    if reward is None:
                        rollout.fail("the sandbox broke")
                    else:
                        rollout.finish(reward=reward)
    with page_over(run) as address:
        yield address


def test_a_term_is_defined_where_it_is_pointed_at_focused_or_tapped(address: str) -> None:
    with browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp")
        term = page.get_by_role("button", name="Turns", exact=True)
        definition = page.get_by_role("tooltip")
        term.hover()
        expect(definition).to_contain_text("One reply of the model, with the prompt that it was sampled from.")
        page.mouse.move(5, 5)
        expect(definition).to_be_hidden()
        term.focus()
        expect(definition).to_be_visible()
        assert term.get_attribute("aria-describedby") == definition.get_attribute("id")
        assert serious_findings(page) == []
        page.keyboard.press("Escape")
        expect(definition).to_be_hidden()
        page.goto(f"{address}/exp/rollouts")
        page.get_by_role("columnheader").get_by_role("button", name="Attempt").hover()
        expect(definition).to_contain_text("The number of a rollout within its group")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("The rollouts of one task at one step.")
    with browser_page(width=390, height=844) as page:
        page.goto(f"{address}/exp")
        page.get_by_role("button", name="Sampled tokens", exact=True).dispatch_event(
            "click"
        )  # as a tap where buttons take no focus
        box = page.get_by_role("tooltip").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_the_first_chart_of_a_run_of_one_step_shows_each_attempt_at_each_task(address: str) -> None:
    with browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp")
        chart = page.get_by_role("region", name="Rewards by task and attempt")
        expect(chart.locator(".task")).to_have_text(["easy", "broken", "hard"])  # by mean reward
        expect(chart.locator("b")).to_have_text(["1", "0.25", "0.1667"])
        cells = chart.locator(".cell")
        expect(cells).to_have_count(9)
        expect(chart.locator(".cell.none")).to_have_count(1)
        expect(cells.nth(3)).to_have_attribute("aria-label", "attempt 0: failed")
        expect(cells.nth(7)).to_have_attribute("aria-label", "attempt 1: reward 0.5")
        cells.nth(7).click()
        expect(page.locator(".worth .reward")).to_have_text("0.5")


def test_no_card_has_a_single_full_bar_and_nothing_is_called_trained_before_a_trainer_was_there(address: str) -> None:
    with browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp")
        alike = page.get_by_role("list", name="The same in all rollouts")
        expect(alike).to_contain_text("agent")
        expect(alike).to_contain_text("chat")
        expect(page.get_by_role("list", name="Rollouts by status").get_by_role("listitem")).to_have_count(2)
        for name in ("agent", "stop reason"):
            expect(page.get_by_role("list", name=f"Rollouts by {name}")).to_have_count(0)
        figures = page.locator(".figures")
        expect(figures).to_contain_text(re.compile(r"Would train\s*88.9%\s*under exact"))
        expect(page.get_by_role("heading", name="Where the sampled tokens would go")).to_be_visible()
        expect(page.locator(".unit").first).to_have_text("reward")


def test_reward_terms_stand_beside_the_transcript_at_1024_pixels(address: str) -> None:
    with browser_page(width=1024, height=768) as page:
        page.goto(f"{address}/exp")
        page.locator(".cell").first.click()
        talk, facts = (page.locator(name).bounding_box() for name in (".talk", "aside.side"))
        assert talk is not None
        assert facts is not None
        assert facts["x"] >= talk["x"] + talk["width"] - 1
        assert facts["y"] < 300
        assert talk["width"] > 480


@pytest.mark.parametrize("path", ["", "/tasks", "/rollouts"])
def test_no_view_is_wider_than_a_phone(address: str, path: str) -> None:
    with browser_page(width=390, height=844) as page:
        page.goto(f"{address}/exp{path}")
        page.get_by_role("heading", level=1).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
