"""Several workers behind one port against one: turns a second, and turns per second of processor time."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.figures import Figure
from benchmarks.gateway_load import ADMIN_KEY, Bodies, Cost, Server, conversation, file_texts, our_gateway
from benchmarks.raw_client import RawConnection

_SESSIONS, _TURNS, _TEXT = 32, 25, 60
_ROUNDS = 4
_LEAST_RATIO = 1.7
_SETTLE_S = 0.5  # in which a gateway does what it leaves for after its last reply


class _Round(NamedTuple):
    """What one round cost: the gateway, and the clients and the engine."""

    gateway: Cost
    others_cpu_s: float


def worker_figures(folder: Path, engine: Server, workers: Sequence[int]) -> Iterable[Figure]:
    """Each number of workers against the first of them, with a connection for each session and with a shared pool."""
    with contextlib.ExitStack() as stack:
        gateways = {count: stack.enter_context(our_gateway(folder, engine, workers=count)) for count in workers}
        each: dict[int, list[_Round]] = {count: [] for count in workers}
        pooled: dict[int, list[_Round]] = {count: [] for count in workers}
        for _ in range(_ROUNDS):  # in turns, so that what else the machine does falls on all
            for count, gateway in gateways.items():
                each[count].append(_round(gateway, engine, count, pooled=False))
                pooled[count].append(_round(gateway, engine, count, pooled=True))
    yield from _figures(each, "a connection each")
    yield from _figures(pooled, "a shared pool")
    for count in workers:
        if count > 1:
            yield Figure(
                f"{count} workers, a shared pool / a connection each, turns per CPU-second",
                _turns_a_cpu_second(pooled[count]) / _turns_a_cpu_second(each[count]),
                "×",
                note=f"{1 - 1 / count:.0%} of the turns come to another worker and are passed on with their connection",
            )


def _figures(rounds: dict[int, list[_Round]], how: str) -> Iterable[Figure]:
    best = {count: max(of, key=lambda one: one.gateway.turns_a_second) for count, of in rounds.items()}
    per_cpu = {count: _turns_a_cpu_second(of) for count, of in rounds.items()}
    fewest = min(rounds)
    for count, one in best.items():
        busy = one.gateway.cpu_s / one.gateway.wall_s
        others = f"clients and engine {1e3 * one.others_cpu_s / one.gateway.turns:.2f} ms a turn"
        note = f"{busy:.2f} cores busy with {1e3 / per_cpu[count]:.2f} ms a turn; {others}"
        yield Figure(f"turns a second, {count} workers, {how}", one.gateway.turns_a_second, "/s", note=note)
    for count in rounds:
        if count == fewest:
            continue
        ratio = best[count].gateway.turns_a_second / best[fewest].gateway.turns_a_second
        target = _LEAST_RATIO if (fewest, count) == (1, 2) else None
        note = f"at most {_possible(best[fewest], best[count], count / fewest):.2f} on {os.cpu_count()} cores"
        yield Figure(f"{count} workers / {fewest}, {how}", ratio, "×", target, at_most=False, note=note)
        yield Figure(
            f"{count} workers / {fewest}, {how}, turns per CPU-second",
            per_cpu[count] / per_cpu[fewest],
            "×",
            note="of the gateway: what is lost between workers",
        )


def _turns_a_cpu_second(rounds: Sequence[_Round]) -> float:
    return max(one.gateway.turns / one.gateway.cpu_s for one in rounds)


def _possible(fewest: _Round, many: _Round, most: float) -> float:
    """The ratio if all cores did nothing but these turns, at what they cost."""
    cores = os.cpu_count() or 1
    turns_a_second = cores * many.gateway.turns / (many.gateway.cpu_s + many.others_cpu_s)
    return min(turns_a_second / fewest.gateway.turns_a_second, most)


def _round(gateway: Server, engine: Server, workers: int, *, pooled: bool) -> _Round:
    """Sessions that begin, with short messages, from as many client processes as it takes to be no limit."""
    clients = max(1, workers // 2) if (os.cpu_count() or 1) > 4 else 1
    texts = file_texts(_TEXT)
    shares = [[conversation(texts, _TURNS) for _ in range(_SESSIONS)] for _ in range(clients)]
    cpu_s, engine_s = 0.0, 0.0
    with multiprocessing.get_context("fork").Pool(clients) as pool:
        time.sleep(_SETTLE_S)
        cpu_s, engine_s = gateway.cpu_s, engine.cpu_s
        given = pool.starmap(_drive, [(gateway.url, share, pooled) for share in shares], chunksize=1)
        time.sleep(_SETTLE_S)
        cpu_s, engine_s = gateway.cpu_s - cpu_s, engine.cpu_s - engine_s
    wall_s = max(one.ended for one in given) - min(one.began for one in given)
    turns = sum(len(bodies) for share in shares for bodies in share)
    return _Round(Cost(turns, cpu_s, wall_s), engine_s + sum(one.cpu_s for one in given))


class _Driven(NamedTuple):
    began: float
    ended: float
    cpu_s: float


def _drive(url: str, sessions: Sequence[Bodies], pooled: bool) -> _Driven:
    """In a client's process: send all bodies, those of a session one after the other."""
    return uvloop.run(_send(url, sessions, pooled=pooled))


async def _send(url: str, sessions: Sequence[Bodies], *, pooled: bool) -> _Driven:
    """A connection for each session, or any free one of twice as many for each turn."""
    opening = await RawConnection.open(url)
    keys = [await _opened(opening, f"{os.getpid()}-{time.time_ns()}") for _ in sessions]
    connections = [await RawConnection.open(url) for _ in range(len(sessions) * (2 if pooled else 1))]
    free, chance = list(connections), random.Random(0)

    async def one(key: str, bodies: Bodies) -> None:
        connection = free.pop()
        for body in bodies:
            if pooled:
                free.append(connection)
                connection = free.pop(chance.randrange(len(free)))
            await connection.post(f"/s/{key}/v1/chat/completions", body)

    began, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, keys, sessions))
    driven = _Driven(began, time.perf_counter(), time.process_time() - cpu_s)
    for connection in (opening, *connections):
        connection.close()
    return driven


async def _opened(connection: RawConnection, task: str) -> str:
    """The key of a new session."""
    body = await connection.post("/sessions", json.dumps({"task_id": task}).encode(), ADMIN_KEY)
    key: str = json.loads(body)["key"]
    return key
