"""The aiohttp application: all routes of the gateway."""

import logging
from collections.abc import Callable

from aiohttp import web

from rolltape.gateway.peers import Siblings
from rolltape.gateway.server.admin import Admin
from rolltape.gateway.server.agents import Agents
from rolltape.gateway.server.answering import answering_with
from rolltape.gateway.server.forwarding import Forwarding
from rolltape.gateway.server.guard import GatewayGuard
from rolltape.gateway.server.health import Health
from rolltape.gateway.service import Service
from rolltape.serving import is_loopback

http_log = logging.getLogger("rolltape.http")  # for connections whose requests cannot be parsed


def _hide_bytes(record: logging.LogRecord) -> bool:
    """Remove the bytes that aiohttp could not parse, since they may contain a key. Drop records of clients that left,
    which are logged elsewhere."""
    left = record.exc_info is not None and isinstance(record.exc_info[1], ConnectionResetError)
    record.exc_info = record.exc_text = None
    return not left


http_log.addFilter(_hide_bytes)


def make_app(
    service: Service, admin_key: str, public_url: Callable[[], str], forwarding: Forwarding, siblings: Siblings
) -> web.Application:
    """The gateway as an application; `public_url` is called only after it listens."""
    settings = service.settings
    answering = answering_with(service, forwarding.forward)
    app = web.Application(client_max_size=settings.max_body_mib * 2**20, middlewares=[answering])
    guard = GatewayGuard(admin_key, forwarding.is_forwarded, loopback=is_loopback(settings.host))
    app.add_routes(Agents(service, guard, forwarding, siblings).routes())
    app.add_routes(Admin(service, guard, public_url, forwarding, siblings).routes())
    app.add_routes(forwarding.routes())
    app.add_routes(Health(service).routes())
    return app
