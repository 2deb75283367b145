"""Forward requests for sessions of another gateway of the run to it, and stream its replies back.

The other gateway records a reply as delivered only when the forwarding gateway reports that its client got it.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from rolltape.gateway.peers import Peer, ServedElsewhere
from rolltape.gateway.server.answering import StallWatch, drain_all
from rolltape.serving import same_key

# The body of a request that was read before its gateway was known.
BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)

FORWARDED = "x-rolltape-forwarded"  # value: the secret of the receiving gateway, and a name for the request
_OF_CONNECTION = frozenset(("connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", FORWARDED))
_OF_BODY = frozenset(("content-encoding", "content-length"))
_REPORT_S = 60.0  # how long to wait for the report that a forwarded reply arrived


class _Clients(NamedTuple):
    """Connections to one gateway. Reports of arrival have their own, so that they do not wait behind replies."""

    requests: aiohttp.ClientSession
    reports: aiohttp.ClientSession


class Forwarding:
    """Forwards requests to the other gateways of a run, and recognizes requests that they forward."""

    def __init__(self, own: Peer, stall_s: float) -> None:
        self._own = own
        self._stall_s = stall_s
        self._clients: dict[Peer, _Clients] = {}
        self._awaited: dict[str, asyncio.Future[bool]] = {}
        self._reporting: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/forwarded/{name}/{arrived}", self._receive_arrival)]

    def is_forwarded(self, request: web.Request) -> bool:
        """Whether another gateway of the run forwarded a request, after it checked the client's access."""
        secret = request.headers.get(FORWARDED, "").partition(" ")[0]
        return bool(secret) and same_key(secret, self._own.secret)

    async def arrived(self, request: web.Request) -> bool:
        """Whether a written reply has arrived at its client, as reported by the gateway that forwarded the request."""
        if not self.is_forwarded(request):
            return True
        name = request.headers[FORWARDED].partition(" ")[2]
        report = self._awaited[name] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_REPORT_S):
                did: bool = await report
        except TimeoutError:
            return False
        else:
            return did
        finally:
            del self._awaited[name]

    async def _receive_arrival(self, request: web.Request) -> web.Response:
        report = self._awaited.get(request.match_info["name"]) if self.is_forwarded(request) else None
        if report is not None and not report.done():
            report.set_result(request.match_info["arrived"] == "yes")
        return web.Response(status=204 if report is not None else 404)

    async def forward(self, request: web.Request, elsewhere: ServedElsewhere) -> web.StreamResponse:
        """Have another gateway answer; raises ServedElsewhere, which clients retry, if it cannot be reached."""
        peer = elsewhere.peer
        if peer is None or self.is_forwarded(request):
            raise elsewhere
        clients, name = self._to(peer), secrets.token_hex(8)
        left_out = _OF_CONNECTION | _OF_BODY if BODY in request else _OF_CONNECTION
        headers = _headers(request.headers, left_out)
        headers[FORWARDED] = f"{peer.secret} {name}"
        data = request.get(BODY) or (request.content if request.can_read_body else None)
        url = URL(f"http://localhost{request.raw_path}", encoded=True)
        try:
            given = await clients.requests.request(
                request.method, url, data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise ServedElsewhere(f"{elsewhere} ({type(error).__name__})", None) from error
        async with given:
            response = web.StreamResponse(status=given.status, headers=_headers(given.headers, _OF_CONNECTION))
            is_whole = False
            try:
                await _pass_on(request, given, response, self._stall_s)
                is_whole = request.transport is not None and not request.transport.is_closing()
            finally:
                if "x-rolltape-session" in given.headers:
                    self._report_arrival(clients, peer, name, is_whole)
        return response

    async def ask(self, peers: Sequence[Peer], method: str, path: str, body: bytes = b"") -> list[bytes]:
        """The answers of these gateways, without those that are dying or starting."""

        async def one(peer: Peer) -> bytes | None:
            headers = {FORWARDED: f"{peer.secret} {secrets.token_hex(8)}"}
            with contextlib.suppress(aiohttp.ClientError, OSError):
                url = f"http://localhost{path}"
                async with self._to(peer).requests.request(method, url, data=body, headers=headers) as response:
                    return await response.read() if response.status == 200 else None
            return None

        return [answer for answer in await asyncio.gather(*map(one, peers)) if answer is not None]

    def _report_arrival(self, clients: _Clients, peer: Peer, name: str, is_whole: bool) -> None:
        async def send() -> None:
            url = f"http://localhost/forwarded/{name}/{'yes' if is_whole else 'no'}"
            with contextlib.suppress(aiohttp.ClientError, OSError):  # it has died, and the delivery stays unknown
                async with clients.reports.post(url, headers={FORWARDED: peer.secret}):
                    pass

        task = asyncio.ensure_future(send())
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    def _to(self, peer: Peer) -> _Clients:
        if peer not in self._clients:
            self._clients[peer] = _Clients(_client(peer), _client(peer))
        return self._clients[peer]

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._reporting)
        for clients in self._clients.values():
            await clients.requests.close()
            await clients.reports.close()


async def _pass_on(
    request: web.Request, given: aiohttp.ClientResponse, response: web.StreamResponse, stall_s: float
) -> None:
    writer = await response.prepare(request)
    drain_all(request)
    try:
        with StallWatch(request, writer, stall_s):
            async for part in given.content.iter_any():
                await response.write(part)
            await response.write_eof()
    except aiohttp.ClientError as error:  # that gateway has died: the client must not take a part for the whole reply
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the gateway that served it has ended") from error


def _headers(given: "CIMultiDictProxy[str]", left_out: frozenset[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in given.items() if name.lower() not in left_out)


def _client(peer: Peer) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(peer.socket, limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
