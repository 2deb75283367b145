"""Opening a run for a command, selecting rollouts and samples, and reporting what could not be read."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import rolltape
from rolltape.cli.exits import Exit
from rolltape.cli.options import OneRollout, RolloutFilter
from rolltape.cli.screen import note, plural, tracked
from rolltape.errors import LedgerError, RecordError, RolltapeError, TapeError, UsageError
from rolltape.records.ids import is_sample_id_of_0_1, last_turn_of, names_sample
from rolltape.records.policy import PRESETS, Credit, CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.samples import Linearized, counted_tries, linearize_under
from rolltape.samples.linearize import linearize_each, samples_of_rollouts
from rolltape.samples.spelling import Spell, Spellings, speller, token_texts, tokenizer_in
from rolltape.tape.run import RolloutRow, Run
from rolltape.tape.stored import Problem


class OpenedRun(NamedTuple):
    """A run, its rollouts as listed when the command began, and the problems that the command meets."""

    run: Run
    rows: list[RolloutRow]
    problems: list[Problem]


def open_run(path: str) -> OpenedRun:
    """Open a run that holds at least one rollout."""
    return _list_rollouts(rolltape.read(path), path)


def open_run_folder(path: str) -> OpenedRun:
    """As `open_run`, for a command that changes the files of a run."""
    if "://" in path:
        raise UsageError(f"RUN {path}: a URL; give the run directory itself, whose files this command changes")
    return open_run(path)


@contextmanager
def open_snapshot(path: str) -> Iterator[OpenedRun]:
    """Like `open_run`, but everything read within the block is of the same moment."""
    with rolltape.read(path).snapshot() as run:
        yield _list_rollouts(run, path)


def _list_rollouts(run: Run, path: str) -> OpenedRun:
    rows = run.index()
    if not rows:
        found = [f"{problem.where}: {problem.what}" for problem in run.problems()]
        raise TapeError(f"{path}: the run holds no rollouts" + (f" ({'; '.join(found)})" if found else " yet"))
    return OpenedRun(run, rows, [])


def no_match(flags: str, run: Run) -> UsageError:
    """The error for a filter that leaves nothing."""
    return UsageError(f"{flags}: no rollouts match in run {run.name}; `rolltape ls` lists them")


class SelectedRollouts:
    """The rollouts of a run that a command's arguments select: all tries, or only the try of each that counts."""

    def __init__(
        self,
        opened: OpenedRun,
        which: OneRollout | RolloutFilter | None = None,
        *,
        counted_only: bool = False,
    ) -> None:
        one = which if isinstance(which, OneRollout) else OneRollout()
        only = which if isinstance(which, RolloutFilter) else RolloutFilter()
        if one.try_index is not None and one.rollout is None:
            raise UsageError("--try: name the ROLLOUT whose try is meant")
        self.opened = opened
        self._at: str | None = None
        rows = opened.rows
        if one.rollout is not None:
            rows = _tries(opened, one.rollout, one.try_index)
        if counted_only or one.rollout is not None:
            rows = counted_tries(rows)
        self.rows = [row for row in rows if only.holds(row)]
        if not self.rows:
            raise no_match(only.flags(), opened.run)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Rollout]:
        wanted = {row.key for row in self.rows}
        keys = [row.key for row in self.opened.rows if row.key in wanted]  # in the order of their start
        loading = self.opened.run.load_each(keys)
        for rollout_id, _ in keys:
            self._at = rollout_id  # also if loading it fails
            yield next(loading)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add to an error the rollout that was yielded last, or that could not be loaded."""
        try:
            yield
        except (LedgerError, RecordError, TapeError) as error:
            if self._at is None or self._at in str(error):
                raise
            raise type(error)(f"rollout {self._at}: {error}") from error
        except (RolltapeError, OSError):
            raise
        except Exception as error:
            # Recorded messages can contain anything, and can cause any error.
            if self._at is None:
                raise
            raise TapeError(f"rollout {self._at}: {describe(error)}; `rolltape check` checks all rollouts") from error

    def only(self) -> Rollout:
        """The single selected rollout."""
        if len(self.rows) > 1:
            raise UsageError(f"ROLLOUT: the run holds {len(self.rows)}; name one (`rolltape ls` lists them)")
        with self.named_in_errors():
            return next(iter(self))

    def linearized(self, policy: CutPolicy, credit: Credit | None = None) -> Iterator[Linearized]:
        """Yield each rollout under the policy, with a progress bar. Its trees are freed when the next one is read."""
        yield from linearize_each(tracked(self, policy.name, len(self)), policy, credit, self.opened.run.versions())

    def samples(self, policy: CutPolicy, credit: Credit) -> Generator[Sample, None, None]:
        """Every sample, with advantages over whole groups. One that cannot be built is left out, and is a problem."""
        rollouts, run = tracked(self, policy.name, len(self)), self.opened.run

        def leave_out(rollout: str, error: RecordError) -> None:
            self.opened.problems.append(Problem(rollout, f"a sample of it is left out: {error}", ""))

        yield from samples_of_rollouts(rollouts, self.opened.rows, policy, credit, run.versions(), leave_out)


def describe(error: Exception) -> str:
    """An unforeseen error in one line."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _tries(opened: OpenedRun, rollout: str, try_index: int | None) -> list[RolloutRow]:
    found = opened.run.find(rollout, try_index)
    return [row for row in opened.rows if row.id == found.id and row.try_index in found.tries]


