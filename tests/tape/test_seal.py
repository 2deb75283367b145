"""Sealing: shards read back equal bit for bit, and a crash at any point loses nothing and counts nothing twice."""

import json
import math
import os
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

import rolltape
from rolltape.errors import RunNotFound, TapeError
from rolltape.records.rollout import Status
from rolltape.tape.rundir import Place
from rolltape.tape.shards import seal as sealing
from rolltape.tape.shards.writing import ShardWriter
from taped import finished, first_turn, next_turn, python, record_run, record_session, spelled, user


def rich_run(path: Path) -> None:
    """A closed run with everything that a tape can hold."""
    rng = np.random.default_rng(1)
    with rolltape.open(path, name="exp") as tape:
        tape.announce_version("7")
        for index in range(4):
            with tape.rollout(task={"n": index}, step=index, source="s:train", extra={"x": math.inf}) as rollout:
                session = rollout.session(tools=[{"name": "t"}], stop_ids=[5], tokenizer="q", extra={"a": 1})
                side = {
                    "experts": rng.integers(0, 255, (2, 3, 4)).astype(np.uint8),
                    "top": {"values": rng.random((5, 2)).astype(np.float16), "counts": [3, 2]},
                    "empty": {"values": np.zeros((0, 7), np.int64), "start": 1},
                    "big": np.array([[1.5], [2.5]], ">f8"),
                }
                turn = first_turn(session, side_arrays=side, reward=math.nan)
                for step in range(5):
                    turn = next_turn(session, turn, step, logprobs=[None, -0.1, -1e-30])
                session.record_turn(
                    prompt_messages=[user("other")], prompt_ids=[], sampled_ids=[], finish="error", error="boom"
                )
                other = rollout.session()
                first_turn(other, segments=[], sampled_ids=None, logprobs=None, weight_version=None)
                first_turn(other, prompt_ids=None, sampled_ids=None, logprobs=None, token_faithful=False)
                rollout.finish(reward=math.nan if index else 1.0, reward_terms={"a": -math.inf})
        with tape.rollout(task_id="broken") as rollout:
            rollout.fail("no sandbox")
        tape.filter(rollout.id, "because")


def contents(location: str | Path) -> list[Any]:
    return [repr(spelled(rollout)) for rollout in rolltape.read(location).rollouts()]


