"""Damaged journals: what is readable is recovered and is what was written; what is not is named."""

import itertools
import random
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.errors import DamagedTapeError, NewerTapeError
from rolltape.tape.journal.reading import JournalSource
from taped import assistant, first_turn, next_turn, record_run, record_session, spelled, spelled_turn, user


def long_run(path: Path, close: bool = True) -> dict[str, object]:
    """A run whose journal has many pages of each kind; every turn of it by id."""
    tape = rolltape.open(path, name="exp")
    for index in range(6):
        with tape.rollout(task_id=f"task-{index}") as rollout:
            session = rollout.session(tools=[{"name": "t" * 300}])
            turn = first_turn(session, side_arrays={"s": [[1.5], [2.5]]})
            for step in range(40):
                said = [user(f"{index} {step} " * 30)]
                turn = next_turn(session, turn, step, new_messages=said, reply=assistant(f"{index} {step} " * 20))
            rollout.finish(reward=1.0)
    if close:
        tape.close()
    else:
        KEPT.append(tape)
    return {turn.id: spelled_turn(turn) for one in rolltape.read(path).rollouts() for turn in one.turns}


KEPT: list[rolltape.Tape] = []


def journal(path: Path) -> Path:
    (found,) = (path / "journals").glob("*.sqlite")
    return found


def check_recovered(path: Path, written: dict[str, object]) -> int:
    """How many turns are lost; all others are as they were, and losing any is named."""
    run = rolltape.read(path)
    problems = run.problems()
    found = {turn.id: spelled_turn(turn) for rollout in run.rollouts() for turn in rollout.turns}
    for turn, content in found.items():
        # A side array may be lost by itself, and is then named.
        if content != written[turn]:
            assert isinstance(content, dict)
            assert {**content, "side": None} == {**written[turn], "side": None}  # type: ignore[dict-item]
            assert any("side array" in problem.lost for problem in problems)
    lost = written.keys() - found.keys()
    assert not lost or any(problem.lost for problem in problems), f"{len(lost)} turns lost without a word"
    return len(lost)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_found_or_harmless(tmp_path: Path) -> None:
    written = long_run(tmp_path / "run")
    path = journal(tmp_path / "run")
    whole = path.read_bytes()
    dice = random.Random(3)
    places = [dice.randrange(100) for _ in range(8)] + [dice.randrange(len(whole)) for _ in range(52)]
    lost = []
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << dice.randrange(8)
        path.write_bytes(broken)
        lost.append(check_recovered(tmp_path / "run", written))
        assert path.read_bytes() == broken, "reading must not change a damaged journal"
    assert any(lost)
    assert sum(one == len(written) for one in lost) <= len(places) // 10


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.95])
def test_a_truncated_journal_gives_what_is_left(tmp_path: Path, part: float) -> None:
    written = long_run(tmp_path / "run")
    path = journal(tmp_path / "run")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    lost = check_recovered(tmp_path / "run", written)
    assert lost > 0
    assert part < 0.5 or lost < len(written)


