"""Several ranks write one step: none waits for another, and STABLE is true whenever it is there."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from rolltape.tape.rundir import write_whole
from rolltape.tokens import Format, TokenExporter, list_steps, read_tokens
from rolltape.tokens.rank_files import RankFiles
from token_batches import packed, sequence_columns

FOUR = 4


def batch(attempt: int, sequences: int = 3) -> Any:
    columns = [sequence_columns(40, seed=number, trained=[True] * 40) for number in range(sequences)]
    return packed(columns, rewards=[float(attempt)] * sequences)


def write(exporter: TokenExporter, attempt: int, step: int = 0, sequences: int = 3) -> None:
    exporter.export(step, 0, *batch(attempt, sequences))
    exporter.mark_stable(step)
    exporter.close()


def stable(run: Path) -> list[bool]:
    return [step.stable for step in list_steps(run)]


def rewards(run: Path, **which: Any) -> dict[int, set[float | None]]:
    found: dict[int, set[float | None]] = {}
    for record in read_tokens(run, **which):
        found.setdefault(record.rank, set()).add(record.reward)
    return found


def exporters(run: Path, ranks: int = FOUR, **options: Any) -> list[TokenExporter]:
    return [TokenExporter(run, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


# One rank of a job: it trains a step with the others, and is killed in the middle of it if it is told to.
RANK = """
import os, signal, sys
import torch, torch.distributed as dist
from tokens.test_token_ranks import batch
from rolltape.tokens import TokenExporter, pipeline

run, rank, world_size, attempt, is_killed, store = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
pipeline.PART_TOKENS = 120  # a micro-batch
exporter = TokenExporter(run, rank=rank, world_size=world_size)
if store:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
for micro_step in range(3):
    exporter.export(5, micro_step, *batch(attempt))
    if store:
        gradients = torch.ones(10)
        dist.all_reduce(gradients)
        assert gradients[0] == world_size
if is_killed:
    while not exporter.report().records:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
