"""Summarizes rollouts that have just ended, in the background, and appends the summaries to the journal as events."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import NamedTuple

import msgspec

from rolltape.errors import ClosedError, DamagedTapeError
from rolltape.records.rollout import EventKind
from rolltape.tape.index.loading import rebuilt
from rolltape.tape.journal.entries import encode_event
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.journal.writing import Journal
from rolltape.tape.stored import Key, Summarize

log = logging.getLogger("rolltape.tape")

_MOST_WAITING = 1_000  # rollouts; readers compute the summaries of further ones
_CLOSE_S = 2.0  # how long closing a tape waits for summaries that are due


class EndedHere(NamedTuple):
    """A rollout that this process has finished, and where its journal has it."""

    key: Key
    row: int
    first_event: int  # none before it is about the rollout


class SummaryThread:
    """Summarizes the rollouts of one journal, one at a time, in a thread that lives while there are any.

    It works at most half of the time, so that recording can continue. A summary that fails, or for which there is no
    time, is left out: readers of the run compute it.
    """

    def __init__(self, journal: Journal, summarize: Summarize) -> None:
        self._journal = journal
        self._summarize = summarize
        self._lock = threading.Lock()
        self._waiting: deque[EndedHere] = deque()
        self._thread: threading.Thread | None = None
        self._is_working = False
        self._closing = threading.Event()

    def add(self, ended: EndedHere, tape: object) -> None:
        """Queue a rollout whose finish is durable. Returns at once.

        The thread keeps `tape` alive until it ends: the tape must not be closed in the middle of a commit.
        """
        with self._lock:
            if self._closing.is_set() or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting.append(ended)
            if not self._is_working:
                self._thread = threading.Thread(target=self._work, args=(tape,), name="rolltape-summaries", daemon=True)
                with contextlib.suppress(RuntimeError):  # the program is ending, or has too many threads
                    self._thread.start()
                    self._is_working = True

    def close(self) -> None:
        """Wait a short time for summaries that are due, and end the thread. A forked child has no thread."""
        if self._journal.pid != os.getpid():
            return
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)
        with self._lock:
            self._waiting.clear()

    def _work(self, _: object) -> None:
        source: JournalSource | None = None
        while (ended := self._next()) is not None:
            start_s = time.monotonic()
            try:
                source = source or JournalSource(self._journal.path)
                self._append(source, ended)
            except ClosedError:
                break
            except Exception as error:  # noqa: BLE001 - what a recorded message may hold has no end, nor the ways it can fail
                log.warning("rollout %s has no summary, readers will compute it: %s", ended.key[0], error)
            self._closing.wait(time.monotonic() - start_s)
        if source is not None:
            source.close()

    def _next(self) -> EndedHere | None:
        with self._lock:
            self._is_working = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _append(self, source: JournalSource, ended: EndedHere) -> None:
        ((_, _, head, _),) = source.heads(ended.row, ended.row)
        events = source.events_about(head.key, ended.first_event)
        stored = source.stored(ended.row, head)
        rollout, problems = rebuilt(head, stored, [one.event for one in events], False, source.where)
        problems += source.problems()
        if problems:
            raise DamagedTapeError(str(problems[0]))
        data = msgspec.to_builtins(self._summarize(rollout)) | {"covers": max(one.order_text for one in events)}
        self._journal.append(encode_event(EventKind.SUMMARY, head.key, data), rollout=head.key)
