"""Texts out of a rollout are text and nothing else."""

import base64
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from coding_agents import Conversation, call, png, result, says
from rolltape.cli import run as rolltape_command
from viewed import ask, page_over

_SVG = (
    b"<svg xmlns='http://www.w3.org/2000/svg' onload='top.document.title=1'><script>top.document.title=1</script></svg>"
)
_IMG = "<img src=x onerror=\"document.title='owned'\">"
_HTML = b"<!doctype html><script>top.document.title = 'owned'</script>"


def image(content: bytes, claimed: str = "image/png") -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": claimed, "data": data}}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


HUGE = 10_000_000
_OPEN = "one => one.querySelectorAll('button').forEach(b => /Show more|^Thinking/.test(b.textContent) && b.click())"
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
# What could become more than text where text is set out: Markdown, terminal output, diffs.
SET_OUT = [
    f"# {_IMG}\n\n[a](javascript:document.title='owned') <http://example.com/auto>\n\n"
    "![p](http://example.com/p.png) ![d](data:image/svg+xml;base64,PHN2Zy8+) [ref]\n\n[ref]: http://example.com/ref\n\n"
    "| <b>a</b> | b |\n| --- | --- |\n| <script>document.title='owned'</script> | [x](http://example.com/t) |\n\n"
    "```html\n<script>document.title='owned'</script>\n```\n\n- <iframe src='http://example.com'></iframe>\n"
    + "> " * 400
    + "deep\n\n"
    + "[" * 3000
    + "*a **" * 2000,
    "\x1b]8;;http://example.com/\x07click\x1b]8;;\x07 \x1b]0;owned\x07 \x1b[31;1m"
    f"{_IMG}\x1b[0m "
    "\x1b[38;2;999;0;0mwild \x1b[48;5;777m\x1b[38;5mx \x1b[2Jerased \x1b[8mconcealed \x1b[38;2;1;2;3;4:5;url(x)mend",
    "@@ -1,2 +1,2 @@\n-<script>document.title = 'owned'</script>\n"
    f"+{_IMG}\n \u202eflipped\n"
    "*** Begin Patch\n+<svg onload=\"document.title='owned'\">\n*** End Patch",
]
IMAGES = [
    image(_SVG),
    image(_SVG, "image/svg+xml"),
    image(_HTML),
    image_url("data:image/svg+xml;base64," + base64.b64encode(_SVG).decode()),
    image_url("http://example.com/pixel.png"),
    image_url("javascript:document.title='owned'"),
    image(png()),
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
            _record_set_out(rollout)
            rollout.finish(reward=1.0, reward_terms={"<b>term</b>": 1.0})
    with page_over(run) as address:
        yield address


def _record_set_out(rollout: Any) -> None:
    """A session in which texts stand wherever the page sets them out, with images that are none."""
    talk = Conversation(rollout.session(tools=[{"name": "<b>t</b>", "description": SET_OUT[0]}]), count(1.0, 3.0))
    talk.turn([{"role": "user", "content": [{"type": "text", "text": SET_OUT[0]}, *IMAGES]}], says("looking"))
    for number, text in enumerate(SET_OUT):
        calls = [
            call("Bash", 10 * number, command=text, description=text),
            call("Edit", 10 * number + 1, file_path="/x.html", old_string=text, new_string=text + "<b>"),
            call("Write", 10 * number + 2, file_path="/x.svg", content=text),
            call("Task", 10 * number + 3, prompt=text, todos=[{"content": text, "status": text}]),
            call("TodoWrite", 10 * number + 4, todos=[{"content": text, "status": "done"}]),
        ]
        talk.turn([result(10 * number, text)], says(text, *calls, thinking=text), extra={"ignored_params": [text]})


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
    _check_inert(page)
    links = page.locator("a[href]").evaluate_all("all => all.map(one => one.href)")
    assert all(link.startswith(address) for link in links)


def _check_inert(page: Page) -> None:
    assert page.locator("main iframe, main object, main script, main embed, main b:has-text('hostile')").count() == 0
    assert page.locator("main img[src*='example.com'], main img[src*='svg'], main img:not([src])").count() == 0
    assert page.locator("main [onerror], main [onload], main svg script").count() == 0
    assert page.title() not in ("owned", "1")


def test_texts_that_are_set_out_stay_texts(page: Page, address: str) -> None:
    name = ask(address, "/api/runs")["runs"][0]["r"]
    row = ask(address, f"/api/{name}/rollouts")["rows"][0]
    sessions = ask(address, f"/api/{name}/rollouts/{row['id']}")["sessions"]
    first, *rest = [turn["id"] for turn in sessions[1]["turns"]]
    page.goto(f"{places(address)['rollout']}/turn/{first}")
    said = page.locator("[data-turn]").first.locator(".message.user")
    expect(said.get_by_role("img")).to_have_count(1)  # the one picture that is a picture
    expect(said.locator("figcaption")).to_have_count(len(IMAGES))
    expect(said).to_contain_text("only PNG, JPEG, GIF and WebP are shown")
    expect(said).to_contain_text("it is at another address, and is not fetched: http://example.com/pixel.png")
    expect(said).to_contain_text("<script>document.title='owned'</script>")
    for number, turn in enumerate(rest):
        shown = page.locator(f"[data-turn='{turn}']")
        shown.scroll_into_view_if_needed()
        shown.evaluate(_OPEN)
        expect(shown).to_contain_text("document.title")
        if number == 1:
            expect(shown).to_contain_text("ESC[2J")
            expect(shown).to_contain_text("concealed")
        _check_inert(page)
        assert page.locator("main a[href*='example.com'], main a[href^='javascript']").count() == 0
    page.get_by_role("button", name="1 tool").click()
    expect(page.get_by_role("dialog")).to_contain_text("<b>t</b>")
    _check_inert(page)
    digest = next(one["digest"] for one in sessions[1]["turns"][0]["new_messages"] if one.get("images"))
    statuses = [
        page.request.get(f"{address}/api/{name}/rollouts/{row['id']}/messages/{digest}/images/{index}").status
        for index in range(len(IMAGES))
    ]
    assert statuses == [404] * (len(IMAGES) - 1) + [200]


def test_an_exported_page_runs_nothing_that_was_recorded(page: Page, address: str, tmp_path: Path) -> None:
    location = ask(address, "/api/runs")["runs"][0]["location"]
    assert rolltape_command(["view", "--static", str(tmp_path), location]) == 0
    [written] = tmp_path.glob("rollout-*.html")
    row = ask(address, f"/api/{ask(address, '/api/runs')['runs'][0]['r']}/rollouts")["rows"][0]
    page.goto(f"{written.as_uri()}#/run/rollout/{row['id']}/turn/{row['id']}.0.1.0")
    expect(page.locator("[data-turn] .message.user").get_by_role("img")).to_have_count(1)
    expect(page.locator("[data-turn]")).to_have_count(1 + len(SET_OUT))
    _check_inert(page)


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
