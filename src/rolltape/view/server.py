"""The web page's HTTP server: the page, its answers, and a stream of changes. Only tags and notes are written."""

import asyncio
import gzip
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from rolltape.errors import NoAnswer, NoSuchRollout, RolltapeError, TapeError
from rolltape.view.answers import encode_answer, parse_count, parse_step
from rolltape.view.base_path import add_routes_below, path_below
from rolltape.view.compare.comparison import Comparisons
from rolltape.view.guard import HEADERS, ViewGuard
from rolltape.view.page_files import KINDS, index_page, page_files
from rolltape.view.run.exporting import FORMS, export_form, file_name
from rolltape.view.run.run_answers import RunAnswers, Searched, Work, find_run_answers
from rolltape.view.served_runs import ServedRun, ServedRuns
from rolltape.view.write_routes import MOST_BYTES, WriteRoutes

if TYPE_CHECKING:
    from rolltape.view.rollout.rollout_answers import RolloutAnswers
    from rolltape.view.rollout.shown_rollout import ShownRollout

log = logging.getLogger("rolltape.view")

_COMPRESSED_FROM = 2_000  # bytes
_EVENT_S = 1.0  # at least between two events of a stream
_HEARTBEAT_S = 15.0
_EVENT_IDS = 500

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# Answers about a run, computed in the event loop from the index in memory.
_RUN_ROUTES: dict[str, Callable[[RunAnswers, web.Request], dict[str, Any]]] = {
    "overview": lambda answers, request: answers.overview(parse_step(request.query)),
    "tasks": lambda answers, request: answers.tasks(request.query),
    "change": lambda answers, request: answers.change(request.query),
}
# Answers from a trainer's records of a step, by the names that they have in the answer.
_STEP_ROUTES: dict[str, tuple[str, Callable[[ServedRun, int], object]]] = {
    "trained": ("check", ServedRun.check_trained),
    "mismatches": ("mismatches", ServedRun.find_mismatches),
}
# Answers about a rollout, computed in a thread; bytes are packed tokens.
_ROLLOUT_ROUTES: "dict[str, Callable[[ShownRollout, web.Request], dict[str, Any] | bytes]]" = {
    "": lambda shown, request: shown.detail(request.query.get("policy")),
    "/raw": lambda shown, _: shown.raw(),
    "/compare": lambda shown, request: shown.compare(request.query.get("left"), request.query.get("right")),
    "/messages/{digest}": lambda shown, request: {"message": shown.message(request.match_info["digest"]).to_dict()},
    "/samples/{index}/tokens": lambda shown, request: shown.tokens(
        _index(request), request.query.get("policy"), record=request.query.get("record") or None
    ),
    "/turns/{turn}/tokens": lambda shown, request: shown.turn_tokens(request.match_info["turn"]),
}


