"""The path below which the page is served behind a reverse proxy: `/x` of `https://host/x/…`; empty at the root."""

import re
from collections.abc import Sequence

from aiohttp import web

from rolltape.errors import ViewError

BASE_PATH = web.AppKey("base_path", str)
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def parse_base_path(given: str) -> str:
    """A base path without a slash at its end; raises ViewError."""
    path = given.rstrip("/")
    parts = path.split("/")
    if path and (not _PATH.fullmatch(path) or {".", ".."} & set(parts) or parts[1] == "api"):
        raise ViewError(
            f"--base-path {given[:80]}: the page cannot be served there; give a path such as /rolltape, of letters, "
            "digits, '-', '.', '_' and '~', which does not begin with /api"
        )
    return path


def add_routes_below(app: web.Application, base: str, routes: Sequence[web.RouteDef]) -> None:
    """Add routes at the root and below a base path, since a proxy may remove the path from requests, or keep it."""
    app[BASE_PATH] = base
    if base:
        app.add_routes([web.RouteDef(one.method, base + one.path, one.handler, one.kwargs) for one in routes])
    app.add_routes(routes)


def path_below(request: web.Request) -> str:
    """A request's path without the base path."""
    return without_base(request.path, request.app[BASE_PATH])


def without_base(path: str, base: str) -> str:
    """A path without the base path, if it begins with the base path."""
    return path[len(base) :] or "/" if path == base or path.startswith(f"{base}/") else path
