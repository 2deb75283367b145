"""Who may look: on loopback whoever asks by a local name, elsewhere whoever has the key."""

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

COOKIE = "rolltape_view"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Decides on each request."""

    def __init__(self, key: str | None) -> None:
        self._key = key  # None: the server is on loopback, and asks for none

    def refusal(self, request: web.Request) -> str | None:
        """Why a request is refused; None: it may pass."""
        if self._key is None:
            # A page elsewhere that had its name resolve to this machine still asks by that name.
            if not is_loopback(_host_of(f"//{request.host}")):
                return f"asked as {request.host[:80]!r}; ask as localhost or 127.0.0.1, or start it with --key"
            return None
        return None if self._has_key(request) else "give the key that `rolltape view` was started with, as ?key=…"

    def _has_key(self, request: web.Request) -> bool:
        bearer = request.headers.get("Authorization", "")
        given = [request.cookies.get(COOKIE), request.query.get("key")]
        if bearer.lower().startswith("bearer "):
            given.append(bearer[7:].strip())
        return any(self._is_key(one) for one in given if one)

    def _is_key(self, given: str) -> bool:
        expected = (self._key or "").encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected)

    def greeting(self, request: web.Request) -> web.Response | None:
        """Takes the key out of the address into a cookie; None: it was not in the address."""
        if self._key is None or not self._is_key(request.query.get("key", "")) or request.path.startswith("/api/"):
            return None
        rest = {name: value for name, value in request.query.items() if name != "key"}
        answer = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(rest))})
        answer.set_cookie(COOKIE, self._key, httponly=True, samesite="Strict", path="/")
        return answer


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
