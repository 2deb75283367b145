"""A server that goes away and comes back, a run that vanishes, and one that asks for a key."""

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

import rolltape
from taped import record_session
from viewed import page_over

_SOON_MS = 30_000


def add(run: Path, reward: float) -> None:
    with rolltape.open(run, name="exp") as tape, tape.rollout(task_id=f"worth-{reward}") as rollout:
        record_session(rollout, turns=2)
        rollout.finish(reward=reward)


def test_a_page_says_that_the_server_is_gone_and_goes_on_when_it_is_back(page: Page, tmp_path: Path) -> None:
    add(tmp_path / "exp", 0.25)
    with page_over(tmp_path / "exp") as address:
        page.goto(f"{address}/exp")
        expect(page.locator(".figures")).to_contain_text("0.25std")
    gone = page.get_by_text("The server does not answer. The page shows the last answer and keeps trying.")
    expect(gone).to_be_visible(timeout=_SOON_MS)
    expect(page.locator(".figures")).to_contain_text("0.25std")
    add(tmp_path / "exp", 0.75)
    with page_over(tmp_path / "exp", port=urlsplit(address).port or 0):
        expect(gone).to_be_hidden(timeout=_SOON_MS)
        expect(page.locator(".figures")).to_contain_text("0.5std", timeout=_SOON_MS)


def test_what_could_not_be_fetched_is_asked_again_in_place(page: Page, tmp_path: Path) -> None:
    add(tmp_path / "exp", 0.25)
    with page_over(tmp_path / "exp") as address:
        page.goto(f"{address}/exp")
        page.locator(".figures").wait_for()
        page.route("**/api/exp/rollouts?*", lambda route: route.abort())
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.get_by_role("alert").get_by_role("heading", name="No answer").wait_for()
        page.unroute("**/api/exp/rollouts?*")
        page.evaluate("window.sameDocument = true")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".row .reward")).to_have_text(["0.25"])
        assert page.evaluate("window.sameDocument")


def test_a_run_that_cannot_be_read_any_more_keeps_what_was_seen_and_says_why(page: Page, tmp_path: Path) -> None:
    add(tmp_path / "exp", 0.25)
    with page_over(tmp_path / "exp") as address:
        page.goto(f"{address}/exp")
        page.locator(".figures").wait_for()
        page.route("**/api/exp/overview", lambda route: route.fulfill(status=500, json={"error": {"message": "torn"}}))
        add(tmp_path / "exp", 0.75)
        expect(page.get_by_text("The page shows the last answer: torn")).to_be_visible(timeout=_SOON_MS)
        expect(page.locator(".figures")).to_contain_text("0.25std")
        page.unroute("**/api/exp/overview")
        add(tmp_path / "exp", 0.5)
        expect(page.get_by_text("The page shows the last answer")).to_be_hidden(timeout=_SOON_MS)
        (tmp_path / "exp").rename(tmp_path / "deleted")  # at once: a file that is made meanwhile would stop `rmtree`
