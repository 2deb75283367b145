"""The HTTP client for engines: responses as bytes, failures as the errors of the engine protocol."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
import msgspec

from rolltape.errors import EngineDied, EngineError, EngineFault, EngineUnreachable
from rolltape.gateway.engines.protocol import Generated, Generation, ImplausibleReply
from rolltape.serving import describe_os_error, host_in, is_loopback

_T = TypeVar("_T")

CONNECT_TIMEOUT_S = 8.0  # less than Patience.look_every_s, so that a check finds a machine that is gone
ASK_TIMEOUT_S = 20.0  # for everything but a generation, which has no limit here
# uvicorn and llama.cpp close an idle connection after 5 s. A request on a closing connection would be lost.
_KEEPALIVE_S = 3.0
_SHOWN_CHARACTERS = 300
_LONGEST_CODE = 80
# Parts of an engine's message that no agent may see: URLs, IP addresses, hosts with a port, API keys.
_ADDRESS_OR_KEY = re.compile(
    r"\b\w+://[^\s\"'<>),;]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\b[\w-]+(?:\.[\w-]+)*:\d{2,5}\b"
    r"|\bBearer\s+\S+|\b(?:sk|rts|rta|pk|gsk|key|xai)-[\w*.-]{6,}"
)
# The routed experts of a hundred thousand tokens, which come in one event, need a third of this.
MAX_EVENT_BYTES = 2**30


class Connections:
    """HTTP connections to one engine. The session is made in the event loop that first uses it."""

    def __init__(self, url: str, name: str, *, api_key: str | None = None, proxy: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"{name}: {url!r} is not the address of an engine; give one like http://127.0.0.1:30000")
        self._url = url.rstrip("/")
        self._name = name
        self._api_key = api_key
        self._proxy = proxy
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._later: set[asyncio.Task[None]] = set()

    async def get(self, *paths: str) -> bytes:
        """The answer of the first of these paths that the engine knows; raises EngineUnreachable without an answer."""
        async with self._asking(paths[0]):
            for path in paths[:-1]:
                async with self._response("GET", path, None) as response:
                    if response.status != 404:
                        return await self._body(response, path)
            async with self._response("GET", paths[-1], None) as response:
                return await self._body(response, paths[-1])

    async def check_health(self, program: str) -> None:
        """Ask for `/health`, which every engine has; raises EngineFault if another program than `program` answers."""
        async with self._asking("/health"), self._response("GET", "/health", None) as response:
            if response.status == 404:  # the body is not awaited, as it may never end
                raise EngineFault(
                    f"{self._name}: /health answered 404, so the server there is not {program}; give the address of "
                    "one, without a path such as /v1, or the kind of engine that runs there",
                    status=404,
                )
            await self._body(response, "/health")

    @asynccontextmanager
    async def _asking(self, path: str) -> AsyncIterator[None]:
        """Raise EngineUnreachable if the block gets no answer in time."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                yield
        except TimeoutError:
            raise EngineUnreachable(f"{self._name}: {path} gave no answer in {ASK_TIMEOUT_S:g} s") from None
        except EngineDied as error:
            raise EngineUnreachable(str(error)) from None

    async def post(self, path: str, body: bytes) -> bytes:
        """The answer, without a timeout."""
        async with self._response("POST", path, body) as response:
            return await self._body(response, path)

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the data of server-sent events as they come, without the last, `[DONE]`.

        Closing the generator closes the connection. If it is read to its end, the connection is reused.
        """
        async with self._response("POST", path, body) as response:
            if response.status >= 400:
                await self._body(response, path)
            parts: list[bytes] = []  # of an incomplete line; joined once, since a line may have a hundred megabytes
            size = 0
            async for chunk in response.content.iter_any():
                *lines, rest = chunk.split(b"\n")
                if lines:
                    lines[0] = b"".join([*parts, lines[0]])
                    parts, size = [], 0
                parts.append(rest)
                size += len(rest)
                if max(size, *map(len, lines), 0) > MAX_EVENT_BYTES:
                    raise EngineFault(f"{self._name}: an event of {path} is longer than {MAX_EVENT_BYTES} bytes")
                for line in lines:
                    data = line[5:].strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield data

    def post_later(self, path: str, body: bytes) -> None:
        """Send a request in the background; a failure is ignored. `close` waits for it."""

        async def send() -> None:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    await self.post(path, body)

        task = asyncio.get_running_loop().create_task(send())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._later)
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _response(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                headers=self._headers,
                proxy=self._proxy,
                trust_env=False,  # it would also take keys from ~/.netrc
            )
        try:
            async with self._session.request(method, self._url + path, data=body) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = describe_os_error(error.os_error) if isinstance(error, aiohttp.ClientConnectorError) else error
            raise EngineUnreachable(f"{self._name}: no connection ({why}); check that a server runs there") from None
        except aiohttp.ClientResponseError as error:
            raise EngineFault(f"{self._name}: {path} did not answer in HTTP: {_short(error.message)}") from None
        except aiohttp.InvalidURL as error:
            raise EngineError(
                f"{self._name}: {error} is not an address; give one like http://127.0.0.1:30000"
            ) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineDied(f"{self._name}: the connection ended before the answer to {path}: {error}") from None

    async def _body(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        body = await response.read()
        if response.status >= 400:
            raise self.fault(
                f"{self._name}: {path} answered {response.status}",
                _body_value(body),
                status=response.status,
                retry_after_s=_retry_after_s(response.headers.get("Retry-After")),
            )
        return body

    def fault(self, where: str, value: Any, *, status: int | None, retry_after_s: float | None = None) -> EngineFault:
        """The error that an engine's body, or the `error` in it, describes. The engine's key is removed from it."""
        text, code = error_text(value), error_code(value)
        if self._api_key:
            text = text.replace(self._api_key, "…")
        reason = _ADDRESS_OR_KEY.sub("…", text)
        return EngineFault(f"{where}: {text}", status=status, retry_after_s=retry_after_s, reason=reason, code=code)


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`); None on loopback."""
    scheme, host = url.partition("://")[0], host_in(url)
    if is_loopback(host) or proxy_bypass(host):
        return None
    proxy = getproxies_environment().get(scheme)
    if proxy is None or "://" not in proxy:
        return proxy and f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        kind = proxy.partition("://")[0]
        raise EngineError(
            f"{scheme.upper()}_PROXY names a {kind} proxy, and only http is supported; change or unset it"
        )
    return proxy


