"""`ServedRuns`: the runs of a server, their states, and the worker process that keeps their indexes current."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rolltape.errors import RolltapeError, TapeError
from rolltape.extras import arrow_errors
from rolltape.records.ids import page_name
from rolltape.tape.index.database import POINTER, IndexFile
from rolltape.tape.rundir import find_run
from rolltape.view.run.state import RunState, TrainerFigures, about_now

if TYPE_CHECKING:  # the import for reading shards takes longer than the first page
    from pathlib import Path

    from rolltape.tape.index.index import Index
    from rolltape.tape.run import Run
    from rolltape.view.run.trainer import TokenRecords

_POLL_S = 0.3
_TRAINER_S = 5.0
_RESTART_S = 2.0
_END_S = 2.0
_FIRST_PAGE_S = 0.7
# It has a low priority from the start, since its imports take as long as the first page.
_WORKER = "import os; os.nice(5); from rolltape.view.worker import main; main()"

log = logging.getLogger("rolltape.view")


class ServedRun:
    def __init__(self, name: str, location: str, *, snapshot: int = 0) -> None:
        found = find_run(location)
        self._directory = found.directory
        self.name = name  # in addresses
        self.title = str(found.about["name"])
        self.location = found.location
        path = None if found.directory is None else found.directory.path
        self.path = path  # None if it is not on this machine
        self.state = RunState(IndexFile(path, found.location, found.about.get("created")), found.directory, snapshot)
        self.search_file = IndexFile(path, found.location, found.about.get("created"))  # for the threads that search
        self.has_index = (self.search_file.folder / POINTER).exists()
        self.changed = asyncio.Condition()
        self.lock = threading.Lock()  # for objects that are made when they are first needed
        # Findings about a trainer's steps, by kind and step, each with the state that it is valid for.
        self._found: dict[tuple[str, int], tuple[object, dict[str, Any] | None]] = {}

    @cached_property
    def _run(self) -> "Run":
        from rolltape.tape.run import read

        return read(self.location)

    @property
    def reader(self) -> "Run":
        """The run for loading rollouts. For threads; the event loop uses `state`."""
        with self.lock:
            return self._run

    @property
    def index(self) -> "Index":
        """The index of the run."""
        return self.reader.tape_index

    @cached_property
    def records(self) -> "TokenRecords | None":
        """The trainer's token records, or None if the run is not on this machine."""
        from rolltape.view.run.trainer import TokenRecords

        return None if self.path is None else TokenRecords(self.path)

    def check_trained(self, step: int) -> dict[str, Any] | None:
        """Where a trainer's records of a step and the tape disagree; None without records. For a thread."""
        from rolltape.view.run.trainer import check_records

        return self._find_in_step("disagreements", step, check_records, self.state.snapshot)

    def find_mismatches(self, step: int) -> dict[str, Any] | None:
        """Where trainer and engine differ most in a step, by task and by turn; None if unknown. For a thread."""
        from rolltape.view.run.mismatches import find_mismatches

        return self._find_in_step("mismatches", step, find_mismatches)

    def _find_in_step(
        self, what: str, step: int, find: "Callable[[Run, Path, int], dict[str, Any] | None]", *given: object
    ) -> dict[str, Any] | None:
        """The result of `find` for a trainer's step, cached until the step's records or `given` change."""
        if self.path is None or (figures := self.state.trainer.get(step)) is None:
            return None
        now, known = (figures.mark, *given), self._found.get((what, step))
        if known is None or known[0] != now:
            known = self._found[what, step] = (now, find(self.reader, self.path, step))
        return known[1]

    def figures(self) -> list[TrainerFigures]:
        """Figures of the trainer's steps that have changed. For a thread."""
        if self.path is None or next(self.path.glob("token*/step_*"), None) is None:
            return []
        from rolltape.view.run.trainer import changed_figures

        return list(changed_figures(self.path, {step: one.mark for step, one in self.state.trainer.items()}))

    def catch_up(self, *, words: bool) -> None:
        """Index and summarize everything on the tape in this process; with `words`, make it searchable too."""
        from rolltape.samples.summary import summarize
        from rolltape.tape.index.background import fill

        self.index.advance()
        fill(self.index, summarize, words=words)
        self.state.refresh()

    def successor(self) -> "ServedRun | None":
        """The run that lies in its place now, after it was deleted; None: it is there, or no other is."""
        if self._directory is None or about_now(self._directory) in (self._directory.about, None):
            return None
        try:
            return ServedRun(self.name, self.location, snapshot=self.state.snapshot + 1)
        except TapeError:  # that was deleted too
            return None

    def close(self) -> None:
        if "_run" in self.__dict__:
            self.index.close()
        self.state.close()
        self.search_file.close()


class ServedRuns:
    """All served runs. Everything except reading files happens in the event loop."""

    def __init__(self, locations: Sequence[str]) -> None:
        self.runs = {run.name: run for run in _name_runs(locations)}
        self._tasks: list[asyncio.Task[None]] = []
        self.on_close: list[Callable[[], None]] = []  # called before the runs are closed
        self.threads = ThreadPoolExecutor(2, "rolltape-view")

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(one) for one in (self._keep_worker(), self._poll(), self._poll_trainer())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.threads.shutdown(wait=True)
        for close in self.on_close:
            close()
        for run in self.runs.values():
            run.close()

    async def _keep_worker(self) -> None:
        if all(run.has_index for run in self.runs.values()):
            # The indexes are enough for the first page, and a worker's imports would compete with it.
            await asyncio.sleep(_FIRST_PAGE_S)
        while True:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _WORKER, *(run.location for run in self.runs.values())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                process_group=0,  # only the server handles Ctrl-C in the terminal
            )
            try:
                await worker.wait()
                log.warning("the process that reads the runs has ended with %s; it is started again", worker.returncode)
            finally:
                await _end(worker)
            await asyncio.sleep(_RESTART_S)

    async def _poll(self) -> None:
        """Read changes of the indexes, and wake the requests that wait for them."""
        while True:
            for name, run in self.runs.items():
                successor = run.successor()
                if successor is not None:
                    self.runs[name] = successor
                if (successor or run).state.refresh() or successor is not None:
                    await notify(run)
            await asyncio.sleep(_POLL_S)

    async def _poll_trainer(self) -> None:
        while True:
            for run in list(self.runs.values()):
                try:
                    figures = await asyncio.get_running_loop().run_in_executor(self.threads, run.figures)
                except arrow_errors(RolltapeError, OSError, ValueError):
                    log.exception("what a trainer exported to %s cannot be read", run.location)
                    continue
                for one in figures:
                    run.state.add_figures(one)
                if figures:
                    await notify(run)
            await asyncio.sleep(_TRAINER_S)


async def notify(run: ServedRun) -> None:
    """Wake the requests that wait for changes of a run."""
    async with run.changed:
        run.changed.notify_all()


async def _end(worker: asyncio.subprocess.Process) -> None:
    """End a worker: it ends itself when its input closes."""
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        async with asyncio.timeout(_END_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()


def _name_runs(locations: Sequence[str]) -> list[ServedRun]:
    """The runs, each with a unique name for addresses."""
    runs: dict[str, ServedRun] = {}
    for location in locations:
        name = page_name(str(find_run(location).about["name"]), runs)
        runs[name] = ServedRun(name, location)
    return list(runs.values())
