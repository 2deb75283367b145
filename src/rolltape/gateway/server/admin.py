"""The admin's HTTP API: open, inspect, finish and drop sessions; change weights; read metrics."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from rolltape.errors import BadRequest
from rolltape.export.files import json_line
from rolltape.export.schema import SAMPLE, RowKind
from rolltape.gateway.finished import Ending, Finished
from rolltape.gateway.metrics import add_expositions
from rolltape.gateway.peers import Siblings
from rolltape.gateway.server.answering import read_body
from rolltape.gateway.server.forwarding import BODY, Forwarding
from rolltape.gateway.server.guard import GatewayGuard
from rolltape.gateway.service import Service
from rolltape.gateway.sessions import OpenSession, SessionSpec
from rolltape.gateway.wire import base_urls, named_urls

T = TypeVar("T")

SCHEMA = 1  # the version of these bodies, increased by a change that breaks readers
# How the figures of several workers are combined.
_SUMMED = ("sessions", "in_flight")
_TALLIES = ("counts", "unbridged", "ignored_params")
_PER_SECOND = ("turns_per_s", "sampled_tokens_per_s")

_Words = Annotated[str, msgspec.Meta(min_length=1)]


class WeightsName(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /weights` and `/weights/pause`."""

    version: _Words | None = None  # None: the version stays the same


class ResumedWeights(WeightsName, forbid_unknown_fields=True):
    """The body of `POST /weights/resume`."""

    folder: _Words | None = None  # of the weights of that version, for engines that restart; None if unknown


