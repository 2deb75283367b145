"""Every view in light and dark, at three widths: nothing is cut off, and each term is explained.

With ROLLTAPE_SCREENSHOTS=FOLDER the pictures are kept, to be looked at.
"""

import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from coding_agents import record_coding_agents
from compared_runs import record_compared
from stepped_runs import record_stepped
from taped import first_turn, record_run
from viewed import VIEWER, ask, page_over, serious_findings

WIDTHS = (390, 1024, 1440)
_WORDS = (VIEWER / "src" / "words.ts").read_text()
TERMS = re.findall(r'^  "?([\w@ ]+?)"?: "', _WORDS.split("TERMS = {")[1].split("} as const")[0], re.MULTILINE)
# Terms that the page itself writes and nowhere explains. Texts out of rollouts, and messages, are not its own.
_UNEXPLAINED = """terms => {
  const explained = new Set([...document.querySelectorAll("main [data-term]")].map((one) => one.dataset.term));
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const found = new Set();
  const others = "option, bdi, pre, code, .mono, .sr, .body, .t, .state, .empty, [title], [data-term]";
  while (texts.nextNode()) {
    const { parentElement: place, textContent: text } = texts.currentNode;
    if (!place.checkVisibility() || place.closest(others)) continue;
    for (const term of terms.filter((one) => !explained.has(one))) {
      const written = new RegExp(`(^|[^\\\\w@-])${term}s?($|[^\\\\w@-])`, "i");
      if (written.test(text)) found.add(`${term}: ${text.trim()}`);
    }
  }
  return [...found];
}"""
# Text that is cut at the edge of its element, without a sign that more follows.
_CUT = """() => [...document.querySelectorAll("main *, header *")].filter((one) => {
  const style = getComputedStyle(one);
  return !one.children.length && one.textContent.trim() && !one.closest(".sr") && style.textOverflow !== "ellipsis"
    && ["hidden", "clip"].includes(style.overflowX) && one.scrollWidth > one.clientWidth + 1;
}).map((one) => one.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("every")
    coding = record_coding_agents(folder / "coding")
    record_compared(folder)
    record_stepped(folder / "exp")
    with rolltape.open(folder / "empty", name="empty"):
        pass
    record_run(folder / "damaged", summaries=False)
    (journal,) = (folder / "damaged" / "journals").glob("*.sqlite")
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE turns SET facts = x'00' WHERE pk = (SELECT pk FROM turns LIMIT 1 OFFSET 2)")
    names = ("coding", "base", "tuned", "exp", "empty", "damaged")
    with page_over(*(folder / name for name in names)) as address:
        located = {Path(one["location"]).name: one["r"] for one in ask(address, "/api/runs")["runs"]}
        row = ask(address, "/api/exp/rollouts?step=1&task=parse")["rows"][0]
        turn = ask(address, f"/api/exp/rollouts/{row['id']}")["sessions"][0]["turns"][0]["id"]
        left, right = (
            ask(address, f"/api/{name}/rollouts?task=learned")["rows"][0]["id"] for name in ("base", "tuned")
        )
        damaged = located["damaged"]
        paths = {
            "runs": "/",
            "run": "/exp",
            "step": "/exp?step=1",
            "tasks": "/exp/tasks",
            "rollouts": "/exp/rollouts",
            "search": "/coding/rollouts?q=parse_date",
            "nothing-found": "/coding/rollouts?q=nowhere",
            "group": f"/exp/group/{row['group']}",
            "rollout": f"/exp/rollout/{row['id']}",
            "transcript": f"/coding/rollout/{coding['claude']}/turn/7",
            "forks": f"/coding/rollout/{coding['claude']}",
            "policies": f"/coding/compare/{coding['claude']}",
            "tokens": f"/exp/rollout/{row['id']}/tokens/0/5",
            "turn-tokens": f"/exp/rollout/{row['id']}/tokens/turn/{turn}",
            "comparison": "/compare?a=base&b=tuned",
            "comparison-of-steps": "/compare?a=exp&a_step=0&b=exp&b_step=1",
            "no-comparison": "/compare",
            "two-rollouts": f"/diff?a=base&a_rollout={left}&b=tuned&b_rollout={right}",
            "empty": "/empty",
            "no-tasks": "/empty/tasks",
            "no-rollouts": "/empty/rollouts",
            "damaged": f"/{damaged}",
            "damaged-rollout": f"/{damaged}/rollout/{ask(address, f'/api/{damaged}/rollouts')['rows'][0]['id']}",
            "no-run": "/nothing",
            "no-rollout": "/exp/rollout/ffffffff",
            "no-group": "/exp/group/ffffffff",
            "no-page": "/exp/what/is/this",
        }
        yield {name: address + path for name, path in paths.items()}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser_page() as page:
        yield page


_VIEWS = (
    "runs", "run", "step", "tasks", "rollouts", "search", "nothing-found", "group", "rollout", "transcript", "forks",
    "policies", "tokens", "turn-tokens", "comparison", "comparison-of-steps", "no-comparison", "two-rollouts", "empty",
    "no-tasks", "no-rollouts", "damaged", "damaged-rollout", "no-run", "no-rollout", "no-group", "no-page",
)  # fmt: skip


@pytest.mark.parametrize("view", _VIEWS)
def test_nothing_is_cut_off_and_each_term_is_explained(page: Page, places: dict[str, str], view: str) -> None:
    kept = os.environ.get("ROLLTAPE_SCREENSHOTS")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
            page.goto(places[view])
            expect(page.locator("main h1, main h2").first).to_be_visible()
            expect(page.locator("main [aria-busy=true]")).to_have_count(0)
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(_CUT) == []
            assert serious_findings(page) == []
            if kept is not None:
                page.screenshot(path=Path(kept) / f"{view}-{width}-{theme}.png", full_page=True)
    assert page.evaluate(_UNEXPLAINED, TERMS) == []
    assert "– to –" not in page.locator("main").inner_text()  # a range of nothing


def test_the_head_of_a_column_stays_in_it_however_long_the_name_of_a_term_is(page: Page, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "long", name="long") as tape, tape.rollout(task_id="task") as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=1.0, reward_terms={"a_judge_with_a_rather_long_name": 0.5, "length_penalty_2": -0.5})
    page.set_viewport_size({"width": 1440, "height": 900})
    with page_over(tmp_path / "long") as address:
        page.goto(f"{address}/long/rollouts")
        heads = page.get_by_role("columnheader").get_by_role("button")
        expect(heads.nth(1)).to_contain_text("a_judge_with")
        edges = heads.evaluate_all(
            "all => all.map((one) => [one, one.parentElement].map((e) => e.getBoundingClientRect().right))"
        )
        assert [own <= cell for own, cell in edges] == [True] * len(edges)
