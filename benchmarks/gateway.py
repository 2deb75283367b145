"""The gateway over loopback in front of an engine that answers at once, beside that engine alone, and beside a peer."""

import asyncio
import contextlib
import functools
import json
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.figures import Figure, seconds, shortest_s
from benchmarks.gateway_load import (
    AT_ONCE,
    PEER,
    REPLY,
    Bodies,
    Cost,
    Server,
    conversation,
    file_texts,
    instant_engine,
    measure,
    open_session,
    our_gateway,
    peer_gateway,
    post,
)
from benchmarks.gateway_soak import soak_figures
from benchmarks.gateway_streams import stream_figures
from benchmarks.gateway_workers import worker_figures
from rolltape.gateway.prompts import ChatPrompts
from rolltape.tiny import shipped_model

_TURNS, _LAST_BODY = 30, 66 * 1024
_TEXT = _LAST_BODY // _TURNS - 180  # characters of a message, so that the last body has that size
_SHORT_TEXT = 60
_CONTEXT = 100_000
_ROUNDS = 3
_CALL_TEXT = '<tool_call>\n{"name": "read_file", "arguments": {"path": "next"}}\n</tool_call>'


def figures(part: str | None = None, workers: str = "1,2") -> Iterable[Figure]:
    """Costs, comparisons, and a long run, with the real Qwen3 tokenizer where npm can bring it."""
    folder = _model_folder()
    prompts = ChatPrompts(folder, renderer="qwen3", thinking=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [*tokenizer.encode(REPLY, add_special_tokens=False).ids, prompts.stop_ids[0]]
    with instant_engine(ids) as engine:
        parts: dict[str, Callable[[], Iterable[Figure]]] = {
            "render": lambda: _render_figures(prompts),
            "cpu": lambda: _cpu_figures(folder, engine),
            "speed": lambda: _speed_figures(folder, engine),
            "context": lambda: _context_figures(folder, prompts, engine),
            "user": lambda: _user_figures(folder, tokenizer, prompts.stop_ids[0], engine),
            "workers": lambda: worker_figures(folder, engine, [int(count) for count in workers.split(",")]),
            "stream": lambda: stream_figures(folder, tokenizer, prompts.stop_ids[0]),
            "soak": lambda: soak_figures(folder, engine),
        }
        if part is not None and part not in parts:
            raise SystemExit(f"--part {part}: it is one of {', '.join(parts)}")
        for name in parts if part is None else [part]:
            yield from parts[name]()


def _model_folder() -> Path:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from qwen3_tokenizer import qwen3_folder

    return qwen3_folder() if shutil.which("npm") else shipped_model()


def _render_figures(prompts: ChatPrompts) -> Iterable[Figure]:
    """A second full render, and one that begins as an earlier one, against the first."""
    texts = file_texts(_TEXT)
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": next(texts)}} for n in range(10)]
    system = {"role": "system", "content": "".join(islice(texts, 5))}
    history = [system, *json.loads(conversation(texts, _TURNS)[-1])["messages"]]
    question = {"role": "user", "content": "Read the other files."}
    opening_s, other_s, first_s = (
        seconds(functools.partial(prompts.render, chat, tools, False))
        for chat in (history[:2], [system, question], history)
    )
    again_s = shortest_s(lambda: prompts.render(history, tools, False), 3)
    yield Figure("a session's first render", 1e3 * opening_s, "ms", note="a system prompt and tools of 30 KiB")
    yield Figure("another session with these / first", other_s / opening_s, "×", 1 / 5)
    yield Figure("full render of a history", 1e3 * first_s, "ms", note="66 KiB of new texts after that beginning")
    yield Figure("the same again / first", again_s / first_s, "×", 1 / 5)


def _cpu_figures(folder: Path, engine: Server) -> Iterable[Figure]:
    """Processor time of a turn: the engine alone, our gateway, the peer."""
    floor = _cheapest(engine, _small)
    with our_gateway(folder, engine) as gateway:
        small = _cheapest(gateway, _small)
        bridged = _cheapest(gateway, _bridged, known=_TURNS)
        new = _rendered()
        rendered, again = measure(gateway, new), measure(gateway, new)
    yield Figure(
        "engine's CPU a turn, small body", floor.cpu_ms, "ms", note="asked directly; its answers are made beforehand"
    )
    yield Figure(
        "our CPU a turn, small body", small.cpu_ms, "ms", 2.5, note=f"{small.cpu_ms / floor.cpu_ms:.1f} × that"
    )
    yield Figure("our CPU a turn, 66 KiB, bridged", bridged.cpu_ms, "ms", 4)
    yield Figure("our CPU a turn, 66 KiB, rendered", rendered.cpu_ms, "ms", note="texts that it never saw")
    yield Figure("our CPU a turn, 66 KiB, rendered again", again.cpu_ms, "ms", note="in other sessions")
    if find_spec(PEER) is None:
        yield Figure("peer", float("nan"), "", note=f"{PEER} is not installed")
        return
    with peer_gateway(engine) as peer:
        their_small, their_long = _cheapest(peer, _small), _cheapest(peer, _bridged, known=_TURNS)
    yield Figure("their CPU a turn, small body", their_small.cpu_ms, "ms", note=f"{PEER}: it renders nothing")
    yield Figure("their CPU a turn, 66 KiB", their_long.cpu_ms, "ms")
    yield Figure("our CPU / theirs, small body", small.cpu_ms / their_small.cpu_ms, "×", 1)
    yield Figure("our CPU / theirs, 66 KiB, bridged", bridged.cpu_ms / their_long.cpu_ms, "×", 1)


def _small() -> list[Bodies]:
    """Sessions that begin, with short messages."""
    texts = file_texts(_SHORT_TEXT)
    return [conversation(texts, 20) for _ in range(6 * AT_ONCE)]


def _bridged() -> list[Bodies]:
    """Sessions that have grown to 66 KiB, and go on with short messages."""
    texts = chain(islice(file_texts(_TEXT), _TURNS), file_texts(_SHORT_TEXT))
    return [conversation(texts, 2 * _TURNS)] * AT_ONCE


def _rendered() -> list[Bodies]:
    """Sessions with one turn each, in which all of a history comes at once."""
    texts = file_texts(_TEXT)
    return [conversation(texts, _TURNS)[-1:] for _ in range(6 * AT_ONCE)]


def _growing() -> list[Bodies]:
    """Sessions that grow from nothing to 66 KiB."""
    return [conversation(file_texts(_TEXT), _TURNS)] * AT_ONCE


def _cheapest(server: Server, load: Callable[[], list[Bodies]], known: int = 0) -> Cost:
    """The cost in the round that was disturbed least."""
    return min((measure(server, load(), known) for _ in range(_ROUNDS)), key=lambda cost: cost.cpu_s)


def _speed_figures(folder: Path, engine: Server) -> Iterable[Figure]:
    """Turns a second and bytes on disk: the engine alone, our gateway, the peer."""
    note = f"{AT_ONCE} sessions × {_TURNS} turns, bodies to 66 KiB"
    alone, _ = _quickest(engine)
    yield Figure("engine's turns a second", alone, "/s", note=f"asked directly; {note}")
    with our_gateway(folder, engine) as gateway:
        ours, our_bytes = _quickest(gateway)
    yield Figure("our turns a second", ours, "/s", note=f"{ours / alone:.2f} × the engine's")
    yield Figure("our disk", our_bytes, "bytes a turn", note="after a checkpoint")
    if find_spec(PEER) is None:
        return
    with peer_gateway(engine) as peer:
        theirs, their_bytes = _quickest(peer)
    yield Figure("their turns a second", theirs, "/s")
    yield Figure("our turns a second / theirs", ours / theirs, "×", 2, at_most=False)
    yield Figure("their disk / ours", their_bytes / our_bytes, "×", 25, at_most=False)


def _quickest(server: Server) -> tuple[float, float]:
    """Turns a second in the quickest round, and bytes a turn on disk."""
    costs = [measure(server, _growing()) for _ in range(_ROUNDS)]
    return max(cost.turns_a_second for cost in costs), _bytes_on_disk(server) / sum(cost.turns for cost in costs)


def _context_figures(folder: Path, prompts: ChatPrompts, engine: Server) -> Iterable[Figure]:
    """One long conversation: what a turn costs at its end, against rendering it anew."""
    with our_gateway(folder, engine) as gateway:
        (at_tenth, at_end), messages, tokens = asyncio.run(_long_conversation(gateway))
    ids = prompts.render(messages, None, False).ids
    direct_s = asyncio.run(_asked_directly(engine, ids.tolist()))
    added_s = at_end - direct_s
    yield Figure("a turn at 100,000 tokens", 1e3 * at_end, "ms", note=f"by the client's clock; {tokens:,} tokens")
    yield Figure("the same ids to the engine itself", 1e3 * direct_s, "ms")
    again_s = shortest_s(lambda: _applied_template(folder, messages), 3)
    yield Figure("a full render of it", 1e3 * again_s, "ms", note="by transformers, with the same tokenizer")
    yield Figure("added by the gateway / full render", added_s / again_s, "×", 1 / 20)
    yield Figure("turn at 100,000 / at 10,000 tokens", at_end / at_tenth, "×", note="its body is ten times as long")


def _applied_template(folder: Path, messages: list[dict[str, Any]]) -> object:
    """What is done where nothing is held: the chat template, and all of it tokenized."""
    return _tokenizer(folder).apply_chat_template(messages, add_generation_prompt=True, tokenize=True)


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


async def _asked_directly(engine: Server, ids: list[int]) -> float:
    """The median of what the engine takes for a prompt of these ids, which it does not read."""
    body = json.dumps({"input_ids": ids}).encode()
    took = []
    async with aiohttp.ClientSession() as client:
        for _ in range(9):
            start = time.perf_counter()
            await post(client, f"{engine.url}/generate", body)
            took.append(time.perf_counter() - start)
    return float(np.median(took))


async def _long_conversation(gateway: Server) -> tuple[tuple[float, float], list[dict[str, Any]], int]:
    """The median cost of a turn at a tenth and at the end, the messages, and their tokens."""
    parts = file_texts(2_000)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read every file of the project."}]
    tokens, took = 0, list[tuple[int, float]]()
    async with aiohttp.ClientSession() as client:
        base = await open_session(client, gateway)
        while tokens < _CONTEXT:
            body = json.dumps({"model": "m", "messages": messages}).encode()
            start = time.perf_counter()
            answer = await post(client, f"{base}/chat/completions", body)
            took.append((tokens, time.perf_counter() - start))
            tokens = answer["usage"]["prompt_tokens"]
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": next(parts)})
    near = [seconds_ for at, seconds_ in took if 0.08 * _CONTEXT < at < 0.14 * _CONTEXT]
    return (float(np.median(near)), float(np.median([seconds_ for _, seconds_ in took[-9:]]))), messages[:-2], tokens


def _user_figures(folder: Path, tokenizer: Tokenizer, stop_id: int, engine: Server) -> Iterable[Figure]:
    """Conversations in which the user speaks each time, against such with tool results; the template may think."""
    call_ids = [*tokenizer.encode(_CALL_TEXT, add_special_tokens=False).ids, stop_id]
    talk, work = ([conversation(file_texts(_TEXT), _TURNS, tools=tools)] * AT_ONCE for tools in (False, True))
    talks, works = list[Cost](), list[Cost]()
    with (
        instant_engine(call_ids) as calling,
        our_gateway(folder, engine, "--thinking") as talked_to,
        our_gateway(folder, calling, "--thinking") as worked_for,
    ):
        for _ in range(_ROUNDS):  # in turns, so that what else the machine does falls on both
            talks.append(measure(talked_to, talk))
            works.append(measure(worked_for, work))
    by_user, by_tool = (max(cost.turns_a_second for cost in costs) for costs in (talks, works))
    note = "no reply has thinking, and the template would keep it until the user speaks"
    yield Figure("turns a second, user messages", by_user, "/s", note=note)
    yield Figure("turns a second, tool results", by_tool, "/s")
    yield Figure("user messages / tool results", by_user / by_tool, "×", 0.9, at_most=False)


def _bytes_on_disk(server: Server) -> int:
    """What a server has stored, with the journals' logs written back."""
    if server.folder is None:
        return 0
    for database in chain(server.folder.rglob("*.sqlite"), server.folder.rglob("*.db")):
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return sum(file.stat().st_size for file in server.folder.rglob("*") if file.is_file())
