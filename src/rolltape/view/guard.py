"""`ViewGuard` decides who may see the page: on loopback requests by a local name, elsewhere those with the key."""

from hashlib import sha256

from aiohttp import web

from rolltape.serving import bearer_token, host_in, is_loopback, same_key
from rolltape.view.base_path import BASE_PATH, path_below, without_base

_COOKIE = "rolltape_view_"
_OWN_SITES = ("same-origin", "none")  # the page itself, and an address that was typed in
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


class ViewGuard:
    """Admits or refuses each request."""

    def __init__(self, key: str | None) -> None:
        self._key = key or None  # None: the server is on loopback, and asks for none
        # The cookie opens this server alone, and does not reveal the key. Its name differs between two servers on one
        # host, since browsers share cookies between ports.
        self._ticket = sha256(_bytes(f"rolltape view {key}")).hexdigest()
        self._cookie = _COOKIE + sha256(_bytes(self._ticket)).hexdigest()[:8]

    def refusal(self, request: web.Request) -> str | None:
        """Why a request is refused; None: it may pass."""
        site, mode = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode"))
        if site is not None and site not in _OWN_SITES and mode != "navigate":
            return "a page of another site asked for this; open the address itself"
        if self._key is None:
            # A page whose own name resolves to this machine still asks by that name.
            if not is_loopback(host_in(f"//{request.host}")):
                return f"asked as {request.host[:80]!r}; ask as localhost or 127.0.0.1, or start it with --key"
            return None
        return None if self._has_key(request) else "give the key that `rolltape view` was started with, as ?key=…"

    def _has_key(self, request: web.Request) -> bool:
        given = [request.query.get("key", ""), bearer_token(request) or ""]
        return any(map(self._is_key, given)) or same_key(request.cookies.get(self._cookie, ""), self._ticket)

    def _is_key(self, given: str) -> bool:
        return self._key is not None and same_key(given, self._key)

    def redirect_with_cookie(self, request: web.Request) -> web.Response | None:
        """Move the key from the address into a cookie; None: it was not in the address."""
        if not self._is_key(request.query.get("key", "")) or path_below(request).startswith("/api/"):
            return None
        rest = [(name, value) for name, value in request.query.items() if name != "key"]
        base = request.app[BASE_PATH]
        address = without_base(str(request.rel_url.with_query(rest)), base)
        # An address that begins with two slashes would lead to another host.
        answer = web.Response(status=303, headers={"Location": f"{base}/{address.lstrip('/')}"})
        # Not "Strict": links from elsewhere should open with the cookie, and this server only reads.
        answer.set_cookie(self._cookie, self._ticket, httponly=True, samesite="Lax", path=base or "/")
        return answer


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
