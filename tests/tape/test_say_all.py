"""Many statements at once: all of them are kept, or none, and the latest count as if they were said one by one."""

import threading
import time
from pathlib import Path

import pytest

import rolltape
from rolltape.errors import NoSuchRollout
from rolltape.records.rollout import EventKind
from rolltape.tape.journal.entries import NewEvent
from taped import finished, first_turn, python, record_run

SCORER = """
import sys, rolltape
with rolltape.open(sys.argv[1]) as tape:
    tape.score(sys.argv[2], reward=9.0)
"""


def filters(*ids: str, reason: str | None = "no") -> list[NewEvent]:
    return [NewEvent(EventKind.FILTER, one, {"reason": reason}, "rule", 0) for one in ids]


def test_statements_of_several_kinds_are_kept_together(tmp_path: Path) -> None:
    ids = record_run(tmp_path, rollouts=2)
    with rolltape.open(tmp_path) as tape:
        score = NewEvent(EventKind.SCORE, ids[1], {"reward": 0.5, "terms": {}}, "judge")
        turn = NewEvent(EventKind.SCORE, ids[0], {"reward": 2.0, "terms": {}}, turn=f"{ids[0]}.0.0.1")
        tape.append_events([*filters(ids[0]), score, turn])
        tape.append_events([])
    first, second = rolltape.read(tmp_path).rollouts()
    assert (first.outcome.filtered, first.turns[1].facts.reward) == ("no", 2.0)
    assert (second.reward, second.outcome.rewarded_by) == (0.5, "judge")


@pytest.mark.parametrize("bad", ["missing", "turn"])
def test_one_that_is_refused_keeps_the_others_off_the_tape(tmp_path: Path, bad: str) -> None:
    ids = record_run(tmp_path, rollouts=1)
    turn = NewEvent(EventKind.SCORE, ids[0], {"reward": 1.0, "terms": {}}, turn=f"{ids[0]}.0.0.99")
    with rolltape.open(tmp_path) as tape:
        with pytest.raises(NoSuchRollout):
            tape.append_events([*filters(ids[0]), *(filters("missing") if bad == "missing" else [turn])])
        tape.tag(ids[0], "after")
    read = rolltape.read(tmp_path).rollout(ids[0])
    assert (read.outcome.filtered, read.outcome.tags) == (None, ("after",))


@pytest.mark.parametrize("sealed", [False, True])
def test_they_come_after_what_a_writer_with_a_fast_clock_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    now = time.time_ns
    ids = record_run(tmp_path, rollouts=2)
    with monkeypatch.context() as ahead, rolltape.open(tmp_path) as tape:
        ahead.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
        tape.append_events(filters(*ids))
    if sealed:
        rolltape.seal(tmp_path)
    with rolltape.open(tmp_path) as tape:
        tape.append_events(filters(*ids, reason=None))
    assert [row.outcome.filtered for row in rolltape.read(tmp_path).index()] == [None, None]


def test_afterwards_the_tape_hears_others_again(tmp_path: Path) -> None:
    ids = record_run(tmp_path, rollouts=1)
    with rolltape.open(tmp_path) as tape:
        tape.append_events(filters(*ids))
        with rolltape.open(tmp_path) as other:
            with other.rollout(task_id="new") as rollout:
                first_turn(rollout.session())
                rollout.finish()
            other.close()
        tape.filter(rollout.id, "too easy")
        finished(python(SCORER, str(tmp_path), ids[0]))
        tape.score(ids[0], reward=1.0)
    run = rolltape.read(tmp_path)
    assert (run.rollout(ids[0]).reward, run.rollout(rollout.id).outcome.filtered) == (1.0, "too easy")


def test_other_threads_go_on_recording_meanwhile(tmp_path: Path) -> None:
    ids = record_run(tmp_path, rollouts=5)
    with rolltape.open(tmp_path) as tape:

        def record() -> None:
            for attempt in range(20):
                with tape.rollout(task_id="thread", attempt=attempt) as rollout:
                    first_turn(rollout.session())
                    rollout.finish(reward=1.0)

        thread = threading.Thread(target=record)
        thread.start()
        for number in range(20):
            tape.append_events(filters(*ids, reason=str(number)))
        thread.join()
    rows = rolltape.read(tmp_path).index()
    assert [row.outcome.filtered for row in rows] == ["19"] * 5 + [None] * 20
    assert rolltape.read(tmp_path).problems() == []
