"""The page and its answers over HTTP. There is nothing to post: it only reads."""

import asyncio
import gzip
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rolltape.errors import NoAnswer, RolltapeError, TapeError
from rolltape.view.answers import count_in, encoded, step_in
from rolltape.view.guard import HEADERS, Guard
from rolltape.view.live import live
from rolltape.view.page_files import KINDS, page_files
from rolltape.view.service import RunAnswers, Work
from rolltape.view.watching import WatchedRun, Watcher

if TYPE_CHECKING:
    from rolltape.view.rollout_answers import RolloutAnswers

log = logging.getLogger("rolltape.view")

_COMPRESSED_FROM = 2_000  # bytes
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers for the runs of a watcher."""

    def __init__(self, watcher: Watcher, guard: Guard) -> None:
        self._watcher = watcher
        self._guard = guard
        self._answers = {name: RunAnswers(run) for name, run in watcher.runs.items()}
        self._rollout_answers: dict[str, RolloutAnswers] = {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        rollout = "/api/{r}/rollouts/{id}"
        app.add_routes(
            [
                web.get("/api/runs", self._runs),
                web.get("/api/{r}/overview", self._overview),
                web.get("/api/{r}/rollouts", self._rollouts),
                web.get("/api/{r}/live", self._live, allow_head=False),
                web.get("/api/{r}/groups/{group}", self._group),
                web.get(rollout, self._rollout),
                web.get(f"{rollout}/raw", self._raw),
                web.get(f"{rollout}/compare", self._compare),
                web.get(f"{rollout}/messages/{{digest}}", self._message),
                web.get(f"{rollout}/samples/{{index}}/tokens", self._tokens),
                web.get(f"{rollout}/turns/{{turn}}/tokens", self._turn_tokens),
                web.get("/api/{rest:.*}", self._nothing),
                web.get("/{path:.*}", self._page),
            ]
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refusal = self._guard.refusal(request)
            if refusal is not None:
                answer: web.StreamResponse = _failure(refusal, 401, request)
            else:
                answer = self._guard.greeting(request) or await handler(request)
        except NoAnswer as error:
            answer = _failure(str(error), error.status, request)
        except web.HTTPException as error:
            answer = _failure(error.reason, error.status, request)
        except (RolltapeError, OSError, sqlite3.Error) as error:
            answer = _failure(str(error), 404 if isinstance(error, TapeError) else 500, request)
        except Exception as error:
            log.exception("%s", request.path)
            answer = _failure(f"{type(error).__name__}: {error}", 500, request)
        if not answer.prepared:
            answer.headers.update(HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    def _of(self, request: web.Request) -> RunAnswers:
        found = self._answers.get(request.match_info["r"])
        if found is None:
            raise NoAnswer(f"no run {request.match_info['r'][:64]!r} is served here", 404)
        return found

    async def _whole(self, request: web.Request) -> "RolloutAnswers":
        """Answers about rollouts, too. What computes them is imported when it is first asked for."""
        run = self._of(request).run
        if run.name not in self._rollout_answers:
            answers = await self._done(lambda: _rollout_answers(run))
            self._answers[run.name] = self._rollout_answers.setdefault(run.name, answers)
        return self._rollout_answers[run.name]

    async def _row(self, request: web.Request) -> "tuple[RolloutAnswers, int]":
        answers = await self._whole(request)
        return answers, answers.row(request.match_info["id"], request.query.get("try"))

    async def _done(self, work: Work) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._watcher.threads, work)

    async def _json(self, request: web.Request, work: Work) -> web.Response:
        """Does the work and spells its answer in a thread."""
        return await self._answer(request, await self._done(lambda: encoded(work())))

    async def _answer(self, request: web.Request, body: bytes, kind: str = "application/json") -> web.Response:
        """A body as an answer, compressed where it is long and is asked for so."""
        answer = _plain_answer(body, kind)
        if len(body) < _COMPRESSED_FROM or kind.startswith(("image/png", "font/")):
            return answer
        answer.headers["Vary"] = "Accept-Encoding"
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            # At the lowest level: the others take five times as long for a tenth less.
            answer.body = await self._done(lambda: gzip.compress(body, 1, mtime=0))
            answer.headers["Content-Encoding"] = "gzip"
        return answer

    async def _runs(self, request: web.Request) -> web.Response:
        runs = [answers.headline() for answers in self._answers.values()]
        return await self._answer(request, encoded({"runs": runs}))

    async def _overview(self, request: web.Request) -> web.Response:
        return await self._answer(request, encoded(self._of(request).overview(step_in(request.query))))

    async def _rollouts(self, request: web.Request) -> web.Response:
        answers = self._of(request)
        asked = request.query.get("q", "").strip()
        searched = await self._done(answers.search(asked)) if asked else None
        return await self._answer(request, encoded(answers.table(request.query, searched)))

    async def _group(self, request: web.Request) -> web.Response:
        return await self._json(request, (await self._whole(request)).group(request.match_info["group"]))

    async def _rollout(self, request: web.Request) -> web.Response:
        answers, row = await self._row(request)
        return await self._json(request, answers.rollout(row, request.query.get("policy")))

    async def _raw(self, request: web.Request) -> web.Response:
        answers, row = await self._row(request)
        return await self._json(request, answers.raw(row))

    async def _message(self, request: web.Request) -> web.Response:
        answers, row = await self._row(request)
        return await self._json(request, answers.message(row, request.match_info["digest"]))

    async def _compare(self, request: web.Request) -> web.Response:
        answers, row = await self._row(request)
        return await self._json(request, answers.compare(row, request.query.get("left"), request.query.get("right")))

    async def _tokens(self, request: web.Request) -> web.Response:
        answers, row = await self._row(request)
        index = count_in(request.match_info, "index", 0, 2**31)
        policy, record = request.query.get("policy"), request.query.get("record") or None
        packed = await self._done(answers.tokens(row, index, policy, record=record))
        return await self._answer(request, packed, "application/octet-stream")

    async def _turn_tokens(self, request: web.Request) -> web.Response:
        answers, row = await self._row(request)
        packed = await self._done(answers.turn_tokens(row, request.match_info["turn"]))
        return await self._answer(request, packed, "application/octet-stream")

    async def _live(self, request: web.Request) -> web.StreamResponse:
        return await live(request, self._of(request).run, HEADERS)

    async def _nothing(self, request: web.Request) -> web.Response:
        raise NoAnswer(f"nothing is asked for by {request.path[:80]}", 404)

    async def _page(self, request: web.Request) -> web.Response:
        """A file of the page; what is none is an address within it."""
        path = request.match_info["path"]
        held = page_files()
        kind, content = held.get(path) or held["index.html"]
        if path not in held and path.rpartition(".")[2] in KINDS:  # a turn's id has dots, too
            raise NoAnswer(f"the page has no file {path[:80]!r}", 404)
        etag = sha256(content).hexdigest()[:16]
        headers = {"ETag": f'"{etag}"', "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        answer = await self._answer(request, content, kind)
        answer.headers.update(headers)
        return answer


def _rollout_answers(run: WatchedRun) -> "RolloutAnswers":
    from rolltape.view.rollout_answers import RolloutAnswers

    return RolloutAnswers(run)


def _plain_answer(body: bytes, kind: str = "application/json", status: int = 200) -> web.Response:
    answer = web.Response(body=body, status=status, content_type=kind)
    if kind.startswith("text/") or kind == "application/json":
        answer.charset = "utf-8"
    return answer


def _failure(message: str, status: int, request: web.Request) -> web.Response:
    """What went wrong, as the page takes it; to one who opened the page itself, to be read."""
    if not request.path.startswith("/api/") and "text/html" in request.headers.get("Accept", ""):
        page = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Rolltape</title><p>{escape(message)}"
        return _plain_answer(page.encode(), "text/html", status)
    return _plain_answer(encoded({"error": {"message": message, "where": request.path}}), status=status)
