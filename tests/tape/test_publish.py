"""Published while it is recorded: each rollout and each event once, and what the dead left behind."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.records.rollout import Status
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.recording.tape import Tape, open_tape
from rolltape.tape.rundir import Place, RunDirectory
from rolltape.tape.shards.publish import Publisher, publish_left
from rolltape.tape.shards.seal import make_run, written
from taped import first_turn, record_session, spelled


def shared(folder: Path, tape: Tape) -> Place:
    place = Place(folder / "shared")
    make_run(place, tape.directory)
    return place


def test_what_is_published_reads_as_what_was_recorded(tmp_path: Path) -> None:
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
        publisher = Publisher(tape, place)
        with tape.rollout(task_id="a") as rollout:
            record_session(rollout, 3)
            rollout.finish(reward=1.0)
        assert publisher.publish() == {rollout.head.key}
        assert publisher.publish() == frozenset()
        tape.score(rollout.id, reward=2.0)
        assert publisher.publish() == frozenset()
        (there,), (here,) = rolltape.read(place.url).rollouts(), tape.run().rollouts()
        assert spelled(there) == spelled(here)
        assert there.reward == 2.0


def test_in_any_order_of_ends_each_rollout_and_event_is_published_once(tmp_path: Path) -> None:
    chance = random.Random(5)
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
        publisher = Publisher(tape, place)
        published: list[tuple[str, int]] = []
        open_ones = []
        for index in range(60):
            rollout = tape.rollout(task_id=str(index))
            open_ones.append((rollout, rollout.session()))  # a session's row is written with its first turn
            if chance.random() < 0.6:
                rollout, session = open_ones.pop(chance.randrange(len(open_ones)))
                turn = first_turn(session)
                tape.score(rollout.id, reward=0.5, turn=turn.id)
                rollout.finish(reward=float(index))
                if chance.random() < 0.5:
                    tape.tag(rollout.id, "late")
            if chance.random() < 0.3:
                published += publisher.publish()
        for rollout, session in open_ones:
            first_turn(session)
            rollout.fail("broken")
        published += publisher.publish()
        assert len(published) == len(set(published)) == 60
        there, here = rolltape.read(place.url), tape.run()
        assert [row.key for row in there.index()] == [row.key for row in here.index()]
        assert there.events() == here.events()
        for one, other in zip(there.rollouts(), here.rollouts(), strict=True):
            assert spelled(one) == spelled(other)
    assert rolltape.read(place.url).verify_shards() == []


def test_what_begins_while_the_rest_is_published_is_published_in_full_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
        publisher = Publisher(tape, place)
        with tape.rollout(task_id="first") as first:
            record_session(first, 1)
            first.finish(reward=1.0)

        second: Any = None

        def begin(*what: Any) -> Iterator[dict[str, Any]]:
            nonlocal second
            second = tape.rollout(task_id="second")
            record_session(second, 2)
            return written(*what)

        monkeypatch.setattr("rolltape.tape.shards.publish.written", begin)
        assert publisher.publish() == {first.head.key}
        monkeypatch.undo()
        second.finish(reward=1.0)
        assert publisher.publish() == {second.head.key}
        there = {one.head.task_id: one for one in rolltape.read(place.url).rollouts()}
        assert [len(there[task].turns) for task in ("first", "second")] == [1, 2]


def test_a_publication_that_fails_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
        publisher = Publisher(tape, place)
        with tape.rollout(task_id="a") as rollout:
            record_session(rollout, 2)
            rollout.finish(reward=1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Place, "checksum", full_disk)
            with pytest.raises(rolltape.errors.TapeWriteError, match="No space left"):
                publisher.publish()
        assert rolltape.read(place.url).index() == []
        assert publisher.publish() == {rollout.head.key}
        assert [row.outcome.reward for row in rolltape.read(place.url).index()] == [1.0]


def full_disk(*_: object) -> tuple[int, str]:
    raise OSError(28, "No space left on device")


def test_what_a_dead_process_left_is_published_with_what_it_had_not_ended_as_lost(tmp_path: Path) -> None:
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
    child = os.fork()
    if child == 0:
        dying = open_tape(tmp_path / "node", "run")
        publisher = Publisher(dying, place)
        for task in ("published", "ended"):
            with dying.rollout(task_id=task) as rollout:
                record_session(rollout, 2)
                rollout.finish(reward=1.0)
            if task == "published":
                publisher.publish()
        record_session(dying.rollout(task_id="running"), 1)
        os._exit(0)
    os.waitpid(child, 0)
    directory = RunDirectory.opened(tmp_path / "node")
    ended = publish_left(directory, place)
    rows = {row.head.task_id: row for row in rolltape.read(place.url).index()}
    assert ended == {rows["published"].key, rows["ended"].key}
    assert [rows[task].outcome.status for task in ("published", "ended", "running")] == [
        Status.FINISHED,
        Status.FINISHED,
        Status.LOST,
    ]
    assert rows["running"].turns == 1
    assert directory.journal_paths() == []
    assert publish_left(directory, place) == frozenset()
    assert len(rolltape.read(place.url).index()) == 3


def test_a_damaged_journal_gives_what_can_be_read_and_stays(tmp_path: Path) -> None:
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
        for task in range(200):
            with tape.rollout(task_id=str(task)) as rollout:
                record_session(rollout, 3)
                rollout.finish(reward=1.0)
        path = tape.directory.journals / f"{tape.writer}.sqlite"
    raw = bytearray(path.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 8192] = bytes(8192)
    path.write_bytes(raw)
    publish_left(tape.directory, place)
    assert 0 < len(rolltape.read(place.url).index()) <= 200
    assert list(tape.directory.journals.glob("*.damaged"))
    assert tape.directory.journal_paths() == []


def test_a_try_that_ended_elsewhere_counts_before_the_same_one_that_a_node_lost(tmp_path: Path) -> None:
    with open_tape(tmp_path / "away", "run") as tape:
        place = shared(tmp_path, tape)
    child = os.fork()
    if child == 0:
        record_session(open_tape(tmp_path / "away", "run").rollout(task_id="a", try_index=0), 1)
        os._exit(0)
    os.waitpid(child, 0)
    with open_tape(tmp_path / "here", "run") as tape:
        with tape.rollout(task_id="a", try_index=0) as rollout:
            record_session(rollout, 2)
            rollout.finish(reward=1.0)
        Publisher(tape, place).publish()
    publish_left(RunDirectory.opened(tmp_path / "away"), place)
    (row,) = rolltape.read(place.url).index()
    assert (row.outcome.status, row.outcome.reward, row.turns) == (Status.FINISHED, 1.0, 2)


def test_a_session_begun_before_that_of_an_older_rollout_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tape(tmp_path / "node", "run") as tape:
        place = shared(tmp_path, tape)
        publisher = Publisher(tape, place)
        older = tape.rollout(task_id="older")
        begun: list[tuple[RolloutRecorder, SessionRecorder]] = []

        def rows(source: JournalSource, columns: str, table: str, *what: Any) -> Iterator[tuple[Any, ...]]:
            if table == "events" and not begun:
                younger = tape.rollout(task_id="younger")
                begun.append((younger, younger.session()))
                first_turn(older.session())
            return read_rows(source, columns, table, *what)

        read_rows = JournalSource._rows
        monkeypatch.setattr(JournalSource, "_rows", rows)
        assert publisher.publish() == frozenset()
        older.finish(reward=0.0)
        ((younger, session),) = begun
        first_turn(session)
        younger.finish(reward=1.0)
        assert len(publisher.publish()) == 2
        assert [row.turns for row in rolltape.read(place.url).index()] == [1, 1]
        assert [len(rollout.turns) for rollout in rolltape.read(place.url).rollouts()] == [1, 1]
