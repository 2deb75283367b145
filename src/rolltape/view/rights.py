"""The rights of links: to annotate, for the first browser that opens it, and to see one rollout until it expires."""

import base64
import binascii
import hmac
import secrets
import time
from collections.abc import Callable
from hashlib import sha256

import msgspec
from aiohttp import web

from rolltape.serving import host_in, same_key
from rolltape.view.base_path import BASE_PATH, without_base

WRITE_HEADER = "X-Rolltape-Write"
_COOKIE = "rolltape_annotate_"
_SHARE_COOKIE = "rolltape_share_"
_MOST_CODES = 100  # unopened links
_ROLLOUT = "/api/{r}/rollouts/{id}"
# The routes with the parts of a shared rollout.
_SHARED = {
    _ROLLOUT,
    f"{_ROLLOUT}/raw",
    f"{_ROLLOUT}/compare",
    f"{_ROLLOUT}/messages/{{digest}}",
    f"{_ROLLOUT}/messages/{{digest}}/images/{{index}}",
    f"{_ROLLOUT}/samples/{{index}}/tokens",
    f"{_ROLLOUT}/turns/{{turn}}/tokens",
}


class AnnotateRight:
    """Gives browsers the right to annotate, each by a link that works once, and recognizes them by a cookie."""

    def __init__(self, author: str) -> None:
        self.author = author  # if the page names no other
        self._codes: dict[str, None] = {}
        self._holders: set[str] = set()  # hashes of cookies
        # Browsers share cookies between ports, so each server's cookie has another name.
        self.cookie = _COOKIE + secrets.token_hex(4)

    def new_code(self) -> str:
        """A new code for a link. If many are unopened, the oldest expire."""
        code = secrets.token_urlsafe(24)
        self._codes[code] = None
        while len(self._codes) > _MOST_CODES:
            del self._codes[next(iter(self._codes))]
        return code

    def exchange(self, code: str) -> str | None:
        """Exchange a code for the value of a cookie; None if the code was used before, or is invalid."""
        found = [known for known in self._codes if same_key(code, known)]
        if not found:
            return None
        del self._codes[found[0]]
        value = secrets.token_urlsafe(32)
        self._holders.add(_digest(value))
        return value

    def is_held(self, request: web.Request) -> bool:
        """Whether a request comes from a browser with the right."""
        given = _digest(request.cookies.get(self.cookie, ""))
        return any(same_key(given, one) for one in self._holders)

    def refusal(self, request: web.Request) -> str | None:
        """Why a request to write is refused, or None."""
        if not self.is_held(request):
            return "this browser may only read; open the link that `rolltape view --annotate` printed"
        return other_site(request)


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One rollout that a link opens, until it expires."""

    r: str  # the run's name in addresses
    rollout: str
    expires_s: int  # since the epoch

    def opens(self, request: web.Request, files: Callable[[str], bool]) -> bool:
        """Whether a request is only for this rollout; `files` returns whether a path is one of the page's own files."""
        resource = request.match_info.route.resource
        asked = "" if resource is None else without_base(resource.canonical, request.app[BASE_PATH])
        if request.method not in ("GET", "HEAD"):
            return False
        if asked in _SHARED:
            return (request.match_info["r"], request.match_info["id"]) == (self.r, self.rollout)
        if asked == "/{path}":
            path = request.match_info["path"]
            r, view, rollout, *_ = (*path.split("/"), "", "", "")
            return files(path) or ((r, rollout) == (self.r, self.rollout) and view in ("rollout", "compare"))
        return asked == "/api/session"


class ShareLinks:
    """Signs links that open one rollout, and checks them. They depend only on the server's key."""

    def __init__(self, key: str, now: Callable[[], float] = time.time) -> None:
        self._secret = sha256(f"rolltape share {key}".encode("utf-8", "surrogatepass")).digest()
        self._now = now

    def sign(self, share: Share) -> str:
        """A share as a signed text, which cannot be made without the key."""
        payload = msgspec.json.encode(share)
        return f"{_to_text(payload)}.{_to_text(self._signature(payload))}"

    def read(self, token: str) -> Share | None:
        """The share in such a text; None if it was changed, is of another key, or has expired."""
        payload_text, _, signature_text = token[:4096].partition(".")
        try:
            payload, signature = _from_text(payload_text), _from_text(signature_text)
        except (binascii.Error, ValueError):
            return None
        if not hmac.compare_digest(signature, self._signature(payload)):
            return None
        share = msgspec.json.decode(payload, type=Share)
        return share if self._now() < share.expires_s else None

    def cookie(self, share: Share) -> str:
        """The name of the cookie for a share; a browser can have several."""
        return _SHARE_COOKIE + sha256(self._secret + f"{share.r}/{share.rollout}".encode()).hexdigest()[:16]

    def held(self, request: web.Request) -> list[Share]:
        """The shares that a request has, in its address or in cookies."""
        given = [value for name, value in request.cookies.items() if name.startswith(_SHARE_COOKIE)]
        found = [self.read(token) for token in [request.query.get("share", ""), *given]]
        return [share for share in found if share is not None]

    def lasts_s(self, share: Share) -> int:
        """How many seconds a share is still valid."""
        return max(int(share.expires_s - self._now()), 0)

    def _signature(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")


def other_site(request: web.Request) -> str | None:
    """Why a request to change something cannot come from the page itself, or None."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    hosts = {request.host, request.headers.get("X-Forwarded-Host", request.host)}  # a proxy may have its own name
    if request.headers.get(WRITE_HEADER) != "1" or site not in (None, "same-origin"):
        return "only the page itself may ask for this"
    if origin is None or not host_in(origin) or origin.partition("://")[2] not in hosts:
        return f"a page of {str(origin)[:80]!r} asked for this, and the server is {request.host[:80]!r}"
    if request.content_type != "application/json":
        return f"the request is {request.content_type[:80]!r}; it must be application/json"
    return None


def _digest(value: str) -> str:
    return sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _to_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