exporter.mark_stable(5)
exporter.close()
"""


def started(run: Path, rank: int, attempt: int, *, kill: bool = False, store: Path | None = None) -> Any:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    arguments = [
        str(run),
        str(rank),
        str(FOUR),
        str(attempt),
        str(int(kill)),
        "" if store is None else str(store),
    ]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *arguments],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: Any) -> int:
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return int(process.returncode)


def test_four_processes_write_one_step_and_one_is_killed_and_started_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = [started(run, rank, 0, kill=rank == 2, store=tmp_path / "store") for rank in range(FOUR)]
    assert [ended(process) for process in job] == [0, 0, -signal.SIGKILL, 0]
    (step,) = list_steps(run)
    assert [done.rank for done in step.ranks] == [0, 1, 3]
    assert not step.stable
    assert step.partial_ranks == (2,)
    assert rewards(run) == {0: {0.0}, 1: {0.0}, 3: {0.0}}, "nothing of a rank that did not get done"

    assert ended(started(run, 2, 1)) == 0
    (step,) = list_steps(run)
    assert step.stable
    assert step.partial_ranks == ()
    assert rewards(run) == {0: {0.0}, 1: {0.0}, 2: {1.0}, 3: {0.0}}
    assert {path.name.split(".")[0] for path in step.paths()} == {f"rank_{rank}" for rank in range(FOUR)}

    job = [started(run, rank, 2, store=tmp_path / "second") for rank in range(FOUR)]
    assert [ended(process) for process in job] == [0] * FOUR
    assert stable(run) == [True]
    assert rewards(run) == {rank: {2.0} for rank in range(FOUR)}


@pytest.mark.parametrize("file_format", list(Format))
def test_stable_appears_with_the_last_rank(file_format: Format, tmp_path: Path) -> None:
    for rank, exporter in enumerate(exporters(tmp_path, file_format=file_format)):
        assert stable(tmp_path) in ([], [False])
        write(exporter, rank)
    assert stable(tmp_path) == [True]
    assert len(list(tmp_path.rglob("STABLE"))) == 1
    assert len(list(read_tokens(tmp_path))) == 3 * FOUR


def test_a_job_that_starts_over_is_not_stable_by_what_is_left_of_it(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path):
        write(exporter, 0)
    again = exporters(tmp_path)
    assert stable(tmp_path) == [True], "nobody has touched the step yet"
    for exporter in again[:3]:
        write(exporter, 1)
        assert stable(tmp_path) == [False], "the last rank has yet to write its part again"
    assert rewards(tmp_path) == {0: {1.0}, 1: {1.0}, 2: {1.0}}, "what the last one wrote before is not shown beside it"
    write(again[3], 1)
    assert stable(tmp_path) == [True]
    assert rewards(tmp_path) == {rank: {1.0} for rank in range(FOUR)}


def test_a_job_that_goes_on_with_a_later_step_leaves_the_earlier_ones_stable(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path):
        write(exporter, 0, step=0)
    for exporter in exporters(tmp_path):
        write(exporter, 1, step=1)
    assert stable(tmp_path) == [True, True]


def test_a_step_that_is_written_again_replaces_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.tokens.pipeline.PART_TOKENS", 40)
    write(TokenExporter(tmp_path, rank=0, world_size=1), 0, sequences=5)
    assert len(list(tmp_path.rglob("*.parquet"))) == 5
    write(TokenExporter(tmp_path, rank=0, world_size=1), 1, sequences=2)
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    assert rewards(tmp_path) == {0: {1.0}}


def test_the_same_exporter_may_write_a_step_again(tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        for attempt in range(3):
            exporter.export(0, 0, *batch(attempt))
            exporter.mark_stable(0)
    assert exporter.report().problems == ()
    assert rewards(tmp_path) == {0: {2.0}}
    assert stable(tmp_path) == [True]


def test_two_exporters_of_one_rank_do_not_write_side_by_side(tmp_path: Path) -> None:
    first, second = (TokenExporter(tmp_path, rank=0, world_size=1) for _ in range(2))
    write(second, 1)
    write(first, 0)
    assert "a later exporter was made for rank 0" in first.report().problems[0]
    assert second.report().problems == ()
    assert rewards(tmp_path) == {0: {1.0}}
    assert stable(tmp_path) == [True]


def test_an_exporter_that_was_replaced_halfway_spoils_nothing(tmp_path: Path) -> None:
    first = TokenExporter(tmp_path, rank=0, world_size=1)
    first.export(0, 0, *batch(0))
    second = TokenExporter(tmp_path, rank=0, world_size=1)
    second.export(0, 0, *batch(1))
    second.mark_stable(0)
    second.close()
    first.mark_stable(0)
    first.export(1, 0, *batch(0))
    first.close()
    assert rewards(tmp_path) == {0: {1.0}}
    assert stable(tmp_path) == [True], "and there is no step 1"
    assert not list(tmp_path.rglob("*.partial"))
    assert (first.report().records, first.report().lost_records) == (0, 6)


def test_a_job_with_fewer_ranks_removes_what_the_others_left(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path, 4):
        write(exporter, 0)
    for exporter in exporters(tmp_path, 2):
        write(exporter, 1)
    assert stable(tmp_path) == [True]
    assert rewards(tmp_path) == {0: {1.0}, 1: {1.0}}
    assert not list(tmp_path.rglob("*rank_3.parquet"))


def test_a_job_with_fewer_writers_does_not_count_what_the_others_left(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path):
        write(exporter, 0)
    again = [
        TokenExporter(tmp_path, rank=rank, world_size=FOUR, context_parallel_rank=rank % 2, context_parallel_size=2)
        for rank in range(FOUR)
    ]
    write(again[0], 1)
    assert stable(tmp_path) == [False], "rank 2 has yet to write its part again"
    assert rewards(tmp_path) == {0: {1.0}}
    write(again[2], 1)
    assert stable(tmp_path) == [True]
    assert rewards(tmp_path) == {0: {1.0}, 2: {1.0}}
    assert sorted(path.name for path in tmp_path.rglob("*.parquet")) == ["rank_0.parquet", "rank_2.parquet"]


def test_attempts_are_not_mixed_while_the_ranks_become_fewer(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path, 4):
        write(exporter, 0)
    write(exporters(tmp_path, 2)[0], 1)
    assert rewards(tmp_path) == {0: {1.0}}


def test_attempts_are_not_mixed_by_a_rank_that_dies_as_it_gets_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for exporter in exporters(tmp_path, 2):
        write(exporter, 0)

    def write_and_die(path: Path, data: bytes) -> None:
        write_whole(path, data)
        if path.suffix == ".done":
            raise OSError

    (alone,) = exporters(tmp_path, 1)
    monkeypatch.setattr("rolltape.tokens.rank_files.write_whole", write_and_die)
    write(alone, 1)
    assert stable(tmp_path) == [False]
    assert rewards(tmp_path) == {0: {1.0}}


def test_attempts_are_not_mixed_when_the_job_dies_again_and_again(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path):
        write(exporter, 0)
    write(exporters(tmp_path)[0], 1)
    third = exporters(tmp_path)
    assert rewards(tmp_path) == {0: {1.0}}, "of the second attempt; the first one is replaced"
    for exporter in third:
        write(exporter, 2)
    assert stable(tmp_path) == [True]
    assert rewards(tmp_path) == {rank: {2.0} for rank in range(FOUR)}


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_is_marked_twice_stays_as_it_is(waits: bool, tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *batch(0))
        exporter.mark_stable(0)
        while waits and stable(tmp_path) != [True]:
            pass
        exporter.mark_stable(0)
    assert exporter.report().problems == ()
    assert stable(tmp_path) == [True]
    assert rewards(tmp_path) == {0: {0.0}}


def test_a_stable_that_names_another_attempt_does_not_count(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path, 2):
        write(exporter, 0)
    (marker,) = tmp_path.rglob("STABLE")
    said = json.loads(marker.read_text())
    said["attempts"]["1"] = "another"
    marker.write_text(json.dumps(said))
    assert stable(tmp_path) == [False]


def test_a_process_that_is_forked_at_the_wrong_moment_does_not_keep_the_lock(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, Format.PARQUET, rank=0, world_size=1, writers=1)
    forked: list[int] = []
    replace = Path.replace

    def fork_and_replace(self: Path, target: Path) -> Path:
        forked.append(os.fork())
        if not forked[-1]:
            signal.pause()
        return replace(self, target)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        patch.setattr(Path, "replace", fork_and_replace)
        files.announce()
    try:
        with (tmp_path / ".lock").open("ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for process in forked:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def test_files_of_others_in_a_step_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "tokens" / "step_0"
    folder.mkdir(parents=True)
    (folder / "rank_x.done").touch()
    write(TokenExporter(tmp_path, rank=0, world_size=1), 0)
    assert stable(tmp_path) == [True]
    assert (folder / "rank_x.done").exists()


def test_ranks_share_no_file(tmp_path: Path) -> None:
    for exporter in exporters(tmp_path, 12):
        write(exporter, 0)
    (step,) = list_steps(tmp_path)
    names = [path.name for path in step.paths()]
    assert sorted(names) == sorted(f"rank_{rank}.parquet" for rank in range(12))
    assert len(list(step.paths(rank=1))) == 1