def test_a_wiped_page_loses_no_more_than_what_depends_on_it(tmp_path: Path) -> None:
    written = long_run(tmp_path / "run")
    path = journal(tmp_path / "run")
    whole = path.read_bytes()
    lost = []
    for page in range(0, len(whole) // 4096, 5):
        broken = bytearray(whole)
        broken[page * 4096 : (page + 1) * 4096] = bytes(4096)
        path.write_bytes(broken)
        lost.append(check_recovered(tmp_path / "run", written))
    assert sum(one == len(written) for one in lost) <= len(lost) // 4
    assert sorted(lost)[len(lost) // 2] < len(written) // 2


def test_rows_that_cannot_be_read_up_to_the_end_are_not_counted(tmp_path: Path) -> None:
    long_run(tmp_path / "run")
    path = journal(tmp_path / "run")
    with sqlite3.connect(path) as opened:
        ((root,),) = opened.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turns'").fetchall()
    opened.close()
    broken = bytearray(path.read_bytes())
    broken[(root - 1) * 4096 : root * 4096] = bytes(4096)
    path.write_bytes(broken)
    run = rolltape.read(tmp_path / "run")
    run.index()
    unread = [str(problem) for problem in run.problems() if "cannot be read" in str(problem)]
    assert unread
    assert all(" from 0 on cannot be read" in one for one in unread)


def test_a_page_in_the_place_of_another_does_not_pass_for_it(tmp_path: Path) -> None:
    written = long_run(tmp_path / "run")
    path = journal(tmp_path / "run")
    whole = path.read_bytes()
    dice = random.Random(1)
    pages = [whole[start : start + 4096] for start in range(0, len(whole), 4096)]
    of_turns = [number for number, page in enumerate(pages) if page[0] == 13 and b'"length"' in page]
    for _ in range(15):
        target, source = dice.sample(of_turns, 2)
        broken = bytearray(whole)
        broken[target * 4096 : (target + 1) * 4096] = whole[source * 4096 : (source + 1) * 4096]
        path.write_bytes(broken)
        check_recovered(tmp_path / "run", written)


def test_one_bad_journal_does_not_hide_the_others(tmp_path: Path) -> None:
    good = record_run(tmp_path / "run", rollouts=2)
    (tmp_path / "run" / "journals" / "aaa.sqlite").write_bytes(b"this is no database" * 400)
    (tmp_path / "run" / "journals" / "bbb.sqlite").write_bytes(b"")
    with sqlite3.connect(tmp_path / "run" / "journals" / "foreign.sqlite") as foreign:
        foreign.execute("CREATE TABLE recipes (name TEXT)")
    foreign.close()
    before = (tmp_path / "run" / "journals" / "foreign.sqlite").read_bytes()
    run = rolltape.read(tmp_path / "run")
    assert [row.id for row in run.index()] == good
    named = {problem.where for problem in run.problems()}
    assert named == {"journal aaa.sqlite", "journal bbb.sqlite", "journal foreign.sqlite"}
    assert "no journal of Rolltape" in next(str(one) for one in run.problems() if "foreign" in one.where)
    assert (tmp_path / "run" / "journals" / "foreign.sqlite").read_bytes() == before
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="new") as rollout:
        rollout.finish()
    assert len(run.index()) == 3


def crashed_copy(path: Path, target: Path) -> Path:
    """The files of a live writer as a crash would leave them."""
    shutil.copytree(path, target)
    return journal(target)


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    written = long_run(tmp_path / "live", close=False)
    assert check_recovered(tmp_path / "live", written) == 0
    path = crashed_copy(tmp_path / "live", tmp_path / "run")
    log = Path(f"{path}-wal")
    assert check_recovered(tmp_path / "run", written) == 0
    whole = log.read_bytes()
    for place in (len(whole) // 2, len(whole) - 100, 5):
        broken = bytearray(whole)
        broken[place] ^= 4
        log.write_bytes(broken)
        Path(f"{path}-shm").unlink(missing_ok=True)
        assert check_recovered(tmp_path / "run", written) < 60, "pages behind the damage are read all the same"
        assert any("its log (-wal) is damaged" in one.what for one in rolltape.read(tmp_path / "run").problems())
        assert log.read_bytes() == broken


def test_a_log_that_was_copied_before_its_journal_is_named(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "live")
    tape.rollout(task_id="before").finish()
    early = Path(f"{journal(tmp_path / 'live')}-wal").read_bytes()
    for number in range(100):
        tape.rollout(task_id=f"after {number}").finish()
    tape.close()  # which folds the log into the journal
    copied = crashed_copy(tmp_path / "live", tmp_path / "run")
    Path(f"{copied}-wal").write_bytes(early)
    copied.with_suffix(".owner").write_bytes(b"")  # as it was while the tape was open
    run = rolltape.read(tmp_path / "run")
    assert any("its log (-wal) is older than the file" in one.what for one in run.problems())
    assert len(run.index()) == 101, "what the journal has since is read"
    assert not rolltape.read(tmp_path / "live").problems()


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    written = long_run(tmp_path / "live", close=False)
    path = crashed_copy(tmp_path / "live", tmp_path / "run")
    Path(f"{path}-wal").unlink()
    Path(f"{path}-shm").unlink(missing_ok=True)
    check_recovered(tmp_path / "run", written)
    assert any("its log (-wal) is missing" in one.what for one in rolltape.read(tmp_path / "run").problems())


def test_a_dead_journal_in_a_read_only_directory_is_read_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = long_run(tmp_path / "live", close=False)
    path = crashed_copy(tmp_path / "live", tmp_path / "run")
    Path(f"{path}-shm").unlink(missing_ok=True)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, whom no mode keeps out
    before = sorted(path.parent.iterdir())
    assert check_recovered(tmp_path / "run", written) == 0
    assert rolltape.read(tmp_path / "run").problems() == []
    assert sorted(path.parent.iterdir()) == before


def test_a_journal_that_cannot_be_opened_in_its_place_is_no_damage_if_its_copy_is_sound(tmp_path: Path) -> None:
    written = long_run(tmp_path / "live", close=False)
    path = crashed_copy(tmp_path / "live", tmp_path / "run")
    Path(f"{path}-shm").unlink(missing_ok=True)
    Path(f"{path}-shm").mkdir()  # SQLite cannot make it, as on a full disk
    assert check_recovered(tmp_path / "run", written) == 0
    assert rolltape.read(tmp_path / "run").problems() == []


def test_a_damaged_log_in_a_read_only_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = long_run(tmp_path / "live", close=False)
    path = crashed_copy(tmp_path / "live", tmp_path / "run")
    Path(f"{path}-shm").unlink(missing_ok=True)
    log = Path(f"{path}-wal")
    whole = bytearray(log.read_bytes())
    whole[len(whole) // 2] ^= 4
    log.write_bytes(whole)
    monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, whom no mode keeps out
    assert check_recovered(tmp_path / "run", written) < 60
    assert any("its log (-wal) is damaged" in one.what for one in rolltape.read(tmp_path / "run").problems())


def test_a_turn_coded_against_a_lost_one_is_lost_and_named(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1, turns=5)
    with sqlite3.connect(journal(tmp_path / "run")) as connection:
        connection.execute("UPDATE turns SET sampled = x'0000000000000000' WHERE pk & 0xffffff = 2")
    connection.close()
    run = rolltape.read(tmp_path / "run")
    assert [turn.sequence for turn in run.rollout(rollout).turns] == [0, 1]
    said = [str(problem) for problem in run.problems()]
    assert any(f"turn {rollout}.0.0.2 is damaged: its checksum does not agree" in line for line in said)
    assert any(f"turn {rollout}.0.0.3 is coded against turn 2, which is lost" in line for line in said)


def test_turns_missing_at_the_end_are_noticed(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1, turns=5)
    with sqlite3.connect(journal(tmp_path / "run")) as connection:
        connection.execute("DELETE FROM turns WHERE pk & 0xffffff >= 3")
    connection.close()
    said = [str(problem) for problem in rolltape.read(tmp_path / "run").problems()]
    assert any(f"session {rollout}.0.0 had 5 turns when it finished, 3 are found" in line for line in said)


def test_a_damaged_journal_is_sealed_as_far_as_it_reads_and_kept(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=3, turns=3)
    with sqlite3.connect(journal(tmp_path / "run")) as connection:
        connection.execute("UPDATE turns SET facts = x'00' WHERE pk = ?", ((2 << 24) | 2,))
    connection.close()
    report = rolltape.seal(tmp_path / "run")
    assert (report.rollouts, report.turns, list(report.kept.values())) == (3, 8, ["it is damaged"])
    run = rolltape.read(tmp_path / "run")
    assert [len(run.rollout(one).turns) for one in ids] == [3, 2, 3]
    assert any(f"{ids[1]}.0.0.2" in problem.lost for problem in run.problems())


def test_a_newer_minor_version_opens_and_its_fields_survive_a_rewrite(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1, turns=2)
    about = tmp_path / "run" / "run.json"
    about.write_text(about.read_text().replace('"schema": "1.0"', '"schema": "1.7", "colour": "green"'))
    path = journal(tmp_path / "run")
    newer = sqlite3.connect(path)
    from rolltape.tape.journal.entries import encode_event, row_crc

    ((head,),) = newer.execute("SELECT head FROM rollouts").fetchall()
    head = head[:-1] + b',"mood":{"x":[1]}}'
    newer.execute("UPDATE rollouts SET head = ?, crc = ?", (head, row_crc(1, rollout, 0, head)))
    body = encode_event("applause", (rollout, 0), {"loud": True}).body(2**61)[:-1] + b',"volume":11}'
    newer.execute("INSERT INTO events VALUES (3, ?, ?)", (body, row_crc(3, body)))
    newer.commit()
    newer.close()

    def check() -> None:
        run = rolltape.read(tmp_path / "run")
        read = run.rollout(rollout)
        assert (run.schema, run.problems()) == ("1.7", [])
        assert read.head.unknown == {"mood": {"x": [1]}}
        assert [(event.kind, event.data) for event in read.events][-1] == ("applause", {"loud": True})

    check()
    before = spelled(rolltape.read(tmp_path / "run").rollout(rollout))
    rolltape.seal(tmp_path / "run")
    assert not path.exists()
    check()
    assert spelled(rolltape.read(tmp_path / "run").rollout(rollout)) == before
    rolltape.seal(tmp_path / "run", to=tmp_path / "copy")
    bodies = [file.read_bytes() for file in (tmp_path / "copy" / "shards").glob("*/events.parquet")]
    assert len(bodies) == 1
    assert rolltape.read(tmp_path / "copy").rollout(rollout).head.unknown == {"mood": {"x": [1]}}
    assert '"colour": "green"' in (tmp_path / "copy" / "run.json").read_text()


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1)
    about = tmp_path / "run" / "run.json"
    older = about.read_text()
    about.write_text(older.replace('"1.0"', '"2.0"'))
    with pytest.raises(NewerTapeError, match=r"written with schema 2\.0.*update rolltape"):
        rolltape.read(tmp_path / "run")
    with pytest.raises(NewerTapeError):
        rolltape.open(tmp_path / "run")
    about.write_text("{}")
    with pytest.raises(DamagedTapeError, match=r"run\.json is not one that Rolltape wrote"):
        rolltape.read(tmp_path / "run")


def test_a_rollout_in_progress_is_no_problem(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        record_session(rollout, 3)
        assert tape.run().problems() == []
        rollout.finish()


def test_what_is_recorded_between_two_reads_of_a_check_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_rows = JournalSource._rows
    tape = rolltape.open(tmp_path / "run")
    numbers = itertools.count()

    def record() -> None:
        with tape.rollout(task_id="a", attempt=next(numbers)) as rollout:
            record_session(rollout, 2)
            rollout.finish()

    def rows(source: JournalSource, *what: Any, **options: Any) -> Iterator[tuple[Any, ...]]:
        yield from read_rows(source, *what, **options)
        record()

    record()
    with tape:
        run = tape.run()
        run.index()
        monkeypatch.setattr(JournalSource, "_rows", rows)
        assert run.problems() == []


@pytest.mark.parametrize("table", ["rollouts", "events"])
def test_a_damaged_shard_does_not_stop_the_recording(tmp_path: Path, table: str) -> None:
    record_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run")
    (path,) = (tmp_path / "run" / "shards").glob(f"*/{table}.parquet")
    path.write_bytes(b"PAR1 no longer PAR1")
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="another") as rollout:
        rollout.finish(reward=1.0)
        tape.score(rollout.id, reward=0.5)
    run = rolltape.read(tmp_path / "run")
    assert [row.outcome.reward for row in run.index() if row.id == rollout.id] == [0.5]
    assert run.noticed()
