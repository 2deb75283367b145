"""Changes weights while replies are in flight, at a gateway of this process or of other processes."""

import asyncio
from pathlib import Path

import httpx

from rolltape.errors import EngineError, GroupsError
from rolltape.gateway.admin_key import find_gateways, read_admin_key
from rolltape.gateway.gateway import Gateway
from rolltape.integrations.background import BackgroundLoop


class WeightChange:
    """A `with` block in which weights may change. `LiveGroups.new_weights` makes it."""

    def __init__(self, background: BackgroundLoop, gateway: Gateway, version: str) -> None:
        self._background = background
        self._gateway = gateway
        self._version = version

    def __enter__(self) -> None:
        self._background.submit(self._gateway.pause()).result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._background.submit(self._resume(kind is None)).result()

    async def __aenter__(self) -> None:
        await asyncio.wrap_future(self._background.submit(self._gateway.pause()))

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await asyncio.wrap_future(self._background.submit(self._resume(kind is None)))

    async def _resume(self, is_changed: bool) -> None:
        await self._gateway.resume(self._version if is_changed else None)


def ask_gateways(run: Path, folder: Path, version: str) -> int:
    """Make other processes' gateways that record in a run load weights. Return how many replies they interrupted."""
    urls = [gateway.url for gateway in find_gateways(str(run))]
    if not urls:
        raise GroupsError(
            f"run {run}: no gateway that keeps its key there records in it now; start one (`rolltape serve`, or "
            "`rolltape collect --max-ahead N`), or give collect"
        )
    weights = {"folder": str(folder.absolute()) if folder.exists() else str(folder), "version": version}
    with httpx.Client(headers={"Authorization": f"Bearer {read_admin_key(run)}"}, timeout=None) as http:
        # Two gateways may share engines: all pause, so that none samples while another loads weights.
        paused = [_post(http, f"{url}/weights/pause", {}) for url in urls] if len(urls) > 1 else []
        return sum(paused) + sum(_post(http, f"{url}/weights/update", weights) for url in urls)


def _post(http: httpx.Client, url: str, body: dict[str, str]) -> int:
    """Send a request. Return how many replies were interrupted."""
    try:
        answer = http.post(url, json=body)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: {error}; see the log of this gateway's process") from None
    if answer.is_error:
        raise EngineError(f"{url}: {answer.status_code}: {answer.text}")
    interrupted: int = answer.json()["interrupted"]
    return interrupted
