"""The index as a file: disposable, replaceable, and never in the way."""

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rolltape
from rolltape.errors import RunNotFound
from rolltape.tape.index import database
from taped import first_turn, next_turn, record_run


def index_files(run: Path) -> list[Path]:
    return sorted((run / "cache").glob("index-*.sqlite"))


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    assert len(rolltape.read(tmp_path / "run").index()) == 3
    (held,) = index_files(tmp_path / "run")
    held.write_bytes(b"SQLite format 3\0" + b"\xff" * 8192)
    run = rolltape.read(tmp_path / "run")
    assert {row.id for row in run.index()} == set(ids)
    assert run.noticed() == []


def test_an_index_with_a_damaged_page_is_made_again_by_whoever_meets_it(tmp_path: Path) -> None:
    def contents() -> object:
        run = rolltape.read(tmp_path / "run")
        ids = [row.id for row in run.index()]
        tags = [run.annotations(one, 0).rollout_tags for one in ids]
        with run.snapshot() as still:
            assert [row.id for row in still.index()] == ids
        return ids, run.versions(), [len(run.rollout(one[:12]).turns) for one in ids], tags, run.noticed()

    ids = record_run(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        tape.announce_version("9")
        tape.add_tags(ids[0], "odd")
    sound = contents()
    (file,) = index_files(tmp_path / "run")
    pages, pointer = file.read_bytes(), (tmp_path / "run" / "cache" / "index.json").read_bytes()
    for start in range(4096, len(pages), 4096):
        shutil.rmtree(tmp_path / "run" / "cache")
        file.parent.mkdir()
        file.write_bytes(pages[:start] + bytes(4096) + pages[start + 4096 :])
        (file.parent / "index.json").write_bytes(pointer)
        assert contents() == sound, f"page at {start}"


def test_an_index_that_was_deleted_is_made_again_also_for_a_reader_that_had_it_open(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    assert len(run.index()) == 3
    for path in (tmp_path / "run" / "cache").iterdir():
        path.unlink()
    assert len(run.index()) == 3


def test_a_run_that_cannot_be_written_to_is_indexed_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    usable = database._is_usable
    monkeypatch.setattr(
        database, "_is_usable", lambda folder: tmp_path / "run" not in folder.parents and usable(folder)
    )
    assert len(rolltape.read(tmp_path / "run").index()) == 3
    assert not (tmp_path / "run" / "cache").exists()
    assert list((tmp_path / "home" / "rolltape").glob("*/index-*.sqlite"))


def test_where_nothing_can_be_written_the_index_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")

    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(database.IndexFile, "replace", full)
    run = rolltape.read(tmp_path / "run")
    assert len(run.index()) == 3
    assert sum(len(rollout.turns) for rollout in run.rollouts()) > 0
    assert run.noticed() == []


def test_another_run_in_the_same_place_has_another_index(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=2)
    assert len(rolltape.read(tmp_path / "run").index()) == 2
    record_run(tmp_path / "other", rollouts=1)
    for path in (tmp_path / "run" / "journals").iterdir():
        path.unlink()
    (tmp_path / "run" / "run.json").write_bytes((tmp_path / "other" / "run.json").read_bytes())
    for path in (tmp_path / "other" / "journals").iterdir():
        path.rename(tmp_path / "run" / "journals" / path.name)
    assert len(rolltape.read(tmp_path / "run").index()) == 1


HOLD = """
import sys, sqlite3
from pathlib import Path
(file,) = Path(sys.argv[1]).glob("cache/index-*.sqlite")
connection = sqlite3.connect(file, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_holder_of_the_write_lock_that_was_stopped_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    assert len(rolltape.read(tmp_path / "run").index()) == 3
    (before,) = index_files(tmp_path / "run")
    monkeypatch.setattr(database, "_BUSY_S", 0.05)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGSTOP)
        with rolltape.open(tmp_path / "run") as tape:
            tape.rollout(task_id="later").finish(reward=1.0)
        run = rolltape.read(tmp_path / "run")
        assert len(run.index()) == 4
        assert run.tape_index.file.path != before
    finally:
        os.kill(holder.pid, signal.SIGCONT)
        holder.communicate()
    assert len(rolltape.read(tmp_path / "run").index()) == 4


def test_nobody_waits_for_a_holder_of_the_lock_that_was_stopped_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    assert len(run.index()) == 3
    lock = run.tape_index.file.lock_path

    def wait(seconds: float) -> None:
        raise AssertionError("it waits")

    with lock.open("ab") as held, rolltape.open(tmp_path / "run") as tape:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.utime(lock, (0, 0))
        tape.rollout(task_id="later").finish(reward=1.0)
        monkeypatch.setattr(time, "sleep", wait)
        assert len(run.index()) == 4


@pytest.mark.parametrize("later", ["rollout", "turn"])
def test_an_index_that_was_copied_later_than_the_journals_is_made_again(tmp_path: Path, later: str) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        session = tape.rollout(task_id="first").session()
        before = first_turn(session)
        assert len(tape.run().index()) == 1
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", copy, ignore=shutil.ignore_patterns("cache"))
        if later == "rollout":
            tape.rollout(task_id="later")
        else:
            next_turn(session, before)
        assert sum(row.turns + 1 for row in tape.run().index()) == 3
        shutil.copytree(tmp_path / "run" / "cache", copy / "cache")
    assert [(row.task_id, row.turns) for row in rolltape.read(copy).index()] == [("first", 1)]


def test_a_reader_of_a_run_that_was_moved_or_replaced_says_so(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    assert len(run.index()) == 3
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(RunNotFound, match="no run there"):
        run.index()
    record_run(tmp_path / "run", rollouts=1)
    with pytest.raises(RunNotFound, match="the run there is not the one that was opened; read it again"):
        run.index()
    assert len(rolltape.read(tmp_path / "moved").index()) == 3


def test_a_reward_does_not_outlive_the_journal_that_has_it(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1)
    with rolltape.open(tmp_path / "run") as judge:
        judge.score(rollout, reward=5.0)
        writer = judge.writer
    run = rolltape.read(tmp_path / "run")
    assert [row.reward for row in run.index()] == [5.0]
    for path in (tmp_path / "run" / "journals").glob(f"{writer}*"):
        path.unlink()
    assert [row.reward for row in run.index()] == [0.0]


def test_a_run_copied_without_its_logs_says_so(tmp_path: Path) -> None:
    code = """
import os, sys, rolltape
tape = rolltape.open(sys.argv[1])
for number in range(4):
    tape.rollout(task_id=str(number)).finish(reward=1.0)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    for path in (tmp_path / "run" / "journals").glob("*-wal"):
        path.unlink()
    listed = subprocess.run(
        [sys.executable, "-m", "rolltape.cli", "ls", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert listed.returncode == 3
    assert "its log (-wal) is missing" in listed.stderr
