"""Several gateway processes behind one port: a parent starts them, and replaces one that dies.

    parent ─┬─ worker 0 ── journal      each worker accepts connections of the same port, and forwards requests for
            ├─ worker 1 ── journal      sessions of the others to them
            └─ …

A worker is an ordinary gateway. If it is killed, the others and its successor take over its sessions at their next
request.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from rolltape.errors import GatewayError, RolltapeError
from rolltape.serving import bound_url, describe_listen_error, reserve_port

_LOOK_S = 0.1  # between checks for ready workers and for successors to start
_SHORT_LIFE_S = 1.0  # a successor is started at least so long after the start of its predecessor
_PR_SET_PDEATHSIG = 1
_WATCHED = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}


class WorkerPlace(NamedTuple):
    """A worker's number and its group."""

    group: str  # the shared name of one parent's workers
    number: int  # from 0
    workers: int
    port: int
    is_successor: bool = False  # whether it replaces a worker that died


class _Worker:
    def __init__(self, place: WorkerPlace, work: Callable[[WorkerPlace, Callable[[], None]], None]) -> None:
        self.place = place
        self.began_at = time.monotonic()
        self.ready = False
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run_worker(place, work, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        self._pipe = reading

    def look(self) -> None:
        """Check whether it has reported that it is ready."""
        with contextlib.suppress(BlockingIOError):
            self.ready = self.ready or bool(os.read(self._pipe, 1))

    def reaped(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        self.look()
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(status)


def serve_workers(
    count: int,
    host: str,
    port: int,
    work: Callable[[WorkerPlace, Callable[[], None]], None],
    on_ready: Callable[[str], None],
) -> int:
    """Run `work` in `count` processes until SIGINT or SIGTERM. Return the exit code.

    `work` gets its place and a function to call once it serves. `on_ready` is called with the address when all serve.
    """
    try:
        reserved = reserve_port(host, port)
    except OSError as error:
        raise GatewayError(describe_listen_error(host, port, error)) from None
    group, port = secrets.token_hex(4), reserved.getsockname()[1]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        with reserved:
            workers = [_Worker(WorkerPlace(group, index, count, port), work) for index in range(count)]
            return _watch(workers, work, lambda: on_ready(bound_url(reserved)))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def _watch(
    workers: list[_Worker], work: Callable[[WorkerPlace, Callable[[], None]], None], on_ready: Callable[[], None]
) -> int:
    """Replace workers that die, until a signal ends all. If a first worker cannot start, all end too."""
    announced = ending = False
    code = 0
    successors: list[tuple[float, WorkerPlace]] = []  # with their start times
    while workers or successors:
        got = _wait(None if announced and not successors else _LOOK_S)
        if got is not None and got != signal.SIGCHLD:
            ending = True
            _signal(workers)
        for worker in list(workers):
            worker.look()
            ended = worker.reaped()
            if ended is None:
                continue
            workers.remove(worker)
            if not ending and ended >= 0 and not worker.ready and not worker.place.is_successor:
                ending, code = True, 1
                _signal(workers)
            elif not ending:
                how = f"by signal {-ended}" if ended < 0 else f"with exit code {ended}"
                name = f"worker {worker.place.number} (process {worker.pid})"
                print(f"rolltape: {name} ended {how}; another one takes its place", file=sys.stderr, flush=True)
                successors.append((worker.began_at + _SHORT_LIFE_S, worker.place._replace(is_successor=True)))
        for due in [] if ending else [one for one in successors if one[0] <= time.monotonic()]:
            successors.remove(due)
            workers.append(_Worker(due[1], work))
        if ending:
            successors.clear()
        if not announced and not ending and not successors and all(worker.ready for worker in workers):
            announced = True
            on_ready()
    return code


def _wait(within_s: float | None) -> int | None:
    """Wait for the next watched signal; None if none came in that time."""
    got = signal.sigwaitinfo(_WATCHED) if within_s is None else signal.sigtimedwait(_WATCHED, within_s)
    return None if got is None else got.si_signo


def _signal(workers: list[_Worker]) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)


def _run_worker(place: WorkerPlace, work: Callable[[WorkerPlace, Callable[[], None]], None], pipe: int) -> None:
    """In the child: run the work, then exit the process."""
    code = 1
    try:
        os.setpgid(0, 0)  # only the parent gets Ctrl-C, and signals all workers
        # If the parent is killed, workers are killed too: an orderly end would end their sessions.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        work(place, lambda: os.close(pipe) if not os.write(pipe, b"1") else None)
        code = 0
    except RolltapeError as error:
        print(f"rolltape: worker {place.number}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
