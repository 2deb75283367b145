"""What the disk and the threads do wrong is counted and said once, and training goes on."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltape.errors import DamagedTapeError
from rolltape.tokens import TokenExporter, list_steps, read_tokens
from rolltape.tokens.parquet import write_parquet
from token_batches import packed, padded, sequence_columns

BATCH = packed([sequence_columns(50, trained=[True] * 50) for _ in range(4)])


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    goes_on = threading.Event()

    def write_later(*given: Any) -> None:
        goes_on.wait()
        write_parquet(*given)

    monkeypatch.setattr("rolltape.tokens.exporter.write_parquet", write_later)
    try:
        yield goes_on
    finally:
        goes_on.set()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_full_queue_drops_what_comes_and_keeps_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # 200 tokens take about 13 kB here.
    with (
        slow_disk(monkeypatch) as goes_on,
        TokenExporter(tmp_path, rank=0, world_size=1, max_queued_bytes=60_000) as exporter,
    ):
        for micro_step in range(20):
            exporter.export(0, micro_step, *BATCH)
        exporter.mark_stable(0)
        assert exporter.report().dropped_records > 0
        assert len(said(caplog)) == 1
        goes_on.set()
    report = exporter.report()
    assert report.records + report.dropped_records == 80
    assert report.records >= 4
    written = {record.micro_step for record in read_tokens(tmp_path)}
    assert written == set(range(len(written))), "the first ones wait, the later ones are dropped"
    (step,) = list_steps(tmp_path)
    assert step.stable
    assert step.ranks[0].dropped_records == report.dropped_records
    assert len(said(caplog)) == 2, "once when it began, once at the end"
    assert f"{report.dropped_records} dropped" in said(caplog)[-1]


def test_a_queue_that_was_full_takes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        slow_disk(monkeypatch) as goes_on,
        TokenExporter(tmp_path, rank=0, world_size=1, max_queued_bytes=1) as exporter,
    ):
        exporter.export(0, 0, *BATCH)
        exporter.export(0, 1, *BATCH)
        goes_on.set()
        exporter.mark_stable(0)
        while exporter.report().records < 4:
            threading.Event().wait(0.01)
        exporter.export(1, 0, *BATCH)
        exporter.mark_stable(1)
    assert [(record.step, record.micro_step) for record in read_tokens(tmp_path)] == [(0, 0)] * 4 + [(1, 0)] * 4


def test_what_is_dropped_counts_for_the_attempt_that_it_was_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        slow_disk(monkeypatch) as goes_on,
        TokenExporter(tmp_path, rank=0, world_size=1, max_queued_bytes=1) as exporter,
    ):
        exporter.export(0, 0, *BATCH)
        exporter.mark_stable(0)
        exporter.export(0, 0, *BATCH)
        exporter.export(1, 0, *BATCH)
        exporter.export(1, 1, *BATCH)
        assert exporter.report().dropped_records == 12
        exporter.mark_stable(0)
        exporter.mark_stable(1)
        goes_on.set()
    counts = [(step.step, done.records, done.dropped_records) for step in list_steps(tmp_path) for done in step.ranks]
    assert counts == [(0, 0, 4), (1, 0, 8)]


def test_every_sequence_is_accounted_for_once_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    exporter = TokenExporter(tmp_path / "run", rank=0, world_size=1)
    exporter.export(0, 0, *packed([sequence_columns(3, trained=[True] * 3), sequence_columns(4, trained=[False] * 4)]))
    while not exporter.report().lost_records:
        threading.Event().wait(0.01)
    assert (exporter.report().untrained_sequences, exporter.report().lost_records) == (1, 1)
    assert exporter.close().lost_records == 1


def test_records_that_were_lost_before_a_step_could_be_opened_count_in_its_marker(tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        blocking = tmp_path / "tokens" / "step_0"
        blocking.write_text("")
        exporter.export(0, 0, *BATCH)
        while not exporter.report().lost_records:
            threading.Event().wait(0.01)
        exporter.mark_stable(1, wait=True)  # what came before is over
        blocking.unlink()
        exporter.export(0, 1, *BATCH)
        assert not exporter.mark_stable(0, wait=True)
    step = list_steps(tmp_path)[0]
    assert [(done.records, done.lost_records) for done in step.ranks] == [(4, 4)]


FORKED = """
import json, logging, os, sys
from token_batches import packed, sequence_columns
from rolltape.tokens import TokenExporter

