"""How rollouts stand, in brief: what the index says, without reading what it reads."""

import gc
import sqlite3
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import rolltape
from rolltape.errors import RecordError
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.index.index import STATUS_CODES
from rolltape.tape.recording.tape import open_tape
from rolltape.tape.run import Run
from taped import finished, first_turn, python, record_session

STATUSES = {code: status for status, code in STATUS_CODES.items()}
Told = set[tuple[str, int, Status, bool]]

LOSE = """
import os, sys, rolltape
tape = rolltape.open(sys.argv[1])
tape.rollout(task_id="ended", source="s").finish(reward=1.0)
tape.rollout(task_id="lost", source="s")
os._exit(0)
"""


def mixed_run(path: Path, *, lost: bool = True) -> None:
    """Rollouts that ended in every way, rewarded early, late, by others or not at all, of two steps and sources."""
    with rolltape.open(path, name="exp") as tape:
        tape.announce_version("1")
        for task in ("rewarded", "late", "by others", "never", "of a turn"):
            with tape.rollout(task_id=task, source="s") as rollout:
                turn = first_turn(rollout.session())
                rollout.finish(reward=1.0 if task == "rewarded" else None)
            if task == "late":
                tape.score(rollout.id, reward=0.5)
            if task == "of a turn":
                tape.score(rollout.id, reward=0.5, turn=turn.id)
            if task == "by others":
                with rolltape.open(path) as judge:
                    judge.score(rollout.id, reward=0.25)
        tape.rollout(task_id="failed", source="s").fail("no sandbox")
        tape.rollout(task_id="failed", source="s", new_try=True).finish(reward=0.0)
        tape.rollout(task_id="other step", source="s", step=3).finish(reward=1.0)
        tape.rollout(task_id="other source").finish(reward=1.0)
        tape.filter(rollout.id, "too easy")
    if lost:
        finished(python(LOSE, str(path)))


def in_brief(run: Run, step: int = 0, source: str | None = "s") -> Told:
    rows = run.standings(step=step, source=source)
    return {
        (row["id"].ljust(16, b"\0").hex(), int(row["try_index"]), STATUSES[row["status"]], bool(row["rewarded"]))
        for row in rows
    }


def by_index(run: Run, step: int = 0, source: str | None = "s") -> Told:
    rows = [row for row in run.index() if (row.head.step, row.head.source) == (step, source)]
    return {(*row.key, row.outcome.status, row.outcome.reward is not None) for row in rows}


def check_all(path: Path) -> None:
    run = rolltape.read(path)
    assert len(by_index(run)) >= 7
    for step, source in ((0, "s"), (3, "s"), (0, None), (1, "s")):
        assert in_brief(run, step, source) == by_index(run, step, source)
    assert [event.data for event in run.remarks(EventKind.VERSION)] == [{"version": "1"}]


def sealed_later(path: Path) -> None:
    rolltape.seal(path)
    with rolltape.open(path) as tape:
        never = next(row.id for row in tape.run().index() if row.head.task_id == "never")
        tape.score(never, reward=0.125)
    rolltape.seal(path)


def kept_open(path: Path) -> None:
    KEPT.append(rolltape.open(path))
    KEPT[-1].rollout(task_id="running", source="t")


KEPT: list[rolltape.Tape] = []


@pytest.mark.parametrize(
    "then",
    [
        lambda path: None,
        kept_open,
        rolltape.seal,
        sealed_later,
        lambda path: rolltape.seal(path, to=path.parent / "elsewhere"),
        lambda path: rolltape.prune(path, before_step=9),
    ],
    ids=["journals", "alive", "sealed", "scored and sealed", "published", "pruned"],
)
def test_standings_are_what_the_index_says(tmp_path: Path, then: Callable[[Path], object]) -> None:
    mixed_run(tmp_path / "run")
    then(tmp_path / "run")
    check_all(tmp_path / "run")