def decoded(data: bytes, decoder: "msgspec.json.Decoder[_T]", where: str) -> _T:
    """Decode an engine's JSON; raises EngineFault if it does not have the expected shape."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = _short(data.decode(errors="replace"))
        raise EngineFault(f"{where} answered with JSON that cannot be read: {error}; it begins {shown!r}") from None


def error_text(value: Any) -> str:
    """The message in an error body, under any of the usual keys, and that of the provider behind the endpoint."""
    provider = ""
    while (error := _first(value)) is not None:
        metadata = error.get("metadata")  # of OpenRouter, whose own message is "Provider returned error"
        if isinstance(metadata, dict) and isinstance(raw := metadata.get("raw"), str) and raw:
            provider = error_text(_body_value(raw.encode(errors="replace")))
        inner = next((error[key] for key in ("error", "message", "detail", "msg") if error.get(key)), None)
        if inner is None:
            break
        value = inner
    text = value if isinstance(value, str) else str(value)
    return _short(f"{text}: {provider}" if provider else text) or "nothing"


def _first(value: Any) -> dict[str, Any] | None:
    """An error as an object, also if it is the only one of a list, as Google's; None if it is neither."""
    one = value[0] if isinstance(value, list) and value else value
    return one if isinstance(one, dict) else None


def error_code(value: Any) -> str | None:
    """The error code in an error body, or None."""
    body = _first(value)
    error = None if body is None else body.get("error", body)
    words = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return next((word[:_LONGEST_CODE] for word in words if isinstance(word, str) and word), None)


