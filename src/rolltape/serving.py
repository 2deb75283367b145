"""Shared by all HTTP servers of Rolltape: the event loop, the address, and checks of hosts and keys."""

import asyncio
import contextlib
import errno
import hmac
import os
import resource
import socket
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

_FILES = 2**16  # more slows down child processes that close every possible file at their start


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes event loops: uvloop's if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def raise_file_limit() -> None:
    """Raise this process's limit of open files and connections, as far as the system allows, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listening_url(runner: web.AppRunner) -> str:
    """The address of a server that listens."""
    return _url(*runner.addresses[0][:2])


def open_listener(host: str, port: int, backlog: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens; connections wait in it until a server accepts them. Raises OSError.

    Several processes can listen on a `shared` port. The system gives each connection to one of them.
    """
    listener = _bound(host, port, shared=shared)
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def reserve_port(host: str, port: int) -> socket.socket:
    """A socket that reserves a port for processes that share it, and accepts nothing itself. Raises OSError."""
    with _bound(host, port, shared=False) as probe:  # fails if another process has it
        port = probe.getsockname()[1]
    return _bound(host, port, shared=True)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] is not socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def describe_listen_error(host: str, port: int, error: OSError) -> str:
    """Why an address cannot be listened on, and what to do."""
    is_host = error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror)
    advice = "give an address of this machine" if is_host else "give another port, or 0 for any"
    return f"{host}:{port} cannot be listened on: {describe_os_error(error)}; {advice}"


def describe_os_error(error: OSError) -> str:
    """The system's text for an error, such as "Connection refused", without what asyncio adds."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def bound_url(listener: socket.socket) -> str:
    """The address of a listener."""
    return _url(*listener.getsockname()[:2])


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_in(address: str) -> str:
    """The host in a URL, or "" if there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def bearer_token(request: web.Request) -> str | None:
    """The key in a request's Authorization header, or None."""
    given = request.headers.get("Authorization", "")
    return given[7:].strip() if given.lower().startswith("bearer ") else None


def same_key(given: str, expected: str) -> bool:
    """Whether two keys are equal, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass"))
