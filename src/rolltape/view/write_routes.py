"""The routes that write tags and notes, or make links that share a rollout or the right to annotate."""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from rolltape.errors import NoAnswer
from rolltape.view.annotating import AnnotationRequest, RunAnnotator, why_read_only
from rolltape.view.answers import encode_answer
from rolltape.view.guard import ViewGuard
from rolltape.view.rights import Share
from rolltape.view.run.run_answers import Work
from rolltape.view.served_runs import ServedRun, ServedRuns, notify

if TYPE_CHECKING:
    from rolltape.view.rollout.shown_rollout import ShownRollout

T = TypeVar("T")

MOST_BYTES = 256 * 1024  # of a request
_MOST_DAYS = 365
_DAY_S = 24 * 3600


class ShareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a link to a rollout should work."""

    days: float = 7.0


class WriteRoutes:
    """Answers requests that change something."""

    def __init__(
        self,
        guard: ViewGuard,
        served: ServedRuns,
        find: "Callable[[web.Request], Awaitable[ShownRollout]]",
        in_thread: Callable[[Work], Awaitable[Any]],
    ) -> None:
        self._guard = guard
        self._find = find  # finds the rollout of a request
        self._in_thread = in_thread
        self._served = served
        self._annotators: dict[ServedRun, RunAnnotator] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/session", self._session),
            web.post("/api/annotate-link", self._annotate_link),
            web.post("/api/{r}/rollouts/{id}/annotations", self._annotate),
            web.post("/api/{r}/rollouts/{id}/share", self._share),
        ]

    async def _session(self, request: web.Request) -> web.Response:
        """The rights of the browser that sent the request."""
        guard = self._guard
        may_see_all = guard.shares is None or guard.has_key(request)
        annotate = None
        if guard.annotate is not None and guard.may_annotate(request):
            read_only = {
                name: why for name, run in self._served.runs.items() if (why := why_read_only(run)) is not None
            }
            annotate = {"author": guard.annotate.author, "read_only": read_only}
        shared = [] if may_see_all else guard.shared(request)
        return _answer(
            {
                "annotate": annotate,
                "may_share": guard.shares is not None and may_see_all,
                "shared": [{"r": one.r, "rollout": one.rollout, "expires_s": one.expires_s} for one in shared],
            }
        )

    async def _annotate(self, request: web.Request) -> web.Response:
        right = self._guard.require_annotate(request)
        asked = _decode(await request.read(), AnnotationRequest)
        shown = await self._find(request)
        if shown.run not in self._annotators:
            self._annotators[shown.run] = annotator = RunAnnotator(shown.run)
            self._served.on_close.append(annotator.close)
        annotator = self._annotators[shown.run]
        held = await self._in_thread(
            lambda: shown.annotate(lambda rollout: annotator.write(asked, rollout, right.author))
        )
        if shown.run.state.refresh():
            await notify(shown.run)
        return _answer(held)

    async def _annotate_link(self, request: web.Request) -> web.Response:
        """A new link that gives the right to annotate once."""
        right = self._guard.require_annotate(request)
        return _answer({"query": f"annotate={right.new_code()}"})

    async def _share(self, request: web.Request) -> web.Response:
        shares = self._guard.require_share(request)
        asked = _decode(await request.read(), ShareRequest)
        if not 0 < asked.days <= _MOST_DAYS:
            raise NoAnswer(f"days is {asked.days:g}; give more than 0, and at most {_MOST_DAYS}")
        shown = await self._find(request)
        expires_s = int(time.time() + asked.days * _DAY_S)
        rollout = shown.row["id"]
        token = shares.sign(Share(shown.run.name, rollout, expires_s))
        path = f"/{shown.run.name}/rollout/{rollout}?share={token}"
        return _answer({"path": path, "expires_s": expires_s})


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoAnswer(f"the request cannot be read: {str(error)[:200]}") from None


def _answer(answer: object) -> web.Response:
    return web.Response(body=encode_answer(answer), content_type="application/json", charset="utf-8")