def event_error(error: Any, where: str) -> EngineFault:
    """The error in an event. An error of the request itself, such as an invalid grammar, has a status."""
    code = error.get("code") if isinstance(error, dict) else None
    refused = isinstance(code, int) and 400 <= code < 500
    return EngineFault(f"{where}: {error_text(error)}", status=code if refused else None)


def _retry_after_s(value: str | None) -> float | None:
    """The seconds to wait by a Retry-After header, which has a number or a date; None without one."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _body_value(body: bytes) -> Any:
    """The body of an error: its JSON value, else its text."""
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(body)
    return body.decode(errors="replace")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


class GrowingReply(Protocol):
    """A reply that is built from events."""

    ids: list[int]

    @property
    def ended(self) -> bool:
        """Whether the engine has reported how it ended."""

    def add(self, data: bytes) -> list[int]:
        """Add an event and return its new ids. Raises EngineFault for an invalid event, and then adds nothing."""


class Contradiction(EngineFault):
    """An event contradicts earlier ones, so neither can be trusted."""


class HttpEngine:
    """What engines with an HTTP API have in common. Most abort a generation when its connection is closed."""

    def __init__(self, kind: str, url: str, api_key: str | None, proxy: str | None = None) -> None:
        self.name = f"{kind} {url}"
        self._http = Connections(url, self.name, api_key=api_key, proxy=proxy)
        self._in_flight: dict[str, asyncio.Task[Any]] = {}

    async def abort(self, generation_id: str) -> None:
        task = self._in_flight.get(generation_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        await self._http.close()

    async def _stream(
        self, wanted: Generation, path: str, body: bytes, reply: "GrowingReply", generated: Callable[[bool], Generated]
    ) -> Generated:
        """Read a reply's events to their end, and pass on its ids as they come.

        If the stream breaks, or an event is invalid, the ids before that are kept. `generated(True)` returns the
        complete reply, `generated(False)` the part that was received.
        """
        try:
            await self._run(wanted.id, self._read(wanted, path, body, reply))
            return generated(reply.ended)
        except Contradiction as error:
            raise ImplausibleReply(str(error), generated(False)) from None
        except (EngineDied, EngineFault) as error:
            if not reply.ids:
                raise
            raise EngineDied(str(error), generated(False)) from None

    async def _read(self, wanted: Generation, path: str, body: bytes, reply: "GrowingReply") -> None:
        assert wanted.sampling.max_tokens is not None
        try:
            async with aclosing(self._http.events(path, body)) as events:
                async for data in events:
                    ids = reply.add(data)
                    if wanted.on_sampled is not None:
                        wanted.on_sampled(ids)
                    if len(reply.ids) > wanted.sampling.max_tokens:
                        return  # too many ids already
        except EngineDied:
            if not reply.ended:
                raise
        if not reply.ended:
            raise EngineDied(f"{self.name}, generation {wanted.id}: its events ended before the reply did")

    async def _run(self, generation_id: str, work: Coroutine[None, None, _T]) -> _T | None:
        """The result of `work`, or None if it was aborted. Cancelling the caller ends the work too."""
        task = asyncio.get_running_loop().create_task(work)
        self._in_flight[generation_id] = task
        try:
            await asyncio.wait({task})
        finally:
            del self._in_flight[generation_id]
            task.cancel()
        return None if task.cancelled() else task.result()


class ModelCard(msgspec.Struct):
    """An entry of `/v1/models`."""

    id: str = ""
    max_model_len: int | None = None


class ModelCards(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: list[ModelCard] = []


MODEL_CARDS = msgspec.json.Decoder(ModelCards)
