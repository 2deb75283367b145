"""Each view of the page, in a real browser over a recorded run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import ConsoleMessage, Page, expect

import rolltape
from browser import browser_page
from rolltape.demo import record_scripted
from taped import first_turn
from viewed import ask, page_over, serious_findings


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run: Path = tmp_path_factory.mktemp("page") / "demo"
    record_scripted(run)
    with page_over(run) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page(width=1400, height=900) as page:
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if _is_wrong(said) else None)
        yield page
        assert problems == []


def _is_wrong(said: ConsoleMessage) -> bool:
    # That an answer is missing is the business of the tests that ask for it.
    return said.type == "error" and not said.text.startswith("Failed to load resource")


@pytest.fixture
def page(browser: Page, address: str) -> Page:
    browser.set_viewport_size({"width": 1400, "height": 900})
    browser.goto(address)
    return browser


@pytest.fixture(scope="module")
def forked(address: str) -> str:
    rows = ask(address, "/api/demo/rollouts?sort=-forks")["rows"]
    return str(rows[0]["id"])


def test_runs_lead_to_a_run_and_its_figures(page: Page) -> None:
    page.get_by_role("link", name="demo", exact=True).click()
    page.get_by_role("heading", name="demo", exact=True).wait_for()
    figures = page.locator(".figures").inner_text()
    assert re.search(r"Mean reward\s+0\.5std", figures)
    assert re.search(r"Forks\s+4", figures)
    assert page.get_by_role("img", name=re.compile("trained .*, masked: abandoned .*")).count() == 1
    causes = page.get_by_role("list", name="Forks by cause").inner_text()
    assert {"retry", "sub agent", "compaction", "reply whitespace"} <= set(causes.split("\n"))


def test_a_bar_leads_to_the_rollouts_behind_it(page: Page, address: str) -> None:
    page.goto(f"{address}/demo")
    page.get_by_role("list", name="The same in all rollouts").get_by_role("link", name="finished").click()
    page.wait_for_url(f"{address}/demo/rollouts?status=finished")
    expect(page.get_by_role("row")).to_have_count(3)


def test_a_forks_cause_leads_to_the_rollouts_that_have_it(page: Page, address: str) -> None:
    page.goto(f"{address}/demo")
    page.get_by_role("list", name="Forks by cause").get_by_role("link", name="compaction").click()
    page.wait_for_url(f"{address}/demo/rollouts?cause=compaction")
    expect(page.locator(".row .reward")).to_have_text(["1"])
    expect(page.get_by_label("fork by", exact=True)).to_have_value("compaction")
    page.get_by_label("fork by", exact=True).select_option("")
    expect(page.locator(".row .reward")).to_have_count(2)


def test_whole_numbers_that_are_few_have_a_bar_each(page: Page, address: str) -> None:
    page.goto(f"{address}/demo")
    turns = page.get_by_role("figure", name="Turns per rollout")
    expect(turns.locator("figcaption span")).to_have_text([str(number) for number in range(1, 9)])
    expect(turns.locator(".n")).to_have_text(["1", "1"])


def test_the_table_sorts_filters_and_keeps_both_in_the_address(page: Page, address: str) -> None:
    page.goto(f"{address}/demo/rollouts")
    page.get_by_role("button", name="Reward").click()
    page.wait_for_url("**sort=-reward")
    rewards = page.locator(".row .reward")
    expect(rewards).to_have_text(["1", "0"])
    page.get_by_role("button", name="Reward").click()
    page.wait_for_url("**sort=reward")
    expect(rewards).to_have_text(["0", "1"])
    page.get_by_label("forks ≥").fill("1")
    page.keyboard.press("Enter")
    page.wait_for_url("**min_forks=1&sort=reward")
    page.get_by_text("1 of 2").wait_for()
    page.reload()
    page.get_by_text("1 of 2").wait_for()
    page.get_by_role("button", name="Remove the filter forks ≥ 1").click()
    expect(rewards).to_have_count(2)


def test_full_text_search_finds_rollouts_by_what_was_said(page: Page, address: str) -> None:
    page.goto(f"{address}/demo")
    page.keyboard.press("/")
    page.keyboard.type("cannot find")
    page.keyboard.press("Enter")
    page.get_by_text("1 of 2").wait_for()
    assert page.locator(".row .reward").all_inner_texts() == ["0"]


def test_a_group_shows_what_attempts_share_once_and_where_they_part(page: Page, address: str) -> None:
    group = ask(address, "/api/demo/rollouts")["rows"][0]["group"]
    page.goto(f"{address}/demo/group/{group}")
    page.locator(".cell").first.wait_for()
    assert page.locator(".attempt .reward").all_inner_texts() == ["1", "0"]
    assert page.locator(".cell", has_text="You are a coding agent.").count() == 1
    assert page.locator(".cell.above").count() == 1
    assert page.locator(".cell.below").count() == 1


def test_a_group_shows_what_was_said_before_a_compaction(page: Page, address: str) -> None:
    group = ask(address, "/api/demo/rollouts")["rows"][0]["group"]
    page.goto(f"{address}/demo/group/{group}")
    expect(page.locator(".cell.all")).to_have_count(2)
    expect(page.locator(".cell.all").nth(1)).to_contain_text("Fix the failing test in parser.py")
    compacted = page.locator(".cell", has_text="So far: parser.py fixed")
    expect(compacted).to_contain_text("compaction")
    expect(page.locator(".cell", has_text="All tests pass.")).to_have_count(1)


def test_a_rollout_shows_its_tree_and_the_transcript_of_a_branch(page: Page, address: str, forked: str) -> None:
    page.goto(f"{address}/demo/rollout/{forked}")
    page.locator("[data-turn]").first.wait_for()
    causes = page.locator(".cause").all_inner_texts()
    assert causes == ["retry", "sub agent", "reply whitespace", "compaction"]
    # The abandoned reply and the helper's answer are beside the branch, not on it.
    turns = page.locator("[data-turn] > header > a").all_inner_texts()
    assert turns == ["turn 0", "turn 2", "turn 4", "turn 5", "turn 6", "turn 7"]
    assert page.get_by_text("2 messages sent again, 1 changed").count() == 1
    page.get_by_role("button", name=re.compile("Line 12 reads")).click()
    page.wait_for_url(re.compile(r"/turn/.*\.3$"))
    assert page.locator("[data-turn] > header > a").all_inner_texts() == ["turn 3"]


def test_a_click_on_a_fork_shows_the_difference_in_text_and_in_tokens(page: Page, address: str, forked: str) -> None:
    page.goto(f"{address}/demo/rollout/{forked}")
    page.get_by_role("button", name="reply whitespace", exact=True).click()
    dialog = page.get_by_role("dialog")
    assert "turn 6 departs from turn 5" in dialog.inner_text()
    assert "after 20 characters that agree" in dialog.inner_text()
    assert dialog.locator(".tokens").first.locator("li").first.inner_text().split("\n") == ["·", "7"]
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")


def test_tokens_say_everything_that_is_known_of_them(page: Page, address: str, forked: str) -> None:
    page.goto(f"{address}/demo/rollout/{forked}/tokens/1")
    page.locator(".t").first.wait_for()
    page.get_by_role("button", name="Trained or masked").click()
    page.wait_for_url("**by=trained")
    assert page.locator(".t.f-trained").count() > 0
    page.locator(".t.f-trained").first.hover()
    inspector = page.locator(".inspector").inner_text()
    for word in ("logprob", "probability", "version", "fate", "trained", "from", "reply, message 2"):
        assert word in inspector
    assert "No trainer has exported a token record of this" in page.locator("aside").inner_text()


def test_the_worst_token_is_one_key_away_and_leads_to_its_turn(page: Page, address: str, forked: str) -> None:
    page.goto(f"{address}/demo/rollout/{forked}/tokens/1")
    page.locator(".t").first.wait_for()
    page.keyboard.press("w")
    page.wait_for_url(re.compile(r"/tokens/1/\d+$"))
    chosen = int(page.url.rsplit("/", 1)[1])
    assert page.locator(f'.t.chosen[data-token="{chosen}"]').count() == 1
    listed = page.locator("aside ol li").first.inner_text().split("\n")
    assert str(chosen) in listed
    page.keyboard.press("Enter")
    page.wait_for_url("**/turn/**")


def test_one_rollout_under_two_policies(page: Page, address: str, forked: str) -> None:
    page.goto(f"{address}/demo/compare/{forked}?left=exact&right=keep-head")
    page.get_by_role("heading", name=re.compile("turns? differ")).wait_for()
    sums = page.locator(".sum").all_inner_texts()
    assert sums[0].startswith("4 samples")
    assert sums[1].startswith("3 samples")
    page.get_by_label("Policy on the right").select_option("slime")
    page.wait_for_url("**right=slime")


def test_what_is_not_there_says_so(page: Page, address: str) -> None:
    page.goto(f"{address}/demo/no/such/page")
    page.get_by_role("alert").get_by_text("there is no such page").wait_for()
    sample = f"{ask(address, '/api/demo/rollouts')['rows'][0]['id']}/tokens/sample/other.0.0.1@exact-1/3"
    page.goto(f"{address}/demo/rollout/{sample}")
    page.get_by_role("alert").get_by_text("no sample that ends with turn other.0.0.1").wait_for()
    for place in ("elsewhere", "demo/rollout/nothing", "demo/group/nothing", "demo/rollout/nothing/tokens/0"):
        page.goto(f"{address}/{place}")
        page.get_by_role("alert").get_by_role("heading", name="Not there").wait_for()


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_no_view_has_a_serious_accessibility_finding(page: Page, address: str, forked: str, colors: str) -> None:
    page.emulate_media(color_scheme="dark" if colors == "dark" else "light")
    group = ask(address, "/api/demo/rollouts")["rows"][0]["group"]
    places = {
        "": ".name",
        "demo": ".figures",
        "demo/rollouts": ".row a",
        f"demo/group/{group}": ".cell",
        f"demo/rollout/{forked}": "[data-turn]",
        f"demo/rollout/{forked}/tokens/1/20": ".t.chosen",
        f"demo/rollout/{forked}/tokens/1?by=trained": ".t",
        f"demo/compare/{forked}": ".strips",
        "demo/rollouts?q=nobody+said+this": ".empty",
        "demo/rollout/nothing": "[role=alert]",
    }
    found = {}
    for place, there in places.items():
        page.goto(f"{address}/{place}")
        page.locator(there).first.wait_for()
        found[place] = serious_findings(page)
    page.emulate_media(color_scheme="light")
    assert {place: one for place, one in found.items() if one} == {}


def test_colors_follow_the_system_until_one_is_chosen(page: Page, address: str) -> None:
    def dark() -> bool:
        paper = str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        return sum(map(int, re.findall(r"\d+", paper)[:3])) < 150

    page.emulate_media(color_scheme="dark")
    assert dark()
    page.get_by_role("button", name="Colors: system; change").click()
    assert not dark()
    page.reload()
    assert not dark()
    page.get_by_role("button", name="Colors: light; change").click()
    page.emulate_media(color_scheme="light")
    assert dark()
    page.get_by_role("button", name="Colors: dark; change").click()
    assert not dark()


def test_a_printed_page_has_no_buttons(page: Page, address: str, forked: str) -> None:
    page.goto(f"{address}/demo/rollout/{forked}")
    page.locator("[data-turn]").first.wait_for()
    page.emulate_media(media="print")
    assert not page.get_by_role("banner").is_visible()
    assert not page.get_by_role("navigation", name="This rollout").is_visible()
    assert page.locator("[data-turn]").first.is_visible()
    page.emulate_media(media="screen")


def test_nothing_is_wider_than_a_narrow_window(page: Page, address: str, forked: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    group = ask(address, "/api/demo/rollouts")["rows"][0]["group"]
    for place in ("", "demo", "demo/rollouts", f"demo/group/{group}", f"demo/rollout/{forked}",
                  f"demo/rollout/{forked}/tokens/1", f"demo/compare/{forked}"):  # fmt: skip
        page.goto(f"{address}/{place}")
        page.locator("main h1").wait_for()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, place
    page.goto(f"{address}/demo/rollout/{forked}")
    page.get_by_role("button", name="Turns", exact=True).click()
    assert page.locator(".cause").first.is_visible()
    assert not page.locator("[data-turn]").first.is_visible()


def test_an_earlier_try_opens_as_itself_wherever_it_is_listed(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        for reward in (None, 1.0):
            rollout = tape.rollout(task_id="t", new_try=True)
            first_turn(rollout.session())
            if reward is None:
                rollout.fail("it broke")
            else:
                rollout.finish(reward=reward)
    with page_over(tmp_path / "exp") as address, browser_page(width=1400, height=900) as page:
        own = f"{address}/exp/rollout/{rollout.id}"
        page.goto(f"{address}/exp/rollouts?sort=reward")
        links = page.locator(".row a")
        expect(links).to_have_count(2)
        shown = [one.get_attribute("href") for one in links.all()]
        assert shown == [f"{own.removeprefix(address)}?try={at}" for at in (1, 0)]
        links.last.click()
        expect(page.locator("header.title")).to_contain_text("it broke")
        page.get_by_role("button", name="Compare with…").click()
        page.goto(f"{own}?try=1")
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.locator(".head.a")).to_contain_text("failed")
        expect(page.locator(".head.b .reward")).to_have_text("1")
        page.goto(f"{address}/exp")
        page.get_by_role("link", name="attempt 0: failed").click()
        expect(page.locator("header.title")).to_contain_text("it broke")
