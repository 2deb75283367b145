"""What is said after the fact: it may come late, from another process, and be revised; the latest counts."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.rollout import EventKind
from rolltape.records.turn import Delivery
from rolltape.tape.journal.entries import NewEvent
from rolltape.tape.recording.rollout import RolloutRecorder
from taped import finished, first_turn, python, record_run, record_session

JUDGE = """
import sys, rolltape
with rolltape.open(sys.argv[1]) as tape:
    tape.score(sys.argv[2], reward=float(sys.argv[3]), by="judge " + sys.argv[3], terms={"style": 0.5})
"""


def test_a_late_reward_from_another_process_counts_and_the_history_stays(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    for reward in ("0.25", "0.75"):
        finished(python(JUDGE, str(tmp_path / "run"), ids[1], reward))
    read = rolltape.read(tmp_path / "run").rollout(ids[1])
    assert (read.reward, read.outcome.rewarded_by, read.outcome.reward_terms) == (0.75, "judge 0.75", {"style": 0.5})
    assert [event.data["reward"] for event in read.events if event.kind == EventKind.SCORE] == [1.0, 0.25, 0.75]
    assert [row.outcome.reward for row in rolltape.read(tmp_path / "run").index()] == [0.0, 0.75, 2.0]


def test_a_late_reward_survives_sealing_before_and_after(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1)
    finished(python(JUDGE, str(tmp_path / "run"), rollout, "0.25"))
    assert len(rolltape.seal(tmp_path / "run").removed) == 2
    finished(python(JUDGE, str(tmp_path / "run"), rollout, "0.5"))
    assert rolltape.read(tmp_path / "run").rollout(rollout).reward == 0.5
    report = rolltape.seal(tmp_path / "run")
    assert (report.rollouts, len(report.removed)) == (0, 1)
    read = rolltape.read(tmp_path / "run").rollout(rollout)
    assert [event.data["reward"] for event in read.events if event.kind == EventKind.SCORE] == [0.0, 0.25, 0.5]
    assert rolltape.seal(tmp_path / "run").shards == ()


def test_deliveries_turn_rewards_filters_and_tags_apply(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", tags=["x"]) as rollout:
        turn = first_turn(rollout.session(), delivery="unknown", reward=0.0)
        rollout.finish(reward=1.0)
        tape.mark_delivered(turn.id, Delivery.UNDELIVERED)
        tape.mark_delivered(turn.id, "delivered")
        tape.score(rollout.id, reward=0.5, turn=turn.id)
        tape.filter(rollout.id, "too easy")
        tape.tag(rollout.id, "y", "z")
        read = tape.run().rollout(rollout.id)
        assert (read.turns[0].facts.delivery, read.turns[0].facts.reward) == (Delivery.DELIVERED, 0.5)
        assert (read.reward, read.outcome.filtered, read.outcome.tags) == (1.0, "too easy", ("y", "z"))
        tape.filter(rollout.id, None)
        assert tape.run().rollout(rollout.id).outcome.filtered is None


def two_tries(tape: rolltape.Tape) -> RolloutRecorder:
    """A rollout whose first try finished and whose second failed."""
    with tape.rollout(task_id="a") as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=0.0)
    with tape.rollout(task_id="a", new_try=True) as again:
        again.fail("the sandbox is gone")
    return rollout


def test_a_score_without_a_try_is_about_the_try_that_counts(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout = two_tries(tape)
        tape.score(rollout.id, reward=1.0)
        assert tape.run().rollout(rollout.id, 0).reward == 1.0
        with rolltape.open(tmp_path / "run") as judge:
            judge.score(rollout.id, reward=0.75)
        assert tape.run().rollout(rollout.id, 0).reward == 0.75
        with tape.rollout(task_id="a", new_try=True) as third:
            third.finish(reward=0.0)
        tape.score(rollout.id, reward=0.5)
        tape.score(rollout.id, reward=0.25, try_index=0)
        assert [tape.run().rollout(rollout.id, index).reward for index in range(3)] == [0.25, None, 0.5]
    rolltape.seal(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        fourth = tape.rollout(task_id="a", new_try=True)
        tape.score(rollout.id, reward=2.0)
        assert tape.run().rollout(rollout.id, 2).reward == 2.0
        fourth.finish()


def test_filters_and_tags_without_a_try_are_about_every_try(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout = two_tries(tape)
        tape.filter(rollout.id, "too easy")
        tape.tag(rollout.id, "x")
        outcomes = [row.outcome for row in tape.run().index()]
        assert [(one.filtered, one.tags) for one in outcomes] == [("too easy", ("x",))] * 2
        tape.filter(rollout.id, None, try_index=1)
        tape.tag(rollout.id, "y", try_index=0)
        outcomes = [row.outcome for row in tape.run().index()]
        assert [(one.filtered, one.tags) for one in outcomes] == [("too easy", ("y",)), (None, ("x",))]


@pytest.mark.parametrize("sealed", [False, True])
def test_the_latest_counts_also_if_its_writers_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    now = time.time_ns
    with monkeypatch.context() as ahead, rolltape.open(tmp_path / "run") as tape:
        ahead.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
        with tape.rollout(task_id="a") as rollout:
            turn = first_turn(rollout.session())
            rollout.finish(reward=0.0)
        tape.score(rollout.id, reward=0.25, turn=turn.id)
        tape.announce_version("1")
    if sealed:
        rolltape.seal(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        tape.score(rollout.id, reward=1.0)
        tape.score(rollout.id, reward=0.5, turn=turn.id)
        tape.announce_version("0")
        read = tape.run().rollout(rollout.id)
        assert (read.reward, read.turns[0].facts.reward) == (1.0, 0.5)
        assert tape.run().versions() == ("7", "1", "0")


def test_a_finish_comes_after_what_a_fast_clock_said_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        with monkeypatch.context() as ahead, rolltape.open(tmp_path / "run") as judge:
            ahead.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
            judge.score(rollout.id, reward=0.25)
        rollout.finish(reward=1.0)
        assert tape.run().rollout(rollout.id).reward == 1.0


def test_what_is_said_of_a_turn_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        turn = first_turn(rollout.session())

        def refused(by: rolltape.Tape) -> None:
            with pytest.raises(NoSuchRollout, match=r"\.0\.0\.99: its session has 1 turns"):
                by.mark_delivered(f"{rollout.id}.0.0.99")
            with pytest.raises(NoSuchRollout, match=r"\.0\.7\.0: its rollout has 1 sessions"):
                by.score(rollout.id, reward=1.0, turn=f"{rollout.id}.0.7.0")
            by.mark_delivered(turn.id)

        refused(tape)
        rollout.finish()
        refused(tape)
        with rolltape.open(tmp_path / "run") as other:
            refused(other)
        assert tape.run().problems() == []


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        (EventKind.FINISH, {"status": "finished"}, "end a rollout with its finish() or fail()"),
        (EventKind.SCORE, {}, "Object missing required field `reward`"),
        (EventKind.FILTER, {"reason": 5}, "Expected `str | null`, got `int`"),
        (EventKind.COLLECT, {"settings": {"step": 0, "group_size": 2}}, "missing required field `source`"),
        (EventKind.COLLECTED, {"step": "0"}, "Expected `int`, got `str`"),
        (EventKind.VERSION, {"version": 7}, "Expected `str`, got `int`"),
        (EventKind.TRACE, {"step": "0"}, "Expected `int | null`, got `str`"),
        (EventKind.TRACE, {"step": 0, "turns": 5}, "Expected `array`, got `int`"),
        (EventKind.TRACE, None, "Expected `object`, got `null`"),
    ],
)
def test_an_event_that_readers_could_not_read_is_refused(
    tmp_path: Path, kind: EventKind, data: dict[str, Any], says: str
) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1)
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(RecordError, match=re.escape(says)):
            tape.append_event(kind, rollout, data)
        with pytest.raises(RecordError, match=re.escape(says)):
            tape.append_run_event(kind, data)
        assert [row.reward for row in tape.run().index()] == [0.0]


def test_what_was_said_of_a_turn_that_is_not_there_is_named_by_readers(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        first_turn(rollout.session())
        with rolltape.open(tmp_path / "run") as other:
            other.mark_delivered(f"{rollout.id}.0.0.1")  # it cannot know what a rollout that runs elsewhere has
        rollout.finish()
        (problem,) = tape.run().problems()
    assert problem.what == f"its delivery is of turn {rollout.id}.0.0.1, which rollout {rollout.id} does not have"
    assert problem.lost == ""


def test_a_snapshot_is_one_moment_for_many_questions(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    with run.snapshot() as held, rolltape.open(tmp_path / "run") as tape:
        running = tape.rollout(task_id="new")
        tape.score(ids[0], reward=9.0)
        assert [held.rollout(one).reward for one in ids] == [0.0, 1.0, 2.0]
        assert [rollout.id for rollout in held.rollouts(step=1)] == [ids[1]]
        assert len(held.index()) == 3
        assert len(run.index()) == 4
        assert len(held.index()) == 3
        running.finish()
    assert (held.rollout(ids[0]).reward, len(held.index())) == (9.0, 4)
    with run.snapshot() as held:
        assert held.problems() == run.noticed() == []


def test_versions_come_as_announced_then_as_they_appear(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        with tape.rollout(task_id="a") as rollout:
            record_session(rollout, 2)
            rollout.finish()
        running = tape.rollout(task_id="b")
        first_turn(running.session(), weight_version=("1", "9"))
        tape.announce_version("10")
        tape.announce_version(8)
        assert tape.run().versions() == ("7", "1", "9", "10", "8")
        running.finish()
    rolltape.seal(tmp_path / "run")
    assert rolltape.read(tmp_path / "run").versions() == ("7", "1", "9", "10", "8")


def test_after_a_rollback_the_old_version_is_the_newest(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for version in ("7", "8", "7"):
            tape.announce_version(version)
        assert tape.run().versions() == ("8", "7")


def test_a_rollout_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=20, turns=1)
    run = rolltape.read(tmp_path / "run")
    assert run.rollout(ids[0][:12]).id == ids[0]
    with pytest.raises(NoSuchRollout, match="holds no rollout 'zz'; `rolltape ls` lists"):
        run.rollout("zz")
    shared = next(first[:1] for first in ids if sum(one[0] == first[0] for one in ids) > 1)
    with pytest.raises(NoSuchRollout, match=f"'{shared}' begins"):
        run.rollout(shared)
    with pytest.raises(NoSuchRollout, match="has no try 4; it has 0"):
        run.rollout(ids[0], try_index=4)
    assert [one.id for one in run.rollouts(step=3)] == [ids[3]]
    assert [one.id for one in run.rollouts(task_id="task-5")] == [ids[5]]
    assert [one.id for one in run.rollouts(group=run.rollout(ids[7]).head.group)] == [ids[7]]


def test_old_names_of_the_tape_work_and_warn(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        with tape.rollout(task_id="t") as rollout:
            turn = first_turn(rollout.session())
            rollout.finish()
        old: Any = tape
        with pytest.warns(DeprecationWarning, match=r"Tape\.say is now append_event"):
            old.say(EventKind.FILTER, rollout.id, {"reason": "short"})
        with pytest.warns(DeprecationWarning, match=r"Tape\.say_all is now append_events"):
            old.say_all([NewEvent(EventKind.TAG, rollout.id, {"tags": ["odd"]})])
        with pytest.warns(DeprecationWarning, match=r"Tape\.note is now append_run_event"):
            old.note(EventKind.VERSION, {"version": "7"})
        with pytest.warns(DeprecationWarning, match=r"Tape\.deliver is now mark_delivered"):
            old.deliver(turn.id, "undelivered")
        assert not hasattr(tape, "own_journal")
        read = tape.run().rollout(rollout.id)
    assert (read.outcome.filtered, read.outcome.tags) == ("short", ("odd",))
    assert [event.data for event in read.events if event.turn == turn.id] == [{"delivery": "undelivered"}]
