"""Room for attempts: processors and memory that Ray reserves on a node while an attempt runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_LOOK_S = 0.2  # between checks for reservations that Ray has made


class AttemptRoom:
    """Reserves room by placement groups, which need no process. Ray removes them when the collector ends."""

    def __init__(self, cpus: float, memory: int) -> None:
        self._bundle = {name: amount for name, amount in (("CPU", cpus), ("memory", float(memory))) if amount}
        self._pending: dict[str, asyncio.Future[str]] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_limited(self) -> bool:
        return bool(self._bundle)

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[str | None]:
        """Wait for room, and keep it inside the block. Yields its node, or None if no room must be reserved."""
        if not self._bundle:
            yield None
            return
        from ray.util.placement_group import placement_group, remove_placement_group

        group = await asyncio.to_thread(placement_group, [self._bundle])
        placed = self._pending[group.id.hex()] = asyncio.get_running_loop().create_future()
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        try:
            yield await placed
        finally:
            self._pending.pop(group.id.hex(), None)
            await asyncio.to_thread(remove_placement_group, group)

    async def _look(self) -> None:
        """Find out where Ray has made room, as long as an attempt waits for it."""
        from ray.util.placement_group import placement_group_table

        try:
            while self._pending:
                table: dict[str, Any] = await asyncio.to_thread(placement_group_table)
                for name, placed in self._pending.items():
                    found = table.get(name, {})
                    if found.get("state") == "CREATED" and not placed.done():
                        placed.set_result(next(iter(found["bundles_to_node_id"].values())))
                self._pending = {name: placed for name, placed in self._pending.items() if not placed.done()}
                await asyncio.sleep(_LOOK_S)
        except Exception as error:  # any error of Ray: waiting attempts must get it
            for placed in self._pending.values():
                if not placed.done():
                    placed.set_exception(error)
            raise
        finally:
            self._looking = None