class NewWeights(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /weights/update`."""

    folder: _Words
    version: _Words


class DropReason(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `DELETE /sessions/{id}`."""

    reason: _Words = "dropped"


class Admin:
    """Handlers for requests with the admin key."""

    def __init__(
        self,
        service: Service,
        guard: GatewayGuard,
        public_url: str,
        forwarding: Forwarding,
        siblings: Siblings,
    ) -> None:
        self._service = service
        self._guard = guard
        self._public_url = public_url
        self._forwarding = forwarding
        self._siblings = siblings

    async def _others(self, request: web.Request, body: dict[str, Any] | None = None) -> list[bytes]:
        """The other workers' answers to the same request; none if a worker forwarded the request."""
        if self._forwarding.is_forwarded(request) or not (others := self._siblings.others()):
            return []
        data = b"" if body is None else msgspec.json.encode(body)
        return await self._forwarding.ask(others, request.method, request.path, data)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sessions", self._open),
            web.get("/sessions", self._list),
            web.get("/sessions/{id}", self._look),
            web.post("/sessions/{id}/finish", self._finish),
            web.delete("/sessions/{id}", self._drop),
            web.post("/weights", self._announce),
            web.post("/weights/pause", self._pause),
            web.post("/weights/resume", self._resume),
            web.post("/weights/update", self._update),
            web.get("/status", self._status),
            web.get("/metrics", self._metrics),
        ]

    async def _open(self, request: web.Request) -> web.Response:
        spec = await self._read(request, SessionSpec)
        if spec.rollout is not None:
            await self._service.rollout_here(spec.rollout)
        elif not self._forwarding.is_forwarded(request):
            self._siblings.check_next()
        session = self._service.open_session(spec)
        urls = {"base_url": self._public_url, **named_urls(base_urls(self._public_url, session.key))}
        return _json({"schema": SCHEMA, **described(session), "key": session.key, **urls})

    async def _list(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        sessions = [described(session) for session in self._service.sessions]
        for answer in await self._others(request):
            sessions += msgspec.json.decode(answer)["sessions"]
        return _json({"schema": SCHEMA, "sessions": sessions})

    async def _look(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        session = await self._service.session_of_id(request.match_info["id"])
        turns = [
            {
                "id": turn.id,
                "finish": turn.facts.finish.value,
                "error": turn.facts.error,
                "prompt_tokens": len(turn.prompt_tokens),
                "sampled_tokens": len(turn.sampled_ids),
                "delivery": session.deliveries.get(turn.id, turn.facts.delivery).value,
                "flags": [flag.value for flag in turn.facts.flags],
                "extra": turn.facts.extra,
            }
            for turn in session.recorder.turns
        ]
        return _json({"schema": SCHEMA, **described(session), "turns": turns})

    async def _finish(self, request: web.Request) -> web.Response:
        ending = await self._read(request, Ending)
        session = await self._service.session_of_id(request.match_info["id"])
        done = await self._service.finish(session.id, ending)
        return web.Response(body=await asyncio.to_thread(finished_json, done), content_type="application/json")

    async def _drop(self, request: web.Request) -> web.Response:
        body = await self._read(request, DropReason)
        session = await self._service.session_of_id(request.match_info["id"])
        await self._service.drop(session.id, body.reason)
        return _json({"schema": SCHEMA, "dropped": request.match_info["id"]})

    async def _announce(self, request: web.Request) -> web.Response:
        body = await self._read(request, WeightsName)
        if body.version is None:
            raise BadRequest("version: give the name of the weights that are in use from now on")
        self._service.weights.announce(body.version, record=not self._forwarding.is_forwarded(request))
        return self._weights(await self._others(request, {"version": body.version}))

    async def _pause(self, request: web.Request) -> web.Response:
        await self._read(request, WeightsName)
        interrupted, others = await asyncio.gather(self._service.weights.pause(), self._others(request))
        return self._weights(others, interrupted)

    async def _resume(self, request: web.Request) -> web.Response:
        body = await self._read(request, ResumedWeights)
        record = not self._forwarding.is_forwarded(request)
        await self._service.weights.resume(body.version, folder=body.folder, record=record)
        weights = {"version": self._service.weights.version, "folder": body.folder}
        return self._weights(await self._others(request, weights))

    async def _update(self, request: web.Request) -> web.Response:
        body = await self._read(request, NewWeights)
        others = self._siblings.others()

        async def ask_workers(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
            answers = await self._forwarding.ask(others, "POST", path, msgspec.json.encode(body))
            return [msgspec.json.decode(answer) for answer in answers]

        # Shielded: a client that disconnects must not leave the engines with different weights.
        updating = asyncio.ensure_future(
            self._service.weights.update(body.folder, body.version, ask_workers if others else None)
        )
        interrupted = await asyncio.shield(updating)
        return _json({"schema": SCHEMA, "version": body.version, "paused": False, "interrupted": interrupted})

    def _weights(self, others: Sequence[bytes], interrupted: int | None = None) -> web.Response:
        """The state of the weights, with the counts of all workers."""
        version, pool = self._service.weights.version, self._service.pool
        counts = {"in_flight": pool.in_flight} | ({} if interrupted is None else {"interrupted": interrupted})
        for answer in map(msgspec.json.decode, others):
            counts = {name: value + answer[name] for name, value in counts.items()}
        return _json({"schema": SCHEMA, "version": version, "paused": pool.paused, **counts})

    async def _status(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        others = [msgspec.json.decode(answer) for answer in await self._others(request)]
        own = {"schema": SCHEMA, **self._service.status()}
        return _json(_add_status([own, *others]) if others else own)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        own, others = self._service.metrics.exposition(), await self._others(request)
        body = add_expositions([own, *others]) if others else own
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        """Check the admin key, then parse a body of this type; no body counts as an empty object."""
        self._guard.admit_admin(request)
        body = request[BODY] = await read_body(request, self._service.settings, asyncio.to_thread)
        try:
            return msgspec.json.decode(body or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"{request.path}: {error}") from None


def described(session: OpenSession) -> dict[str, Any]:
    """A session as JSON, without its key."""
    return {
        "session": session.id,
        "rollout": session.rollout.id,
        "try": session.rollout.try_index,
        "group": session.rollout.group,
        "task_id": session.rollout.head.task_id,
        "step": session.rollout.head.step,
        "attempt": session.rollout.head.attempt,
        "opened_at": session.opened_at,
        "turns": len(session.recorder.turns),
        "in_flight": session.in_flight,
        "ended": session.ended,
    }


def finished_json(done: Finished) -> bytes:
    """The answer to a finish; samples have the schema of `rolltape export --format jsonl`."""
    fields = {
        "schema": SCHEMA,
        "session": done.session,
        "rollout": done.rollout,
        "try": done.try_index,
        "group": done.group,
        "rollout_ended": done.rollout_ended,
        "turns": done.turns,
        "interrupted": done.interrupted,
    }
    if done.linearized is None:
        return msgspec.json.encode({**fields, "samples": None, "ledger": None})
    ledger = {fate.value: count for fate, count in done.linearized.ledger.totals().items()}
    rows = [msgspec.Raw(json_line(SAMPLE.row(sample), RowKind.SAMPLE)) for sample in done.linearized.samples()]
    return msgspec.json.encode({**fields, "samples": rows, "ledger": ledger})


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _add_status(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The combined status of all workers; latencies are those of the slowest."""
    whole = dict(parts[0])
    for name in _SUMMED:
        whole[name] = sum(part[name] for part in parts)
    for name in _TALLIES:
        whole[name] = dict(sum((Counter(part[name]) for part in parts), Counter()))
    whole["rates"] = {
        name: (sum if name in _PER_SECOND else max)(part["rates"][name] for part in parts) for name in whole["rates"]
    }
    whole["forks_per_session"] = whole["counts"].get("forks", 0) / max(whole["counts"].get("sessions", 0), 1)
    by_engine = zip(*(part["engines"] for part in parts), strict=True)
    whole["engines"] = [
        {**same[0], "up": any(one["up"] for one in same), "sessions": sum(one["sessions"] for one in same)}
        for same in by_engine
    ]
    whole["workers"] = len(parts)
    return whole