logging.basicConfig(stream=sys.stderr, format="%(message)s")
batch = packed([sequence_columns(9, trained=[True] * 9)])
exporter = TokenExporter(sys.argv[1], rank=0, world_size=1)
exporter.export(0, 0, *batch)
if os.fork() == 0:
    if sys.argv[2] == "exports":
        exporter.export(0, 1, *batch)
        assert not exporter.mark_stable(0, wait=True)
    sys.exit()
os.wait()
exporter.mark_stable(0)
print(exporter.close().problems)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("child", ["exports", "only ends"])
def test_a_forked_process_does_not_touch_the_exporter_of_its_parent(child: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path), child],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "()\n"
    assert [record.micro_step for record in read_tokens(tmp_path, stable_only=True)] == [0]
    expected = ["it was made before this process was forked; make one in each process"] if child == "exports" else []
    assert [line.split(": ")[1].split("; training")[0] for line in ended.stderr.splitlines()] == expected


FULL_DISK = """
import json, logging, resource, sys
from token_batches import packed, sequence_columns
from rolltape.tokens import TokenExporter

logging.basicConfig(stream=sys.stderr, format="%(message)s")
batch = packed([sequence_columns(20_000, trained=[True] * 20_000)])
with TokenExporter(sys.argv[1], rank=0, world_size=1) as exporter:
    exporter.export(0, 0, *batch)
    exporter.mark_stable(0)
    while not exporter.report().records:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for step in (1, 2, 3):
        exporter.export(step, 0, *batch)
        exporter.mark_stable(step)
report = exporter.report()
print(json.dumps([report.records, report.lost_records, report.problems]))
"""


