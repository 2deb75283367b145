"""Turns snapshots into files on background threads: one cuts them into sequences, others encode and write.

At most `max_queued_bytes` wait between the training thread and the disk. A micro-batch that does not fit is dropped
whole; micro-batches in the queue stay.
"""

import contextlib
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from rolltape.errors import RolltapeError, TapeError
from rolltape.tokens.rank_files import RankFiles
from rolltape.tokens.report import Reporter
from rolltape.tokens.sequences import PART_TOKENS, CutBatch, Sequences, cut_sequences
from rolltape.tokens.snapshot import DeviceSnapshotter, Snapshot
from rolltape.tokens.steps import TokenFile

_LOOK_EVERY_S = 0.5  # how often to check that the writing threads are alive

Job = Callable[[], None]
WriteFile = Callable[[Path, int, int, int, Sequence[Sequences]], None]  # path, step, rank, first sequence, sequences


class Workers:
    """Background threads with one queue. `on_death` gets the exception that ended a thread; jobs should raise none."""

    def __init__(self, name: str, count: int, on_death: Callable[[str], None]) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._on_death = on_death
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self, deadline: float) -> bool:
        """Finish the queued jobs, until a time of the monotonic clock. Return whether all were done by then."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not self.alive

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
                del job  # release what it holds before waiting for the next job
        except BaseException as error:
            self._on_death(repr(error))
            raise


class ByteBudget:
    """How many bytes may wait. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Take room for `size` bytes. Return False if there is none. When nothing waits, any size fits."""
        with self._lock:
            if self._used and self._used + size > self.limit:
                return False
            self._used += size
            return True

    def resize(self, size: int, new_size: int) -> None:
        """Change the room that was taken from `size` to `new_size` bytes."""
        with self._lock:
            self._used += new_size - size


class _OpenStep:
    """A step that is being written. Parts are numbered as they are cut, and written in any order."""

    def __init__(self, step: int, attempt: str) -> None:
        self.step = step
        self.attempt = attempt
        self.held: list[Sequences] = []
        self.held_bytes = 0
        self.held_tokens = 0
        self.sequences = 0
        self.parts: list[TokenFile | None] = []
        self.writing = 0
        self.missing: Counter[str] = Counter()  # records that were dropped or lost
        self.marked = False


class Pipeline:
    """The threads behind an exporter. `submit`, `finish` and `close` raise nothing."""

    def __init__(
        self,
        files: RankFiles,
        snapshotter: DeviceSnapshotter,
        write: WriteFile,
        reporter: Reporter,
        *,
        threads: int,
        max_queued_bytes: int,
    ) -> None:
        self._files = files
        self._snapshotter = snapshotter
        self._write = write
        self._reporter = reporter
        self._budget = ByteBudget(max_queued_bytes)
        self._open: dict[int, _OpenStep] = {}
        self._missed_unopened: dict[int, Counter[str]] = {}  # by step: records missed while it could not be opened
        # By step, once it is marked: whether all of it is on disk, as soon as this is known.
        self._marks: dict[int, Future[bool]] = {}
        self._changed = threading.Condition()
        self._cutter = Workers("rolltape-tokens-cut", 1, self._report_death)
        self._writers = Workers("rolltape-tokens-write", threads, self._report_death)

    def submit(self, step: int, size: int, sequences: int, take_snapshot: Callable[[], Snapshot]) -> None:
        """Take a snapshot and queue it, if there is room for `size` bytes; otherwise count its records as dropped."""
        self._reporter.count(sequences=sequences)
        if not self.is_alive():
            self._miss(step, "lost_records", sequences)
        elif not self._budget.take(size):
            self._reporter.problem("dropped", f"the disk is too slow: {self._budget.limit} bytes wait to be written")
            self._miss(step, "dropped_records", sequences)
        else:
            try:
                snapshot = take_snapshot()
            except Exception as error:  # noqa: BLE001 - no room on the device, say; training may have enough
                self._budget.resize(size, 0)
                self._report(error)
                self._miss(step, "lost_records", sequences)
            else:
                self._cutter.put(lambda: self._cut_job(snapshot, size))

    def rehearse(self, snapshot: Snapshot) -> None:
        """Process a snapshot like any other, and write it to /dev/null."""
        made = self._cut(snapshot, fraction=1)
        self._snapshotter.buffers.give_back(snapshot.buffer)
        self._write(Path(os.devnull), 0, self._files.rank, 0, [made.kept])

    def finish(self, step: int) -> "Future[bool]":
        """Queue the mark that a step has no more records. Its result is whether all of them are on disk."""
        mark: Future[bool] = Future()
        self._cutter.put(lambda: self._mark(step, mark))
        return mark

    def wait(self, mark: "Future[bool]", timeout_s: float) -> bool:
        """Wait for a mark for at most `timeout_s`, or until a thread dies. Return whether all records are on disk."""
        deadline = time.monotonic() + timeout_s
        while not wait([mark], min(max(deadline - time.monotonic(), 0), _LOOK_EVERY_S)).done:
            if time.monotonic() >= deadline or not self.is_alive():
                return False
        return mark.result()

    def is_alive(self) -> bool:
        """Whether what is queued will be written."""
        return self._cutter.alive and self._writers.alive

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._cutter.put(self._flush_all)
        stopped = [self._cutter.stop(deadline), self._writers.stop(deadline)]
        if not all(stopped):
            self._reporter.problem("late", f"not everything was written within {timeout_s} s")
        for step in self._unmarked():
            if step.sequences:
                self._reporter.problem("unmarked", f"step {step.step} was never marked stable; its files stay partial")

    def _miss(self, step: int, why: str, records: int) -> None:
        self._reporter.count(**{why: records})
        self._cutter.put(lambda: self._count_missing(step, why, records))

    def _report_death(self, error: str) -> None:
        self._reporter.problem("thread", f"one of its threads died: {error}")

    def _report(self, error: Exception, what: str = "") -> None:
        kind = "files" if isinstance(error, OSError | TapeError) else "records"
        self._reporter.problem(kind, what + (str(error) or repr(error)))

    # On the cutting thread.

    def _cut(self, snapshot: Snapshot, fraction: float) -> CutBatch:
        columns = {name: column.numpy() for name, column in snapshot.columns().items()}
        loss = None if snapshot.batch.loss is None else snapshot.batch.loss.to_json()
        return cut_sequences(snapshot.batch, columns, fraction=fraction, loss=loss)

    def _cut_job(self, snapshot: Snapshot, size: int) -> None:
        batch = snapshot.batch
        kept_bytes, records = 0, batch.sequences
        try:
            made = self._cut(snapshot, self._files.fraction)
            self._reporter.count(untrained_sequences=made.untrained, unsampled_sequences=made.not_sampled)
            records = len(made.kept)
            if records:
                step = self._open_step(batch.step)
                kept_bytes = made.kept.nbytes
                self._hold(step, made.kept)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one micro-batch, the next may be right
            self._report(error)
            self._reporter.count(lost_records=records)
            self._count_missing(batch.step, "lost_records", records)
        finally:
            self._budget.resize(size, kept_bytes)
            self._snapshotter.buffers.give_back(snapshot.buffer)

    def _hold(self, step: _OpenStep, sequences: Sequences) -> None:
        for other in self._unmarked():
            if other is not step:
                self._flush(other)
        for part in sequences.parts(PART_TOKENS):
            if step.held_tokens + part.tokens > PART_TOKENS:
                self._flush(step)
            step.held.append(part)
            step.held_tokens += part.tokens
            step.held_bytes += part.nbytes
        # Held sequences use the budget too, and must not use all of it.
        if step.held_bytes * 4 > self._budget.limit:
            self._flush(step)

    def _count_missing(self, number: int, why: str, records: int) -> None:
        """Count records that will not be written, for the marker of their step."""
        try:
            missing = self._open_step(number).missing
        except (OSError, RolltapeError):  # it has no marker, unless it can be opened later
            missing = self._missed_unopened.setdefault(number, Counter())
        with self._changed:
            missing[why] += records

    def _open_step(self, step: int) -> _OpenStep:
        """The open step. A step that was marked before is opened anew, and replaces what was written."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._open or not self._open[step].marked)
        if step not in self._open:
            self._marks.pop(step, None)
            opened = _OpenStep(step, self._files.begin(step))
            opened.missing = self._missed_unopened.pop(step, Counter())
            with self._changed:
                self._open[step] = opened
        return self._open[step]

    def _flush(self, step: _OpenStep) -> None:
        if not step.held:
            return
        held, size, first, part = step.held, step.held_bytes, step.sequences, len(step.parts)
        step.held, step.held_bytes, step.held_tokens = [], 0, 0
        step.sequences += sum(map(len, held))
        with self._changed:
            step.parts.append(None)
            step.writing += 1
        self._writers.put(lambda: self._write_part(step, part, first, held, size))

    def _flush_all(self) -> None:
        for step in self._unmarked():
            self._flush(step)

    def _unmarked(self) -> list[_OpenStep]:
        with self._changed:
            return [step for step in self._open.values() if not step.marked]

    def _mark(self, number: int, mark: "Future[bool]") -> None:
        if number in self._marks:  # opening it anew would replace it by an empty step
            self._marks[number].add_done_callback(lambda known: mark.set_result(known.result()))
            return
        try:
            step = self._open_step(number)
        except (OSError, RolltapeError) as error:
            self._report(error, f"step {number} could not be begun: ")
            mark.set_result(False)
            return
        self._flush(step)
        with self._changed:
            self._marks[number] = mark
            step.marked = True
            last = not step.writing
        if last:
            self._complete(step)

    # On a writing thread.

    def _write_part(self, step: _OpenStep, part: int, first: int, held: Sequence[Sequences], size: int) -> None:
        path = self._files.partial(step.step, step.attempt, part)
        records, tokens = sum(map(len, held)), sum(sequences.tokens for sequences in held)
        try:
            self._write(path, step.step, self._files.rank, first, held)
            step.parts[part] = TokenFile(path.name, path.stat().st_size, records, tokens)
            self._reporter.count(records=records, tokens=tokens, files=1)
        except Exception as error:  # noqa: BLE001 - a library that fails to encode must not end the thread either
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._report(error, f"step {step.step} could not be written: ")
            self._reporter.count(lost_records=records)
            with self._changed:
                step.missing["lost_records"] += records
        finally:
            self._budget.resize(size, 0)
            with self._changed:
                step.writing -= 1
                last = step.marked and not step.writing
        if last:
            self._complete(step)

    def _complete(self, step: _OpenStep) -> None:
        """Mark that this rank has written a step."""
        parts = [part for part in step.parts if part is not None]
        is_written = not step.missing.total()
        try:
            self._files.finish(
                step.step,
                step.attempt,
                parts,
                dropped_records=step.missing["dropped_records"],
                lost_records=step.missing["lost_records"],
            )
        except (OSError, RolltapeError) as error:
            self._report(error, f"step {step.step} could not be marked: ")
            records, tokens = sum(part.records for part in parts), sum(part.tokens or 0 for part in parts)
            # No reader will see them.
            self._reporter.count(records=-records, tokens=-tokens, files=-len(parts), lost_records=records)
            is_written = False
        finally:
            with self._changed:
                mark = self._marks[step.step]
                del self._open[step.step]
                self._changed.notify_all()
            mark.set_result(is_written)
