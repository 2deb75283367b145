"""Two runs compared in a real browser, task by task and rollout by rollout; the answers are known."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

import rolltape
from compared_runs import record_compared
from viewed import ask, page_over, serious_findings

_HOSTILE = "<img src=x onerror=alert(1)><script>document.title = 'owned'</script>"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    record_compared(folder)
    with rolltape.open(folder / "hostile", name="<b>hostile</b>") as tape:
        for attempt, word in enumerate(("one", "two")):
            with tape.rollout(task_id=_HOSTILE, attempt=attempt, source=_HOSTILE) as rollout:
                call = {"name": "<u>f</u>", "arguments": f'{{"a": "<s>{word}"}}'}
                rollout.session().record_turn(
                    prompt_messages=[{"role": "user", "content": _HOSTILE}],
                    prompt_ids=[1],
                    sampled_ids=[2],
                    logprobs=[-0.5],
                    reply={
                        "role": "assistant",
                        "content": f"{_HOSTILE} \u202e {word}",
                        "reasoning_content": f"{_HOSTILE} thought {word}",
                        "tool_calls": [{"id": "1", "type": "function", "function": call}],
                    },
                    finish="stop",
                )
                rollout.finish(reward=float(attempt), reward_terms={"<b>term</b>": 1.0})
    with page_over(folder / "base", folder / "tuned", folder / "hostile") as address:
        yield address


@pytest.fixture
def page(page: Page, address: str) -> Page:
    page.goto(address)
    return page


def _tasks(page: Page) -> list[str]:
    return page.locator("tbody tr td.task").all_inner_texts()


def _diff(address: str, task: str = "lost") -> str:
    (row,) = ask(address, f"/api/compare?a=base&b=tuned&name={task}")["rows"]
    return f"{address}/diff?a=base&a_rollout={row['a']['rollout']}&b=tuned&b_rollout={row['b']['rollout']}"


def test_from_the_list_of_runs_to_two_transcripts_side_by_side(page: Page, address: str) -> None:
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url(f"{address}/compare?a=base&b=tuned")
    result = page.get_by_role("region", name="Result")
    expect(result).to_contain_text(
        "B has the higher mean reward: +0.3958 over 12 tasks, 95% interval +0.1875 to +0.6041"
    )
    expect(result).to_contain_text("Sign test: p = 0.012, from 10 tasks up and 1 down.")
    expect(result.get_by_role("listitem")).to_have_text(
        ["better in B 10", "the same 1", "worse in B 1", "only in A 1", "only in B 1", "without it on one side 1"]
    )
    measures = page.get_by_role("region", name="Measures").locator("tbody tr")
    expect(measures).to_have_count(6)
    expect(measures.nth(3).locator("td")).to_have_text(
        ["correctterm", "0.3542", "0.75", "+0.3958", "+0.1875 to +0.6041", "0.0015"]
    )
    expect(page.locator("tbody tr td.task")).to_have_count(15)
    assert _tasks(page)[:2] == ["learned", "lost"]  # the largest change first
    result.get_by_role("button", name="worse in B").click()
    expect(page.locator("tbody tr td.task")).to_have_text(["lost"])
    expect(page.locator("tbody tr:has(td.task)")).to_contain_text("-0.5")
    page.get_by_role("link", name="side by side").click()
    page.wait_for_url(_diff(address))
    expect(page.locator(".pairrow.shared")).to_have_count(3)
    expect(page.locator(".pairrow:not(.shared) .cell.a mark")).to_have_text(["12", "12"])
    expect(page.locator(".pairrow:not(.shared) .cell.b mark")).to_have_text(["11", "11"])
    page.get_by_role("button", name="lines alike").first.click()
    expect(page.locator(".cell.a").first).to_contain_text("step 15 is done")
    # Another attempt of A found what B found.
    page.get_by_label("Attempt A").select_option(label="step 4, attempt 3: 0")
    expect(page.locator(".pairrow.shared")).to_have_count(5)
    expect(page.locator("header.title")).to_contain_text("all messages are the same")
    page.get_by_label("differences alone").check()
    expect(page.get_by_text("No message differs")).to_be_visible()


def test_an_address_holds_sides_measure_filter_and_order(page: Page, address: str) -> None:
    page.goto(f"{address}/compare?a=base&a_step=3&b=base&b_step=4")
    expect(page.get_by_label("Run A")).to_have_value("base")
    expect(page.get_by_role("region", name="Result")).to_contain_text(
        "B has the lower mean reward: -0.375 over 12 tasks"
    )
    page.get_by_role("button", name="sampled tokens").click()
    expect(page.get_by_role("region", name="Result")).to_contain_text("No difference")
    page.goto(f"{address}/compare?a=base&b=tuned&sort=difference&name=e")
    expect(page.locator("tbody tr td.task").first).to_have_text("better-00")
    page.get_by_role("columnheader", name="Difference").get_by_role("button").click()
    page.wait_for_url("**/compare?a=base&b=tuned&name=e")  # the next order is the page's own
    page.keyboard.press("s")
    page.wait_for_url("**/compare?a=tuned&b=base&name=e")
    expect(page.get_by_role("region", name="Result")).to_contain_text("B has the lower mean reward")
    page.get_by_label("Run B").select_option("tuned")
    expect(page.get_by_text("51 rollouts are on both sides")).to_be_visible()
    page.goto(f"{address}/base")
    page.get_by_role("link", name="Compare runs").click()
    page.wait_for_url(f"{address}/compare?a=base&b=tuned")
    page.goto(f"{address}/compare?a=base")
    expect(page.get_by_text("Choose two runs, or two parts of one")).to_be_visible()
    page.goto(f"{address}/compare?a=base&b=nothing")
    expect(page.get_by_text("no run 'nothing' is served here")).to_be_visible()


def test_any_two_rollouts_are_chosen_one_after_the_other(page: Page, address: str) -> None:
    (first,) = (row for row in ask(address, "/api/base/rollouts?task=always")["rows"] if row["attempt"] == 0)
    page.goto(f"{address}/base/rollout/{first['id']}")
    page.get_by_role("button", name="Compare with…").click()
    expect(page.get_by_label("Rollout to compare with")).to_contain_text(
        "Compare always, attempt 0 of base with another"
    )
    page.goto(f"{address}/tuned/rollouts?task=learned&sort=attempt")  # it is remembered
    page.get_by_role("button", name="Compare with always, attempt 0").first.click()
    page.wait_for_url(f"{address}/diff?a=base&a_rollout={first['id']}&b=tuned&b_rollout=*")
    expect(page.get_by_text("different tasks")).to_be_visible()
    expect(page.locator(".pairrow.shared")).to_have_count(3)  # system, tool and the last reply
    expect(page.locator(".cell.a mark")).to_have_text(["always", "always"])
    expect(page.locator(".cell.b mark")).to_have_text(["learned", "learned"])
    expect(page.get_by_label("Rollout to compare with")).to_have_count(0)
    page.keyboard.press("n")
    expect(page.locator(".pairrow.at")).to_have_attribute("data-row", "1")
    page.keyboard.press("s")
    expect(page.locator(".cell.b mark").first).to_have_text("always")


def test_hostile_texts_stay_texts(page: Page, address: str) -> None:
    name = next(run["r"] for run in ask(address, "/api/runs")["runs"] if "hostile" in run["name"])
    one, other = (row["id"] for row in ask(address, f"/api/{name}/rollouts")["rows"])
    for path, shown in (
        (f"/diff?a={name}&a_rollout={one}&b={name}&b_rollout={other}", ".cell.b"),
        (f"/compare?a={name}&b={name}", "td.task"),
    ):
        page.goto(address + path)
        expect(page.locator(shown).last).to_contain_text("<script>document.title")
        assert page.locator("main img, main script, main u, main s, main b:has-text('hostile')").count() == 0
        assert "owned" not in page.title()
    page.goto(f"{address}/diff?a={name}&a_rollout={one}&b={name}&b_rollout={other}")
    expect(page.locator(".cell.a mark")).to_have_text(["one", "one", "one"])
    expect(page.locator(".cell.a").get_by_title("right-to-left override")).to_be_visible()


@pytest.mark.parametrize("width", [1400, 1024, 390])
def test_both_pages_are_accessible_at_every_width(page: Page, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for path, shown in (("/compare?a=base&b=tuned", "td.task"), (_diff(address).removeprefix(address), ".pairrow")):
        page.goto(address + path)
        page.locator(shown).first.wait_for()
        assert serious_findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
