"""Event loops for the user's code, each in its own thread, and a watch that finds the code that blocks a loop.

Code of one module shares a loop, as in a program of its own. Code that blocks this loop delays only its module, and
never the gateway.
"""

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

log = logging.getLogger("rolltape.collect")

_LOOK_EVERY_S = 0.25
_BLOCKED_S = 1.0  # a loop that answers later than this was blocked
# Code in these folders is not the user's, and is not named as the cause of a block.
_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


def is_library(filename: str) -> bool:
    """Whether a file with code is not the user's own, but Python's, an installed package's, or Rolltape's."""
    return filename.startswith((*_LIBRARIES, "<"))


class WatchedLoop:
    """How long an event loop was blocked, and by what."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, thread: int) -> None:
        """`thread` is the one that the loop runs in."""
        self.culprit: str | None = None  # of the latest block
        self._loop = loop
        self._name = name
        self._thread = thread
        self._asked_at: float | None = None  # when it was asked for a sign of life that is still missing
        self._blocked_s = 0.0
        self._warned: set[str] = set()

    @property
    def blocked_s(self) -> float:
        """How long it was blocked so far, including a current block."""
        silent_s = time.monotonic() - (self._asked_at or _WATCH.looked_at)
        return self._blocked_s + (silent_s if silent_s > _BLOCKED_S + _LOOK_EVERY_S else 0.0)

    @property
    def is_blocked(self) -> bool:
        asked_at = self._asked_at
        return asked_at is not None and time.monotonic() - asked_at > _BLOCKED_S

    def look(self, stopped_s: float) -> None:
        """Ask for a sign of life, or find out why none comes. `stopped_s` is how long the whole process was stopped."""
        if self._asked_at is None:
            if stopped_s > _BLOCKED_S + _LOOK_EVERY_S:
                self._blocked_s += stopped_s
                self.culprit = "what held the whole process, such as a stop, a C extension or a busy machine"
            self._asked_at = time.monotonic()
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._answer)
        elif self.is_blocked:
            self.culprit = self._find_culprit() or self.culprit

    def _answer(self) -> None:
        assert self._asked_at is not None
        silent_s = time.monotonic() - self._asked_at
        self._asked_at = None
        if silent_s > _BLOCKED_S:
            self._count(silent_s, self.culprit or "something unknown")

    def _count(self, seconds: float, culprit: str) -> None:
        self._blocked_s += seconds
        self.culprit = culprit
        if culprit not in self._warned:
            self._warned.add(culprit)
            log.warning("the event loop of %s was blocked for %.1f s by %s", self._name, seconds, culprit)

    def _find_culprit(self) -> str | None:
        """The innermost function of the user's code, and the task that runs it."""
        frame = innermost = sys._current_frames().get(self._thread)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        found = frame or innermost
        if found is None:
            return None
        where = f"{found.f_code.co_qualname} ({found.f_code.co_filename}:{found.f_code.co_firstlineno})"
        task = None
        with contextlib.suppress(RuntimeError):
            task = asyncio.current_task(self._loop)
        return where if task is None or frame is None else f"{where} in {task.get_name()}"


class _Watch:
    """One thread that checks all watched loops. It runs while there are any."""

    def __init__(self) -> None:
        self.looked_at = time.monotonic()
        self._loops: list[WatchedLoop] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, watched: WatchedLoop) -> WatchedLoop:
        with self._lock:
            self._loops.append(watched)
            if self._thread is None:
                self.looked_at = time.monotonic()
                self._thread = threading.Thread(target=self._work, name="rolltape-loop-watch", daemon=True)
                self._thread.start()
        return watched

    def remove(self, watched: WatchedLoop) -> None:
        with self._lock:
            self._loops.remove(watched)

    def _work(self) -> None:
        while True:
            with self._lock:
                loops = list(self._loops)
                if not loops:
                    self._thread = None
                    return
            now = time.monotonic()
            stopped_s, self.looked_at = now - self.looked_at, now
            for watched in loops:
                watched.look(stopped_s)
            time.sleep(_LOOK_EVERY_S)


_WATCH = _Watch()


@contextlib.contextmanager
def watching_loop(name: str) -> Iterator[WatchedLoop]:
    """Watch the running event loop within the block."""
    watched = _WATCH.add(WatchedLoop(asyncio.get_running_loop(), name, threading.get_ident()))
    try:
        yield watched
    finally:
        _WATCH.remove(watched)


class BlockedTime:
    """How long an attempt could not continue because an event loop that it needs was blocked."""

    def __init__(self, own: WatchedLoop) -> None:
        """`own` is the loop of the gateway and the agents."""
        self._own = own
        self._before_s = own.blocked_s
        self._elsewhere_s = 0.0
        self._culprit: str | None = None

    def add(self, seconds: float, culprit: str | None) -> None:
        """Add a block of a loop in which the user's code was called."""
        self._elsewhere_s += seconds
        self._culprit = culprit or self._culprit

    @property
    def seconds(self) -> float:
        return self._own.blocked_s - self._before_s + self._elsewhere_s

    @property
    def culprit(self) -> str:
        return self._culprit or self._own.culprit or "something unknown"


ATTEMPT_BLOCKED: ContextVar[BlockedTime | None] = ContextVar("attempt_blocked", default=None)  # of the running attempt


class UserLoop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"rolltape-{name}", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self.watched = _WATCH.add(WatchedLoop(self._loop, name, self._thread.ident))

    def submit(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """Call a function in that loop, and await its result if possible. Cancelling this cancels the call."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run(label, function, args, kwargs), self._loop))

    def call(self, label: str, function: Callable[..., Any], *args: Any) -> Any:
        """Like `submit`, from a thread without an event loop."""
        return asyncio.run_coroutine_threadsafe(_run(label, function, args, {}), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(0.5)
        if not self._thread.is_alive():
            self._loop.close()


async def _run(label: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.set_name(label)
    try:
        given = function(*args, **kwargs)
        return await given if inspect.isawaitable(given) else given
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # SystemExit would end the loop, and GeneratorExit the collection
        raise RuntimeError(f"it raised {type(error).__name__}") from error


_USER_LOOPS: dict[str, UserLoop] = {}
_LOCK = threading.Lock()


def user_loop(module: str) -> UserLoop:
    """The loop for code of a module, started when it is first needed."""
    with _LOCK:
        if module not in _USER_LOOPS:
            _USER_LOOPS[module] = UserLoop(module)
        return _USER_LOOPS[module]


def abandon_loop(module: str, loop: UserLoop) -> None:
    """Use another loop for a module's further calls, since this one is blocked. Its thread cannot be ended."""
    with _LOCK:
        if _USER_LOOPS.get(module) is loop:
            del _USER_LOOPS[module]
            _WATCH.remove(loop.watched)


def _forget_loops() -> None:
    """Reset all loops in a forked child, which has none of its parent's threads."""
    global _WATCH, _LOCK
    _WATCH, _LOCK = _Watch(), threading.Lock()
    _USER_LOOPS.clear()


os.register_at_fork(after_in_child=_forget_loops)


@atexit.register
def _close_loops() -> None:
    with _LOCK:
        for loop in _USER_LOOPS.values():
            loop.close()
        _USER_LOOPS.clear()
