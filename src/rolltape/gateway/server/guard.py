"""Access checks: a session's key opens that session, the admin key everything else."""

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from rolltape.errors import NotAllowed


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def given_key(request: web.Request) -> str | None:
    """The key in a request's path, or else in its headers; None: there is none."""
    in_path = request.match_info.get("key")
    if in_path is not None:
        return in_path
    bearer = request.headers.get("Authorization", "")
    if bearer.lower().startswith("bearer "):
        return bearer[7:].strip()
    return request.headers.get("x-api-key")


class Guard:
    """The gateway's door for whoever runs it."""

    def __init__(self, admin_key: str | None, *, loopback: bool) -> None:
        self._admin_key = admin_key  # None: whoever reaches the port on this machine may
        self._loopback = loopback

    def admit_local(self, request: web.Request) -> None:
        """Where no key is asked for, let no page through that a browser on this machine shows; raises NotAllowed.

        Such a page reaches loopback under a name of its own, or else the browser says where it came from.
        """
        names = [f"//{request.host}", *request.headers.getall("Origin", ())]
        strange = next((name for name in names if not is_loopback(_host_of(name))), None)
        if self._loopback and strange is not None:
            raise NotAllowed(
                f"asked as {strange.lstrip('/')!r}; ask as localhost, or start the gateway with an admin key"
            )

    def admit_admin(self, request: web.Request) -> None:
        """Let those through who may open, look at and end sessions; raises NotAllowed."""
        if self._admin_key is None:
            self.admit_local(request)
            return
        key = given_key(request)
        if key is None or not hmac.compare_digest(
            key.encode("utf-8", "surrogatepass"), self._admin_key.encode("utf-8", "surrogatepass")
        ):
            raise NotAllowed("give the gateway's admin key as a bearer token")


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
