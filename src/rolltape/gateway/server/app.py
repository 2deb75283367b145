"""The aiohttp application: routes, and errors in each API's own form."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from rolltape.errors import GatewayError, RolltapeError
from rolltape.gateway.peers import ServedElsewhere, Siblings
from rolltape.gateway.server.admin import Admin
from rolltape.gateway.server.agents import DIALECT, SESSION, Agents, StreamFailed, told_to_agent
from rolltape.gateway.server.forwarding import Forwarding
from rolltape.gateway.server.guard import ADMIN, GatewayGuard
from rolltape.gateway.server.health import Health
from rolltape.gateway.service import Service
from rolltape.gateway.wire import DIALECTS, dialect_of
from rolltape.serving import is_loopback

log = logging.getLogger("rolltape.access")
http_log = logging.getLogger("rolltape.http")  # of connections whose requests could not be read

_KEY_IN_PATH = re.compile(r"^/+s/+[^/]+")
_KEY = re.compile(r"(rts|rta)-[\w-]{32,}")  # a session's or the gateway's, wherever somebody put it
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _hide_bytes(record: logging.LogRecord) -> bool:
    """aiohttp shows bytes that it could not read, and a key may be among them. Clients that left are logged already."""
    left = record.exc_info is not None and isinstance(record.exc_info[1], ConnectionResetError)
    record.exc_info = record.exc_text = None
    return not left


http_log.addFilter(_hide_bytes)


def make_app(
    service: Service, admin_key: str, public_url: Callable[[], str], forwarding: Forwarding, siblings: Siblings
) -> web.Application:
    """The gateway as an application; `public_url` is asked once it listens."""
    settings = service.settings
    answering = _answering(service, forwarding)
    app = web.Application(client_max_size=settings.max_body_mib * 2**20, middlewares=[answering])
    guard = GatewayGuard(admin_key, forwarding.is_forwarded, loopback=is_loopback(settings.host))
    app.add_routes(Agents(service, guard, forwarding, siblings).routes())
    app.add_routes(Admin(service, guard, public_url, forwarding, siblings).routes())
    app.add_routes(forwarding.routes())
    app.add_routes(Health(service).routes())
    return app


def _answering(service: Service, forwarding: Forwarding) -> Middleware:
    """Middleware of every request: errors are answered in their API's form and logged, without keys."""

    async def answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ServedElsewhere as error:
            return await forwarding.forward(request, error)

    @web.middleware
    async def answering(request: web.Request, handler: _Handler) -> web.StreamResponse:
        began = time.monotonic()
        status: int | str = "gone"
        why = ""
        try:
            response = await answer(request, handler)
            status = response.status
            return response
        except StreamFailed as error:
            status, why = error.status, f"told within its stream: {error}"
            return error.response
        except web.HTTPException as error:
            status, why = error.status, error.reason
            if error.status < 400:
                raise
            if error.status == 413:
                why = f"the body is larger than {service.settings.max_body_mib} MiB, which is the gateway's limit"
            return _refusal(request, error.status, f"{why}: {request.method} {_path(request)}", final=True)
        except web.RequestPayloadError as error:  # cut short
            status, why = 400, f"the body cannot be read: {' '.join(str(error).split())}"
            return _refusal(request, status, why, final=True)
        except GatewayError as error:
            status, why = error.status, str(error)
            told = told_to_agent(error)
            response = _refusal(request, error.status, told, final=error.final, code=error.code)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = f"{math.ceil(error.retry_after_s)}"
            return response
        except RolltapeError as error:
            status, why = 500, str(error)
            log.exception("%s %s", request.method, _shown(request))
            told = f"{type(error).__name__}: {error}" if request.get(ADMIN) else told_to_agent(error)
            return _refusal(request, 500, told, final=False)
        except (ConnectionResetError, asyncio.CancelledError):
            why = "the client has gone"
            raise
        except Exception:
            status, why = 500, "see the traceback"
            log.exception("%s %s", request.method, _shown(request))
            return _refusal(request, 500, "the gateway failed; its log says how", final=False)
        finally:
            took_s = time.monotonic() - began
            failed = not isinstance(status, int) or status >= 400
            if isinstance(status, int) and status >= 400:
                service.metrics.count("errors", str(status))
                if status < 500 and SESSION in request:  # a failure of ours has a turn that says so
                    service.refused(request[SESSION], status, _without_keys(request, why))
            if failed or took_s > service.settings.slow_s:
                what, who = f"{request.method} {_shown(request)}", request.get(SESSION, "-")
                log.warning("%s %s %.1f s %s: %s", what, status, took_s, who, _without_keys(request, why))

    return answering


def _refusal(request: web.Request, status: int, message: str, *, final: bool, code: str | None = None) -> web.Response:
    dialect = request.get(DIALECT) or dialect_of(request.path, request.headers, request.query)
    headers = {"x-should-retry": "false"} if final else {}
    body = dialect.error(status, message, code, final=final)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _shown(request: web.Request) -> str:
    """A request's path for the log. Of one that has no route, only the words of routes: any other may be a key."""
    path = _path(request)
    if request.match_info.http_exception is None:
        return path
    known = {word for route in request.app.router.resources() for word in route.canonical.split("/")}
    return "/".join(word if word in known else "…" for word in path.split("/"))


def _path(request: web.Request) -> str:
    """A request's path as it came, without the key that may be in it."""
    return _without_keys(request, _KEY_IN_PATH.sub("/s/…", request.rel_url.raw_path))


def _without_keys(request: web.Request, text: str) -> str:
    """A text without the keys that a request carries, and whatever else looks like a key of ours."""
    for key in {dialect.find_key(request.headers, request.query) for dialect in DIALECTS}:
        if key:
            text = text.replace(key, "…")
    return _KEY.sub(r"\1-…", text)
