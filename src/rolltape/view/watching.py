"""The runs that a server answers for: their states, kept up by a worker process, and their caches."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rolltape.records.policy import PRESETS
from rolltape.tape.run import read
from rolltape.view.cachefile import Folder, cache_path, cached_state, kept_of, write_cache
from rolltape.view.following import RunPlaces
from rolltape.view.frames import LENGTH_BYTES, Order, Read, Watch, decode_told, framed
from rolltape.view.loading import Loader
from rolltape.view.rows import NOT_ASKED
from rolltape.view.state import RunState
from rolltape.view.trainer import TokenRecords

_READ_AHEAD = 256  # rollouts that the worker has before it
_CACHE_S = 20.0
_RESTART_S = 2.0
_LET_GO_S = 2.0
_FIRST_PAGE_S = 0.7
# It gives way to others from the start: what it imports takes as long as the first page.
_WORKER = "import os; os.nice(5); from rolltape.view.worker import main; main()"

log = logging.getLogger("rolltape.view")


class WatchedRun:
    """One run that is served."""

    def __init__(self, name: str, location: str) -> None:
        run = read(location)
        self.name = name  # in addresses
        self.title = run.name
        self.location = run.location
        self.places = RunPlaces(run.location)
        self.folder = Folder(self.places)
        self.policy = PRESETS["exact"]
        self.cache = cache_path(self.folder, self.policy)
        self.state = cached_state(self.cache, self.places, self.folder.created) or RunState()
        self.loader = Loader(run.location)
        self.records = None if self.places.directory is None else TokenRecords(self.places.directory.path)
        self.changed = asyncio.Condition()
        self.writes_index = False
        self.asked = 0  # rollouts that the worker has before it
        self._cached_snapshot = self.state.snapshot
        self._cached_at_s = time.monotonic()

    @property
    def backlog(self) -> int:
        """How many rollouts that have ended have no summary yet."""
        columns = self.state.rows.columns
        return int((columns["placed"] & (columns["derived"] == 0)).sum())

    def is_cache_due(self) -> bool:
        due = time.monotonic() - self._cached_at_s >= _CACHE_S
        return due and self.state.read_through and self.state.snapshot != self._cached_snapshot

    def to_keep(self) -> Callable[[], None] | None:
        """What writes down what is known now, for a thread to call; None: it is written already."""
        if self.state.snapshot == self._cached_snapshot or not self.state.read_through:
            return None
        self._cached_at_s, self._cached_snapshot = time.monotonic(), self.state.snapshot
        kept = kept_of(self.state, self.folder.created)

        def write() -> None:
            # What cannot be written is found out again the next time.
            with contextlib.suppress(OSError):
                write_cache(self.cache, kept)

        return write

    def close(self) -> None:
        self.loader.close()
        self.folder.close()


class Watcher:
    """All runs that are served. Everything here happens in the event loop, but for reading and writing files."""

    def __init__(self, locations: Sequence[str]) -> None:
        self.runs = {run.name: run for run in _named(locations)}
        self._worker: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.threads = ThreadPoolExecutor(2, "rolltape-view")

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.threads.shutdown(wait=True)
        for run in self.runs.values():
            if (write := run.to_keep()) is not None:
                write()
            run.close()

    async def _follow(self) -> None:
        """Keep a worker running, and take in what it tells."""
        if all(run.state.read_through for run in self.runs.values()):
            # Enough is known for the first page, and what a worker imports would compete with it.
            await asyncio.sleep(_FIRST_PAGE_S)
        while True:
            worker = self._worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _WORKER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,  # a Ctrl-C in the terminal is for the server to answer
            )
            try:
                for run in self.runs.values():
                    await self._order(_watch(run))
                await self._take_reports(worker)
            except Exception:
                log.exception("what the worker told could not be taken in; it is started again")
            finally:
                await _ended(worker)
            # It died, of a full memory perhaps. What it was reading then is asked for again.
            for run in self.runs.values():
                run.asked = 0
                run.state.rows.columns["asked"][:] = NOT_ASKED
            await asyncio.sleep(_RESTART_S)

    async def _take_reports(self, worker: asyncio.subprocess.Process) -> None:
        assert worker.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
            while True:
                size = int.from_bytes(await worker.stdout.readexactly(LENGTH_BYTES), "big")
                told = decode_told(await worker.stdout.readexactly(size))
                run = self.runs[told.run]
                before = run.state.snapshot
                run.writes_index = told.index is not None
                if told.index is not None:
                    run.state.take_index(told.index)
                for report in told.reports:
                    run.state.apply(report)
                run.asked -= sum(type(report).__name__ == "Derived" for report in told.reports)
                await self._ask_more(run)
                if run.state.snapshot != before:
                    async with run.changed:
                        run.changed.notify_all()
                if run.is_cache_due() and (write := run.to_keep()) is not None:
                    await asyncio.get_running_loop().run_in_executor(self.threads, write)

    async def _ask_more(self, run: WatchedRun) -> None:
        if run.asked <= _READ_AHEAD // 2:
            wanted = run.state.wanted(_READ_AHEAD - run.asked, search=run.writes_index)
            if wanted:
                run.asked += len(wanted)
                await self._order(Read(run.name, wanted))

    async def _order(self, order: Order) -> None:
        assert self._worker is not None
        assert self._worker.stdin is not None
        self._worker.stdin.write(framed(order))
        await self._worker.stdin.drain()


async def _ended(worker: asyncio.subprocess.Process) -> None:
    """Let a worker go. What it still has to say is read: it may wait for that, and asyncio waits for the pipe's end."""
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        async with asyncio.timeout(_LET_GO_S):
            await _said_out(worker)
    except TimeoutError:
        worker.kill()
        await _said_out(worker)
    await worker.wait()


async def _said_out(worker: asyncio.subprocess.Process) -> None:
    assert worker.stdout is not None
    while await worker.stdout.read(1 << 16):
        pass


def _watch(run: WatchedRun) -> Watch:
    marks = {step: figures.mark for step, figures in run.state.trainer.items()}
    return Watch(run.name, run.location, str(run.folder.path), run.folder.created, run.state.marks, marks)


def _named(locations: Sequence[str]) -> list[WatchedRun]:
    """The runs with short names that addresses use: of their own names what an address can hold, and a number."""
    runs: dict[str, WatchedRun] = {}
    for location in locations:
        title = read(location).name
        plain = "".join(one if one.isascii() and one.isalnum() else "-" for one in title).strip("-")[:40] or "run"
        name, number = plain, 1
        while name in runs or name == "api":
            number += 1
            name = f"{plain}-{number}"
        runs[name] = WatchedRun(name, location)
    return list(runs.values())
