"""Summaries of rollouts: computed in the background at a finish, kept as events, outdated by later ones."""

import contextlib
import gc
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rolltape
from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.sample import SUMMARY_RULES, RolloutSummary
from rolltape.samples.summary import summarize
from rolltape.tape.index.background import fill
from rolltape.tape.journal.file import is_alive
from rolltape.tape.recording import summaries
from rolltape.tape.recording.tape import Tape, open_tape
from rolltape.tape.run import Run
from taped import check_summaries, first_turn, python, record_run, record_session

THREAD = "rolltape-summaries"


class HeldSummaries:
    """Computes summaries when it is let to."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self, rollout: Rollout) -> RolloutSummary:
        self.begun.release()
        assert self.may_end.wait(60)
        return summarize(rollout)


@pytest.fixture
def held() -> Iterator[HeldSummaries]:
    made = HeldSummaries()
    yield made
    made.may_end.set()
    wait_for_threads()


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)


def written(run: Path) -> list[str | None]:
    """The rollouts of which the tape has a summary."""
    found = rolltape.read(run).events(summaries=True)
    return [event.rollout for event in found if event.kind == EventKind.SUMMARY]


def summarized(run: Run) -> int:
    run.tape_index.advance()
    ((count,),) = run.tape_index.ask(lambda connection: connection.execute("SELECT count(*) FROM summaries").fetchall())
    return int(count)


def finish_one(tape: Tape, name: str, turns: int = 2) -> str:
    with tape.rollout(task_id=name) as rollout:
        record_session(rollout, turns)
        rollout.finish(reward=1.0)
    return rollout.id


def test_a_summary_whose_writer_did_not_know_a_delivery_is_computed_again(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, rolltape.open(tmp_path / "run") as gateway:
        rollout = tape.rollout(task_id="a")
        turn = first_turn(rollout.session())
        gateway.mark_delivered(turn.id, "undelivered")
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    assert len(written(tmp_path / "run")) == 1
    assert check_summaries(run.tape_index) == 0
    fill(run.tape_index, summarize)
    assert check_summaries(run.tape_index) == 1


def test_a_finished_rollout_has_a_summary_that_the_index_takes_from_the_tape(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    assert sorted(map(str, written(tmp_path / "run"))) == sorted(ids)
    run = rolltape.read(tmp_path / "run")
    assert summarized(run) == 3
    check_summaries(run.tape_index)
    event = next(one for one in run.events(summaries=True) if one.kind == EventKind.SUMMARY)
    assert event.data["rules"] == SUMMARY_RULES
    assert sorted(event.data["policies"]) == ["exact", "keep-head", "slime"]


def test_a_failed_rollout_has_a_summary_too(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        record_session(rollout, 2)
    run = rolltape.read(tmp_path / "run")
    assert summarized(run) == 1
    check_summaries(run.tape_index)


def test_summaries_are_not_shown_as_history(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1)
    run = rolltape.read(tmp_path / "run")
    assert [event.kind for event in run.events()] == ["finish", "score"]
    assert [event.kind for event in run.rollout(rollout).events] == ["finish", "score"]
    rolltape.seal(tmp_path / "run")
    assert [event.kind for event in rolltape.read(tmp_path / "run").rollout(rollout).events] == ["finish", "score"]


def test_whoever_finishes_a_rollout_does_not_wait_for_its_summary(tmp_path: Path, held: HeldSummaries) -> None:
    with open_tape(tmp_path / "run", summarize=held) as tape:
        finish_one(tape, "a")
        assert held.begun.acquire(timeout=60)  # it is being computed, and `finish` has returned
        finish_one(tape, "b")
        assert written(tmp_path / "run") == []
        assert [row.outcome.reward for row in tape.run().index()] == [1.0, 1.0]
        held.may_end.set()
    assert len(written(tmp_path / "run")) == 2


def test_closing_a_tape_does_not_wait_long_and_leaves_out_what_is_not_done(
    tmp_path: Path, held: HeldSummaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "_CLOSE_S", 0.0)
    tape = open_tape(tmp_path / "run", summarize=held)
    for name in "abc":
        finish_one(tape, name)
    assert held.begun.acquire(timeout=60)
    tape.close()
    held.may_end.set()
    wait_for_threads()
    run = rolltape.read(tmp_path / "run")
    assert written(tmp_path / "run") == []
    assert (summarized(run), run.problems()) == (0, [])
    fill(run.tape_index, summarize)
    assert summarized(run) == 3


def test_summaries_are_left_out_when_too_many_are_waiting(
    tmp_path: Path, held: HeldSummaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "_MOST_WAITING", 2)
    with open_tape(tmp_path / "run", summarize=held) as tape:
        finish_one(tape, "first")
        assert held.begun.acquire(timeout=60)
        for name in "abcde":
            finish_one(tape, name)
        held.may_end.set()
    assert len(written(tmp_path / "run")) == 3


def test_a_summary_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(rollout: Rollout) -> RolloutSummary:
        raise KeyError("odd")

    with open_tape(tmp_path / "run", summarize=fails) as tape:
        ids = [finish_one(tape, name) for name in "ab"]
    assert written(tmp_path / "run") == []
    assert all(f"rollout {one} has no summary" in caplog.text for one in ids)
    assert rolltape.read(tmp_path / "run").problems() == []


def test_closed_tapes_leave_no_thread(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    assert [thread for thread in threading.enumerate() if thread.name == THREAD] == []


def test_a_tape_that_is_dropped_without_a_close_is_closed_once_its_summaries_are_written(
    tmp_path: Path, held: HeldSummaries
) -> None:
    tape = open_tape(tmp_path / "run", summarize=held)
    finish_one(tape, "a")
    journal = tmp_path / "run" / "journals" / f"{tape.writer}.sqlite"
    assert held.begun.acquire(timeout=60)
    del tape
    gc.collect()
    held.may_end.set()
    wait_for_threads()
    gc.collect()
    assert len(written(tmp_path / "run")) == 1
    assert not is_alive(journal)


def test_a_forked_child_summarizes_its_own_rollouts(tmp_path: Path, held: HeldSummaries) -> None:
    with open_tape(tmp_path / "run", summarize=held) as tape:
        finish_one(tape, "parent")
        assert held.begun.acquire(timeout=60)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                held.may_end = threading.Event()  # no thread is left that could set it
                held.may_end.set()
                finish_one(tape, "child")
                tape.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(written(tmp_path / "run")) == 1
        held.may_end.set()
    assert len(written(tmp_path / "run")) == 2


def test_a_later_delivery_makes_a_summary_unknown_until_it_is_computed_again(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        turn = first_turn(rollout.session(), delivery="unknown")
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    assert summarized(run) == 1
    check_summaries(run.tape_index)
    with rolltape.open(tmp_path / "run") as tape:
        tape.mark_delivered(turn.id, "undelivered")
    assert summarized(run) == 0
    shutil.rmtree(tmp_path / "run" / "cache")
    anew = rolltape.read(tmp_path / "run")
    assert summarized(anew) == 0, "the one on the tape does not cover the delivery"
    fill(anew.tape_index, summarize)
    assert summarized(anew) == 1
    check_summaries(anew.tape_index)


def test_a_delivery_that_came_before_the_finish_is_in_the_summary(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        turn = first_turn(rollout.session(), delivery="unknown")
        tape.mark_delivered(turn.id, "undelivered")
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    assert summarized(run) == 1
    check_summaries(run.tape_index)


def test_a_delivery_that_is_written_after_the_summary_was_read_makes_it_unknown_though_it_was_made_before_the_finish(
    tmp_path: Path, held: HeldSummaries
) -> None:
    with open_tape(tmp_path / "run", summarize=held) as tape:
        with tape.rollout(task_id="a") as rollout:
            turn = first_turn(rollout.session(), delivery="unknown")
            made = tape._writer.encode_delivery(turn.id, "undelivered")
            rollout.finish(reward=1.0)
        assert held.begun.acquire(timeout=60)  # the rollout was read, and its summary is being computed
        made.journal.append(*made.events, rollout=made.rollout)
        held.may_end.set()
        wait_for_threads()
    run = rolltape.read(tmp_path / "run")
    assert written(tmp_path / "run") == [rollout.id]
    assert summarized(run) == 0
    fill(run.tape_index, summarize)
    check_summaries(run.tape_index)


def test_rewards_filters_and_tags_leave_a_summary_as_it_is(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1)
    with rolltape.open(tmp_path / "run") as tape:
        tape.score(rollout, reward=0.0)
        tape.filter(rollout, "odd")
        tape.tag(rollout, "x")
    run = rolltape.read(tmp_path / "run")
    assert summarized(run) == 1
    check_summaries(run.tape_index)


def test_a_prune_makes_summaries_unknown(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    rolltape.prune(tmp_path / "run", before_step=2)
    run = rolltape.read(tmp_path / "run")
    assert summarized(run) == 1
    fill(run.tape_index, summarize)
    assert summarized(run) == 3
    check_summaries(run.tape_index)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "published"])
def test_sealing_carries_summaries(tmp_path: Path, elsewhere: bool) -> None:
    record_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run", to=tmp_path / "there" if elsewhere else None)
    run = rolltape.read(tmp_path / ("there" if elsewhere else "run"))
    assert summarized(run) == 3
    check_summaries(run.tape_index)


def test_a_summary_may_lie_in_another_shard_than_its_rollout(tmp_path: Path, held: HeldSummaries) -> None:
    with open_tape(tmp_path / "run", summarize=held) as tape:
        ids = [finish_one(tape, name) for name in "ab"]
        assert held.begun.acquire(timeout=60)
        rolltape.seal(tmp_path / "run")
        run = rolltape.read(tmp_path / "run")
        assert summarized(run) == 0
        held.may_end.set()
    assert summarized(run) == 2, "found in the journal"
    rolltape.seal(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "cache")
    anew = rolltape.read(tmp_path / "run")
    assert summarized(anew) == 2, "found in the shard"
    check_summaries(anew.tape_index)
    assert sorted(row.id for row in anew.index()) == sorted(ids)


def test_a_rollout_that_was_taken_over_is_left_to_readers(tmp_path: Path) -> None:
    code = (
        "import os, sys, rolltape, taped\n"
        "rollout = rolltape.open(sys.argv[1]).rollout(task_id='a')\n"
        "taped.record_session(rollout, 2)\n"
        "os._exit(0)"
    )
    python(code, str(tmp_path / "run")).communicate(timeout=60)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", resume=True) as rollout:
        record_session(rollout, 2)
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    assert (written(tmp_path / "run"), summarized(run)) == ([], 0)
    fill(run.tape_index, summarize)
    assert summarized(run) == 1
    check_summaries(run.tape_index)
