"""The page and the command line write the same number in the same way."""

import math
from pathlib import Path

import pytest
from playwright.sync_api import expect

import rolltape
from browser import browser_page
from rolltape.cli import run as rolltape_command
from rolltape.records.wording import number
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
