"""New rollouts and turns appear while a run is being recorded."""

from pathlib import Path

from playwright.sync_api import expect

import rolltape
from browser import browser_page
from taped import first_turn, next_turn
from viewed import page_over

_SOON_MS = 20_000


def test_what_is_recorded_appears_in_every_view_that_is_open(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        rollout = tape.rollout(task_id="first")
        session = rollout.session()
        turn = first_turn(session)
        with page_over(tmp_path / "exp") as address, browser_page(width=1400, height=900) as page:
            page.goto(f"{address}/exp/rollout/{rollout.id}")
            expect(page.locator("[data-turn]")).to_have_count(1)
            next_turn(session, turn)
            expect(page.locator("[data-turn]")).to_have_count(2, timeout=_SOON_MS)
            rollout.finish(reward=0.75)
            expect(page.locator(".title .reward")).to_have_text("0.75", timeout=_SOON_MS)

            page.goto(f"{address}/exp/rollouts")
            expect(page.locator(".row .reward")).to_have_text(["0.75"])
            with tape.rollout(task_id="second") as other:
                first_turn(other.session())
                other.finish(reward=0.25)
            expect(page.locator(".row .reward")).to_have_count(2, timeout=_SOON_MS)

            page.goto(f"{address}/exp")
            expect(page.locator(".figures")).to_contain_text("0.5std", timeout=_SOON_MS)
            with tape.rollout(task_id="third") as third:
                first_turn(third.session())
                third.finish(reward=2.0)
            expect(page.locator(".figures")).to_contain_text("1std", timeout=_SOON_MS)


def test_a_tab_that_nobody_looks_at_keeps_no_connection_and_catches_up(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        with tape.rollout(task_id="first") as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=0.75)
        with page_over(tmp_path / "exp") as address, browser_page(width=1400, height=900) as page:
            listens: list[str] = []
            page.on("request", lambda asked: listens.append(asked.url) if asked.url.endswith("/live") else None)
            page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.away ?? true })")
            page.goto(f"{address}/exp/rollouts")
            expect(page.locator(".row .reward")).to_have_text(["0.75"])
            assert listens == []
            with tape.rollout(task_id="second") as other:
                first_turn(other.session())
                other.finish(reward=0.25)
            with page.expect_request("**/live"):
                page.evaluate("away = false; document.dispatchEvent(new Event('visibilitychange'))")
            expect(page.locator(".row .reward")).to_have_count(2, timeout=_SOON_MS)
            with page.expect_event("requestfailed", lambda ended: ended.url.endswith("/live")):
                page.evaluate("away = true; document.dispatchEvent(new Event('visibilitychange'))")