def test_shards_read_back_equal_bit_for_bit(tmp_path: Path) -> None:
    rich_run(tmp_path / "run")
    before = contents(tmp_path / "run")
    index = [repr(row.outcome) for row in rolltape.read(tmp_path / "run").index()]
    report = rolltape.seal(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    assert (report.rollouts, len(report.shards), report.running, report.kept) == (5, 1, 0, {})
    assert list((tmp_path / "run" / "journals").iterdir()) == []
    assert contents(tmp_path / "run") == before
    assert [repr(row.outcome) for row in run.index()] == index
    assert all(row.sealed for row in run.index())
    assert (run.problems(), run.verify_shards(), run.versions()) == ([], [], ("8", "7"))


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_published_run_is_a_run_there_and_part_of_the_run_here(tmp_path: Path, kind: str) -> None:
    rich_run(tmp_path / "run")
    before = contents(tmp_path / "run")
    target = f"memory://bucket/{tmp_path.name}" if kind == "memory" else str(tmp_path / "shared" / "exp")
    with pytest.raises(RunNotFound):
        rolltape.read(target)
    report = rolltape.seal(tmp_path / "run", to=target)
    assert report.rollouts == 5
    assert not (tmp_path / "run" / "shards").exists()
    for location in (target, str(tmp_path / "run")):
        run = rolltape.read(location)
        assert (run.name, run.problems(), run.verify_shards()) == ("exp", [], [])
        assert contents(location) == before
    assert rolltape.seal(tmp_path / "run", to=target).shards == ()
    with rolltape.open(tmp_path / "run") as tape:
        tape.score(rolltape.read(target).index()[0].id, reward=9.0)
    rolltape.seal(tmp_path / "run", to=target)
    assert rolltape.read(target).index()[0].outcome.reward == 9.0


def test_publishing_gives_a_place_also_what_was_sealed_before(tmp_path: Path) -> None:
    rich_run(tmp_path / "run")
    before = contents(tmp_path / "run")
    rolltape.seal(tmp_path / "run")
    assert rolltape.seal(tmp_path / "run", to=tmp_path / "copy").rollouts == 5
    assert contents(tmp_path / "copy") == before
    assert contents(tmp_path / "run") == before
    assert rolltape.seal(tmp_path / "run").rollouts == 0


def test_a_rollout_is_listed_while_it_moves_to_a_remote_place(tmp_path: Path) -> None:
    target = f"memory://bucket/{tmp_path.name}"
    record_run(tmp_path / "run", rollouts=1)
    rolltape.seal(tmp_path / "run", to=target)
    run = rolltape.read(tmp_path / "run")
    assert len(run.index()) == 1
    with rolltape.open(tmp_path / "run") as tape:
        tape.rollout(task_id="later").finish(reward=1.0)
    assert len(run.index()) == 2
    rolltape.seal(tmp_path / "run", to=target)  # the reader has just looked there
    assert len(run.index()) == 2


def test_another_runs_place_is_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    rolltape.open(tmp_path / "other", name="other").close()
    with pytest.raises(TapeError, match="holds the run 'other', not 'exp'"):
        rolltape.seal(tmp_path / "run", to=tmp_path / "other")


def test_a_place_out_of_reach_is_named(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    (tmp_path / "run" / "published.json").write_text(json.dumps({"locations": ["memory://nowhere/exp"]}))
    run = rolltape.read(tmp_path / "run")
    assert [row.id for row in run.index()] == ids
    assert [problem.where for problem in run.problems()] == ["memory:///nowhere/exp"]


def test_a_place_that_cannot_be_opened_here_is_named_and_stops_no_recording(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    (tmp_path / "run" / "published.json").write_text(json.dumps({"locations": ["nope://bucket/exp"]}))
    run = rolltape.read(tmp_path / "run")
    assert [row.id for row in run.index()] == ids
    (problem,) = run.problems()
    assert (problem.where, problem.lost) == ("nope://bucket/exp", "the rollouts that were published there")
    assert "Protocol not known: nope" in problem.what
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="new") as rollout:
        rollout.finish()


class NoCredentials(Exception):
    """An error of a storage client, as botocore's, which is no OSError."""


class LockedStorage(AbstractFileSystem):  # type: ignore[misc]
    protocol = "locked"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        raise NoCredentials("Unable to locate credentials")

    info = cat_file = makedirs = rm = ls


def test_an_error_of_a_storage_client_is_an_error_of_the_tape(tmp_path: Path) -> None:
    fsspec.register_implementation("locked", LockedStorage, clobber=True)
    ids = record_run(tmp_path / "run")
    reason = "NoCredentials: Unable to locate credentials"
    with pytest.raises(TapeError, match=rf"locked://bucket/exp/run\.json: cannot be read: {reason}"):
        rolltape.read("locked://bucket/exp")
    with pytest.raises(TapeError, match=reason):
        rolltape.seal(tmp_path / "run", to="locked://bucket/exp")
    (tmp_path / "run" / "published.json").write_text(json.dumps({"locations": ["locked://bucket/exp"]}))
    run = rolltape.read(tmp_path / "run")
    assert [row.id for row in run.index()] == ids
    (problem,) = run.problems()
    assert problem.what == f"cannot be reached: {reason}"
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="new") as rollout:
        rollout.finish()


@pytest.mark.parametrize("content", ["[]", "5", '{"locations": 5}', '{"locations": null}', "{"])
def test_a_damaged_list_of_places_is_named_and_stops_no_recording(tmp_path: Path, content: str) -> None:
    ids = record_run(tmp_path / "run")
    (tmp_path / "run" / "published.json").write_text(content)
    run = rolltape.read(tmp_path / "run")
    assert [row.id for row in run.index()] == ids
    assert "published.json: cannot be read" in str(run.problems()[0])
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="new") as rollout:
        rollout.finish()


