"""Functions of the user: found by the name "python:module:function", and called without blocking the event loop."""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rolltape.errors import NoSuchFunction

PREFIX = "python:"


def function_named(text: str) -> Callable[..., Any]:
    """The function that "python:module:function" names. The working directory is searched first, as `python -m` does.

    An error that the module raises while it is imported is passed on.
    """
    module_name, colon, name = text.removeprefix(PREFIX).partition(":")
    if not (colon and module_name and name):
        raise NoSuchFunction(f"{text} names no function; write python:module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise NoSuchFunction(
            f"{text}: there is no module {error.name}, in {here} or installed; run where it lies, or install it"
        ) from None
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        what = "is not there" if function is None else f"is of type {type(function).__name__}"
        raise NoSuchFunction(f"{text}: {name} of module {module_name} {what}; name a function of it")
    return function  # type: ignore[no-any-return]


async def call_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function and return its result: a coroutine function on the event loop, any other in a new thread.

    A thread cannot be ended. If this call is cancelled, the thread goes on, but does not keep the process alive.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    given = await _call_in_thread(function, args, kwargs)
    return await given if inspect.isawaitable(given) else given


async def _call_in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
