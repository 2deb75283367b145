"""Long tables, trees and samples: the page holds only what is in view."""

import json
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, Route, expect

import made_up_view
from taped import record_run
from viewed import ask, ask_bytes, page_over

ROWS = 100_000
TOKENS = 200_000
WORST = 123_456
MOST_NODES = 6_000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("scale") / "exp"
    record_run(run, rollouts=1)
    with page_over(run) as address:
        yield address


def test_made_up_answers_say_what_the_server_says(address: str) -> None:
    real = ask(address, "/api/exp/rollouts?limit=1")
    assert made_up_view.rows(1, 0, 1).keys() <= real.keys()
    assert made_up_view.row(0).keys() <= real["rows"][0].keys()
    base = f"/api/exp/rollouts/{real['rows'][0]['id']}"
    whole, made = ask(address, base), made_up_view.rollout(3, 1)
    assert made.keys() <= whole.keys()
    assert made["sessions"][0].keys() <= whole["sessions"][0].keys()
    assert made["sessions"][0]["turns"][0].keys() <= whole["sessions"][0]["turns"][0].keys()
    header, invented = (
        json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
        for packed in (ask_bytes(address, f"{base}/samples/0/tokens"), made_up_view.tokens(2000, 500))
    )
    assert invented.keys() <= header.keys()
    assert invented["spans"][0].keys() <= header["spans"][0].keys()
    kinds = {column["name"]: column["dtype"] for column in header["columns"]}
    shared = {column["name"]: column["dtype"] for column in invented["columns"] if column["name"] in kinds}
    assert shared == {name: kinds[name] for name in shared}
    assert {"ids", "logprob", "trained", "text_offsets", "text_utf8"} <= shared.keys()


def nodes(page: Page) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def test_a_table_of_100_000_rows_fetches_what_is_scrolled_to(page: Page, address: str) -> None:
    asked: list[int] = []

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        offset, limit = int(query["offset"][0]), int(query["limit"][0])
        asked.append(offset)
        route.fulfill(json=made_up_view.rows(ROWS, offset, limit))

    page.route("**/api/exp/rollouts?*", answer)
    page.goto(f"{address}/exp/rollouts")
    page.get_by_text("100,000", exact=True).wait_for()
    scroller = page.get_by_role("region", name="Rollouts")
    for share in (0.25, 0.5, 0.987):
        scroller.evaluate("(all, share) => { all.scrollTop = share * all.scrollHeight }", share)
        page.wait_for_timeout(200)
    scroller.evaluate("all => { all.scrollTop = all.scrollHeight }")
    expect(page.get_by_role("link", name="task-99999")).to_be_visible()
    assert len(asked) < 20
    assert nodes(page) < MOST_NODES
    page.keyboard.press("Home")
    expect(page.locator(".row.selected")).to_contain_text("task-0")


def test_a_session_of_2_000_turns_with_300_forks_is_drawn_a_window_at_a_time(page: Page, address: str) -> None:
    made = json.dumps(made_up_view.rollout(2000, 300))
    page.route("**/api/exp/rollouts/long", lambda route: route.fulfill(body=made, content_type="application/json"))
    page.goto(f"{address}/exp/rollout/long")
    page.locator("[data-turn]").first.wait_for()
    assert nodes(page) < MOST_NODES
    page.get_by_role("group", name="Turns").evaluate("all => { all.scrollTop = all.scrollHeight }")
    page.get_by_role("button", name=re.compile("reply 1999")).click()
    expect(page.locator("[data-turn].selected > header > a")).to_have_text("turn 1999")
    assert nodes(page) < 2 * MOST_NODES


def test_a_sample_of_200_000_tokens_opens_scrolls_and_leads_to_its_worst(page: Page, address: str) -> None:
    packed = made_up_view.tokens(TOKENS, WORST)
    page.route("**/samples/0/tokens", lambda route: route.fulfill(body=packed))
    page.route("**/api/exp/rollouts/long", lambda route: route.fulfill(json=made_up_view.rollout(2, 0)))
    page.goto(f"{address}/exp/rollout/long/tokens/0?by=mismatch_kl")
    page.locator(".t").first.wait_for()
    expect(page.locator("header")).to_contain_text(["rolltape", "200,000 tokens, 140,000 trained"])
    assert nodes(page) < MOST_NODES
    page.keyboard.press("w")
    page.wait_for_url(f"**/tokens/0/{WORST}?by=mismatch_kl")
    chosen = page.locator(".t.chosen")
    expect(chosen).to_have_attribute("data-token", str(WORST))
    expect(chosen).to_be_in_viewport()
    expect(page.locator(".inspector")).to_contain_text("mismatch KL3.5")
    page.keyboard.press("ArrowDown")
    below = int(page.url.split("?")[0].rsplit("/", 1)[1])
    assert WORST < below < WORST + 100
    assert nodes(page) < MOST_NODES
