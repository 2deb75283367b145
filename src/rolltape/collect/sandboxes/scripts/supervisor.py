"""A supervisor process: it starts one program, logs its output, and ends all processes that the program started.

It runs as a script with nothing but the standard library. It reads an order (JSON, one line) from stdin, and writes how
the program ended (JSON) to stdout. The rest of stdin is its lifeline: when that closes, because the collector wants it
or has died, it ends the program. A container is ended by commands: stopped if the collector wants that, and removed if
the collector has died. On Linux, processes that leave their parent and their group become children of the
supervisor, so that none escapes. Elsewhere only the program's process group is ended.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
_TAIL_BYTES = 64 * 1024  # the end of a long output, kept besides its beginning
_UNKILLABLE_S = 10.0  # how long to wait for a process that SIGKILL does not end
_PROC = Path("/proc")
END = b"end\n"  # written by a living collector before it closes the lifeline
_CONTAINER_FAILED = 125  # the exit code of podman and docker for errors of their own
_COMMAND_S = 60.0  # for commands that end a container, on a busy machine
_CLIENT_S = 2.0  # for the program that started a container to notice its end


class Order(NamedTuple):
    """The program to run, and its limits."""

    command: list[str]
    env: dict[str, str]
    cwd: str
    stdin: str  # a file, like the next two
    stdout: str
    stderr: str
    max_log_bytes: int = 0  # of each of the two
    grace_s: float = 0.0  # between SIGTERM and SIGKILL
    descriptors: list[int] = []  # that it inherits
    is_sandbox: bool = False  # the program is a sandbox, which SIGTERM would end at once: only processes inside get it
    stop: list[str] = []  # the command that ends all processes of its container; empty without a container
    remove: list[str] = []  # the command that also removes the container


class _OutputLog:
    """A file with the program's output: its beginning, and if that is too long, a note and the end."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._room = max_bytes
        self._over = 0
        self._tail = b""

    def write(self, data: bytes) -> None:
        kept = self._put(data[: self._room])
        self._room = self._room - kept if kept else 0
        if kept < len(data):
            self._over += len(data) - kept
            self._tail = (self._tail + data[kept:])[-_TAIL_BYTES:]

    def close(self) -> int:
        """Write the end, and return how many bytes were left out."""
        left_out = self._over - len(self._tail)
        if left_out:
            self._put(f"\n… {left_out} bytes left out …\n".encode())
        left_out += len(self._tail) - self._put(self._tail)
        self._file.close()
        return left_out

    def _put(self, data: bytes) -> int:
        """Write, and return how many bytes the disk took."""
        try:
            return self._file.write(data) if data else 0
        except OSError:
            return 0


