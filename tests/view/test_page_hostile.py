"""Texts out of a rollout are text and nothing else."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from viewed import ask, page_over

HUGE = 10_000_000
_INK = "one => getComputedStyle(one).color"
HOSTILE = [
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">",
    '[click](javascript:document.title="owned") <a href="javascript:document.title=1">x</a> http://example.com/',
    "![remote](http://example.com/pixel.png) <iframe src='http://example.com'></iframe> {@html 1} {{constructor}}",
    "price: \u202e0001\u202c then \u2066isolated\u2069 and zero\u200bwidth\ufeff",
    "half \ud800 a pair",
    "x" * HUGE,
    "\x1b[31mred\x1b[0m \x00 null \x07 bell",
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("hostile") / "hostile"
    with rolltape.open(run, name="<b>hostile</b>") as tape:
        tape_rollout = tape.rollout(task_id="<img src=x onerror=alert(1)>", tags=("<i>tag</i>",))
        with tape_rollout as rollout:
            session = rollout.session()
            turn = None
            for index, text in enumerate(HOSTILE):
                fields: dict[str, Any] = {
                    "sampled_ids": [100 + index, 2],
                    "logprobs": [-0.5, -0.1],
                    "reply": {
                        "role": "assistant",
                        "content": text if len(text) < 1000 else "short",
                        "reasoning_content": HOSTILE[0],
                        "tool_calls": [
                            {
                                "id": "1",
                                "type": "function",
                                "function": {"name": "<u>f</u>", "arguments": '{"a": "<s>"}'},
                            }
                        ],
                    },
                    "finish": "stop",
                }
                said = [{"role": "user", "content": text}]
                if turn is None:
                    turn = session.record_turn(prompt_messages=said, prompt_ids=[1, 2, 3], **fields)
                else:
                    turn = session.record_turn(after=turn, new_messages=said, new_prompt_ids=[4 + index], **fields)
            rollout.finish(reward=1.0, reward_terms={"<b>term</b>": 1.0})
    with page_over(run) as address:
        yield address


@pytest.fixture
def page(address: str) -> Iterator[Page]:
    with browser_page(width=1400, height=900) as page:
        refused: list[str] = []
        page.on("console", lambda said: refused.append(said.text) if "Content Security Policy" in said.text else None)
        yield page
        assert refused == []
        assert "owned" not in page.title()


def places(address: str) -> dict[str, str]:
    name = ask(address, "/api/runs")["runs"][0]["r"]
    row = ask(address, f"/api/{name}/rollouts")["rows"][0]
    base = f"{address}/{name}"
    return {
        "run": base,
        "rollouts": f"{base}/rollouts",
        "group": f"{base}/group/{row['group']}",
        "rollout": f"{base}/rollout/{row['id']}",
        "tokens": f"{base}/rollout/{row['id']}/tokens/0",
        "compare": f"{base}/compare/{row['id']}",
    }


@pytest.mark.parametrize("view", ["run", "rollouts", "group", "rollout", "tokens", "compare"])
def test_no_text_becomes_markup_a_link_or_a_request(page: Page, address: str, view: str) -> None:
    page.goto(places(address)[view])
    page.locator("main h1").wait_for()
    page.wait_for_timeout(300)
    assert page.locator("main img, main iframe, main object, main script, main b:has-text('hostile')").count() == 0
    links = page.locator("a[href]").evaluate_all("all => all.map(one => one.href)")
    assert all(link.startswith(address) for link in links)


def test_markup_is_shown_as_it_was_written(page: Page, address: str) -> None:
    page.goto(places(address)["rollout"])
    page.locator("[data-turn]").first.wait_for()
    assert HOSTILE[0] in page.locator("[data-turn]").first.inner_text()
    assert "<u>f</u>" in page.locator("[data-turn]").first.inner_text()
    expect(page.get_by_role("heading", name="<img src=x onerror=alert(1)>")).to_be_visible()


def test_characters_that_cannot_be_seen_are_named(page: Page, address: str) -> None:
    page.goto(places(address)["rollout"])
    turn = page.locator("[data-turn]").nth(3).locator(".message.user")
    turn.wait_for()
    said = turn.inner_text()
    for name in ("U+202E", "U+202C", "U+2066", "U+2069", "U+200B", "U+FEFF"):
        assert name in said
    assert "\u202e" not in said
    terminal = page.locator("[data-turn]").nth(6).locator(".message.user")
    for name in ("U+0000", "U+0007"):
        expect(terminal).to_contain_text(name)
    expect(terminal.get_by_text("red", exact=True)).not_to_have_css("color", terminal.evaluate(_INK))
    terminal.hover()
    terminal.get_by_role("button", name="plain text").click()
    expect(terminal).to_contain_text("U+001B")


def test_text_that_is_not_unicode_is_shown_repaired_and_flagged(page: Page, address: str) -> None:
    page.goto(places(address)["rollout"])
    turn = page.locator("[data-turn]").nth(4)
    turn.wait_for()
    assert "half \ufffd a pair" in turn.inner_text()
    assert "repaired unicode" in turn.inner_text()


def test_a_line_of_ten_megabytes_is_cut_and_more_of_it_is_shown_on_request(page: Page, address: str) -> None:
    page.goto(places(address)["rollout"])
    turn = page.locator("[data-turn]").nth(5)
    turn.wait_for()
    assert len(turn.inner_text()) < 10_000
    turn.get_by_role("button", name="Show more").click()
    expect(turn.get_by_role("button", name="Show less")).to_be_visible()
    assert 20_000 < len(turn.inner_text()) < 100_000
    turn.get_by_role("button", name="Show more").click()
    with page.expect_response("**/messages/*"):  # beyond what came with the rollout
        turn.get_by_role("button", name="Show more").click()
    expect(turn.get_by_role("button", name=re.compile("9.68 M characters"))).to_be_visible(timeout=30_000)
    assert 300_000 < len(turn.inner_text()) < 400_000
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400
