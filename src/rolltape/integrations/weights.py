"""New weights while replies are in flight: at a gateway of this process, or at that of another one."""

import asyncio
from pathlib import Path

import httpx

from rolltape.errors import EngineError, GroupsError
from rolltape.gateway.admin_key import find_gateway, read_admin_key
from rolltape.gateway.gateway import Gateway
from rolltape.integrations.background import BackgroundLoop


class WeightChange:
    """A block in which weights may change; `LiveGroups.new_weights` makes it."""

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


def ask_gateway(run: Path, folder: Path, version: str) -> int:
    """Have the gateway of another process, which records in a run, load weights; how many replies it interrupted."""
    running = find_gateway(str(run))
    if running is None:
        raise GroupsError(
            f"run {run}: no gateway that keeps its key there records in it now; start one, or give collect"
        )
    answer = httpx.post(
        f"{running.url}/weights/update",
        json={"folder": str(folder.absolute()) if folder.exists() else str(folder), "version": version},
        headers={"Authorization": f"Bearer {read_admin_key(run)}"},
        timeout=None,  # as long as the engines take
    )
    if answer.is_error:
        raise EngineError(f"{running.url}: {answer.status_code}: {answer.text}")
    interrupted: int = answer.json()["interrupted"]
    return interrupted
