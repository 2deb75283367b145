"""Streamed replies: when the first of them reaches the client, and what an event costs a gateway."""

import asyncio
import json
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.figures import Figure
from benchmarks.gateway_load import (
    AT_ONCE,
    PEER,
    REPLY,
    Bodies,
    Server,
    conversation,
    file_texts,
    first_and_last_s,
    instant_engine,
    measure,
    open_session,
    our_gateway,
    peer_gateway,
)

_SENTENCES = 20
_TURNS, _LONG_TURNS = 12, 30


def stream_figures(folder: Path, tokenizer: Tokenizer, stop_id: int) -> Iterable[Figure]:
    """Time to the first token, and processor time of an event: the engine alone, our gateway, the peer."""
    reply = " ".join([REPLY] * _SENTENCES)
    ids = [*tokenizer.encode(reply, add_special_tokens=False).ids, stop_id]
    # Without thinking, the reply is text from its first id on.
    small = conversation(file_texts(60), _TURNS, reply=reply, stream=True)
    long = conversation(
        chain(islice(file_texts(1_000), _LONG_TURNS), file_texts(60)), _LONG_TURNS + _TURNS, reply=reply, stream=True
    )
    with instant_engine(ids) as engine:
        floor, _ = asyncio.run(_first_tokens(engine, f"{engine.url}/generate", [_engine_body()] * _TURNS, 0))
        with our_gateway(folder, engine) as gateway:
            first, share = asyncio.run(_first_tokens(gateway, None, small, 1))
            first_long, _ = asyncio.run(_first_tokens(gateway, None, long, _LONG_TURNS))
            ours = _event_us(gateway, reply, len(ids))
        yield Figure("engine's first token", 1e3 * floor, "ms", note="asked directly")
        yield Figure(
            "first token through us, small body", 1e3 * first, "ms", note=f"{first / floor:.1f} × the engine's"
        )
        yield Figure("first token through us, 66 KiB, bridged", 1e3 * first_long, "ms")
        yield Figure("first token / last, through us", share, "×", 0.25, note=f"{len(ids)} ids, one each 2 ms")
        yield Figure("our CPU a streamed event", ours, "µs", note="beyond what the reply costs unstreamed")
        if find_spec(PEER) is not None:
            with peer_gateway(engine) as peer:
                theirs = _event_us(peer, reply, len(ids))
            yield Figure("their CPU a streamed event", theirs, "µs")
            yield Figure("our CPU / theirs, a streamed event", ours / theirs, "×", 1)


def _engine_body() -> bytes:
    return json.dumps({"input_ids": [1], "stream": True}).encode()


async def _first_tokens(server: Server, url: str | None, bodies: Bodies, known: int) -> tuple[float, float]:
    """The median time to the first token, of turns one after the other, and its share of the time to the last."""
    async with aiohttp.ClientSession() as client:
        url = url or f"{await open_session(client, server)}/chat/completions"
        took = [await first_and_last_s(client, url, body) for body in bodies]
    firsts, lasts = zip(*took[known:], strict=True)
    return float(np.median(firsts)), float(np.median(firsts) / np.median(lasts))


def _event_us(server: Server, reply: str, events: int) -> float:
    """Processor time of an event: of a streamed turn less that of the same unstreamed, by the number of events."""
    whole, streamed = (
        measure(server, [conversation(file_texts(60), _TURNS, reply=reply, stream=stream)] * AT_ONCE).cpu_ms
        for stream in (False, True)
    )
    return 1e3 * (streamed - whole) / events