def test_a_full_disk_loses_records_and_says_so(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    records, lost, problems = json.loads(ended.stdout)
    assert (records, lost) == (1, 3)
    assert len(problems) == 1
    assert "File too large" in problems[0]
    assert ended.stderr.count("File too large") == 2, "when it happened, and at the end"
    assert [record.step for record in read_tokens(tmp_path)] == [0]
    assert [sum(done.lost_records for done in step.ranks) for step in list_steps(tmp_path)] == [0, 1, 1, 1]
    assert not list(tmp_path.rglob("*.partial"))


@contextmanager
def nobody() -> Iterator[Path]:
    """A directory, and a user who may not write to it, whoever runs the tests."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)
            Path(folder).chmod(0o755)


def test_a_directory_that_cannot_be_written_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with nobody() as folder:
        with TokenExporter(folder / "run", rank=0, world_size=1) as exporter:
            for step in range(3):
                exporter.export(step, 0, *BATCH)
                exporter.mark_stable(step)
        assert not list(folder.iterdir())
    report = exporter.report()
    assert report.lost_records == 12
    assert "Permission denied" in report.problems[0]
    assert len(said(caplog)) == 2


def test_a_run_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with TokenExporter(tmp_path / "run", rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *BATCH)
    assert exporter.report().lost_records == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit

    monkeypatch.setattr("rolltape.tokens.pipeline.cut_sequences", killed)
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *BATCH)
        while exporter._pipeline._cutter.alive:  # type: ignore[union-attr]
            pass
        exporter.export(0, 1, *BATCH)
        exporter.export(0, 2, *BATCH)
        exporter.mark_stable(0)
    assert exporter.report().lost_records == 12
    assert exporter.report().dropped_records == 0, "no queue was full"
    assert "died" in said(caplog)[0]
    assert len(said(caplog)) == 2


def test_a_batch_that_cannot_be_cut_is_lost_alone(tmp_path: Path) -> None:
    batch, outputs = padded([sequence_columns(5, trained=[True] * 5), sequence_columns(3, trained=[True] * 3)])
    batch["trained_mask"][1, 4] = True
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, batch, outputs)
        exporter.export(0, 1, *BATCH)
        exporter.mark_stable(0)
    assert exporter.report().problems == (
        "step 0, micro step 0: 1 trained tokens lie in padding; correct attention_mask or the mask",
    )
    assert exporter.report().lost_records == 2
    assert {record.micro_step for record in read_tokens(tmp_path)} == {1}
    assert [done.lost_records for step in list_steps(tmp_path) for done in step.ranks] == [2]


def test_columns_that_torch_cannot_copy_do_not_raise(tmp_path: Path) -> None:
    batch, outputs = BATCH
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, {**batch, "input_ids": batch["input_ids"].to("meta")}, outputs)
        exporter.mark_stable(0)
    assert exporter.report().lost_records == 4
    assert exporter.report().problems
    assert [done.lost_records for step in list_steps(tmp_path) for done in step.ranks] == [4], "though it never began"


def test_a_close_that_takes_too_long_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_disk(monkeypatch):
        exporter = TokenExporter(tmp_path, rank=0, world_size=1)
        exporter.export(0, 0, *BATCH)
        exporter.mark_stable(0)
        report = exporter.close(timeout_s=0.2)
        assert (report.records, report.lost_records) == (0, 4)
        assert any("not everything was written" in problem for problem in report.problems)
        assert exporter.close() == exporter.report() == report, "closing again does nothing"
    while not exporter.report().records:
        threading.Event().wait(0.01)
    assert exporter.report().lost_records == 0, "what was written after all is not lost"


def test_a_step_that_is_never_marked_stays_partial(tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *BATCH)
    assert "step 0 was never marked stable" in exporter.report().problems[0]
    (step,) = list_steps(tmp_path)
    assert not step.stable
    assert step.partial_ranks == (0,)
    assert list(read_tokens(tmp_path)) == []


def test_after_close_nothing_is_taken(tmp_path: Path) -> None:
    exporter = TokenExporter(tmp_path, rank=0, world_size=1)
    exporter.close()
    exporter.export(0, 0, *BATCH)
    exporter.mark_stable(0)
    assert not list(tmp_path.rglob("step_*"))


def test_what_nobody_closes_is_written_when_the_program_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from token_batches import packed, sequence_columns; from rolltape.tokens import TokenExporter\n"
        "e = TokenExporter(sys.argv[1], rank=0, world_size=1)\n"
        "e.export(0, 0, *packed([sequence_columns(9, trained=[True] * 9)])); e.mark_stable(0)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, check=True)
    assert len(list(read_tokens(tmp_path, stable_only=True))) == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *BATCH)
        exporter.mark_stable(0)
    (file,) = tmp_path.rglob("rank_0.parquet")
    written = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(written[:-8] if damage == "cut" else bytes(len(written)))
    with pytest.raises(DamagedTapeError, match=r"rank_0\.parquet"):
        list(read_tokens(tmp_path))


def test_memory_is_used_again() -> None:
    from rolltape.tokens.snapshot import PinnedBuffers

    buffers = PinnedBuffers()
    first = buffers.take(3 << 20, pinned=False)
    buffers.give_back(first)
    assert buffers.take(2 << 20, pinned=False).data_ptr() == first.data_ptr()
    assert buffers.take(2 << 20, pinned=False).data_ptr() != first.data_ptr()
    assert isinstance(first, torch.Tensor)


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from rolltape.tokens import TokenExporter, list_steps
from tokens.test_token_failures import BATCH

exporter = TokenExporter({run!r}, rank=0, world_size=1)
for step in range(3):
    exporter.export(step, 0, *BATCH)
    print(exporter.mark_stable(step, wait=True), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_step_that_was_waited_for_survives_a_kill_right_after(tmp_path: Path) -> None:
    script = KILLED.format(path=sys.path, run=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.split()) == (-signal.SIGKILL, ["True"] * 3), ended.stderr
    assert [(step.step, step.stable, step.ranks[0].records) for step in list_steps(tmp_path)] == [
        (number, True, 4) for number in range(3)
    ]


def test_waiting_says_what_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_disk(monkeypatch) as goes_on, TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *BATCH)
        assert exporter.mark_stable(0) is False
        assert exporter.mark_stable(0, wait=True, timeout_s=0.0) is False
        goes_on.set()
        assert exporter.mark_stable(0, wait=True)
        assert exporter.mark_stable(0, wait=True)
    assert exporter.mark_stable(1, wait=True) is False


def test_waiting_for_a_step_with_lost_records_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("rolltape.tokens.exporter.write_parquet", fail)
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, *BATCH)
        assert exporter.mark_stable(0, wait=True) is False
        assert exporter.report().lost_records == 4
