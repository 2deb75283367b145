"""Back, forward, reload and focus: the page is where it was left."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from taped import record_session
from viewed import ask, page_over

_ARRIVES = "top => Math.abs(scrollY - top) < 2"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("history") / "exp"
    with rolltape.open(run, name="exp") as tape:
        for index in range(6):
            with tape.rollout(task_id=f"task-{index // 3}", attempt=index % 3, step=index // 2) as rollout:
                record_session(rollout, turns=20)
                rollout.finish(reward=float(index))
    with page_over(run) as address:
        yield address


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page(width=1200, height=600) as page:
        yield page


def test_back_leads_to_where_the_page_was_left_and_so_does_a_reload(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    bars = page.get_by_role("list", name="The same in all rollouts").get_by_role("link", name="finished")
    bars.scroll_into_view_if_needed()
    left = page.evaluate("scrollY")
    assert left > 0
    bars.click()
    page.locator(".row a").first.wait_for()
    assert page.evaluate("scrollY") == 0
    page.go_back()
    page.wait_for_function(_ARRIVES, arg=left)
    page.reload()
    page.wait_for_function(_ARRIVES, arg=left)
    page.go_forward()
    page.locator(".row a").first.wait_for()


def test_a_step_can_be_looked_at_alone_and_left_again(page: Page, address: str) -> None:
    page.goto(f"{address}/exp?step=1")
    expect(page.locator(".figures")).to_contain_text("2.5std")
    choice = page.get_by_role("combobox")
    expect(choice).to_have_value("1")
    expect(choice.locator("option")).to_have_text(["all 3 steps", "step 0", "step 1", "step 2"])
    choice.select_option("2")
    expect(page.locator(".figures")).to_contain_text("4.5std")
    choice.select_option("")
    page.wait_for_url(f"{address}/exp")
    expect(page.locator(".figures")).to_contain_text("+4 since step 0")
    page.go_back()
    expect(page.locator(".figures")).to_contain_text("4.5std")


def test_a_mean_says_how_sure_it_is_and_of_how_many(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    chart = page.get_by_role("figure", name="Mean reward by step")
    expect(chart).to_contain_text("step 2, 2 rewarded")
    expect(chart).to_contain_text("mean 4.5")
    expect(chart).to_contain_text("± 2 standard errors 3.793 to 5")  # two rewards, 4 and 5; never more than was given


def test_after_a_change_of_view_the_tab_key_goes_on_in_it(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    page.locator(".figures").wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.get_by_role("link", name="Rollouts", exact=True).press("Enter")
    page.locator(".row a").first.wait_for()
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null && document.activeElement !== document.body")


def test_rows_are_in_the_document_as_they_are_on_the_screen(page: Page, address: str) -> None:
    rows = [ask(address, "/api/exp/rollouts")["rows"][0] | {"id": f"{n:032x}", "task": f"t{n}"} for n in range(400)]

    def answer(offset: int) -> dict[str, object]:
        return {"total": 400, "matched": 400, "rows": rows[offset : offset + 200], "snapshot": 1}

    page.route("**/api/exp/rollouts?*offset=0*", lambda route: route.fulfill(json=answer(0)))
    page.route("**/api/exp/rollouts?*offset=200*", lambda route: route.fulfill(json=answer(200)))
    page.goto(f"{address}/exp/rollouts")
    page.get_by_role("link", name="t0", exact=True).wait_for()
    made = page.locator(".row").first.element_handle()
    scroller = page.get_by_role("region", name="Rollouts")
    scroller.evaluate("all => { all.scrollTop = 32 * 205 }")
    expect(page.get_by_role("link", name="t205", exact=True)).to_be_visible()
    page.wait_for_function(
        "() => { const links = [...document.querySelectorAll('.row a')];"
        " const names = links.map(link => Number(link.textContent.trim().slice(1)));"
        " return names.length > 10 && names.every((name, at) => at === 0 || name === names[at - 1] + 1) }"
    )
    # Rows are filled anew, not made anew: this is what keeps scrolling smooth.
    assert made is not None
    assert made.evaluate("row => row.isConnected")
