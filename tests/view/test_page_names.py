"""Names and reasons that users give are shown as they are, however long they are and whatever is in them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from rolltape.cli import run as rolltape_command
from taped import first_turn
from viewed import ask, page_over

TAGS = tuple(f"tag_{number}" for number in range(100))
REASON = "it broke: \u202e" + "y" * 3000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("named") / "exp"
    with rolltape.open(run, name="exp \u202e") as tape:
        for step, (task, environment) in enumerate([("a", "swe_bench"), ("x" * 5000, "swe bench")]):
            with tape.rollout(task_id=task, step=step, extra={"environment": environment}, tags=TAGS) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=1.0, reward_terms={"is_right": 1.0, "is right": 0.0})
        tape.rollout(task_id="broken").fail(REASON)
    with page_over(run) as address:
        yield address


def _open(page: Page, address: str, task: str) -> None:
    (served,) = ask(address, "/api/runs")["runs"]
    rows = ask(address, f"/api/{served['r']}/rollouts")["rows"]
    (rollout,) = [row["id"] for row in rows if row["task"] == task]
    page.goto(f"{address}/{served['r']}/rollout/{rollout}")


def test_names_that_differ_in_an_underscore_are_two(page: Page, address: str) -> None:
    (served,) = ask(address, "/api/runs")["runs"]
    page.goto(f"{address}/{served['r']}")
    bars = page.get_by_role("list", name="Rollouts by environment").locator(".name")
    expect(bars).to_have_text(["swe_bench", "swe bench"])
    expect(page.get_by_role("heading", level=1)).to_have_text("exp U+202E")
    page.goto(f"{address}/{served['r']}/rollouts")
    expect(page.get_by_label("environment").locator("option")).to_have_text(["environment", "swe_bench", "swe bench"])
    _open(page, address, "a")
    expect(page.locator(".terms .name")).to_have_text(["is_right", "is right"])


def test_a_reason_of_one_long_word_is_wrapped_and_folded(page: Page, address: str) -> None:
    _open(page, address, "broken")
    empty = page.locator(".empty")
    expect(empty).to_contain_text("it broke: U+202E")
    expect(empty.get_by_role("button", name="Show more")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_neither_a_long_task_nor_many_tags_push_the_transcript_away(page: Page, address: str) -> None:
    _open(page, address, "x" * 5000)
    expect(page.locator(".talk")).to_be_in_viewport()
    marks = page.get_by_role("group", name="Tags and notes of the rollout")
    expect(marks.locator(".chip")).to_have_count(30)
    marks.get_by_role("button", name="70 more tags").click()
    expect(marks.locator(".chip")).to_have_count(len(TAGS))


HIDDEN = "\x1b[31mred\x07 rtl\u202eoverride"
# The texts of the page that hold a hidden character.
SHOWN_RAW = """() => {
  const raw = /[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u202a-\\u202e]/, found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) if (raw.test(texts.currentNode.data)) found.push(texts.currentNode.parentElement.outerHTML);
  return found;
}"""


def test_hidden_characters_of_names_are_named_on_every_page(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name=HIDDEN) as tape:
        for attempt in range(2):
            of = tape.rollout(
                source=HIDDEN, task_id=HIDDEN, attempt=attempt, tags=(HIDDEN,), extra={"environment": HIDDEN}
            )
            with of as rollout:
                first_turn(rollout.session(), reply={"role": "assistant", "content": HIDDEN})
                rollout.finish(reward=float(attempt), reward_terms={HIDDEN: 1.0})
            tape.add_note(rollout.id, HIDDEN, by=f"{HIDDEN} {attempt}")
        tape.rollout(task_id=HIDDEN, source="other").fail(HIDDEN)
    with page_over(tmp_path / "exp") as address:
        (served,) = ask(address, "/api/runs")["runs"]
        row = ask(address, f"/api/{served['r']}/rollouts")["rows"][0]
        run = f"/{served['r']}"
        found: list[str] = []
        compared = f"/compare?a={served['r']}&b={served['r']}"
        group, own = f"{run}/group/{row['group']}", f"{run}/rollout/{row['id']}"
        for path in ("/", run, f"{run}/rollouts", f"{run}/tasks", group, own, compared):
            page.goto(address + path)
            expect(page.locator("main")).to_contain_text("U+202E")
            found += [f"{path}: {one}" for one in page.evaluate(SHOWN_RAW)]
    assert found == []


def test_long_names_of_runs_and_authors_leave_the_figures_in_view(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="n" * 200) as tape:
        with tape.rollout(task_id="a") as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=123456789.0)
        for author in "xy":
            tape.add_note(rollout.id, "a note", by=author * 80)
    with page_over(tmp_path / "exp") as address:
        run = f"{address}/{ask(address, '/api/runs')['runs'][0]['r']}"
        page.goto(address)
        assert page.locator(".scroll").evaluate("one => one.scrollWidth - one.clientWidth") == 0
        page.goto(f"{run}/rollouts")
        reward = page.locator(".reward span").first
        assert reward.evaluate("one => one.offsetWidth - one.parentElement.clientWidth") <= 0
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto(run)
        expect(page.get_by_label("Notes of", exact=True)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_run_without_token_ids_claims_nothing_about_ids(page: Page, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": str(n)}]} for n in "45"]
    (tmp_path / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rolltape_command(["import", "messages", str(tmp_path / "sft.jsonl"), str(tmp_path / "exp")]) == 0
    with page_over(tmp_path / "exp") as address:
        page.goto(f"{address}/exp")
        forks = page.locator("section.panel").filter(has_text="Forks by cause")
        expect(forks.locator("p")).to_have_text("No forks.")
        expect(page.get_by_role("list", name="The same in all rollouts")).not_to_contain_text("sampled tokens")


def test_a_comparison_in_a_file_offers_nothing_that_needs_a_server(page: Page, tmp_path: Path) -> None:
    for name in ("one", "other"):
        with rolltape.open(tmp_path / name) as tape, tape.rollout(task_id="a", source=name) as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=1.0)
    runs = [str(tmp_path / name) for name in ("one", "other")]
    assert rolltape_command(["view", *runs, "--static", str(tmp_path / "pages")]) == 0
    page.goto((tmp_path / "pages" / "compare.html").as_uri())
    expect(page.get_by_text("No task has the same source and id on both sides.")).to_be_visible()
    expect(page.get_by_role("button", name="Pair tasks by their id alone")).to_have_count(0)
    with page_over(tmp_path / "one") as address:
        page.goto(f"{address}/compare?a=one&b=one")
        expect(page.get_by_text("1 rollout is on both sides")).to_be_visible()
