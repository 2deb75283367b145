"""How a collection is told of while it goes: on a terminal, however narrow, and of what is left."""

import logging
import re
from pathlib import Path

import pytest

from collecting import SUMS, instant, task_file
from commands import on_terminal
from rolltape.cli.record.collect_progress import figure_texts, fold, print_report
from rolltape.cli.record.collect_run import warnings_to
from rolltape.collect.collector import Launch
from rolltape.collect.results import RolloutResult
from rolltape.collect.stats import CollectionStats
from rolltape.records.rollout import Status, StopReason
from rolltape.tiny import shipped_model
from scripted_engine import Step

STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # a line that is written over stays apart


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_shows_where_it_stands_within_its_width(columns: int, tmp_path: Path) -> None:
    slow = lambda asked: Step("4", token_delay_s=0.4)  # noqa: E731
    with instant(slow).in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "--max-concurrent", 2)
        printed = on_terminal(
            "collect", task_file(tmp_path, SUMS[:2]), "--run", tmp_path / "run", "-g", 3, *how, columns=columns
        )
    plain = STYLE.sub("", printed)
    live = [line for line in re.split(r"[\r\n]+", plain) if re.search(r"\d of 6 done|running|tokens/s| left$", line)]
    assert max(map(len, live)) <= columns
    assert re.search(r"[1-5] of 6 done, [12] running, 0 failed", plain)
    assert re.search(r"6 of 6 done, 0 failed,\s+mean reward 0", plain)
    assert ("━" in printed) == (columns == 120)


def result(
    attempt: int, status: Status = Status.FINISHED, reward: float | None = 1.0, tokens: int = 10
) -> RolloutResult:
    return RolloutResult(
        rollout=f"{attempt:032x}",
        try_index=0,
        task_index=0,
        task="t",
        attempt=attempt,
        seat="agent",
        status=status,
        reward=reward if status is Status.FINISHED else None,
        stop_reason=StopReason.COMPLETED if status is Status.FINISHED else None,
        reason=None if status is Status.FINISHED else "it broke",
        turns=1,
        sampled_tokens=tokens,
        ended=None,
    )


def tally_of(*results: RolloutResult, launch: Launch) -> CollectionStats:
    tally = CollectionStats()
    tally.launched(launch)
    for one in results:
        tally.add([one])
    return tally


def test_a_line_says_done_running_failed_reward_and_speed() -> None:
    launch = Launch(tasks=1, attempts=1_200, done_before=1_000, running_elsewhere=0)
    tally = tally_of(result(0), result(1, reward=0.0), result(2, Status.FAILED), launch=launch)
    figures = tally.figures(running=32)._replace(tokens_per_s=1234.5, seconds_left=3725.0)
    assert ", ".join(figure_texts(figures)) == (
        "1,002 of 1,200 done, 32 running, 1 failed, mean reward 0.5, 1,234 tokens/s, 1 h 2 min left"
    )
    assert figures.left == 197


def test_the_commands_of_a_report_can_be_pasted_if_the_run_has_a_space_in_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(tally_of(result(0), launch=Launch(1, 1, 0, 0)), Path("my runs/a"), 3, whole=True)
    assert "rolltape ls 'my runs/a' --step 3" in capsys.readouterr().out


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_example_of_a_low_reward_is_never_one_that_is_not_a_number(order: tuple[int, ...]) -> None:
    results = [result(attempt, reward=reward) for attempt, reward in enumerate((0.5, 0.0, float("nan")))]
    tally = tally_of(*(results[at] for at in order), launch=Launch(1, 3, 0, 0))
    assert tally.worst is not None
    assert tally.worst.reward == 0.0


def test_time_left_is_not_guessed_before_as_many_have_ended_as_run() -> None:
    tally = tally_of(result(0), result(1), launch=Launch(1, 10, 0, 0))
    assert tally.figures(running=3).seconds_left is None
    assert tally.figures(running=2).seconds_left is not None


def test_parts_are_folded_and_none_is_lost() -> None:
    parts = ["12 of 120 done", "32 running", "0 failed", "mean reward 0.5", "355 tokens/s", "6 s left"]
    lines = fold(parts, 40)
    assert max(map(len, lines)) <= 40
    assert ", ".join(lines) == ", ".join(parts)


def test_what_a_tally_holds_does_not_grow_with_failures() -> None:
    tally = CollectionStats()
    tally.launched(Launch(1, 5_000, 0, 0))
    for attempt in range(3_000):
        tally.add([result(attempt, Status.FAILED)._replace(reason=f"reason number {attempt}")])
    assert len(tally.endings) <= 1_001
    assert sum(one.count for one in tally.endings.values()) == 3_000


def test_warnings_are_a_line_each_and_only_so_many_and_a_file_has_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "logs" / "collect.log"
    log = logging.getLogger("rolltape.collect")
    before = list(logging.getLogger("rolltape").handlers)
    with warnings_to(file):
        for number in range(50):
            log.warning("attempt %d", number, exc_info=ValueError("no\nroom"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rolltape: attempt 0: ValueError: no\\nroom"
    assert len(lines) == 21
    assert lines[-1] == f"rolltape: further warnings go only to {file}"
    assert file.read_text().count("ValueError: no") == 50
    assert logging.getLogger("rolltape").handlers == before