def test_reading_a_shard_leaves_no_thread_that_could_outlive_the_interpreter(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run")
    code = """
import os, sys
import pyarrow.parquet, rolltape
run = rolltape.read(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
print(sum(len(one.turns) for one in run.rollouts()), len(os.listdir("/proc/self/task")) - before)
"""
    assert finished(python(code, str(tmp_path / "run"))) == "12 0\n"


def test_a_live_writers_journal_stays_and_its_running_rollouts_with_it(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    with tape.rollout(task_id="done") as done:
        record_session(done, 3)
        done.finish(reward=1.0)
    running = tape.rollout(task_id="running")
    session = running.session()
    turn = first_turn(session)
    report = rolltape.seal(tmp_path / "run")
    assert (report.rollouts, report.running, list(report.kept.values())) == (1, 1, ["its writer is alive"])
    run = rolltape.read(tmp_path / "run")
    assert [(row.id, row.sealed) for row in run.index()] == [(done.id, True), (running.id, False)]
    next_turn(session, turn)
    running.finish(reward=0.5)
    tape.score(done.id, reward=0.25)
    tape.close()
    assert [row.outcome.reward for row in run.index()] == [0.25, 0.5]
    report = rolltape.seal(tmp_path / "run")
    assert (report.rollouts, len(report.removed)) == (1, 1)
    assert [(row.outcome.reward, row.turns, row.sealed) for row in run.index()] == [(0.25, 3, True), (0.5, 2, True)]
    assert run.problems() == []


def test_a_lost_rollout_is_sealed_as_lost(tmp_path: Path) -> None:
    code = "import os, sys, rolltape; from taped import *; tape = rolltape.open(sys.argv[1])\n"
    code += "record_session(tape.rollout(task_id='a'), 3); os.kill(os.getpid(), 9)"
    python(code, str(tmp_path / "run")).wait()
    report = rolltape.seal(tmp_path / "run")
    assert (report.rollouts, len(report.removed)) == (1, 1)
    (row,) = rolltape.read(tmp_path / "run").index()
    assert (row.outcome.status, row.turns, row.sealed) == (Status.LOST, 3, True)


CRASH_POINTS = ["open", "add_rollout", "add_events", "make_safe", "write", "removed-one"]


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("target", [None, "copy"])
def test_a_seal_cut_short_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path, point: str, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run", rollouts=2)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="late") as rollout:
        record_session(rollout, 2)
        rollout.finish(reward=7.0)
    before = contents(tmp_path / "run")
    to = None if target is None else tmp_path / target
    child = os.fork()
    if child == 0:
        try:
            _die_at(point, monkeypatch)
            rolltape.seal(tmp_path / "run", to=to)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert contents(tmp_path / "run") == before
    assert rolltape.read(tmp_path / "run").problems() == []
    rolltape.seal(tmp_path / "run", to=to)
    assert contents(tmp_path / "run") == before
    assert rolltape.read(tmp_path / "run").problems() == []
    assert rolltape.seal(tmp_path / "run", to=to).shards == ()
    assert list((tmp_path / "run" / "journals").glob("*.sqlite*")) == []


def _die_at(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        os._exit(9)

    def removed_one(path: Path) -> None:
        path.unlink()
        os._exit(9)

    if point == "removed-one":
        monkeypatch.setattr(sealing, "remove_journal", removed_one)
    elif point in ("open", "make_safe", "write"):
        plain = getattr(Place, point)

        def reached(self: Place, *arguments: Any) -> Any:
            last = arguments[-1] if arguments else ""
            if (point, last) in (("open", "turns.parquet"), ("make_safe", "sides.parquet"), ("write", "MANIFEST.json")):
                die()
            return plain(self, *arguments)

        monkeypatch.setattr(Place, point, reached)
    else:
        monkeypatch.setattr(ShardWriter, point, die)


def test_a_sealed_file_that_changed_is_found(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=2, turns=30)
    rolltape.seal(tmp_path / "run")
    (file,) = (tmp_path / "run" / "shards").glob("*/turns.parquet")
    first = pq.read_metadata(file).row_group(0).column(0)
    broken = bytearray(file.read_bytes())
    broken[first.data_page_offset + first.total_compressed_size - 1] ^= 1
    file.write_bytes(broken)
    run = rolltape.read(tmp_path / "run")
    (problem,) = run.verify_shards()
    assert "turns.parquet has" in problem.what
    assert [row.id for row in run.index()] == ids
    assert any(ids[0] in one.lost for one in run.problems())


@pytest.mark.parametrize("changed", ['"sha256"', '"bytes"', '"files"'])
def test_a_manifest_that_changed_is_found(tmp_path: Path, changed: str) -> None:
    ids = record_run(tmp_path / "run", rollouts=2)
    rolltape.seal(tmp_path / "run")
    (file,) = (tmp_path / "run" / "shards").glob("*/MANIFEST.json")
    file.write_text(file.read_text().replace(changed, '"odd"'))
    run = rolltape.read(tmp_path / "run")
    (problem,) = run.verify_shards()
    assert "MANIFEST.json is damaged" in problem.what
    assert [row.id for row in run.index()] == ids


def test_loading_one_rollout_of_a_big_shard_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    with rolltape.open(tmp_path / "run") as tape:
        for index in range(40):
            with tape.rollout(task_id=str(index)) as rollout:
                first_turn(
                    rollout.session(),
                    prompt_messages=[user(rng.bytes(100_000).hex())],
                    prompt_ids=rng.integers(0, 151_000, 100_000),
                )
                rollout.finish()
    report = rolltape.seal(tmp_path / "run")
    read = 0
    plain = Place.open

    def counting(self: Place, mode: str, *names: str) -> Any:
        handle = plain(self, mode, *names)
        inner = handle.read

        def reads(*arguments: int) -> bytes:
            nonlocal read
            data: bytes = inner(*arguments)
            read += len(data)
            return data

        monkeypatch.setattr(handle, "read", reads, raising=False)
        return handle

    monkeypatch.setattr(Place, "open", counting)
    assert len(rolltape.read(tmp_path / "run").rollout(rollout.id).turns) == 1
    assert 0 < read < report.bytes / 4


def test_progress_is_told(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=3)
    told: list[tuple[int, int]] = []
    rolltape.seal(tmp_path / "run", progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_reader_sees_every_rollout_once_while_others_write_and_seal(tmp_path: Path) -> None:
    rolltape.open(tmp_path / "run").close()
    code = "import sys, rolltape\nfrom taped import *\n"
    code += "for i in range(4):\n  with rolltape.open(sys.argv[1]) as tape:\n    for j in range(5):\n"
    code += "      with tape.rollout(task_id=sys.argv[2], step=i, attempt=j) as r:\n"
    code += "        record_session(r, 5); r.finish(reward=1.0)\n"
    writers = [python(code, str(tmp_path / "run"), name) for name in ("a", "b")]
    run, seen = rolltape.read(tmp_path / "run"), 0
    while any(writer.poll() is None for writer in writers):
        rolltape.seal(tmp_path / "run")
        keys = [row.key for row in run.index()]
        assert len(set(keys)) == len(keys) >= seen
        seen = len(keys)
    for writer in writers:
        finished(writer)
    rolltape.seal(tmp_path / "run")
    assert [row.turns for row in run.index()] == [5] * 40
    assert run.problems() == []


SEALED_ON_A_FULL_DISK = """
import os, resource, sys
from pathlib import Path
import rolltape
from rolltape.tape.shards.seal import seal
from taped import first_turn, user

run = Path(sys.argv[1])
with rolltape.open(run) as tape, tape.rollout(task_id="a") as rollout:
    first_turn(rollout.session(), prompt_messages=[user(os.urandom(1 << 20).hex()) for _ in range(2)])
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
try:
    seal(run)
except rolltape.errors.TapeError as error:
    print(type(error).__name__, str(run) in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
print(len(rolltape.read(run).index()), list((run / "shards").iterdir()), seal(run).rollouts)
"""


def test_a_full_disk_at_sealing_is_named_and_loses_nothing(tmp_path: Path) -> None:
    assert finished(python(SEALED_ON_A_FULL_DISK, str(tmp_path / "run"))) == "TapeWriteError True\n1 [] 1\n"
