"""The gateway over loopback in front of an engine that answers at once, beside a peer that only forwards."""

import asyncio
import contextlib
import functools
import json
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer

import rolltape
from benchmarks.figures import Figure
from rolltape.gateway.prompts import ChatPrompts
from rolltape.tiny import shipped_model

_SESSIONS, _TURNS, _LAST_BODY = 8, 30, 66 * 1024
_CONTEXT = 100_000
_ADMIN_KEY = "benchmark"
_MANY_SESSIONS, _IN_FLIGHT, _MANY_TURNS = 1_000, 64, 20_000
_ROUNDS = 3
_REPLY = "I look at the next file and see what it holds."
_CALL = {"name": "read_file", "arguments": '{"path": "next"}'}
_CALL_TEXT = '<tool_call>\n{"name": "read_file", "arguments": {"path": "next"}}\n</tool_call>'


def figures() -> Iterable[Figure]:
    """Costs, a comparison, and a long run, with the real Qwen3 tokenizer where npm can bring it."""
    folder = _model_folder()
    prompts = ChatPrompts(folder, renderer="qwen3", thinking=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [*tokenizer.encode(_REPLY, add_special_tokens=False).ids, prompts.stop_ids[0]]
    with served([sys.executable, "-m", "benchmarks.instant", ",".join(map(str, ids))]) as engine:
        yield from _context_figures(folder, prompts, engine)
        yield from _user_figures(folder, tokenizer, prompts.stop_ids[0], engine)
        yield from _peer_figures(folder, engine)
        yield from _many_figures(folder, engine)


def _model_folder() -> Path:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from qwen3_tokenizer import qwen3_folder

    return qwen3_folder() if shutil.which("npm") else shipped_model()


def _context_figures(folder: Path, prompts: ChatPrompts, engine: str) -> Iterable[Figure]:
    """One long conversation: what a turn costs at its end, against rendering it anew."""
    with _gateway(folder, engine) as (url, run):
        (at_tenth, at_end), messages, tokens = asyncio.run(_long_conversation(url))
    shutil.rmtree(run.parent)
    ids = prompts.render(messages, None, False).ids
    render_s = min(_seconds(lambda: prompts.render(messages, None, False)) for _ in range(3))
    direct_s = asyncio.run(_asked_directly(engine, ids.tolist()))
    added_s = at_end - direct_s
    yield Figure("a turn at 100,000 tokens", 1e3 * at_end, "ms", note=f"by the client's clock; {tokens:,} tokens")
    yield Figure("the same ids to the engine itself", 1e3 * direct_s, "ms")
    again_s = min(_seconds(lambda: _applied_template(folder, messages)) for _ in range(3))
    yield Figure("a full render of it", 1e3 * again_s, "ms", note="by transformers, with the same tokenizer")
    yield Figure("added by the gateway / full render", added_s / again_s, "×", 1 / 20)
    yield Figure("our own full render", 1e3 * render_s, "ms", note=f"added / this: {added_s / render_s:.3f} ×")
    yield Figure("turn at 100,000 / at 10,000 tokens", at_end / at_tenth, "×", note="its body is ten times as long")


def _applied_template(folder: Path, messages: list[dict[str, Any]]) -> object:
    """What is done where nothing is held: the chat template, and all of it tokenized."""
    return _tokenizer(folder).apply_chat_template(messages, add_generation_prompt=True, tokenize=True)


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


async def _asked_directly(engine: str, ids: list[int]) -> float:
    """The median of what the engine takes for a prompt of these ids, which it does not read."""
    body = json.dumps({"input_ids": ids}).encode()
    took = []
    async with aiohttp.ClientSession() as client:
        for _ in range(9):
            start = time.perf_counter()
            await _post(client, f"{engine}/generate", body)
            took.append(time.perf_counter() - start)
    return float(np.median(took))


async def _long_conversation(url: str) -> tuple[tuple[float, float], list[dict[str, Any]], int]:
    """The median cost of a turn at a tenth and at the end, the messages, and their tokens."""
    parts = _file_texts(2_000)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read every file of the project."}]
    tokens, took = 0, list[tuple[int, float]]()
    async with aiohttp.ClientSession() as client:
        base = await _open(client, url, "long")
        while tokens < _CONTEXT:
            body = json.dumps({"model": "m", "messages": messages}).encode()
            start = time.perf_counter()
            answer = await _post(client, f"{base}/chat/completions", body)
            took.append((tokens, time.perf_counter() - start))
            tokens = answer["usage"]["prompt_tokens"]
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": next(parts)})
    near = [seconds for at, seconds in took if 0.08 * _CONTEXT < at < 0.14 * _CONTEXT]
    return (float(np.median(near)), float(np.median([seconds for _, seconds in took[-9:]]))), messages[:-2], tokens


def _user_figures(folder: Path, tokenizer: Tokenizer, stop_id: int, engine: str) -> Iterable[Figure]:
    """Conversations in which the user speaks each time, against such with tool results; the template may think."""
    call_ids = [*tokenizer.encode(_CALL_TEXT, add_special_tokens=False).ids, stop_id]
    bodies = {False: _bodies(), True: _bodies(tools=True)}
    took: dict[bool, list[float]] = {False: [], True: []}
    with (
        served([sys.executable, "-m", "benchmarks.instant", ",".join(map(str, call_ids))]) as calling,
        _gateway(folder, engine, "--thinking") as (talked_to, run),
        _gateway(folder, calling, "--thinking") as (worked_for, other_run),
    ):
        for round_ in range(_ROUNDS):  # in turns, so that what else the machine does falls on both
            for tools, url in ((False, talked_to), (True, worked_for)):
                took[tools].append(asyncio.run(_drive(url, bodies[tools], f"{round_}", ours=True)))
    for one in (run, other_run):
        shutil.rmtree(one.parent)
    user_s, tool_s = (min(took[tools]) for tools in (False, True))
    turns, note = _SESSIONS * _TURNS, "no reply has thinking, and the template would keep it until the user speaks"
    yield Figure("turns a second, user messages", turns / user_s, "/s", note=note)
    yield Figure("turns a second, tool results", turns / tool_s, "/s")
    yield Figure("user messages / tool results", tool_s / user_s, "×", 0.9, at_most=False)


def _peer_figures(folder: Path, engine: str) -> Iterable[Figure]:
    """Turns a second and bytes on disk, of ours and of `rllm-model-gateway` as it comes."""
    bodies = _bodies()
    with _gateway(folder, engine) as (url, run):
        ours = min(asyncio.run(_drive(url, bodies, f"{time.time_ns()}", ours=True)) for _ in range(2))
    our_bytes = _bytes_on_disk(run) / 2
    shutil.rmtree(run.parent)
    turns = _SESSIONS * _TURNS
    yield Figure("turns a second", turns / ours, "/s", note=f"{_SESSIONS} sessions × {_TURNS} turns, bodies to 66 KiB")
    yield Figure("disk", our_bytes / turns, "bytes a turn", note="after a checkpoint")
    if find_spec("rllm_model_gateway") is None:
        yield Figure("peer", float("nan"), "", note="rllm-model-gateway is not installed")
        return
    place = Path(tempfile.mkdtemp())
    with _peer(engine, place) as url:
        theirs = min(asyncio.run(_drive(url, bodies, f"{time.time_ns()}", ours=False)) for _ in range(2))
    their_bytes = _checkpointed(place / "traces.db") / 2
    shutil.rmtree(place)
    yield Figure("turns a second of rllm-model-gateway", turns / theirs, "/s", note="it renders nothing")
    yield Figure("ours / theirs", theirs / ours, "×", 2, at_most=False)
    yield Figure("their disk / ours", their_bytes / our_bytes, "×", 25, at_most=False)


def _many_figures(folder: Path, engine: str) -> Iterable[Figure]:
    """Many open sessions; memory once they are finished, and after as many turns again."""
    with _gateway(folder, engine) as (url, run):
        rss = asyncio.run(_long_run(url, run))
    shutil.rmtree(run.parent)
    first, last = rss
    yield Figure("memory after 20,000 turns / after 5,000", last / first, "×", 1.1, note=f"{last:.0f} MB")


async def _long_run(url: str, run: Path) -> tuple[float, float]:
    bodies = _bodies(turns=5, last=4096)
    pid = int((run.parent / "pid").read_text())
    early = 0.0
    limit = asyncio.Semaphore(_IN_FLIGHT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for round_ in range(_MANY_TURNS // (_MANY_SESSIONS * len(bodies))):

            async def one(index: int, round_: int = round_) -> tuple[str, str]:
                opened = await _post(client, f"{url}/sessions", json.dumps({"task_id": f"{round_}-{index}"}).encode())
                return opened["session"], opened["openai_base_url"]

            async def turns(base: str) -> None:
                for body in bodies:
                    async with limit:
                        await _post(client, f"{base}/chat/completions", body)

            opened = [await one(index) for index in range(_MANY_SESSIONS)]
            await asyncio.gather(*(turns(base) for _, base in opened))
            for session, _ in opened:
                await _post(client, f"{url}/sessions/{session}/finish", b'{"samples": false}')
            if round_ == 0:
                early = _rss_mb(pid)
    return early, _rss_mb(pid)


def _bodies(turns: int = _TURNS, last: int = _LAST_BODY, *, tools: bool = False) -> list[bytes]:
    """Each turn's whole history: one reply and one more message a turn, up to the size of the last.

    `tools`: replies call a tool, and the messages are its results.
    """
    texts = _file_texts(last // turns - 180)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read every file of the project."}]
    bodies = []
    for number in range(turns):
        bodies.append(json.dumps({"model": "m", "messages": messages}).encode())
        call = {"id": f"call_{number}", "type": "function", "function": _CALL}
        if tools:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": next(texts)})
        else:
            messages += [{"role": "assistant", "content": _REPLY}, {"role": "user", "content": next(texts)}]
    return bodies


def _file_texts(size: int) -> Iterator[str]:
    """Stretches of real files, this project's own: a tokenizer is quicker with text that repeats itself."""
    folder = Path(rolltape.__file__).parent
    text = "\n".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    while True:
        yield from (text[start : start + size] for start in range(0, len(text) - size, size))


async def _drive(url: str, bodies: Sequence[bytes], name: str, *, ours: bool) -> float:
    """Every session's turns in order, the sessions at once; the seconds it took."""
    async with aiohttp.ClientSession() as client:
        bases = [
            await _open(client, url, f"{name}-{index}") if ours else await _open_peer(client, url)
            for index in range(_SESSIONS)
        ]

        async def session(base: str) -> None:
            for body in bodies:
                await _post(client, f"{base}/chat/completions", body)

        start = time.perf_counter()
        await asyncio.gather(*map(session, bases))
        return time.perf_counter() - start


async def _open(client: aiohttp.ClientSession, url: str, task: str) -> str:
    opened = await _post(client, f"{url}/sessions", json.dumps({"task_id": task}).encode())
    base: str = opened["openai_base_url"]
    return base


async def _open_peer(client: aiohttp.ClientSession, url: str) -> str:
    return f"{url}{(await _post(client, f'{url}/sessions', b'{}'))['url']}"


async def _post(client: aiohttp.ClientSession, url: str, body: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_ADMIN_KEY}"}
    async with client.post(url, data=body, headers=headers) as answer:
        given = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url}: {answer.status} {given[:300]!r}")
        said: dict[str, Any] = json.loads(given)
        return said


@contextlib.contextmanager
def _gateway(folder: Path, engine: str, thinking: str = "--no-thinking") -> Iterator[tuple[str, Path]]:
    run = Path(tempfile.mkdtemp()) / "run"
    command = [sys.executable, "-m", "rolltape.cli", "serve", str(run), "--engine", f"sglang:{engine}"]
    options = ["--model", str(folder), "--renderer", "qwen3", thinking, "--port", "0", "--admin-key", _ADMIN_KEY]
    with served([*command, *options], pid_file=run.parent / "pid") as url:
        yield url, run


@contextlib.contextmanager
def _peer(engine: str, place: Path) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "rllm_model_gateway", "--port", str(port), "--host", "127.0.0.1"]
    options = ["--worker", f"{engine}/v1", "--db-path", str(place / "traces.db"), "--log-level", "ERROR"]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(_ready(f"{url}/health"))
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as client, asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def served(command: Sequence[str], pid_file: Path | None = None) -> Iterator[str]:
    """A server that says its address on standard output, ended by SIGTERM."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if pid_file is not None:
                pid_file.write_text(str(process.pid))
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _bytes_on_disk(run: Path) -> int:
    for journal in run.rglob("*.sqlite*"):
        if journal.suffix == ".sqlite":
            _checkpointed(journal)
    return sum(file.stat().st_size for file in run.rglob("*") if file.is_file())


def _checkpointed(database: Path) -> int:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database.stat().st_size


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
