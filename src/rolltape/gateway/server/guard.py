"""Access checks: a session's key allows its model calls, the admin key allows everything else."""

from collections.abc import Callable

from aiohttp import web

from rolltape.errors import NotAllowed
from rolltape.serving import bearer_token, host_in, is_loopback, same_key

# Set on a request that carried the admin key.
ADMIN: web.RequestKey[bool] = web.RequestKey("admin", bool)


def given_key(request: web.Request) -> str | None:
    """The key in a request's path, or else in its headers, or None."""
    given = (request.match_info.get("key"), bearer_token(request), request.headers.get("x-api-key"))
    return next((key for key in given if key is not None), None)


class GatewayGuard:
    """Checks who may use which routes."""

    def __init__(self, admin_key: str, is_forwarded: Callable[[web.Request], bool], *, loopback: bool) -> None:
        """`is_forwarded` returns whether another gateway of the run has admitted a request."""
        self._admin_key = admin_key
        self._is_forwarded = is_forwarded
        self._loopback = loopback

    def admit_local(self, request: web.Request) -> None:
        """Raise NotAllowed for requests of web pages in a browser on this machine, if any key opens a session.

        Such a page reaches loopback under another host name, or the browser sends its origin.
        """
        names = [f"//{request.host}", *request.headers.getall("Origin", ())]
        strange = next((name for name in names if not is_loopback(host_in(name))), None)
        if self._loopback and strange is not None:
            raise NotAllowed(
                f"the Host or Origin is {strange.lstrip('/')!r}; use localhost, or start the gateway without --open"
            )

    def admit_admin(self, request: web.Request) -> None:
        """Raise NotAllowed unless the request carries the admin key, or another gateway of the run has checked it."""
        key = given_key(request)
        if not self._is_forwarded(request) and (key is None or not same_key(key, self._admin_key)):
            raise NotAllowed("this needs the gateway's admin key as a bearer token; agents do not have it")
        request[ADMIN] = True
