"""The page and the command line write the same number in the same way."""

import math
from pathlib import Path

import pytest
from playwright.sync_api import expect

import rolltape
from browser import browser_page
from rolltape.cli import run as rolltape_command
from rolltape.records.wording import number
from rolltape.view.rollout import rollout_answers
from taped import first_turn
from viewed import page_over

WRITTEN = {
    0.5: "0.5",
    1.0: "1",
    -0.25: "-0.25",
    0.0: "0",
    1 / 3: "0.3333",
    0.15625: "0.1562",  # half way: to the even digit
    0.21875: "0.2188",
    1234.5: "1234",
    9999.7: "10,000",
    12344.5: "12,344",
    1234567.8: "1,234,568",
    9999999.0: "1e+07",
    2.5e11: "2.5e+11",
    0.0001: "0.0001",
    0.000012345: "1.234e-05",
    math.nan: "nan",
    math.inf: "inf",
    -math.inf: "-inf",
}


@pytest.mark.parametrize(("value", "text"), WRITTEN.items())
def test_four_digits_count_and_zeros_at_the_end_do_not(value: float, text: str) -> None:
    assert number(value) == text


def test_the_page_writes_each_reward_as_ls_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "exp"
    with rolltape.open(run, name="exp") as tape:
        for attempt, value in enumerate(WRITTEN):
            with tape.rollout(task_id="numbers", attempt=attempt) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=value, reward_terms={"same": value})
    texts = list(WRITTEN.values())
    assert rolltape_command(["ls", str(run)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    column = header.split().index("reward") - len(header.split())
    assert [line.split()[column] for line in lines[: len(texts)]] == texts
    with page_over(run) as address, browser_page(width=1440, height=1200) as page:
        page.goto(f"{address}/exp/rollouts?sort=attempt")
        expect(page.get_by_role("cell").and_(page.locator(".reward"))).to_have_text(texts)


def _record_rewards(run: Path, steps: list[list[float | None]]) -> str:
    """A run with these rewards, by step; the group of the last rollout."""
    with rolltape.open(run, name="exp") as tape:
        for step, rewards in enumerate(steps):
            for attempt, reward in enumerate(rewards):
                with tape.rollout(task_id="numbers", step=step, attempt=attempt) as rollout:
                    first_turn(rollout.session())
                    rollout.finish(reward=reward)
    return rollout.head.group


def test_a_mean_is_over_the_rollouts_that_have_a_finite_reward(tmp_path: Path) -> None:
    _record_rewards(tmp_path / "exp", [[1.0, 1.0, 1.0, 1.0], [0.0, None, None, math.nan]])
    with page_over(tmp_path / "exp") as address, browser_page(width=1440, height=1200) as page:
        page.goto(address)
        expect(page.get_by_role("row").filter(has_text="exp").locator("td.strong")).to_have_text("0.8")
        page.goto(f"{address}/exp")
        expect(page.locator(".figures dd").first).to_have_text("0.8std 0.4")
        rewards = page.locator(".panel").filter(has=page.get_by_role("heading", name="Rewards", exact=True))
        expect(rewards).to_contain_text("of 5 rollouts")
        expect(rewards.locator(".chip")).to_have_text(["1 not finite, left out", "2 finished without one"])
        for width in (1024, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.set_viewport_size({"width": 1440, "height": 1200})
        expect(page.locator(".panel").filter(has_text="Reward over steps")).to_contain_text("step 1, 1 rewarded")


def test_a_group_says_of_how_many_attempts_its_figures_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout_answers, "_MOST_IN_A_GROUP", 2)
    run = tmp_path / "exp"
    group = _record_rewards(run, [[1.0, 2.0, 6.0]])
    says = "a group of 3 attempts mean reward 3, std 2.16"
    with page_over(run) as address, browser_page(width=1440, height=1200) as page:
        page.goto(f"{address}/exp/group/{group}")
        expect(page.locator(".title")).to_contain_text(f"{says} 2 of them are shown here")
        expect(page.locator(".attempt .by")).to_have_text(["-1", "-2"])
        row = rolltape.read(run).index()[0]
        assert rolltape_command(["view", "--static", str(tmp_path / "out"), str(run), row.head.id]) == 0
        page.goto((tmp_path / "out" / f"group-{group}.html").as_uri())
        expect(page.locator(".title")).to_contain_text(f"{says} 1 of them is shown here")


def test_a_time_that_is_rounded_up_to_the_next_unit_is_written_in_that(tmp_path: Path) -> None:
    took = {0.9996: "1.00 s", 9.996: "10.0 s", 59.97: "1 min 0 s", 3599.7: "1 h 0 min", 59.4: "59.4 s"}
    with rolltape.open(tmp_path / "exp", name="exp") as tape, tape.rollout(task_id="t") as rollout:
        for seconds in took:
            first_turn(rollout.session(), started_at=1000.0, ended_at=1000.0 + seconds)
        rollout.finish(reward=1.0)
    with page_over(tmp_path / "exp") as address, browser_page(width=1440, height=1200) as page:
        for session, text in enumerate(took.values()):
            page.goto(f"{address}/exp/rollout/{rollout.id}/turn/{rollout.id}.0.{session}.0")
            expect(page.locator("[data-turn] .facts")).to_contain_text(text)
