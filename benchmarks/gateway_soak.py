"""A long run: many open sessions, streamed turns, and what the gateway's memory does meanwhile."""

import asyncio
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.figures import Figure
from benchmarks.gateway_load import ADMIN_KEY, Server, conversation, file_texts, our_gateway
from benchmarks.raw_client import RawConnection

_SESSIONS, _IN_FLIGHT, _TURNS = 1_000, 64, 20_000
_TURNS_A_SESSION = 5
_SAMPLE_EVERY, _TELL_EVERY = 200, 2_000  # turns
_MOST_RATIO = 1.05


def soak_figures(folder: Path, engine: Server) -> Iterable[Figure]:
    """Errors, speed, and memory: its growth once all sessions have been replaced, and late against early."""
    with our_gateway(folder, engine) as gateway:
        soak = _Soak(gateway)
        cpu_s, start = gateway.cpu_s, time.perf_counter()
        uvloop.run(soak.run())
        took_s, cpu_s = time.perf_counter() - start, gateway.cpu_s - cpu_s
    second, _, last = np.array_split(np.array(soak.memory_mb), 4)[1:]
    later = np.array(soak.memory_mb[len(soak.memory_mb) // 4 :])
    growth, _ = np.polyfit(np.arange(len(later)) * _SAMPLE_EVERY / 1_000, later, 1)
    note = f"{_SESSIONS:,} open sessions, {_IN_FLIGHT} in flight, streamed"
    yield Figure(f"errors in {_TURNS:,} turns", len(soak.errors), "", 0, note="; ".join(soak.errors[:3]) or note)
    yield Figure("streamed turns a second", _TURNS / took_s, "/s", note=f"{1e3 * cpu_s / _TURNS:.2f} ms of CPU each")
    yield Figure("memory, first quarter", float(np.mean(soak.memory_mb[: len(second)])), "MB")
    yield Figure("memory, last quarter", float(np.mean(last)), "MB", note=f"at most {max(soak.memory_mb):.0f} MB")
    yield Figure("memory's growth per 1,000 turns", float(growth), "MB", note="from the second quarter on")
    yield Figure("memory, last quarter / second", float(np.mean(last) / np.mean(second)), "×", _MOST_RATIO)


@dataclass
class _Place:
    """A session that is open, and how many turns it gets."""

    session: dict[str, str]
    turns: int
    given: int = 0


class _Soak:
    """Sessions that end after some turns, each replaced by a new one, so that as many are open all the time."""

    def __init__(self, gateway: Server) -> None:
        self._gateway = gateway
        self._bodies = conversation(file_texts(600), _TURNS_A_SESSION, stream=True)
        self._places: dict[int, _Place] = {}
        self._numbers = iter(range(_TURNS))
        self.memory_mb: list[float] = []
        self.errors: list[str] = []

    async def run(self) -> None:
        connections = [await RawConnection.open(self._gateway.url) for _ in range(_IN_FLIGHT)]
        first = iter(range(_SESSIONS))

        async def open_first(connection: RawConnection) -> None:
            for place in first:  # of different lengths, so that later some end all the time
                await self._open(connection, place, 1 + place % _TURNS_A_SESSION)

        await asyncio.gather(*map(open_first, connections))
        await asyncio.gather(*map(self._send, connections))
        for connection in connections:
            connection.close()

    async def _open(self, connection: RawConnection, place: int, turns: int) -> None:
        body = json.dumps({"task_id": f"{place}-{time.time_ns()}"}).encode()
        self._places[place] = _Place(json.loads(await connection.post("/sessions", body, ADMIN_KEY)), turns)

    async def _send(self, connection: RawConnection) -> None:
        for number in self._numbers:
            try:
                await self._turn(connection, number % _SESSIONS)
            except RuntimeError as error:
                self.errors.append(str(error))
            if number % _SAMPLE_EVERY == 0:
                self.memory_mb.append(self._gateway.memory_mb)
            if number % _TELL_EVERY == 0:
                print(f"  {number:,} turns: {self._gateway.memory_mb:.0f} MB", file=sys.stderr)

    async def _turn(self, connection: RawConnection, at: int) -> None:
        place = self._places[at]
        path = f"/s/{place.session['key']}/v1/chat/completions"
        given = await connection.post(path, self._bodies[place.given])
        if b"data: [DONE]" not in given:
            raise RuntimeError(f"{path}: {given[-300:]!r}")
        place.given += 1
        if place.given == place.turns:
            ending = f"/sessions/{place.session['session']}/finish"
            await connection.post(ending, b'{"samples": false}', ADMIN_KEY)
            await self._open(connection, at, _TURNS_A_SESSION)
