"""The page by keyboard alone, and the addresses that it leaves behind."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

import rolltape
from taped import record_session
from viewed import ask, page_over


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("keys") / "exp"
    with rolltape.open(run, name="exp") as tape:
        for index in range(6):
            with tape.rollout(task_id=f"task-{index // 3}", attempt=index % 3) as rollout:
                record_session(rollout, turns=4)
                rollout.finish(reward=float(index))
    with page_over(run) as address:
        yield address


@pytest.fixture
def page(page: Page, address: str) -> Page:
    page.goto(f"{address}/exp")
    page.locator(".figures").wait_for()
    return page


def reward(page: Page) -> str:
    page.locator("[data-turn]").first.wait_for()
    return page.locator(".title .reward").inner_text()


def test_from_the_overview_to_a_rollout_and_on_to_its_neighbours(page: Page) -> None:
    page.keyboard.press("t")
    page.locator(".row .reward").first.wait_for()
    page.get_by_role("button", name="Reward").click()
    expect(page.locator(".row .reward").first).to_have_text("5")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    page.keyboard.press("j")
    expect(page.locator(".row.selected .reward")).to_have_text("4")
    page.keyboard.press("Enter")
    assert reward(page) == "4"
    page.keyboard.press("j")
    expect(page.locator(".title .reward")).to_have_text("3")
    page.keyboard.press("k")
    expect(page.locator(".title .reward")).to_have_text("4")
    page.keyboard.press("u")
    page.wait_for_url("**/exp/rollouts")
    page.keyboard.press("h")
    page.wait_for_url("**/exp")


def test_without_a_table_neighbours_are_those_of_the_group(page: Page, address: str) -> None:
    rows = ask(address, "/api/exp/rollouts?sort=attempt")["rows"]
    first = next(row for row in rows if row["task"] == "task-1" and row["attempt"] == 0)
    page.goto(f"{address}/exp/rollout/{first['id']}")
    assert reward(page) == "3"
    page.keyboard.press("j")
    expect(page.locator(".title .reward")).to_have_text("4")
    page.keyboard.press("g")
    page.wait_for_url(f"**/group/{first['group']}")


def test_arrows_walk_through_turns_and_tokens(page: Page, address: str) -> None:
    rollout = ask(address, "/api/exp/rollouts")["rows"][0]["id"]
    page.goto(f"{address}/exp/rollout/{rollout}")
    page.locator("[data-turn]").first.wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.wait_for_url(re.compile(r"/turn/.*\.1$"))
    expect(page.locator("[data-turn].selected > header > a")).to_have_text("turn 1")
    page.keyboard.press("x")
    page.wait_for_url(re.compile(r"/tokens/turn/.*\.1$"))
    page.locator(".t").first.wait_for()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile(r"/tokens/turn/.*\.1/1$"))
    page.keyboard.press("m")
    page.wait_for_url(re.compile(r"\?by="))


def test_a_link_to_a_turn_or_a_token_opens_there(page: Page, address: str) -> None:
    rollout = ask(address, "/api/exp/rollouts")["rows"][0]["id"]
    turn = ask(address, f"/api/exp/rollouts/{rollout}")["sessions"][0]["turns"][2]["id"]
    page.goto(f"{address}/exp/rollout/{rollout}/turn/{turn}")
    expect(page.locator("[data-turn].selected > header > a")).to_have_text("turn 2")
    page.goto(f"{address}/exp/rollout/{rollout}/tokens/0/7?by=probability")
    expect(page.locator(".t.chosen")).to_have_attribute("data-token", "7")
    expect(page.get_by_role("button", name="Probability", exact=True)).to_have_attribute("aria-pressed", "true")
    page.go_back()
    expect(page.locator("[data-turn].selected > header > a")).to_have_text("turn 2")


def test_help_lists_the_keys_of_the_view(page: Page) -> None:
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    assert "search the messages and notes of this run" in dialog.inner_text()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_keys_typed_into_a_field_are_text(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("tu?")
    assert page.url.endswith("/exp")
    expect(page.get_by_label("Search the messages and notes of this run")).to_have_value("tu?")