class ViewServer:
    """Answers for served runs."""

    def __init__(self, served: ServedRuns, guard: ViewGuard, base: str = "") -> None:
        self._served = served
        self._base = base  # path
        self._guard = guard
        self._known_answers: dict[str, RunAnswers] = {}
        self._rollout_answers: type[RolloutAnswers] | None = None  # None: not imported yet
        self._comparisons = Comparisons()
        self._writing = WriteRoutes(guard, served, self._shown, self._in_thread)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=MOST_BYTES)
        rollout = "/api/{r}/rollouts/{id}"
        add_routes_below(
            app,
            self._base,
            [
                web.get("/api/runs", self._runs),
                web.get("/api/compare", self._compare_sides),
                web.get("/api/pair", self._pair),
                *self._writing.routes(),
                *(web.get(f"/api/{{r}}/{name}", self._about_run(answer)) for name, answer in _RUN_ROUTES.items()),
                *(web.get(f"/api/{{r}}/{name}/{{step}}", self._about_step(*one)) for name, one in _STEP_ROUTES.items()),
                *(web.get(rollout + path, self._about_rollout(answer)) for path, answer in _ROLLOUT_ROUTES.items()),
                web.get("/api/{r}/export", self._export, allow_head=False),
                web.get("/api/{r}/notes", self._notes),
                web.get("/api/{r}/rollouts", self._rollouts),
                web.get("/api/{r}/lines", self._lines),
                web.get("/api/{r}/live", self._live, allow_head=False),
                web.get("/api/{r}/groups/{group}", self._group),
                web.get(f"{rollout}/messages/{{digest}}/images/{{index}}", self._image),
                web.get("/api/{rest:.*}", self._nothing),
                web.get("/{path:.*}", self._page),
            ],
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refusal = self._guard.refusal(request)
            if refusal is not None:
                answer: web.StreamResponse = _failure(refusal, 401, request)
            else:
                answer = self._guard.redirect_with_cookie(request) or await handler(request)
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

    @property
    def _answers(self) -> dict[str, RunAnswers]:
        """The answers about each run that is served now."""
        known = self._known_answers
        for name, run in self._served.runs.items():
            if name not in known or known[name].run is not run:
                known[name] = RunAnswers(run)
        return known

    def _run_answers(self, request: web.Request) -> RunAnswers:
        return find_run_answers(self._answers, request.match_info["r"])

    async def _load_rollout_answers(self, name: str) -> "RolloutAnswers":
        """Answers about rollouts too. The modules that compute them are imported at the first request."""
        find_run_answers(self._answers, name)
        kind = self._rollout_answers
        if kind is None:
            kind = self._rollout_answers = await self._in_thread(_import_rollout_answers)
        answers = self._answers[name]
        if not isinstance(answers, kind):
            answers = self._known_answers[name] = kind(answers.run)
        return answers

    async def _shown(self, request: web.Request) -> "ShownRollout":
        answers = await self._load_rollout_answers(request.match_info["r"])
        return answers.shown(await self._find_row(answers, request.match_info["id"], request.query.get("try")))

    async def _find_row(self, answers: "RolloutAnswers", rollout: str, try_index: str | None) -> int:
        if answers.holds(rollout):
            return answers.row(rollout, try_index)
        run = answers.run
        try:
            found = await self._in_thread(lambda: run.index.find(rollout, run.title))
        except NoSuchRollout as error:
            raise NoAnswer(str(error), 404) from error
        return answers.row(found.id, try_index) if try_index else answers.row_named(found)

    async def _in_thread(self, work: Work) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._served.threads, work)

    async def _json_from_thread(self, request: web.Request, work: Work) -> web.Response:
        """Run the work and encode its answer in a thread; packed tokens are sent as they are."""

        def encode() -> tuple[bytes, str]:
            answer = work()
            packed = isinstance(answer, bytes)
            return (answer, "application/octet-stream") if packed else (encode_answer(answer), "application/json")

        return await self._body(request, *await self._in_thread(encode))

    async def _json(self, request: web.Request, answer: object) -> web.Response:
        return await self._body(request, encode_answer(answer))

    async def _body(self, request: web.Request, body: bytes, kind: str = "application/json") -> web.Response:
        """A body as an answer, compressed if it is long and the client accepts that."""
        answer = _plain_answer(body, kind)
        if len(body) < _COMPRESSED_FROM or kind.startswith(("image/png", "font/")):
            return answer
        answer.headers["Vary"] = "Accept-Encoding"
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            # At the lowest level: higher ones take five times as long and save only a tenth.
            answer.body = await self._in_thread(lambda: gzip.compress(body, 1, mtime=0))
            answer.headers["Content-Encoding"] = "gzip"
        return answer

    async def _runs(self, request: web.Request) -> web.Response:
        runs = [answers.headline() for answers in self._answers.values()]
        return await self._json(request, {"runs": runs})

    async def _compare_sides(self, request: web.Request) -> web.Response:
        return await self._json(request, self._comparisons.answer(request.query, self._answers))

    async def _pair(self, request: web.Request) -> web.Response:
        """Two rollouts of any runs: `a` and `b` name the runs, `a_rollout` and `b_rollout` the rollouts."""
        works: dict[str, Work] = {}
        for letter in ("a", "b"):
            answers = await self._load_rollout_answers(request.query.get(letter, ""))
            rollout, try_index = (request.query.get(f"{letter}_{name}") for name in ("rollout", "try"))
            works[letter] = answers.conversation(await self._find_row(answers, rollout or "", try_index))
        return await self._json_from_thread(request, lambda: {letter: work() for letter, work in works.items()})

    def _about_run(self, answer: Callable[[RunAnswers, web.Request], object]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._json(request, answer(self._run_answers(request), request))

        return handle

    def _about_step(self, name: str, find: Callable[[ServedRun, int], object]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            run = self._run_answers(request).run
            step = parse_count(request.match_info, "step", 0, 2**53)
            return await self._json_from_thread(request, lambda: {"step": step, name: find(run, step)})

        return handle

    def _about_rollout(self, answer: "Callable[[ShownRollout, web.Request], object]") -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            shown = await self._shown(request)
            return await self._json_from_thread(request, lambda: answer(shown, request))

        return handle

    async def _notes(self, request: web.Request) -> web.Response:
        answers = self._run_answers(request)
        held = await self._in_thread(answers.load_annotations)
        return await self._json(request, answers.notes(held))

    async def _search(self, request: web.Request) -> Searched | None:
        """The result of a search for `q`, or None without `q`."""
        asked = request.query.get("q", "").strip()
        return await self._in_thread(self._run_answers(request).search(asked)) if asked else None

    async def _export(self, request: web.Request) -> web.StreamResponse:
        """A file of the table's matching rows, sent while it is made."""
        answers = self._run_answers(request)
        chunks = await self._in_thread(answers.export(request.query, await self._search(request)))
        chunk = await self._in_thread(lambda: next(chunks, None))  # an immediate failure is answered as an error
        name = quote(file_name(answers.run.title, request.query))
        kind = FORMS[export_form(request.query)]
        answer = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
                "Cache-Control": "no-store",
            }
        )
        await answer.prepare(request)
        try:
            while chunk is not None:
                await answer.write(chunk)
                chunk = await self._in_thread(lambda: next(chunks, None))
            await answer.write_eof()
        finally:
            if chunk is not None and request.transport is not None:
                request.transport.abort()  # so that the client does not take the received part for the whole file
        return answer

    async def _rollouts(self, request: web.Request) -> web.Response:
        answers = self._run_answers(request)
        return await self._json(request, answers.table(request.query, await self._search(request)))

    async def _lines(self, request: web.Request) -> web.Response:
        return await self._json_from_thread(request, self._run_answers(request).lines(request.query))

    async def _group(self, request: web.Request) -> web.Response:
        answers = await self._load_rollout_answers(request.match_info["r"])
        return await self._json_from_thread(request, answers.group(request.match_info["group"]))

    async def _image(self, request: web.Request) -> web.Response:
        """An image of a message, with the media type of its bytes, so that it cannot be opened as a page."""
        shown = await self._shown(request)
        image = await self._in_thread(lambda: shown.image(request.match_info["digest"], _index(request)))
        return web.Response(body=image.content, content_type=image.type)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Send a server-sent event at once, and another whenever the run has changed, until the page is closed."""
        run = self._run_answers(request).run
        answer = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        await answer.prepare(request)
        sent = run.state.snapshot
        await answer.write(_encode_event(sent, []))
        while True:
            try:
                async with run.changed, asyncio.timeout(_HEARTBEAT_S):
                    while self._served.runs[run.name].state.snapshot == sent:
                        await run.changed.wait()
            except TimeoutError:
                await answer.write(b": still here\n\n")
                continue
            run = self._served.runs[run.name]  # another may have been recorded in its place
            changed = list(run.state.changed_since(sent))
            sent = run.state.snapshot
            await answer.write(_encode_event(sent, changed))
            await asyncio.sleep(_EVENT_S)

    async def _nothing(self, request: web.Request) -> web.Response:
        raise NoAnswer(f"there is no route {request.path[:80]}; docs/how-to/view.md names the routes", 404)

    async def _page(self, request: web.Request) -> web.Response:
        """A file of the page; other paths are addresses within the page, and return the page itself."""
        path = request.match_info["path"]
        files = page_files()
        if path not in files and path.rpartition(".")[2] in KINDS:  # a turn's id has dots, too
            raise NoAnswer(f"the page has no file {path[:80]!r}", 404)
        kind, content = files.get(path) or ("text/html", index_page(self._base))
        etag = sha256(content).hexdigest()[:16]
        headers = {"ETag": f'"{etag}"', "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        answer = await self._body(request, content, kind)
        answer.headers.update(headers)
        return answer


def _index(request: web.Request) -> int:
    return parse_count(request.match_info, "index", 0, 2**31)


def _import_rollout_answers() -> "type[RolloutAnswers]":
    from rolltape.view.rollout.rollout_answers import RolloutAnswers

    return RolloutAnswers


def _encode_event(snapshot: int, changed: list[str]) -> bytes:
    data = {"snapshot": snapshot, "rollouts": changed[:_EVENT_IDS], "more": len(changed) > _EVENT_IDS}
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _plain_answer(body: bytes, kind: str = "application/json", status: int = 200) -> web.Response:
    answer = web.Response(body=body, status=status, content_type=kind)
    if kind.startswith("text/") or kind == "application/json":
        answer.charset = "utf-8"
    return answer


def _failure(message: str, status: int, request: web.Request) -> web.Response:
    """An error as JSON for the page's requests, and as HTML for a person who opened an address."""
    if not path_below(request).startswith("/api/") and "text/html" in request.headers.get("Accept", ""):
        page = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Rolltape</title><p>{escape(message)}"
        return _plain_answer(page.encode(), "text/html", status)
    return _plain_answer(encode_answer({"error": {"message": message, "where": request.path}}), status=status)
