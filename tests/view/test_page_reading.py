"""What arrives while a run is being recorded does not move what somebody reads."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

import rolltape
from browser import browser_page
from rolltape.records.turn import Turn
from rolltape.tape.recording.session import SessionRecorder
from taped import assistant, first_turn, next_turn, record_session, user
from viewed import ask, page_over

_SOON_MS = 20_000


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page(width=1400, height=700) as page:
        yield page


def add(tape: rolltape.Tape, name: str) -> None:
    with tape.rollout(task_id=name) as rollout:
        record_session(rollout, turns=1)
        rollout.finish(reward=0.5)


def watch_frames(page: Page) -> None:
    """Note in every frame which row is chosen and where it is: Playwright's boxes may be older than the last frame."""
    page.evaluate(
        """() => {
          window.frames_seen = [];
          const note = () => {
            const row = document.querySelector(".row.selected");
            frames_seen.push([row?.querySelector("a")?.textContent ?? null, row?.getBoundingClientRect().y ?? null]);
            requestAnimationFrame(note);
          };
          requestAnimationFrame(note);
        }"""
    )


def chosen_in_frames(page: Page, name: str) -> set[float]:
    """Where the chosen row has been since `watch_frames`; it has always been this one."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    frames = page.evaluate("frames_seen")
    assert frames
    assert {task for task, _ in frames} == {name}
    return {top for _, top in frames}


def hold(page: Page, pattern: str) -> list[Route]:
    """Requests like this wait, in the list, for the test to let them go."""
    held: list[Route] = []

    def keep(route: Route) -> None:
        held.append(route)

    page.route(pattern, keep)
    return held


def wait_for(page: Page, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SOON_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)  # requests are handled meanwhile


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
        for index in range(80):
            add(tape, f"task-{index}")
        with page_over(tmp_path / "exp") as address:
            page.goto(f"{address}/exp/rollouts?sort=-started")
            page.get_by_role("link", name="task-79").wait_for()
            for _ in range(30):
                page.keyboard.press("j")
            chosen = page.locator(".row.selected")
            expect(chosen).to_contain_text("task-50")
            watch_frames(page)
            for index in range(80, 85):
                add(tape, f"task-{index}")
            page.get_by_text("85", exact=True).wait_for(timeout=_SOON_MS)
            assert len(chosen_in_frames(page, "task-50")) == 1
            page.keyboard.press("j")
            expect(chosen).to_contain_text("task-49")


def test_a_row_that_is_pushed_to_the_next_page_of_the_table_stays_chosen(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        for index in range(210):
            add(tape, f"task-{index}")
        with page_over(tmp_path / "exp") as address:
            page.goto(f"{address}/exp/rollouts?sort=-started")
            page.get_by_role("link", name="task-209").wait_for()
            page.keyboard.press("End")
            for _ in range(11):  # to row 198: the last rows of the first page of 200
                page.keyboard.press("k")
            expect(page.locator(".row.selected")).to_contain_text("task-11")
            watch_frames(page)
            held = hold(page, "**/rollouts?*offset=200*")
            for index in range(210, 215):
                add(tape, f"task-{index}")
            wait_for(page, lambda: bool(held))
            page.unroute("**/rollouts?*offset=200*")
            held[0].continue_()
            page.get_by_text("215", exact=True).wait_for(timeout=_SOON_MS)
            assert len(chosen_in_frames(page, "task-11")) == 1


def test_what_is_recorded_while_an_answer_is_on_its_way_appears(page: Page, tmp_path: Path) -> None:
    page.add_init_script(
        """const Plain = EventSource;
        window.events = 0;
        window.EventSource = class extends Plain {
          constructor(at) { super(at); this.addEventListener("message", () => (window.events += 1)); }
        };"""
    )
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        add(tape, "first")
        with page_over(tmp_path / "exp") as address:
            page.goto(f"{address}/exp/rollouts")
            expect(page.locator(".row .reward")).to_have_count(1)
            wait_for(page, lambda: page.evaluate("events") >= 1)
            held = hold(page, "**/rollouts?*offset=0*")
            add(tape, "second")
            wait_for(page, lambda: bool(held))
            answer = held[0].fetch()
            heard = page.evaluate("events")
            add(tape, "third")
            wait_for(page, lambda: page.evaluate("events") > heard)
            page.unroute("**/rollouts?*offset=0*")
            for route in held[1:]:
                route.continue_()
            held[0].fulfill(response=answer)
            expect(page.locator(".row .reward")).to_have_count(3, timeout=_SOON_MS)


def test_what_is_recorded_before_the_first_event_appears(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        add(tape, "first")
        with page_over(tmp_path / "exp") as address:
            held = hold(page, "**/live")
            page.goto(f"{address}/exp/rollouts")
            expect(page.locator(".row .reward")).to_have_count(1)
            wait_for(page, lambda: bool(held))
            add(tape, "second")
            wait_for(page, lambda: ask(address, "/api/exp/rollouts")["total"] == 2)
            wait_for(page, lambda: ask(address, "/api/exp/rollouts")["rows"][-1]["status"] == "finished")
            held[0].continue_()
            expect(page.locator(".row .reward")).to_have_count(2, timeout=_SOON_MS)


def test_the_list_of_runs_follows_what_is_recorded(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        with tape.rollout(task_id="first") as rollout:
            record_session(rollout, turns=1)
            rollout.finish(reward=0.25)
        with page_over(tmp_path / "exp") as address:
            page.goto(address)
            expect(page.locator("tbody tr")).to_contain_text("0.25")
            with tape.rollout(task_id="second") as rollout:
                record_session(rollout, turns=1)
                rollout.finish(reward=0.75)
            expect(page.locator("tbody tr")).to_contain_text("0.5", timeout=_SOON_MS)
