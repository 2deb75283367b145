"""Calling a function that may block, however many others do: each call has a thread of its own."""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function gives: a coroutine function on the event loop, any other in a thread.

    A thread cannot be ended: cancelled, this leaves it behind, and it does not keep the process from ending.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    given = await _in_thread(function, args, kwargs)
    return await given if inspect.isawaitable(given) else given


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(given: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((given, error))

    def work() -> None:
        given, error = None, None
        try:
            given = context.run(function, *args, **kwargs)
        except BaseException as raised:  # noqa: BLE001 - it is raised where the call is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, given, error)

    threading.Thread(target=work, name="rolltape-call", daemon=True).start()
    given, error = await ended
    if error is not None:
        raise error
    return given
