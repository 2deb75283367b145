"""Opening a run for a command, choosing rollouts in it, and saying what of it could not be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rolltape.cli.exits import Exit, UsageError
from rolltape.cli.output.screen import note, plural
from rolltape.errors import LedgerError, RecordError, RolltapeError, TapeError
from rolltape.records.rollout import Rollout

if TYPE_CHECKING:
    from rolltape.tape.run import RolloutRow, Run


class OpenedRun(NamedTuple):
    """A run and its index as it was when the command began."""

    run: "Run"
    rows: list["RolloutRow"]


def opened(path: str) -> OpenedRun:
    """The run, which holds at least one rollout."""
    import rolltape

    return _listed(rolltape.read(path), path)


@contextmanager
def held(path: str) -> Iterator[OpenedRun]:
    """As `opened`, for many questions in a row: all of them are about the run as it is when the block begins."""
    import rolltape

    with rolltape.read(path).snapshot() as run:
        yield _listed(run, path)


def _listed(run: "Run", path: str) -> OpenedRun:
    rows = run.index()
    if not rows:
        found = [f"{problem.where}: {problem.what}" for problem in run.problems()]
        raise TapeError(f"{path}: the run holds no rollouts" + (f" ({'; '.join(found)})" if found else " yet"))
    return OpenedRun(run, rows)


class Chosen:
    """The rollouts of a run that the arguments name: all their tries, or of each the one that counts."""

    def __init__(
        self,
        opened: OpenedRun,
        rollout: str | None = None,
        *,
        try_index: int | None = None,
        step: int | None = None,
        group: str | None = None,
        task: str | None = None,
        counted_only: bool = False,
    ) -> None:
        if try_index is not None and rollout is None:
            raise UsageError("--try: name the rollout whose try is meant")
        self.opened = opened
        self._at: str | None = None
        self._step, self._task = step, task
        rows = opened.rows
        if rollout is not None:
            rows = _named(opened, rollout, try_index)
        if counted_only or rollout is not None:
            from rolltape.samples import counted_tries

            rows = counted_tries(rows)
        self.rows = [
            row
            for row in rows
            if step in (None, row.head.step)
            and task in (None, row.head.task_id)
            and (group is None or row.head.group.startswith(group))
        ]
        if not self.rows:
            given = {"--step": step, "--group": group, "--task": task}
            flags = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
            raise UsageError(f"{flags}: no rollout of {opened.run.name} is like that; `rolltape ls` lists them")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Rollout]:
        if len(self.rows) == 1:
            self._at = self.rows[0].id
            yield self.opened.run.rollout(self._at, try_index=self.rows[0].head.try_index)
            return
        wanted = {row.key for row in self.rows}
        rollouts = self.opened.run.rollouts(step=self._step, task_id=self._task)
        # The reader goes by the order of the index, so that this is the one which cannot be loaded if it fails.
        loading = (
            row.id
            for row in self.opened.rows
            if self._step in (None, row.head.step) and self._task in (None, row.head.task_id)
        )
        self._at = next(loading, None)
        for rollout in rollouts:
            if rollout.key in wanted:
                self._at = rollout.id
                yield rollout
            self._at = next(loading, None)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Whatever goes wrong inside is said of the rollout that was given out last, or could not be loaded."""
        try:
            yield
        except (LedgerError, RecordError, TapeError) as error:
            if self._at is None or self._at in str(error):
                raise
            raise type(error)(f"rollout {self._at}: {error}") from error
        except (RolltapeError, OSError):
            raise
        except Exception as error:
            # What a recorded message may hold has no end, and neither have the ways in which it can fail.
            if self._at is None:
                raise
            raise TapeError(f"rollout {self._at}: {reason(error)}; `rolltape check` tries them all") from error

    def only(self) -> Rollout:
        """The one rollout that is meant."""
        if len(self.rows) > 1:
            raise UsageError(f"ROLLOUT: the run holds {len(self.rows)}; name one (`rolltape ls` lists them)")
        with self.named_in_errors():
            return next(iter(self))


def reason(error: Exception) -> str:
    """An error that nobody foresaw, in a line."""
    said = str(error).strip()
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _named(opened: OpenedRun, rollout: str, try_index: int | None) -> list["RolloutRow"]:
    """The tries of the one rollout whose id is, or begins with, what was given."""
    rows = [row for row in opened.rows if row.id.startswith(rollout) and try_index in (None, row.head.try_index)]
    exact = [row for row in rows if row.id == rollout]
    if len({row.id for row in exact or rows}) != 1:
        # The reader says what is wrong: none is like that, or several are.
        opened.run.rollout(rollout, try_index=try_index)
    return exact or rows


def ended(opened: OpenedRun) -> int:
    """The exit code of a command that read all it could: what could not be read is named."""
    problems = opened.run.noticed()
    for problem in problems[:5]:
        note(f"{problem.where}: {problem.what}")
    if problems:
        note(f"{plural(len(problems), 'problem')} in this run; `rolltape check` lists them")
    return Exit.RUN if problems else Exit.OK
