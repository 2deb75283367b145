"""Transcripts of coding agents: what a person reads, and where links into them land."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

import rolltape
from browser import browser_page
from coding_agents import record_coding_agents
from rolltape.cli import run as rolltape_command
from viewed import ask, page_over, serious_findings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("transcript") / "coding"
    return path, record_coding_agents(path)


@pytest.fixture(scope="module")
def address(run: tuple[Path, dict[str, str]]) -> Iterator[str]:
    with page_over(run[0]) as address:
        yield f"{address}/coding/rollout"


@pytest.fixture(scope="module")
def shared_page() -> Iterator[Page]:
    with browser_page(width=1440, height=900) as page:
        yield page


@pytest.fixture
def page(shared_page: Page) -> Iterator[Page]:
    problems: list[str] = []
    note = lambda said: problems.append(said.text) if said.type in ("error", "warning") else None  # noqa: E731
    shared_page.on("console", note)
    yield shared_page
    shared_page.remove_listener("console", note)
    assert problems == []


@pytest.fixture(scope="module")
def ids(run: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return run[1]


# The match that one is at is marked, and within the view.
_MARKED_IN_VIEW = """text => {
  const [range] = CSS.highlights.get("found-here") ?? [];
  const top = range?.getBoundingClientRect().top ?? -1;
  return range?.toString() === text && top > 80 && top < innerHeight - 20;
}"""


def turn(page: Page, number: int) -> Locator:
    return page.get_by_role("region", name=f"Turn {number}", exact=True)


def lands_at_the_top(page: Page, target: Locator) -> None:
    """A place comes to rest below the bar that stays in view."""
    target.wait_for()
    page.wait_for_function(
        """one => {
          const bar = document.querySelector("[data-bar]").getBoundingClientRect().bottom;
          return Math.abs(one.getBoundingClientRect().top - bar) < 12;
        }""",
        arg=target.element_handle(),
    )


def test_messages_are_set_out_to_be_read(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}/{ids['claude']}")
    first = turn(page, 0)
    expect(first.locator(".message.user strong")).to_have_text("no")
    expect(first.locator(".message.user code")).to_have_text("parse_date")
    picture = first.get_by_role("img", name="Image 1 of this message")
    expect(picture).to_be_visible()
    assert picture.evaluate("one => one.decode().then(() => [one.naturalWidth, one.naturalHeight])") == [96, 48]
    second = turn(page, 3)
    expect(second.locator(".list li")).to_have_text(
        [re.compile("Find the callers"), re.compile("Fix parse_date"), re.compile("Run the tests")]
    )
    expect(second.locator(".command")).to_contain_text("python -m pytest -q \\\n  tests/test_dates.py")
    second.get_by_text("2 parameters not applied").click()
    expect(second.get_by_text("top_k: not supported by this engine")).to_be_visible()
    third = turn(page, 4)
    expect(third.locator(".hl-keyword").first).to_have_text("import")  # the highlighter came, and knows Python
    expect(third.locator(".numbered").nth(6)).to_have_text("7def parse_date(text: str) -> date:\n")
    red = third.get_by_text("FAILED", exact=True)
    assert red.evaluate("one => getComputedStyle(one).color") != third.evaluate("one => getComputedStyle(one).color")
    assert "\\u001b" not in third.inner_text()
    expect(third.locator(".message.tool.error .who")).to_contain_text("Bash")
    expect(third.locator(".line.del")).to_have_text("-    year, month, day = _ISO.match(text).groups()\n")
    expect(third.locator(".line.add")).to_have_count(4)
    expect(third.locator(".reasoning")).not_to_contain_text("So I check for it first.")
    third.get_by_role("button", name="Thinking").click()
    expect(third.locator(".reasoning")).to_contain_text("So I check for it first.")
    expect(turn(page, 5)).to_contain_text("Request refused, 429: too many requests in flight")


def test_markdown_tables_diffs_and_formulas_and_the_text_as_it_was(
    page: Page, address: str, ids: dict[str, str]
) -> None:
    page.goto(f"{address}/{ids['claude']}/turn/7")
    reply = turn(page, 7).locator(".message.assistant")
    expect(reply.get_by_role("heading")).to_have_text("What changed")
    expect(reply.locator("th")).to_have_text(["file", "change", "tests"])
    expect(reply.locator("td").nth(5)).to_have_css("text-align", "right")
    expect(reply.locator("li")).to_have_count(2)
    expect(reply).to_contain_text("$O(n)$ in the length of the text: $$T(n) = c \\cdot n$$")
    expect(reply).to_contain_text("the format (https://example.com/iso8601)")
    assert reply.locator("a:not(.tools a), img").count() == 0
    output = turn(page, 7).locator(".message.tool")
    expect(output.locator(".line.add")).to_have_count(4)
    expect(output.locator(".line.none").first).to_have_text("On branch main, nothing staged\n")  # after its last hunk
    cut = turn(page, 8)
    expect(cut.get_by_text("cut off at the length limit")).to_be_visible()
    assert "inset" in cut.evaluate("one => getComputedStyle(one).boxShadow")
    page.get_by_role("group", name="Transcript").get_by_role("button", name="Plain text").click()
    expect(reply).to_contain_text("## What changed")
    expect(reply).to_contain_text("| :--- | :---: | ---: |")
    page.reload()
    expect(reply).to_contain_text("## What changed")  # it is remembered
    page.get_by_role("group", name="Transcript").get_by_role("button", name="Plain text").click()
    expect(reply).not_to_contain_text("## What changed")


def test_calls_of_other_agents(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}/{ids['codex']}")
    expect(turn(page, 0).locator(".command")).to_contain_text("sed -n 1,20p src/dates.py | cat -A")
    expect(turn(page, 0)).not_to_contain_text("-lc")
    expect(turn(page, 1).locator(".list li").first).to_contain_text("Patch the parser")
    expect(turn(page, 1).locator(".message.tool")).to_contain_text('"exit_code": 0')
    expect(turn(page, 2).locator(".line.add")).to_have_count(2)
    expect(turn(page, 3)).to_contain_text("arguments are not a JSON object")
    assert serious_findings(page) == []


def test_long_output_is_folded_in_the_middle_and_searched_there(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}/{ids['claude']}/turn/6")
    log = turn(page, 6).locator(".message.tool").nth(1)
    expect(log).to_contain_text("0000 compiled module_0.o")
    expect(log).to_contain_text("0899 compiled module_899.o")
    expect(log).not_to_contain_text("module_500.o")
    log.get_by_role("searchbox").fill("NEEDLE")
    expect(log.locator(".found")).to_contain_text("1 line")
    expect(log.locator(".hit")).to_have_text("501ERROR worker 7: needle-in-the-log, retrying")
    log.get_by_role("button", name="Show more").click()
    expect(log).to_contain_text("0600 compiled module_600.o")


def test_a_text_that_has_not_come_whole_shows_no_end_and_counts_no_lines(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "make", "arguments": "{}"}}
    log = "".join(f"{number} compiled\n" for number in range(30_000))
    asked = {"role": "user", "content": "Build it."}
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.session().record_turn(
            prompt_messages=[
                asked,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": log},
            ],
            reply={"role": "assistant", "content": log},
            finish="stop",
            token_faithful=False,
        )
        rollout.finish(reward=1.0)
    with page_over(tmp_path / "run") as address, browser_page(width=1440, height=900) as page:
        page.goto(f"{address}/run/rollout/{rollout.id}")
        output, reply = page.locator(".message.tool"), page.locator(".message.assistant").last
        expect(output.locator(".fold")).to_contain_text("Show more 439 k characters hidden")
        expect(output).to_contain_text("15 compiled")
        assert output.inner_text().count("compiled") == 16
        expect(reply.get_by_role("button", name=re.compile("^Show more"))).to_have_text("Show more 438 k characters")
        output.get_by_role("searchbox").focus()
        expect(output).to_contain_text("29999 compiled")
        expect(output.locator(".fold")).to_contain_text("29,976 lines, 439 k characters hidden")


def test_a_sub_agent_is_read_beside_the_conversation_that_called_it(
    page: Page, address: str, ids: dict[str, str]
) -> None:
    page.goto(f"{address}/{ids['claude']}")
    turn(page, 0).get_by_role("button", name="Sub-agent").click()
    beside = page.get_by_role("complementary", name="Sub-agent")
    expect(beside.locator("[data-turn] > header > a")).to_have_text(["turn 1", "turn 2"])
    expect(beside).to_contain_text("Two callers: src/report.py:12 and :40.")
    expect(page.locator(".talk [data-turn]").first).to_contain_text("I'll look for the callers first.")
    assert serious_findings(page) == []
    page.reload()
    expect(beside).to_be_visible()
    beside.get_by_role("button", name="Close").click()
    expect(page.get_by_role("complementary", name="Facts")).to_be_visible()


def test_the_tools_are_those_that_the_model_was_told_of(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}/{ids['claude']}")
    page.get_by_role("button", name="4 tools").click()
    tools = page.get_by_role("dialog")
    expect(tools.get_by_role("heading", level=3)).to_have_text(["Bash", "Read", "Edit", "TodoWrite"])
    expect(tools).to_contain_text("What it does, in five to ten words.")
    page.keyboard.press("Escape")
    expect(tools).to_have_count(0)


@pytest.mark.parametrize("number", [0, 3, 40, 63])
def test_a_link_to_a_turn_lands_there(page: Page, address: str, ids: dict[str, str], number: int) -> None:
    page.goto("about:blank")
    page.goto(f"{address}/{ids['long'][:8]}/turn/{number}")
    if number:
        lands_at_the_top(page, turn(page, number))
    expect(page.locator("[data-bar]")).to_contain_text(f"Turn {number} {number + 1} of 72")


def test_a_link_to_a_message_opens_what_is_folded_in_it(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}/{ids['long']}/turn/41")
    reply = turn(page, 41).locator(".message.assistant")
    expect(reply.get_by_role("button", name="Thinking")).to_be_visible()
    reply.hover()
    link = reply.get_by_role("link", name="link to this message").get_attribute("href")
    assert link is not None
    page.goto("about:blank")
    page.goto(address.removesuffix("/coding/rollout") + link)
    lands_at_the_top(page, reply)
    expect(reply.get_by_role("button", name="Fold the thinking")).to_be_visible()
    page.get_by_role("button", name="Next turn").click()
    lands_at_the_top(page, turn(page, 42))


def test_a_search_shows_the_line_that_it_found_and_leads_to_it(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}s?q=%22needle+in%22+worker")
    row = page.locator(".row", has_text="fix-dates/claude")
    expect(row.locator(".line")).to_contain_text("ERROR worker 7: needle-in-the-log, retrying")
    expect(row.locator("mark")).to_have_text(["worker", "needle-in"])
    assert serious_findings(page) == []
    row.get_by_role("link").click()
    log = turn(page, 6).locator(".message.tool").nth(1)
    expect(log).to_contain_text("needle-in-the-log")  # which was folded
    page.wait_for_function(_MARKED_IN_VIEW, arg="worker")
    expect(page.locator("[data-bar]")).to_contain_text("1 message")
    page.keyboard.press("n")
    page.wait_for_function(_MARKED_IN_VIEW, arg="needle-in")
    page.get_by_role("searchbox", name="Find in this transcript").fill("I check for it")
    page.keyboard.press("Enter")
    page.wait_for_function(_MARKED_IN_VIEW, arg="I check for it")
    expect(turn(page, 4).get_by_role("button", name="Fold the thinking")).to_be_visible()
    page.get_by_role("searchbox", name="Find in this transcript").fill("You search code")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="but in turn 1").click()  # of the sub-agent
    page.wait_for_function(_MARKED_IN_VIEW, arg="You search code")
    page.get_by_role("searchbox", name="Find in this transcript").fill("nowhere at all")
    page.keyboard.press("Enter")
    expect(page.locator("[data-bar]")).to_contain_text("not found")


def test_a_search_leads_into_the_conversation_that_has_it(page: Page, address: str, ids: dict[str, str]) -> None:
    page.goto(f"{address}/{ids['claude']}?q=%22search+code%22")  # which only the sub-agent was told
    page.wait_for_function(_MARKED_IN_VIEW, arg="search code")
    expect(page.locator("[data-bar]")).to_contain_text("1 of 2")


def test_an_image_is_served_as_what_its_bytes_are(page: Page, address: str, ids: dict[str, str]) -> None:
    base = address.removesuffix("/coding/rollout")
    answer = ask(base, f"/api/coding/rollouts/{ids['claude']}")
    [message] = [one for one in answer["sessions"][0]["turns"][0]["new_messages"] if one.get("images")]
    assert message["images"] == [{"type": "image/png", "bytes": 166, "width": 96, "height": 48}]
    path = f"{base}/api/coding/rollouts/{ids['claude']}/messages/{message['digest']}/images"
    served = page.request.get(f"{path}/0")
    assert served.headers["content-type"] == "image/png"
    assert served.headers["x-content-type-options"] == "nosniff"
    assert page.request.get(f"{path}/1").status == 404


def test_an_exported_transcript_shows_its_images_and_code(
    page: Page, run: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    path, ids = run
    assert rolltape_command(["view", "--static", str(tmp_path), str(path), ids["claude"]]) == 0
    page.goto((tmp_path / f"rollout-{ids['claude']}.html").as_uri())
    picture = turn(page, 0).get_by_role("img", name="Image 1 of this message")
    assert picture.evaluate("one => one.decode().then(() => one.naturalWidth)") == 96
    expect(turn(page, 4).locator(".hl-keyword").first).to_have_text("import")
    expect(turn(page, 4).locator(".line.add")).to_have_count(4)