def test_a_rollout_that_runs_is_told_as_running_and_later_as_lost(tmp_path: Path) -> None:
    code = "import sys, time, rolltape; tape = rolltape.open(sys.argv[1]); tape.rollout(task_id='a', source='s')\n"
    writer = python(code + "print('ready', flush=True); time.sleep(60)", str(tmp_path / "run"))
    assert writer.stdout is not None
    writer.stdout.readline()
    run = rolltape.read(tmp_path / "run")
    assert {status for _, _, status, _ in in_brief(run)} == {Status.RUNNING}
    writer.kill()
    writer.communicate()
    assert {status for _, _, status, _ in in_brief(run)} == {Status.LOST}


def journals(path: Path) -> list[Path]:
    return sorted((path / "journals").glob("*.sqlite"))


def change(path: Path, *statements: str) -> None:
    for journal in journals(path):
        connection = sqlite3.connect(journal)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()


def test_a_damaged_end_of_a_dead_writers_journal_is_named(tmp_path: Path) -> None:
    finished(python(LOSE, str(tmp_path / "run")))
    change(tmp_path / "run", "DELETE FROM ends")
    said = [problem.what for problem in rolltape.read(tmp_path / "run").problems()]
    assert "0 rollouts are listed as ended, 1 have a finish" in said


def test_a_journal_of_before_says_the_same_from_its_events(tmp_path: Path) -> None:
    mixed_run(tmp_path / "run", lost=False)
    change(tmp_path / "run", "DROP TABLE ends")
    check_all(tmp_path / "run")
    assert rolltape.read(tmp_path / "run").problems() == []


def test_a_shard_of_before_says_the_same_from_its_events(tmp_path: Path) -> None:
    mixed_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run")
    (rollouts,) = (tmp_path / "run" / "shards").glob("*/rollouts.parquet")
    pq.write_table(pq.read_table(rollouts).drop_columns(["status"]), rollouts)
    check_all(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(RecordError, match="is on the tape already"):
            tape.rollout(task_id="rewarded", source="s")
        assert tape.rollout(task_id="lost", source="s", new_try=True).try_index == 1


def test_tries_are_found_in_however_many_shards(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for number in range(12):
        with rolltape.open(path) as tape:
            for attempt in range(1 + number % 3):
                tape.rollout(task_id=str(number), attempt=attempt).finish()
            tape.rollout(task_id="again", new_try=True).finish()
        rolltape.seal(path, to=tmp_path / "elsewhere" if number % 2 else None)
    with rolltape.open(path) as tape:
        assert tape.rollout(task_id="again", new_try=True).try_index == 12
        for number in range(12):
            for attempt in range(1 + number % 3):
                with pytest.raises(RecordError, match="is on the tape already"):
                    tape.rollout(task_id=str(number), attempt=attempt)
            assert tape.rollout(task_id=str(number), attempt=9).try_index == 0


@pytest.mark.slow
def test_a_tape_keeps_nothing_of_rollouts_that_have_ended(tmp_path: Path) -> None:
    # Without summaries: the rollouts that wait for theirs are kept, as many as may wait.
    with open_tape(tmp_path / "run") as tape, rolltape.open(tmp_path / "run") as other:

        def record(first: int, last: int) -> int:
            for number in range(first, last):
                with tape.rollout(task_id=f"task {number}") as rollout:
                    record_session(rollout, 2)
                    rollout.finish(reward=1.0)
                other.tag(rollout.id, "seen")
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = record(0, 250)
            grown = record(250, 1000) - before
        finally:
            tracemalloc.stop()
    assert grown < 750 * 60, f"{grown / 750:.0f} bytes a rollout"


def test_what_others_say_in_the_present_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns
    with rolltape.open(tmp_path / "run") as tape, rolltape.open(tmp_path / "run") as other:
        ids = []
        for number in range(20):
            with tape.rollout(task_id=str(number)) as rollout:
                rollout.finish()
                ids.append(rollout.id)
        for number, one in enumerate(ids):
            with monkeypatch.context() as clock:
                clock.setattr(time, "time_ns", lambda number=number: now() + 10**12 * (number == 7))
                other.score(one, reward=0.5)
        for one in ids:
            tape.score(one, reward=1.0)
        assert [row.outcome.reward for row in tape.run().index()] == [1.0] * 20
