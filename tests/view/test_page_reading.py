"""What arrives while a run is being recorded does not move what somebody reads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from rolltape.records.turn import Turn
from rolltape.tape.recording.recorder import SessionRecorder
from taped import assistant, first_turn, next_turn, record_session, user
from viewed import page_over

_SOON_MS = 20_000


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page(width=1400, height=700) as page:
        yield page


def top(page: Page, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["y"]


def sub_agent(session: SessionRecorder) -> Turn:
    return first_turn(session, prompt_messages=[user("you help")], prompt_ids=[90, 91, 92], reply=assistant("helped"))


def test_turns_that_arrive_leave_the_reader_where_he_is(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        rollout = tape.rollout(task_id="long")
        session = rollout.session()
        turns = [first_turn(session)]
        for index in range(1, 15):
            turns.append(next_turn(session, turns[-1], index))
        with page_over(tmp_path / "exp") as address:
            page.goto(f"{address}/exp/rollout/{rollout.id}/turn/{turns[2].id}")
            expect(page.locator("[data-turn].selected")).to_be_in_viewport()
            page.locator("[data-turn]").nth(9).scroll_into_view_if_needed()
            page.get_by_role("button", name="raw JSON").nth(19).click()
            expect(page.locator("[data-turn]").nth(9)).to_contain_text('"content"')
            before = page.evaluate("scrollY")
            assert before > 0
            next_turn(session, turns[-1], 15)
            expect(page.get_by_role("group", name="Turns")).to_contain_text("reply 15", timeout=_SOON_MS)
            assert page.evaluate("scrollY") == before
            expect(page.locator("[data-turn]").nth(9)).to_contain_text('"content"')


def test_a_sub_agent_that_begins_does_not_take_the_transcript(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        rollout = tape.rollout(task_id="helped")
        session = rollout.session()
        last = next_turn(session, first_turn(session))
        with page_over(tmp_path / "exp") as address:
            page.goto(f"{address}/exp/rollout/{rollout.id}")
            expect(page.locator("[data-turn]")).to_have_count(2)
            sub_agent(session)
            expect(page.locator(".cause")).to_have_text(["sub agent"], timeout=_SOON_MS)
            expect(page.locator("[data-turn] > header > a")).to_have_text(["turn 0", "turn 1"])
            next_turn(session, last, 3)
            turns = page.locator("[data-turn] > header > a")
            expect(turns).to_have_text(["turn 0", "turn 1", "turn 3"], timeout=_SOON_MS)


def test_rows_that_arrive_above_leave_the_chosen_one_in_its_place(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:

        def add(name: str) -> None:
            with tape.rollout(task_id=name) as rollout:
                record_session(rollout, turns=1)
                rollout.finish(reward=0.5)

        for index in range(80):
            add(f"task-{index}")
        with page_over(tmp_path / "exp") as address:
            page.goto(f"{address}/exp/rollouts?sort=-started")
            page.get_by_role("link", name="task-79").wait_for()
            for _ in range(30):
                page.keyboard.press("j")
            chosen = page.locator(".row.selected")
            expect(chosen).to_contain_text("task-50")
            before = top(page, ".row.selected")
            for index in range(80, 85):
                add(f"task-{index}")
            page.get_by_text("85", exact=True).wait_for(timeout=_SOON_MS)
            expect(chosen).to_contain_text("task-50")
            assert top(page, ".row.selected") == before
            page.keyboard.press("j")
            expect(chosen).to_contain_text("task-49")


def test_the_list_of_runs_follows_what_is_recorded(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        with tape.rollout(task_id="first") as rollout:
            record_session(rollout, turns=1)
            rollout.finish(reward=0.25)
        with page_over(tmp_path / "exp") as address:
            page.goto(address)
            expect(page.locator("tbody tr")).to_contain_text("0.250")
            with tape.rollout(task_id="second") as rollout:
                record_session(rollout, turns=1)
                rollout.finish(reward=0.75)
            expect(page.locator("tbody tr")).to_contain_text("0.500", timeout=_SOON_MS)
