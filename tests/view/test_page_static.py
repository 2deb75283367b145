"""Exported pages open from a file, with nothing but the folder that they share."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from compared_runs import record_compared
from rolltape.cli import run as rolltape_command
from rolltape.demo import record_scripted


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("static") / "demo"
    record_scripted(run)
    folder = run.parent / "out"
    assert rolltape_command(["view", "--static", str(folder), str(run)]) == 0
    return folder


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page(width=1400, height=900) as page:
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: problems.append(asked.url) if not asked.url.startswith("file:") else None)
        yield page
        assert problems == []


def test_another_policy_than_the_exported_one_is_not_passed_off_as_it(page: Page, exported: Path) -> None:
    page.goto((exported / "index.html").as_uri())
    page.get_by_role("link", name="worst first").click()
    page.locator(".row:has(.reward span:text-is('0'))").click()
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.locator(".t").first.wait_for()
    page.get_by_label("Policy").select_option("slime")
    page.get_by_role("alert").get_by_text("not part of this export").wait_for()
    page.goto((exported / "index.html").as_uri() + "#/run/rollouts?cause=retry")
    expect(page.locator(".row .reward")).to_have_count(2)
    assert not page.get_by_role("list", name="Active filters").is_visible()  # its rows do not say why they forked


def test_from_the_exported_run_to_a_token_and_back(page: Page, exported: Path) -> None:
    page.goto((exported / "index.html").as_uri())
    page.get_by_role("heading", name="demo", exact=True).wait_for()
    page.get_by_role("link", name="Rollouts", exact=True).click()
    page.get_by_role("button", name="Reward").click()
    expect(page.locator(".row .reward")).to_have_text(["1", "0"])
    page.locator(".row a").first.click()
    expect(page.locator(".cause").first).to_have_text("retry")
    assert re.search(r"/rollout-[0-9a-f]+\.html#/", page.url)
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.locator(".t").first.wait_for()
    page.keyboard.press("w")
    expect(page.locator(".t.chosen")).to_have_count(1)
    page.keyboard.press("u")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name=re.compile("turns? differ"))).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="Group", exact=True).click()
    expect(page.locator(".attempt")).to_have_count(2)
    assert re.search(r"/group-[0-9a-f]+\.html#/", page.url)


def test_exported_pages_share_their_program_and_look_as_served_ones_do(page: Page, exported: Path) -> None:
    assert max(file.stat().st_size for file in exported.glob("*.html")) < 100_000
    page.goto((exported / "index.html").as_uri())
    page.get_by_role("heading", name="demo", exact=True).wait_for()
    page.wait_for_function("document.fonts.status === 'loaded'")
    assert page.evaluate(
        "document.fonts.check('13px Geist') && [...document.fonts].some((font) => font.status === 'loaded')"
    )
    expect(page.locator(".alone")).to_be_hidden()


def test_a_page_that_was_moved_away_from_its_program_says_what_it_needs(exported: Path, tmp_path: Path) -> None:
    shutil.copy(exported / "index.html", tmp_path)
    with browser_page() as page:
        page.goto((tmp_path / "index.html").as_uri())
        expect(page.locator(".alone")).to_contain_text("needs the folder page-")


def test_filters_of_an_exported_table_work_without_a_server(page: Page, exported: Path) -> None:
    page.goto((exported / "index.html").as_uri() + "#/run/rollouts?max_reward=0.5")
    expect(page.locator(".row .reward")).to_have_text(["0"])


def test_what_was_not_exported_says_so(page: Page, exported: Path) -> None:
    page.goto((exported / "index.html").as_uri() + "#/run/rollout/elsewhere")
    expect(page.get_by_role("alert")).to_contain_text("not part of this export")


def test_an_exported_page_says_how_many_keys_were_masked(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="task") as rollout:
        rollout.session().record_turn(
            prompt_messages=[{"role": "user", "content": "my key is sk-ant-api03-" + "Ab3dE5fG7h" * 9}],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-0.5],
            reply={"role": "assistant", "content": "thanks"},
            finish="stop",
        )
        rollout.finish(reward=1.0)
    assert rolltape_command(["view", "--static", str(tmp_path / "out"), str(tmp_path / "run")]) == 0
    [written] = (tmp_path / "out").glob("rollout-*.html")
    page.goto(written.as_uri())
    expect(page.locator(".notice")).to_contain_text("masked when this page was exported")
    assert "Ab3dE5fG7h" not in page.content()


def test_two_runs_are_compared_in_a_page_of_their_own(page: Page, tmp_path: Path) -> None:
    base, tuned = record_compared(tmp_path)
    assert rolltape_command(["view", "--static", str(tmp_path / "out"), str(base), str(tuned)]) == 0
    page.goto((tmp_path / "out" / "compare.html").as_uri())
    result = page.get_by_role("region", name="Result")
    expect(result).to_contain_text(
        "B has the higher mean reward: +0.3958 over 12 tasks, 95% interval +0.1875 to +0.6041"
    )
    expect(page.get_by_role("region", name="Side A")).to_contain_text("base")
    rows = page.locator("tbody tr:has(td.task)")
    expect(rows).to_have_count(15)
    expect(rows.first).to_contain_text("learned")
    page.get_by_label("direction", exact=True).select_option("lower")
    expect(rows.locator(".task")).to_have_text(["lost"])
    page.get_by_label("direction", exact=True).select_option("")
    page.get_by_role("columnheader", name="Difference").get_by_role("button").click()
    expect(rows.first).to_contain_text("learned")
    page.get_by_role("columnheader", name="Difference").get_by_role("button").click()
    expect(rows.first).to_contain_text("lost")
    page.get_by_role("button", name="sampled tokens").click()
    expect(result).to_contain_text("+2")
    page.get_by_role("link", name="Rolltape").click()
    expect(result).to_contain_text("+0.3958")
