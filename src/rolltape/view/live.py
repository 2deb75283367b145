"""What changes in a run, told as it happens: Server-Sent Events."""

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web

from rolltape.view.watching import WatchedRun

_AT_MOST_S = 1.0  # between two events
_HEARTBEAT_S = 15.0
_IDS = 500


async def live(request: web.Request, run: WatchedRun, headers: Mapping[str, str]) -> web.StreamResponse:
    """An event at once, and another whenever something has changed, until the page is gone."""
    answer = web.StreamResponse(
        headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
    await answer.prepare(request)
    told = run.state.snapshot
    await answer.write(_event(told, []))
    while True:
        try:
            async with run.changed, asyncio.timeout(_HEARTBEAT_S):
                while run.state.snapshot == told:
                    await run.changed.wait()
        except TimeoutError:
            await answer.write(b": still here\n\n")
            continue
        changed = list(run.state.changed_since(told))
        told = run.state.snapshot
        await answer.write(_event(told, changed))
        await asyncio.sleep(_AT_MOST_S)


def _event(snapshot: int, changed: list[str]) -> bytes:
    told = {"snapshot": snapshot, "rollouts": changed[:_IDS], "more": len(changed) > _IDS}
    return b"data: " + msgspec.json.encode(told) + b"\n\n"
