"""Why reward changed, charts over steps and odd rollouts in a real browser, over a run whose answers are known."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from stepped_runs import record_stepped
from viewed import page_over, serious_findings


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run: Path = record_stepped(tmp_path_factory.mktemp("steps") / "exp")
    with page_over(run) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page(width=1440, height=900) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.set_viewport_size({"width": 1440, "height": 900})
    return browser


def test_a_step_says_which_task_made_its_reward_fall_and_leads_to_its_rollouts(page: Page, address: str) -> None:
    page.goto(f"{address}/exp?step=1")
    panel = page.get_by_role("region", name="Why reward changed")
    expect(panel).to_contain_text("Mean reward is lower by 0.25")
    expect(panel).to_contain_text("may be chance")
    expect(panel).to_contain_text("4 tasks were attempted at both steps: 0 rose, 1 fell, 3 stayed")
    first = panel.get_by_role("table", name="Change by task").locator("tbody tr").first
    expect(first).to_contain_text("parse")
    expect(first.locator("b")).to_have_text("-0.25")
    expect(panel.get_by_role("table", name="Change by stop reason")).to_contain_text("max tokens")
    expect(panel).to_contain_text("they add up to the reward")
    panel.get_by_role("button", name="step 2").click()
    expect(panel).to_contain_text("No task was attempted at both steps (2 at step 2, 4 at step 1)")
    panel.get_by_role("button", name="step 0").click()
    first.get_by_role("link", name="parse").click()
    page.wait_for_url(f"{address}/exp/rollouts?step=1&task=parse&source=made-up")
    expect(page.locator(".row .reward")).to_have_text(["0"] * 4)


def test_charts_over_steps_say_what_the_rollouts_did(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    expect(page.get_by_role("figure", name="Truncations and tool errors by step")).to_contain_text(
        "rollouts truncated 0%"
    )
    page.goto(f"{address}/exp?step=1")
    cut = page.get_by_role("figure", name="Truncations and tool errors by step")
    expect(cut).to_contain_text("rollouts truncated 31.25%")
    expect(cut).to_contain_text("rollouts with tool errors 25%")
    expect(page.get_by_role("figure", name="How rollouts ended by step")).to_contain_text("max tokens 25%")
    expect(page.get_by_role("figure", name="Sampled tokens over steps")).to_contain_text("mean 188")
    # What is the same in all rollouts has no chart.
    expect(page.get_by_role("list", name="The same in all rollouts")).to_contain_text("finished")
    expect(page.get_by_role("list", name="Rollouts by status")).to_have_count(0)


def test_the_runs_page_counts_what_looks_like_reward_hacking_and_leads_there(page: Page, address: str) -> None:
    page.goto(f"{address}/exp")
    odd = page.get_by_role("list", name="Rollouts worth a look").get_by_role("link")
    expect(odd).to_have_text(
        ["1 rewarded and truncated", "1 rewarded and very short", "1 edited tests", "1 reward far from its group"]
    )
    for index, task in enumerate(["dates", "dates", "dates", "hard-2"]):
        page.goto(f"{address}/exp")
        odd.nth(index).click()
        expect(page.locator(".row .reward")).to_have_text(["1"])
        expect(page.locator(".row a")).to_have_text([task])


def test_presets_and_own_filters_narrow_the_table_and_stay(page: Page, address: str) -> None:
    page.goto(f"{address}/exp/rollouts")
    presets = page.get_by_role("list", name="Presets")
    presets.get_by_role("link", name="rewarded and truncated 1").click()
    page.wait_for_url(f"{address}/exp/rollouts?rewarded=yes&truncated=yes")
    expect(page.locator(".row .reward")).to_have_text(["1"])
    presets.get_by_role("button", name="save this filter").click()
    presets.get_by_label("Name of the filter").fill("cut but paid")
    page.keyboard.press("Enter")
    presets.get_by_role("link", name="rewarded and truncated 1").click()  # takes its filters out again
    page.wait_for_url(f"{address}/exp/rollouts")
    page.reload()
    presets.get_by_role("link", name="cut but paid").click()
    page.wait_for_url(f"{address}/exp/rollouts?rewarded=yes&truncated=yes")
    presets.get_by_role("button", name="Forget the filter cut but paid").click()
    expect(presets.get_by_role("link", name="cut but paid")).to_have_count(0)
    # Within a step a preset counts that step alone.
    page.goto(f"{address}/exp/rollouts?step=2")
    expect(presets.get_by_role("link", name="rewarded and truncated 0")).to_be_visible()


def test_terms_are_columns_and_every_column_sorts(page: Page, address: str) -> None:
    page.goto(f"{address}/exp/rollouts?step=1")
    expect(page.locator(".row .reward")).to_have_count(16)
    headers = page.get_by_role("columnheader")
    assert headers.all_inner_texts()[:5] == ["Reward", "correct", "format", "length", "Task"]
    assert headers.count() == headers.get_by_role("button").count()
    page.get_by_role("button", name="format").click()
    page.wait_for_url(f"{address}/exp/rollouts?step=1&sort=-term.format")
    expect(page.get_by_role("columnheader", name="format")).to_have_attribute("aria-sort", "descending")
    expect(page.locator(".row").first.get_by_role("cell").nth(2)).to_have_text("0.1")
    for name in ("Stop reason", "Environment", "Tool errors", "Trained", "Took", "Id"):
        page.get_by_role("columnheader", name=name, exact=True).get_by_role("button").click()
        expect(page.get_by_role("columnheader", name=name)).not_to_have_attribute("aria-sort", "none")
        expect(page.locator(".row .reward")).to_have_count(16)
    zero, one = (
        page.locator(f".row .reward span:text-is('{text}')").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for text in ("0", "1")
    )
    assert zero != one


def test_the_task_filter_takes_a_part_of_a_name_and_completes_it(page: Page, address: str) -> None:
    page.goto(f"{address}/exp/rollouts")
    task = page.get_by_label("task", exact=True)
    task.press_sequentially("HARD")
    expect(page.locator("#rolltape-tasks option")).to_have_count(2)
    task.press("Enter")
    page.wait_for_url(f"{address}/exp/rollouts?task_like=HARD")
    expect(page.locator(".row .reward")).to_have_count(8)
    task.fill("hard-2")
    expect(page.locator("#rolltape-tasks option")).to_have_count(1)
    task.press("Enter")
    page.wait_for_url(f"{address}/exp/rollouts?task=hard-2")
    expect(page.locator(".row .reward")).to_have_count(4)


def test_what_the_table_shows_can_be_saved_as_csv_rollouts_and_samples(
    page: Page, address: str, tmp_path: Path
) -> None:
    page.goto(f"{address}/exp/rollouts?step=1&truncated=yes&sort=-reward")
    page.get_by_text("Export 5").click()
    page.get_by_label("cut policy of samples").select_option("keep-head")
    saved = {}
    for name in ("CSV", "JSONL", "Samples"):
        with page.expect_download() as started:
            page.locator(".menu").get_by_role("link", name=name).first.click()
        saved[started.value.suggested_filename] = Path(started.value.path()).read_text()
    assert saved.keys() == {"exp-rollouts.csv", "exp-rollouts.jsonl", "exp-samples-keep-head.jsonl"}
    rows = list(csv.DictReader(io.StringIO(saved["exp-rollouts.csv"])))
    assert [(row["task"], row["reward"], row["term.format"]) for row in rows] == [("dates", "1.0", "0.0")] + [
        ("parse", "0.0", "0.0")
    ] * 4
    assert [len(saved[name].splitlines()) for name in list(saved)[1:]] == [5, 5]
    (tmp_path / "samples.jsonl").write_text(saved["exp-samples-keep-head.jsonl"])
    assert {sample.reward for sample in rolltape.read_samples(tmp_path / "samples.jsonl")} == {0.0, 1.0}


def test_rows_do_not_move_under_the_pointer_at_the_top_of_a_live_table(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "live", name="live") as tape:
        for number in range(3):
            with tape.rollout(task_id=f"task-{number}") as rollout:
                rollout.finish(reward=1.0)
        with page_over(tmp_path / "live") as address:
            page.goto(f"{address}/live/rollouts?sort=-started")
            row = page.locator(".row", has=page.get_by_role("link", name="task-1"))
            row.hover()
            before = row.bounding_box()
            for number in (3, 4):
                with tape.rollout(task_id=f"task-{number}") as rollout:
                    rollout.finish(reward=0.0)
            page.get_by_role("button", name="2 new above").wait_for()
            assert row.bounding_box() == before
            page.get_by_role("button", name="2 new above").click()
            expect(page.locator(".row").first).to_contain_text("task-4")


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (1024, "dark"), (390, "light")])
def test_the_views_of_a_step_are_accessible_at_every_width(page: Page, address: str, width: int, theme: str) -> None:
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": 900})
    for view, shown in (("exp?step=1", ".change"), ("exp/rollouts?rewarded=yes", ".row .reward")):
        page.goto(f"{address}/{view}")
        page.locator(shown).first.wait_for()
        assert serious_findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width < 720:  # two lines for each rollout, and nothing beside the screen
        assert page.locator(".scroll").evaluate("e => e.scrollWidth <= e.clientWidth")
        page.get_by_label("sorted by").select_option("-turns")
        page.wait_for_url(f"{address}/exp/rollouts?rewarded=yes&sort=-turns")
        expect(page.locator(".row").first).to_contain_text("attempt")
