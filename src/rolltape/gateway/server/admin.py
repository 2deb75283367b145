"""The HTTP API of whoever runs the agents: open, inspect, finish and drop sessions; weights; metrics."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from rolltape.errors import BadRequest
from rolltape.export.files import json_line
from rolltape.export.schema import SAMPLE, RowKind
from rolltape.gateway.finished import Ending
from rolltape.gateway.server.forwarding import BODY
from rolltape.gateway.server.guard import GatewayGuard
from rolltape.gateway.server.limits import read_body
from rolltape.gateway.service import Finished, Service
from rolltape.gateway.sessions import OpenSession, SessionSpec
from rolltape.gateway.wire import base_urls

T = TypeVar("T")

SCHEMA = 1  # of these bodies; a change that breaks a reader raises it


_Words = Annotated[str, msgspec.Meta(min_length=1)]


class _Version(msgspec.Struct, forbid_unknown_fields=True):
    version: _Words | None = None  # None: the weights stay what they are called


class _Reason(msgspec.Struct, forbid_unknown_fields=True):
    reason: _Words = "dropped"


class Admin:
    """Handlers for whoever holds the admin key."""

    def __init__(self, service: Service, guard: GatewayGuard, public_url: Callable[[], str]) -> None:
        self._service = service
        self._guard = guard
        self._public_url = public_url

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
            web.get("/status", self._status),
            web.get("/metrics", self._metrics),
        ]

    async def _open(self, request: web.Request) -> web.Response:
        spec = await self._read(request, SessionSpec)
        if spec.rollout is not None:
            await self._service.rollout_here(spec.rollout)
        session = self._service.open_session(spec)
        urls = base_urls(self._public_url(), session.key)
        return _json({"schema": SCHEMA, **described(session), "key": session.key, **urls})

    async def _list(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        return _json({"schema": SCHEMA, "sessions": [described(session) for session in self._service.sessions]})

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
        asked = await self._read(request, _Reason)
        session = await self._service.session_of_id(request.match_info["id"])
        await self._service.drop(session.id, asked.reason)
        return _json({"schema": SCHEMA, "dropped": request.match_info["id"]})

    async def _announce(self, request: web.Request) -> web.Response:
        asked = await self._read(request, _Version)
        if asked.version is None:
            raise BadRequest("version: give the name of the weights that are in use from now on")
        self._service.weights.announce(asked.version)
        return self._weights()

    async def _pause(self, request: web.Request) -> web.Response:
        await self._read(request, _Version)
        interrupted = await self._service.weights.pause()
        return self._weights(interrupted=interrupted)

    async def _resume(self, request: web.Request) -> web.Response:
        asked = await self._read(request, _Version)
        await self._service.resume(asked.version)
        return self._weights()

    def _weights(self, **more: Any) -> web.Response:
        weights = self._service.weights
        state = {"version": weights.version, "paused": weights.paused, "in_flight": weights.in_flight}
        return _json({"schema": SCHEMA, **state, **more})

    async def _status(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        return _json({"schema": SCHEMA, **self._service.status()})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._guard.admit_admin(request)
        return web.Response(body=self._service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        """Parse a body of that kind after checking the admin key; no body counts as an empty object."""
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
        "turns": session.recorder.turn_count,
        "in_flight": session.in_flight,
        "ended": session.ended,
    }


def finished_json(done: Finished) -> bytes:
    """What a finish returns; samples in the schema of `rolltape export --format jsonl`."""
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
