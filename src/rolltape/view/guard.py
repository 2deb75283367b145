"""`ViewGuard` decides which requests may see the page: on loopback those to a local name, else those with the key."""

from collections.abc import Mapping
from functools import partial
from hashlib import sha256

from aiohttp import web

from rolltape.errors import NoAnswer
from rolltape.serving import bearer_token, host_in, is_loopback, same_key
from rolltape.view.base_path import BASE_PATH, path_below, without_base
from rolltape.view.page_files import page_files
from rolltape.view.rights import AnnotateRight, Share, ShareLinks, other_site

_COOKIE = "rolltape_view_"
_OWN_SITES = ("same-origin", "none")  # the page itself, and typed addresses
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

    def __init__(self, key: str | None, annotate: AnnotateRight | None = None) -> None:
        self._key = key or None  # None if the server is on loopback and needs none
        self.annotate = annotate  # None if the page is read-only
        self.shares = None if self._key is None else ShareLinks(self._key)
        # The cookie works only for this server, and does not reveal the key. Its name differs between two servers on
        # one host, since browsers share cookies between ports.
        self._ticket = sha256(_bytes(f"rolltape view {key}")).hexdigest()
        self._cookie = _COOKIE + sha256(_bytes(self._ticket)).hexdigest()[:8]

    def refusal(self, request: web.Request) -> str | None:
        """Why a request is refused, or None."""
        site, mode = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode"))
        if site is not None and site not in _OWN_SITES and mode != "navigate":
            return "a page of another site asked for this; open the address itself"
        if self._key is None:
            # A page whose host name resolves to this machine still sends that name.
            if not is_loopback(host_in(f"//{request.host}")):
                return f"the Host is {request.host[:80]!r}; use localhost or 127.0.0.1, or start the page with --key"
            return None
        if self.has_key(request) or any(one.opens(request, page_files().__contains__) for one in self.shared(request)):
            return None
        return "give the key that `rolltape view` was started with, as ?key=…"

    def shared(self, request: web.Request) -> list[Share]:
        """The rollouts that a request may see through links."""
        return [] if self.shares is None else self.shares.held(request)

    def may_annotate(self, request: web.Request) -> bool:
        """Whether a request comes from a browser with the right to annotate."""
        return self.annotate is not None and self.annotate.is_held(request)

    def require_annotate(self, request: web.Request) -> AnnotateRight:
        """The right to annotate, which the request must have. Raises NoAnswer."""
        if self.annotate is None:
            raise NoAnswer("this page only reads; start `rolltape view` with --annotate to write tags and notes", 403)
        if (refusal := self.annotate.refusal(request)) is not None:
            raise NoAnswer(refusal, 403)
        return self.annotate

    def require_share(self, request: web.Request) -> ShareLinks:
        """The signer of links to one rollout, for a request with the key itself. Raises NoAnswer."""
        if self.shares is None:
            raise NoAnswer("links are signed with a key; start `rolltape view` with --key to share a rollout", 403)
        if not self.has_key(request):
            raise NoAnswer("a link to one rollout gives no right to share; open the page with its key", 403)
        if not self._is_key(bearer_token(request) or "") and (refusal := other_site(request)) is not None:
            raise NoAnswer(refusal, 403)
        return self.shares

    def has_key(self, request: web.Request) -> bool:
        given = [request.query.get("key", ""), bearer_token(request) or ""]
        return any(map(self._is_key, given)) or same_key(request.cookies.get(self._cookie, ""), self._ticket)

    def _is_key(self, given: str) -> bool:
        return self._key is not None and same_key(given, self._key)

    def redirect_with_cookie(self, request: web.Request) -> web.Response | None:
        """Move a link's rights from the address into cookies; None if the address has none. Raises NoAnswer."""
        carried = {name: request.query[name] for name in ("key", "share", "annotate") if request.query.get(name)}
        if not carried or path_below(request).startswith("/api/") or request.method != "GET":
            return None
        rest = [(name, value) for name, value in request.query.items() if name not in carried]
        base = request.app[BASE_PATH]
        address = without_base(str(request.rel_url.with_query(rest)), base)
        # An address that begins with two slashes would lead to another host.
        answer = web.Response(status=303, headers={"Location": f"{base}/{address.lstrip('/')}"})
        self._set_cookies(answer, carried, base or "/")
        return answer

    def _set_cookies(self, answer: web.Response, carried: Mapping[str, str], path: str) -> None:
        set_cookie = partial(answer.set_cookie, httponly=True, path=path)
        # Not "Strict" for rights that only allow reading: links from other sites should work with the cookie.
        if self._is_key(carried.get("key", "")):
            set_cookie(self._cookie, self._ticket, samesite="Lax")
        if self.shares is not None and (share := self.shares.read(carried.get("share", ""))) is not None:
            lasts_s = self.shares.lasts_s(share)
            set_cookie(self.shares.cookie(share), carried["share"], samesite="Lax", max_age=lasts_s)
        if self.annotate is not None and "annotate" in carried:
            value = self.annotate.exchange(carried["annotate"])
            if value is None:
                raise NoAnswer("this link to annotate was opened before, or is of a server that has ended", 403)
            set_cookie(self.annotate.cookie, value, samesite="Strict")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
