"""Snapshots → files, on background threads: one cuts them into sequences, a few encode and write.

Between the training thread and the disk at most `max_queued_bytes` wait. A micro-batch that finds no room is dropped
whole; what waits already stays.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rolltape.errors import RolltapeError, TapeError
from rolltape.tokens.budget import Budget
from rolltape.tokens.cutting import cut
from rolltape.tokens.losses import spelled
from rolltape.tokens.rankfiles import RankFiles
from rolltape.tokens.report import Reporter
from rolltape.tokens.sequences import PART_TOKENS, Sequences
from rolltape.tokens.snapshot import Camera, Snapshot
from rolltape.tokens.steps import TokenFile
from rolltape.tokens.workers import Workers

Writer = Callable[[Path, int, int, int, Sequence[Sequences]], None]  # path, step, rank, first sequence, sequences


class _Step:
    """A step that is being written. Parts are numbered as they are cut, and written in any order."""

    def __init__(self, step: int, attempt: str) -> None:
        self.step = step
        self.attempt = attempt
        self.held: list[Sequences] = []
        self.held_size = 0  # bytes
        self.held_tokens = 0
        self.sequences = 0
        self.parts: list[TokenFile | None] = []
        self.writing = 0
        self.missing: Counter[str] = Counter()  # records that were dropped or lost
        self.marked = False


class Pipeline:
    """The threads behind an exporter. Nothing here raises into whoever calls `submit`, `finish` or `close`."""

    def __init__(
        self,
        files: RankFiles,
        camera: Camera,
        write: Writer,
        reporter: Reporter,
        *,
        rank: int,
        fraction: float,
        threads: int,
        max_queued_bytes: int,
    ) -> None:
        self._files = files
        self._camera = camera
        self._write = write
        self._reporter = reporter
        self._rank = rank
        self._fraction = fraction
        self._budget = Budget(max_queued_bytes)
        self._open: dict[int, _Step] = {}
        self._marked: set[int] = set()  # steps, as the cutting thread knows them
        self._changed = threading.Condition()
        self._cutter = Workers("rolltape-tokens-cut", 1, self._died)
        self._writers = Workers("rolltape-tokens-write", threads, self._died)

    def submit(self, step: int, size: int, sequences: int, taken: Callable[[], Snapshot]) -> None:
        """Queue the snapshot that `taken` makes, if there is room for its `size`; else count it as dropped."""
        self._reporter.count(sequences=sequences)
        if not (self._cutter.alive and self._writers.alive):
            self._reporter.count(lost_records=sequences)
        elif not self._budget.take(size):
            self._reporter.problem("dropped", f"the disk is too slow: {self._budget.limit} bytes wait to be written")
            self._miss(step, "dropped_records", sequences)
        else:
            try:
                snapshot = taken()
            except Exception as error:  # noqa: BLE001 - no room on the device, say; training may have enough
                self._budget.exchange(size, 0)
                self._say(error)
                self._miss(step, "lost_records", sequences)
            else:
                self._cutter.put(lambda: self._cut(snapshot, size))

    def rehearse(self, snapshot: Snapshot) -> None:
        """Do with a snapshot what is done with all, and write it to nowhere."""
        columns = {name: column.numpy() for name, column in snapshot.columns().items()}
        made = cut(snapshot.intake, columns, fraction=1, loss=None)
        self._camera.slabs.give_back(snapshot.slab)
        self._write(Path(os.devnull), 0, self._rank, 0, [made.kept])

    def finish(self, step: int) -> None:
        """Queue that a step has no more records."""
        self._cutter.put(lambda: self._mark(step))

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most so long."""
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
        self._cutter.put(lambda: self._note_missing(step, why, records))

    def _died(self, error: str) -> None:
        self._reporter.problem("thread", f"one of its threads died: {error}")

    def _say(self, error: Exception, what: str = "") -> None:
        kind = "files" if isinstance(error, OSError | TapeError) else "records"
        self._reporter.problem(kind, what + (str(error) or repr(error)))

    # On the cutting thread.

    def _cut(self, snapshot: Snapshot, size: int) -> None:
        intake = snapshot.intake
        kept_size, records = 0, intake.sequences
        try:
            columns = {name: column.numpy() for name, column in snapshot.columns().items()}
            loss = None if intake.loss is None else spelled(intake.loss)
            made = cut(intake, columns, fraction=self._fraction, loss=loss)
            self._reporter.count(untrained_sequences=made.untrained, unsampled_sequences=made.not_sampled)
            records = len(made.kept)
            if records:
                step = self._begun(intake.step)
                kept_size = sum(values.nbytes for values in made.kept.columns.values())
                self._hold(step, made.kept)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one micro-batch, the next may be right
            self._say(error)
            self._reporter.count(lost_records=records)
            self._note_missing(intake.step, "lost_records", records)
        finally:
            self._budget.exchange(size, kept_size)
            self._camera.slabs.give_back(snapshot.slab)

    def _hold(self, step: _Step, sequences: Sequences) -> None:
        for other in self._unmarked():
            if other is not step:
                self._flush(other)
        for part in sequences.parts(PART_TOKENS):
            if step.held_tokens + part.tokens > PART_TOKENS:
                self._flush(step)
            step.held.append(part)
            step.held_tokens += part.tokens
            step.held_size += sum(values.nbytes for values in part.columns.values())
        # What is held takes room too, and must not take all of it.
        if step.held_size * 4 > self._budget.limit:
            self._flush(step)

    def _note_missing(self, number: int, why: str, records: int) -> None:
        """Have the marker of a step count records that will not be written."""
        with contextlib.suppress(OSError, RolltapeError):  # a step that cannot be begun has no marker
            step = self._begun(number)
            with self._changed:
                step.missing[why] += records

    def _begun(self, step: int) -> _Step:
        """The step, begun anew if it was marked before: then it is written again, in place of what was."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._open or not self._open[step].marked)
        if step not in self._open:
            self._marked.discard(step)
            begun = _Step(step, self._files.begin(step))
            with self._changed:
                self._open[step] = begun
        return self._open[step]

    def _flush(self, step: _Step) -> None:
        if not step.held:
            return
        held, size, first, part = step.held, step.held_size, step.sequences, len(step.parts)
        step.held, step.held_size, step.held_tokens = [], 0, 0
        step.sequences += sum(map(len, held))
        with self._changed:
            step.parts.append(None)
            step.writing += 1
        self._writers.put(lambda: self._write_part(step, part, first, held, size))

    def _flush_all(self) -> None:
        for step in self._unmarked():
            self._flush(step)

    def _unmarked(self) -> list[_Step]:
        with self._changed:
            return [step for step in self._open.values() if not step.marked]

    def _mark(self, number: int) -> None:
        if number in self._marked:
            return  # to begin it anew would replace it by nothing
        try:
            step = self._begun(number)
        except (OSError, RolltapeError) as error:
            self._say(error, f"step {number} could not be begun: ")
            return
        self._flush(step)
        self._marked.add(number)
        with self._changed:
            step.marked = True
            last = not step.writing
        if last:
            self._seal(step)

    # On a writing thread.

    def _write_part(self, step: _Step, part: int, first: int, held: Sequence[Sequences], size: int) -> None:
        path = self._files.partial(step.step, step.attempt, part)
        records, tokens = sum(map(len, held)), sum(sequences.tokens for sequences in held)
        try:
            self._write(path, step.step, self._rank, first, held)
            step.parts[part] = TokenFile(path.name, path.stat().st_size, records, tokens)
            self._reporter.count(records=records, tokens=tokens, files=1)
        except Exception as error:  # noqa: BLE001 - a library that fails to encode must not end the thread either
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._say(error, f"step {step.step} could not be written: ")
            self._reporter.count(lost_records=records)
            with self._changed:
                step.missing["lost_records"] += records
        finally:
            self._budget.exchange(size, 0)
            with self._changed:
                step.writing -= 1
                last = step.marked and not step.writing
        if last:
            self._seal(step)

    def _seal(self, step: _Step) -> None:
        """Say that this rank is done with a step."""
        parts = [part for part in step.parts if part is not None]
        try:
            self._files.finish(
                step.step,
                step.attempt,
                parts,
                dropped_records=step.missing["dropped_records"],
                lost_records=step.missing["lost_records"],
            )
        except (OSError, RolltapeError) as error:
            self._say(error, f"step {step.step} could not be marked: ")
            records, tokens = sum(part.records for part in parts), sum(part.tokens for part in parts)
            # Nobody will read them.
            self._reporter.count(records=-records, tokens=-tokens, files=-len(parts), lost_records=records)
        finally:
            with self._changed:
                del self._open[step.step]
                self._changed.notify_all()
