"""Nobody waits in silence: neither a trainer whose collector died, nor a collector that has no room."""

import asyncio
import signal
from pathlib import Path

import pytest

import rolltape
from collecting import by, command, instant, task_file
from group_streams import begin, collected, collects, record, stream, tasks
from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.errors import GroupsError
from rolltape.tape.recording.tape import Tape
from rolltape.tiny import shipped_model
from scripted_engine import Step
from taped import finished, python

DYING = """
import os, sys, rolltape
from group_streams import begin, collected, collects, record
tape = rolltape.open(sys.argv[1])
collects(tape, 2)
record(tape, "whole", 1.0, 0.0)
begin(tape, "broken", 0).finish(reward=1.0)
exec(sys.argv[2])
os._exit(0)
"""


def collector_dies(tape: Tape, after: str = "") -> None:
    finished(python(DYING, str(tape.directory.path), after))


@pytest.mark.parametrize("step", [0, None])
def test_when_the_collector_died_what_is_whole_is_given_and_then_it_is_an_error(tape: Tape, step: int | None) -> None:
    collector_dies(tape)
    waiting = tape.groups(step=step, resume_s=0.0, poll_s=0.001)
    next(waiting).done()
    with pytest.raises(GroupsError, match=r"which collected step 0 of sums, ended before it was done.*incomplete: 1\."):
        next(waiting)
    assert tasks(list(tape.groups(complete=False))) == ["broken"], "the claim was given up"


def test_a_collection_that_came_to_its_end_is_no_error(tape: Tape) -> None:
    collector_dies(tape, "collected(tape)")
    given = list(tape.groups(step=0, resume_s=0.0, poll_s=0.001))
    assert [(group.task_id, group.missing) for group in given] == [("whole", 0), ("broken", 1)]


def test_a_step_that_was_left_behind_holds_up_no_later_one(tape: Tape) -> None:
    collector_dies(tape)
    collects(tape, 1, step=1)
    record(tape, "later", 1.0, step=1)
    collected(tape, step=1)
    assert tasks(list(tape.groups(resume_s=0.0, idle_s=0.05, poll_s=0.001))) == ["whole", "later"]
    assert tasks(list(tape.groups(step=1, resume_s=0.0))) == []


def test_a_collection_that_goes_on_is_not_over_whatever_was_said_before(tape: Tape) -> None:
    collects(tape, 2)
    begin(tape, "a", 0).finish(reward=1.0)
    collected(tape)
    collects(tape, 2)
    assert list(stream(tape)) == []
    begin(tape, "a", 1).finish(reward=0.0)
    (group,) = stream(tape)
    assert group.missing == 0


def test_an_attempt_that_somebody_still_runs_is_waited_for_when_a_collection_resumed_beside_it_ends(tape: Tape) -> None:
    collects(tape, 2)
    begin(tape, "a", 0).finish(reward=1.0)
    running = begin(tape, "a", 1)
    with rolltape.open(tape.directory.path) as other:
        collects(other, 2)
        collected(other)
    assert list(stream(tape, step=0)) == []
    running.finish(reward=0.0)
    (group,) = tape.groups(step=0, poll_s=0.001)
    assert (group.rewards, group.missing) == ([1.0, 0.0], 0)


@pytest.mark.slow
async def test_a_collector_that_is_killed_and_resumed_feeds_the_same_stream(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with instant(lambda asked: Step("4", token_delay_s=0.05)) as engine:
        # With room for two groups it still runs when the first one is given, and is killed in the second.
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 2, "--max-ahead", 2)
        killed = command(source, "--run", run, *how)
        given: list[str | None] = []
        with rolltape.open(run) as tape:
            async for group in tape.groups(step=0, poll_s=0.01):
                if not given:
                    assert killed.poll() is None
                    killed.send_signal(signal.SIGKILL)
                    await asyncio.to_thread(killed.communicate)
                    resumed = command(source, "--run", run, *how, "--resume")
                given.append(group.task_id)
                group.done()
        _, errors = await asyncio.to_thread(resumed.communicate)
    assert resumed.returncode == 0, errors
    assert sorted(map(str, given)) == ["sum-1", "sum-2", "sum-3", "sum-4"]


async def test_a_resumed_collector_says_so_on_the_tape(tmp_path: Path) -> None:
    source = task_file(tmp_path)
    async with instant() as engine:
        with rolltape.open(tmp_path / "run") as tape:
            settings = CollectSettings(source=str(source), group_size=1, **by(engine))
            for resume in (False, True):
                await Collector(settings, tape, resume=resume).run(lambda launch: None, lambda results: None)
            said = [event.kind for event in tape.run().events() if event.kind in ("collect", "collected")]
    assert said == ["collect", "collected", "collect", "collected"]


def test_a_stream_that_waits_long_says_for_what(
    tape: Tape, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rolltape.groups.waiting.FIRST_WARNING_S", 0.01)
    assert list(tape.groups(step=7, idle_s=1.0, poll_s=0.001)) == []
    assert "no further group of step 7 has begun" in caplog.text
    collects(tape, 2)
    begin(tape, "a", 0)
    assert list(tape.groups(idle_s=0.1, poll_s=0.001)) == []
    assert "groups that are waited for: 1, " in caplog.text


def test_a_stream_of_which_every_group_was_skipped_says_why(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    collects(tape, 1)
    record(tape, "a", None)
    collected(tape)
    assert list(tape.groups(step=0)) == []
    assert "no group was given; 1 were skipped, the first: late: 0 of 1 attempts had finished with" in caplog.text


def test_a_collector_without_room_says_what_it_waits_for_and_whether_anybody_takes_groups(
    tape: Tape, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rolltape.groups.waiting.FIRST_WARNING_S", 0.0)
    collects(tape, 1)
    record(tape, "a", 1.0)
    training = tape.groups()
    assert not rolltape.RunAheadLimit(tape, max_groups=1).is_free(0)
    assert caplog.messages == [], "a trainer that is alive has time for its step"
    monkeypatch.setattr("rolltape.groups.run_ahead._LONG_S", 0.0)
    assert not rolltape.RunAheadLimit(tape, max_groups=1).is_free(0)
    assert caplog.messages == ["collection has waited 0 s: 1 groups wait for consumer 'trainer', those of step 0 first"]
    training.close()
    assert not rolltape.RunAheadLimit(tape, max_groups=1).is_free(0)
    assert caplog.messages[1:] == [f"{caplog.messages[0]}, and no process takes groups under that name"]
