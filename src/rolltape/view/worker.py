"""The process that reads runs for a server: orders come in on standard input, reports go out on standard output."""

import contextlib
import os
import select
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from rolltape.errors import RolltapeError
from rolltape.records.policy import PRESETS
from rolltape.view.following import Follower
from rolltape.view.frames import Order, Read, Stream, Told, Watch, decode_order, framed, read_frame
from rolltape.view.reading import Reading
from rolltape.view.reports import Failed, Looked, Report, Wanted
from rolltape.view.trainer import trainer_news

_REPORTS_A_FRAME = 1000
_LOOK_S = 0.7  # between looks at a run in which nothing happens
_READ_AT_ONCE = 32
_TRAINER_S = 5.0


class WatchedRun:
    """A run that the server wants to hear of."""

    def __init__(self, order: Watch) -> None:
        self.name = order.run
        self._order = order
        self._location = order.location
        self._follower: Follower | None = None  # None: it could not be opened yet
        self._reading: Reading | None = None
        self._trainer_marks = dict(order.trainer_marks)
        self._trainer_at_s = 0.0
        self.waiting: deque[Wanted] = deque()
        self.is_behind = False  # the last look did not reach the end of the tape

    def look(self) -> Iterator[Told]:
        """What is new on the tape and beside it."""
        try:
            self._open()
        except (RolltapeError, OSError) as error:
            yield from self._told([Failed(str(error))])
            return
        assert self._follower is not None
        for told in self._told(self._follower.look()):
            self.is_behind = any(isinstance(report, Looked) and not report.done for report in told.reports)
            yield told
        now_s = time.monotonic()
        if now_s - self._trainer_at_s >= _TRAINER_S and "://" not in self._location:
            self._trainer_at_s = now_s
            for figures in trainer_news(Path(self._location), self._trainer_marks):
                self._trainer_marks[figures.step] = figures.mark
                yield from self._told([figures])

    def _open(self) -> None:
        if self._follower is None or self._reading is None:
            order = self._order
            self._follower = Follower(order.location, order.marks)
            self._reading = Reading(order.location, Path(order.folder), PRESETS["exact"], order.created)
        self._reading.ready()

    def read(self) -> Iterator[Told]:
        """The next few rollouts that are waited for."""
        some = [self.waiting.popleft() for _ in range(min(_READ_AT_ONCE, len(self.waiting)))]
        if some and self._reading is not None:
            yield from self._told(self._reading.read(some))

    def _told(self, reports: Iterable[Report]) -> Iterator[Told]:
        waiting = iter(reports)
        while batch := list(islice(waiting, _REPORTS_A_FRAME)):
            yield Told(self.name, None if self._reading is None else self._reading.index_made, batch)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()


class Orders(Stream, Protocol):
    """Where orders come from."""

    def fileno(self) -> int: ...


class Worker:
    """Looks at runs in turn, and reads rollouts in between."""

    def __init__(self, orders: Orders, reports: BinaryIO) -> None:
        self._orders = orders
        self._reports = reports
        self._runs: dict[str, WatchedRun] = {}

    def run(self) -> None:
        """Work until the server is gone."""
        looked_at_s = 0.0
        while self._take_orders(wait_s=0.0 if self._is_busy else _LOOK_S):
            if time.monotonic() - looked_at_s >= _LOOK_S:
                self._look(self._runs.values())
                looked_at_s = time.monotonic()
            else:
                self._look(one for one in self._runs.values() if one.is_behind)
            for one in self._runs.values():
                self._tell(one.read())
        for one in self._runs.values():
            one.close()

    @property
    def _is_busy(self) -> bool:
        return any(one.waiting or one.is_behind for one in self._runs.values())

    def _look(self, runs: Iterable[WatchedRun]) -> None:
        for one in runs:
            try:
                self._tell(one.look())
            except (RolltapeError, sqlite3.Error) as error:
                self._tell([Told(one.name, None, [Failed(str(error))])])

    def _take_orders(self, wait_s: float) -> bool:
        """Take what has come; False: nobody is there any more."""
        while select.select([self._orders], [], [], wait_s)[0]:
            raw = read_frame(self._orders)
            if raw is None:
                return False
            self._take(decode_order(raw))
            wait_s = 0.0
        return True

    def _take(self, order: Order) -> None:
        match order:
            case Watch():
                self._runs[order.run] = WatchedRun(order)
            case Read():
                self._runs[order.run].waiting.extend(order.wanted)

    def _tell(self, told: Iterable[Told]) -> None:
        for one in told:
            self._reports.write(framed(one))
        self._reports.flush()


def main() -> None:
    """The process."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the reports
    # Unbuffered, so that waiting for input sees all that has come.
    with os.fdopen(os.dup(0), "rb", buffering=0) as orders, contextlib.suppress(BrokenPipeError):
        Worker(_Whole(orders), reports).run()


class _Whole:
    """An unbuffered stream whose reads give all that was asked for."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    def read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._stream.read(size - len(parts))
            if not part:
                break
            parts += part
        return bytes(parts)
