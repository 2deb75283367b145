"""Servers to measure, each in a process of its own, the conversations that are sent to them, and what these cost."""

import asyncio
import contextlib
import enum
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

import rolltape

PEER = "rllm_model_gateway"
AT_ONCE = 8  # sessions
REPLY = "I look at the next file and see what it holds."
_CALL = {"name": "read_file", "arguments": '{"path": "next"}'}
ADMIN_KEY = "benchmark"
_HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
_SAMPLED = re.compile(rb'"content": ?"I|"output_ids"')  # in an event: it carries something of the reply
_SETTLE_S = 0.5  # in which a server does what it leaves for after its last reply

Bodies = Sequence[bytes]  # the requests of one session, in order


class Kind(enum.Enum):
    """What a server is, and so how a session is opened there."""

    ENGINE = enum.auto()  # it has none
    OURS = enum.auto()
    PEER = enum.auto()


class Server(NamedTuple):
    """A running server."""

    kind: Kind
    url: str
    pid: int
    folder: Path | None = None  # where it keeps what it records

    @property
    def memory_mb(self) -> float:
        return sum(_memory_mb(pid) for pid in self._pids)

    @property
    def cpu_s(self) -> float:
        """The processor time that it and its workers have used, in their own code and in the system's."""
        return sum(_cpu_s(pid) for pid in self._pids)

    @property
    def _pids(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]


def _memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """What a number of turns took: the server's processor time, and time on the clock."""

    turns: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_ms(self) -> float:
        """Processor time of one turn."""
        return 1e3 * self.cpu_s / self.turns

    @property
    def turns_a_second(self) -> float:
        return self.turns / self.wall_s


@contextlib.contextmanager
def served(command: Sequence[str], kind: Kind = Kind.ENGINE) -> Iterator[Server]:
    """A server that prints its address on standard output, ended by SIGTERM."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(kind, process.stdout.readline().strip(), process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)


def instant_engine(ids: Sequence[int]) -> contextlib.AbstractContextManager[Server]:
    """An engine that answers every request with these ids, at once."""
    return served([sys.executable, "-m", "benchmarks.instant", ",".join(map(str, ids))])


@contextlib.contextmanager
def our_gateway(model: Path, engine: Server, thinking: str = "--no-thinking", *, workers: int = 1) -> Iterator[Server]:
    """The gateway in front of an engine like SGLang; its run is deleted in the end."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "rolltape.cli", "serve", str(run), "--engine", f"sglang:{engine.url}"]
        options = ["--model", str(model), "--renderer", "qwen3", thinking, "--port", "0", "--admin-key", ADMIN_KEY]
        with served([*command, *options, "--workers", str(workers)], Kind.OURS) as server:
            yield server._replace(folder=run)


@contextlib.contextmanager
def peer_gateway(engine: Server) -> Iterator[Server]:
    """`rllm-model-gateway` as it comes: it forwards messages to an engine like vLLM, and records what comes back."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", PEER, "--port", str(port), "--host", "127.0.0.1"]
        options = ["--worker", f"{engine.url}/v1", "--db-path", f"{folder}/traces.db", "--log-level", "ERROR"]
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            url = f"http://127.0.0.1:{port}"
            try:
                asyncio.run(_ready(f"{url}/health"))
                yield Server(Kind.PEER, url, process.pid, Path(folder))
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=60)


def measure(server: Server, sessions: Sequence[Bodies], known: int = 0) -> Cost:
    """What these sessions cost, some at once; the first `known` turns of each come before, and are not counted."""
    return asyncio.run(_measure(server, sessions, known))


async def _measure(server: Server, sessions: Sequence[Bodies], known: int) -> Cost:
    async with aiohttp.ClientSession() as client:
        bases = [await open_session(client, server) for _ in sessions]
        await _send(client, bases, [bodies[:known] for bodies in sessions])
        await asyncio.sleep(_SETTLE_S)
        cpu_s, start = server.cpu_s, time.perf_counter()
        await _send(client, bases, [bodies[known:] for bodies in sessions])
        wall_s = time.perf_counter() - start
        await asyncio.sleep(_SETTLE_S)
        return Cost(sum(len(bodies) - known for bodies in sessions), server.cpu_s - cpu_s, wall_s)


async def _send(client: aiohttp.ClientSession, bases: Sequence[str], sessions: Sequence[Bodies]) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(base: str, bodies: Bodies) -> None:
        async with limit:
            for body in bodies:
                await _bytes(client, f"{base}/chat/completions", body)

    await asyncio.gather(*map(one, bases, sessions))


async def open_session(client: aiohttp.ClientSession, server: Server) -> str:
    """The base URL for the turns of a new session."""
    if server.kind is Kind.ENGINE:
        return f"{server.url}/v1"
    if server.kind is Kind.PEER:
        return f"{server.url}{(await post(client, f'{server.url}/sessions', b'{}'))['url']}"
    task = json.dumps({"task_id": f"{time.time_ns()}"}).encode()
    base: str = (await post(client, f"{server.url}/sessions", task))["openai_base_url"]
    return base


async def post(client: aiohttp.ClientSession, url: str, body: bytes) -> dict[str, Any]:
    """The JSON that a server answers with."""
    parsed: dict[str, Any] = json.loads(await _bytes(client, url, body))
    return parsed


async def _bytes(client: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    async with client.post(url, data=body, headers=_HEADERS) as answer:
        given = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url}: {answer.status} {given[:300]!r}")
        return given


async def first_and_last_s(client: aiohttp.ClientSession, url: str, body: bytes) -> tuple[float, float]:
    """When the first sampled text or id of a stream came, and when its end, in seconds since it was asked for."""
    start = time.perf_counter()
    first_s, came = 0.0, b""
    async with client.post(url, data=body, headers=_HEADERS) as answer:
        async for part in answer.content.iter_any():
            if not first_s and _SAMPLED.search(came := came + part):
                first_s = time.perf_counter() - start
    if not first_s:
        raise RuntimeError(f"{url}: {answer.status} {came[:300]!r}")
    return first_s, time.perf_counter() - start


def conversation(
    texts: Iterator[str], turns: int, *, tools: bool = False, reply: str = REPLY, **options: object
) -> list[bytes]:
    """A session's requests, each with its whole history: with every turn one reply and one text more.

    `tools`: replies call a tool, and the texts are its results; otherwise the user says them.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read every file of the project."}]
    bodies = []
    for number in range(turns):
        bodies.append(json.dumps({"model": "m", "messages": messages, **options}).encode())
        call = {"id": f"call_{number}", "type": "function", "function": _CALL}
        if tools:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": next(texts)})
        else:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": next(texts)}]
    return bodies


def file_texts(size: int) -> Iterator[str]:
    """Pieces of this project's files, no two equal: a tokenizer is quicker with text that repeats itself."""
    folder = Path(rolltape.__file__).parent
    text = "\n".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    number = 0
    while True:
        for start in range(0, len(text) - size, size):
            number += 1
            yield f"{number}: {text[start : start + size]}"


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as client, asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
