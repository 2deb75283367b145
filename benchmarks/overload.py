"""What others notice while one holder of a session's key sends the gateway all that it can: how late `/health` answers.

`python -m benchmarks.overload URL NAME` is the attacker alone: it sends one kind of request until it is killed.
"""

import asyncio
import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.figures import Figure
from benchmarks.gateway_load import served
from rolltape.tiny import shipped_model

_ADMIN_KEY = "benchmark"
_AT_ONCE = 4  # requests of the attacker
_SECONDS = 8.0
_EVERY_S = 0.02
_CONTEXT = 40_960
_LATEST_MS = 100.0


class Attack(NamedTuple):
    """One kind of request, or of what looks like the beginning of one."""

    what: str
    body: Callable[[], bytes]
    encoding: str | None = None


def _chat(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 8}).encode()


def _text(size: int) -> bytes:
    words = " ".join(f"word{number % 9973}" for number in range(size // 6))
    return _chat([{"role": "user", "content": words[:size]}])


def _bomb() -> bytes:
    return gzip.compress(_chat([{"role": "user", "content": "a" * 400_000_000}]), 9)


def _tiny_messages(count: int) -> bytes:
    return _chat([{"role": ("user", "assistant")[index % 2], "content": "a"} for index in range(count)])


ATTACKS = {
    "bomb": Attack("a gzip of 389 KB that expands to 400 MB", _bomb, "gzip"),
    "garbage": Attack("400 KB that say gzip and are not", lambda: os.urandom(400_000), "gzip"),
    "long": Attack("a message of 8 MiB, far over the context", lambda: _text(8 * 2**20)),
    "full": Attack("a message about as long as the context", lambda: _text(4 * _CONTEXT)),
    "tiny": Attack("100,000 messages of one letter", lambda: _tiny_messages(100_000)),
    "many": Attack("as many messages as are allowed", lambda: _tiny_messages(10_000)),
    "values": Attack("30 MiB of empty lists", lambda: b'{"model":"m","messages":[' + b"[]," * 10_000_000 + b"[]]}"),
    "broken": Attack("30 MiB of JSON that is cut off", lambda: _text(30 * 2**20)[:-3]),
    "strings": Attack(
        "30 MiB in one text with a lone surrogate", lambda: _text(30 * 2**20).replace(b"word7", b"\\ud83d")
    ),
}


def figures() -> Iterable[Figure]:
    """The latest answer of `/health` under each attack, with the attacker in a process of its own."""
    engine = [sys.executable, "-m", "benchmarks.instant", "1,2,3", str(_CONTEXT)]
    run = Path(tempfile.mkdtemp()) / "run"
    with served(engine) as behind:
        command = [sys.executable, "-m", "rolltape.cli", "serve", str(run), "--engine", f"sglang:{behind.url}"]
        options = ["--model", str(shipped_model()), "--port", "0", "--admin-key", _ADMIN_KEY]
        with served([*command, *options]) as gateway:
            yield _figure("nothing", asyncio.run(_probe(gateway.url)), gateway.pid)
            for name, attack in ATTACKS.items():
                with _attacker(gateway.url, name):
                    took = asyncio.run(_probe(gateway.url))
                yield _figure(attack.what, took, gateway.pid)
    shutil.rmtree(run.parent)


def _figure(what: str, took_ms: list[float], pid: int) -> Figure:
    note = f"median {np.median(took_ms):.1f} ms of {len(took_ms)}; gateway's memory at most {_peak_mb(pid):.0f} MB"
    return Figure(f"latest /health under {what}", max(took_ms), "ms", _LATEST_MS, note=note)


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


async def _probe(url: str) -> list[float]:
    """How many milliseconds each look took, from when it was due: one that had to wait for another counts whole."""
    took = []
    async with aiohttp.ClientSession() as client:
        due = time.perf_counter()
        until = due + _SECONDS
        while due < until:
            async with client.get(f"{url}/health") as answer:
                assert answer.status == 200, await answer.text()
            took.append(1e3 * (time.perf_counter() - due))
            due = max(due + _EVERY_S, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
    return took


@contextlib.contextmanager
def _attacker(url: str, name: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-m", "benchmarks.overload", url, name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # its body is made
            yield
        finally:
            process.kill()


async def _attack(url: str, attack: Attack) -> None:
    headers = {"Authorization": f"Bearer {_ADMIN_KEY}"}
    body = attack.body()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        async with client.post(f"{url}/sessions", json={"task_id": f"{time.time_ns()}"}, headers=headers) as answer:
            base = (await answer.json())["openai_base_url"]
        print(len(body), flush=True)

        async def again() -> None:
            encoding = {} if attack.encoding is None else {"Content-Encoding": attack.encoding}
            sent = {"Content-Type": "application/json", **encoding}
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.post(f"{base}/chat/completions", data=body, headers=sent) as answer:
                        said = await answer.read()
                        print(answer.status, said[:160], file=sys.stderr) if os.environ.get("VERBOSE") else None

        await asyncio.gather(*(again() for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], ATTACKS[sys.argv[2]]))