class Supervisor:
    """Runs one program until none of its processes is left."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._selector = selectors.DefaultSelector()
        self._ended = False  # the lifeline has closed
        self._is_orphan = True  # the collector has died, unless it has sent END
        self._reaped: set[int] = set()
        self._status: int | None = None  # of the program, from waitpid
        self._pid = 0

    def run(self) -> dict[str, Any]:
        """Run the program to its end, and return how it ended."""
        self._watch_children()
        logs = [_OutputLog(path, self._order.max_log_bytes) for path in (self._order.stdout, self._order.stderr)]
        with Path(self._order.stdin).open("rb") as given:
            started = subprocess.Popen(
                self._order.command,
                env=self._order.env,
                cwd=self._order.cwd,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=self._order.descriptors,
                start_new_session=True,
            )
        self._pid = started.pid
        for pipe, log in zip((started.stdout, started.stderr), logs, strict=True):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, log)
        try:
            while self._status is None and not self._ended:
                self._work(None)
        finally:
            survivors = self._end_container() if self._order.remove else self._end_all()
        self._drain()
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        started.returncode = code  # it was waited for here
        return {
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "left_out_bytes": sum(log.close() for log in logs),
            "survivors": survivors,
        }

    def _watch_children(self) -> None:
        if not self._order.remove:  # podman leaves a process that watches the container and must not be ended
            adopt_orphans()
        woken, waker = os.pipe()
        for end in (woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._selector.register(woken, selectors.EVENT_READ, None)
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)

    def _on_signal(self, *_: object) -> None:
        self._ended = True

    def _work(self, timeout_s: float | None) -> None:
        """Wait for output, a signal, or the end of a process, and handle it."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, _OutputLog):
                self._take(key)
            elif key.fileobj is sys.stdin:
                self._selector.unregister(sys.stdin)
                self._ended = True
                self._is_orphan = os.read(key.fd, len(END)) != END
            else:
                os.read(key.fd, 4096)
        with contextlib.suppress(ChildProcessError):
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                self._reaped.add(done[0])
                if done[0] == self._pid:
                    self._status = done[1]

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Move some output to its log, and return whether there was any."""
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            key.data.write(data)
        else:
            self._selector.unregister(key.fileobj)
        return bool(data)

    def _drain(self) -> None:
        """Log the rest of the pipes. It does not wait for other processes that hold one open."""
        for key in [key for key in self._selector.get_map().values() if isinstance(key.data, _OutputLog)]:
            while self._take(key):
                pass

    def _end_all(self) -> list[int]:
        """Send SIGTERM, and SIGKILL after the grace time; return the processes that did not end."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # a stopped process handles no other signal
        self._wait_until_none(self._order.grace_s)
        deadline = time.monotonic() + _UNKILLABLE_S
        while (left := self._left()) and time.monotonic() < deadline:
            self._send(signal.SIGKILL)
            self._wait_until_none(0.05)
        return left

    def _end_container(self) -> list[int]:
        """End all processes of the container, unless its program ended by itself. They are no descendants."""
        is_orphan = self._ended and self._is_orphan
        if self._status is not None:
            code = os.waitstatus_to_exitcode(self._status)
            if is_orphan or code < 0 or code == _CONTAINER_FAILED:
                self._run_aside(self._order.remove if is_orphan else self._order.stop)
            return []
        end, deadline = self._order.remove if is_orphan else self._order.stop, time.monotonic() + _COMMAND_S
        # The program may still be making the container. If it were killed then, podman would keep an incomplete one.
        while self._status is None and time.monotonic() < deadline:
            self._run_aside(end)
            self._wait_for(self._pid, _CLIENT_S)
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._wait_for(self._pid, _UNKILLABLE_S)
        self._run_aside(end)  # once more, since a container may have been made meanwhile
        return []

    def _run_aside(self, command: list[str]) -> None:
        """Run a command while reading the program's output."""
        running = subprocess.Popen(
            command,
            env=self._order.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._wait_for(running.pid, _COMMAND_S)
        running.returncode = 0  # it was waited for here, or continues by itself

    def _wait_for(self, child: int, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while child not in self._reaped and (rest := deadline - time.monotonic()) > 0:
            self._work(min(rest, 0.05))

    def _wait_until_none(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self._left() and (rest := deadline - time.monotonic()) > 0:
            self._work(min(rest, 0.05))
        self._work(0)

    def _left(self) -> list[int]:
        if _PROC.is_dir():
            return descendants(os.getpid())
        return [-self._pid] if _lives(-self._pid) else []  # the group, as for `kill`

    def _send(self, number: signal.Signals) -> None:
        spared = self._pid if self._order.is_sandbox and number is signal.SIGTERM else None
        for pid in self._left():
            if pid == spared:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, if the system supports it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """All living descendants of a process, from /proc. Zombies are not counted."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in brackets may contain anything; state and parent follow it.
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(entry.name), state not in (b"Z", b"X")))
    found: list[int] = []
    below = [root]
    while below:
        for pid, lives in children.get(below.pop(), ()):
            below.append(pid)
            if lives:
                found.append(pid)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the collector died before it sent the order
    try:
        ended = Supervisor(Order(**json.loads(line))).run()
    except OSError as error:
        ended = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(ended))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
