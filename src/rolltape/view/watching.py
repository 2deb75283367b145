"""The runs that a server answers for: their states, read from indexes that a worker process keeps current."""

import asyncio
import logging
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from rolltape.tape.index.database import POINTER, IndexFile
from rolltape.tape.rundir import find_run
from rolltape.view.state import RunState, TrainerFigures

if TYPE_CHECKING:  # what reads shards takes longer to import than the first page takes
    from rolltape.tape.index.index import Index
    from rolltape.tape.run import Run
    from rolltape.view.trainer import TokenRecords

_POLL_S = 0.3
_TRAINER_S = 5.0
_RESTART_S = 2.0
_LET_GO_S = 2.0
_FIRST_PAGE_S = 0.7
# It gives way to others from the start: what it imports takes as long as the first page.
_WORKER = "import os; os.nice(5); from rolltape.view.worker import main; main()"

log = logging.getLogger("rolltape.view")


class WatchedRun:
    """One run that is served."""

    def __init__(self, name: str, location: str) -> None:
        found = find_run(location)
        self.name = name  # in addresses
        self.title = str(found.about["name"])
        self.location = found.location
        path = None if found.directory is None else found.directory.path
        self._path = path
        self.state = RunState(IndexFile(path, found.location, found.about.get("created")), found.directory)
        self.search_file = IndexFile(path, found.location, found.about.get("created"))  # for the threads that search
        self.has_index = (self.search_file.folder / POINTER).exists()
        self.changed = asyncio.Condition()
        self.lock = threading.Lock()  # around what is made when it is first needed

    @cached_property
    def _run(self) -> "Run":
        from rolltape.tape.run import read

        return read(self.location)

    @property
    def index(self) -> "Index":
        """The index as it loads rollouts. For threads: the event loop has `state`."""
        with self.lock:
            return self._run.tape_index

    @cached_property
    def records(self) -> "TokenRecords | None":
        """What a trainer exported; None: the run is not on this machine."""
        from rolltape.view.trainer import TokenRecords

        return None if self._path is None else TokenRecords(self._path)

    def figures(self) -> list[TrainerFigures]:
        """What a trainer has exported since the figures that are known. For a thread."""
        if self._path is None or next(self._path.glob("token*/step_*"), None) is None:
            return []
        from rolltape.view.trainer import trainer_news

        return list(trainer_news(self._path, {step: one.mark for step, one in self.state.trainer.items()}))

    def catch_up(self, *, words: bool) -> None:
        """Index all that is on the tape now and summarize it, make it searchable too if asked for, in this process."""
        from rolltape.samples.summary import summarize
        from rolltape.tape.index.background import fill

        self.index.advance()
        fill(self.index, summarize, words=words)
        self.state.refresh()

    def close(self) -> None:
        if "_run" in self.__dict__:
            self.index.close()
        self.state.close()
        self.search_file.close()


class Watcher:
    """All runs that are served. Everything here happens in the event loop, but for reading files."""

    def __init__(self, locations: Sequence[str]) -> None:
        self.runs = {run.name: run for run in _named(locations)}
        self._tasks: list[asyncio.Task[None]] = []
        self.threads = ThreadPoolExecutor(2, "rolltape-view")

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(one) for one in (self._keep_worker(), self._poll(), self._ask_trainer())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.threads.shutdown(wait=True)
        for run in self.runs.values():
            run.close()

    async def _keep_worker(self) -> None:
        """Keep a worker running."""
        if all(run.has_index for run in self.runs.values()):
            # Enough is known for the first page, and what a worker imports would compete with it.
            await asyncio.sleep(_FIRST_PAGE_S)
        while True:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _WORKER, *(run.location for run in self.runs.values())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C in the terminal is for the server to answer
            )
            try:
                await worker.wait()
                log.warning("the process that reads the runs has ended with %s; it is started again", worker.returncode)
            finally:
                await _ended(worker)
            await asyncio.sleep(_RESTART_S)

    async def _poll(self) -> None:
        """Take in what is new in the indexes, and wake those who wait for it."""
        while True:
            for run in self.runs.values():
                if run.state.refresh():
                    await _notify(run)
            await asyncio.sleep(_POLL_S)

    async def _ask_trainer(self) -> None:
        while True:
            for run in self.runs.values():
                try:
                    figures = await asyncio.get_running_loop().run_in_executor(self.threads, run.figures)
                except Exception:
                    log.exception("what a trainer exported to %s cannot be read", run.location)
                    continue
                for one in figures:
                    run.state.take_figures(one)
                if figures:
                    await _notify(run)
            await asyncio.sleep(_TRAINER_S)


async def _notify(run: WatchedRun) -> None:
    async with run.changed:
        run.changed.notify_all()


async def _ended(worker: asyncio.subprocess.Process) -> None:
    """Let a worker go."""
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        async with asyncio.timeout(_LET_GO_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()


def _named(locations: Sequence[str]) -> list[WatchedRun]:
    """The runs with short names that addresses use: of their own names what an address can hold, and a number."""
    runs: dict[str, WatchedRun] = {}
    for location in locations:
        title = str(find_run(location).about["name"])
        plain = "".join(one if one.isascii() and one.isalnum() else "-" for one in title).strip("-")[:40] or "run"
        name, number = plain, 1
        while name in runs or name == "api":
            number += 1
            name = f"{plain}-{number}"
        runs[name] = WatchedRun(name, location)
    return list(runs.values())