def report_problems(opened: OpenedRun) -> int:
    """Print what could not be read, and return the command's exit code."""
    problems = [*opened.run.noticed(), *opened.problems]
    for problem in problems[:5]:
        note(f"{problem.where}: {problem.what}")
    if problems:
        note(f"{plural(len(problems), 'problem')} in this run; `rolltape check` lists them")
    return Exit.RUN if problems else Exit.OK


def rollout_of_sample(sample_id: str) -> tuple[str, int]:
    parts = last_turn_of(sample_id).rsplit(".", 3)
    if len(parts) != 4 or not parts[1].isdecimal():
        raise UsageError(f"ROLLOUT {sample_id}: not a sample id; `rolltape samples --json` lists them")
    return parts[0], int(parts[1])


def find_sample(tape: Run, rollout: Rollout, policy: CutPolicy, sample_id: str) -> Sample:
    for sample in samples_named(tape, rollout, policy, sample_id):
        return sample
    raise UsageError(
        f"ROLLOUT: there is no sample {sample_id}; give the --policy, --branches, and --max-sample-tokens that made it"
    )


def samples_named(tape: Run, rollout: Rollout, policy: CutPolicy, sample_id: str) -> Iterator[Sample]:
    """Yield the samples that an id may mean, under this policy and the presets: one, unless the id is of 0.1.0.

    An id of 0.1.0 begins with the name of its policy, whose samples come first.
    """
    policies = [policy, *PRESETS.values()]
    if is_sample_id_of_0_1(sample_id):
        policies.sort(key=lambda one: not sample_id.partition("@")[2].startswith(f"{one.name}-"))
    seen: set[str] = set()
    for made in linearize_under(rollout, policies, versions=tape.versions(), as_if_finished=True):
        for outline in made.outlines:
            if outline.id not in seen and names_sample(sample_id, outline.id):
                seen.add(outline.id)
                yield made.sample(outline.index)


def open_spellings(tokenizer: str | None) -> Spellings:
    """The texts of a run's ids. If a tokenizer is given, it is used for all sessions."""
    if tokenizer is None:
        return Spellings()
    file = tokenizer_in(Path(tokenizer))
    if file is None:
        raise UsageError(f"--tokenizer {tokenizer}: not found; give a tokenizer.json or a folder with one")
    try:
        return Spellings(speller(file))
    except ValueError as error:
        raise UsageError(f"--tokenizer: {error}") from None


def excerpt(ids: Sequence[int], spell: Spell | None, limit: int = 12) -> str:
    """The first few tokens as text, or as ids without a tokenizer."""
    texts = token_texts(ids[:limit], spell)
    return " ".join(text.replace(" ", "␣") for text in texts) + (" …" if len(ids) > limit else "")
