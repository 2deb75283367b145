"""Find the user's code by names like "python:module:function", and call it without blocking the event loop.

A function that is not a coroutine function runs in a new thread. Coroutine functions, and all methods of an
environment, run in the event loop of their module (see `loops`).
"""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rolltape.collect.loops import ATTEMPT_BLOCKED, abandon_loop, is_library, user_loop
from rolltape.errors import NoSuchFunction, RolltapeError, UserCodeTimeout

PREFIX = "python:"
_OWN = "rolltape"

_TIME_LIMIT_S: ContextVar[float | None] = ContextVar("time_limit_s", default=None)  # of one call; None for no limit


def function_named(text: str) -> Callable[..., Any]:
    """The function that "python:module:function" names. The working directory is searched first, as by `python -m`."""
    module_name, colon, name = text.removeprefix(PREFIX).partition(":")
    if not (colon and module_name and name):
        raise NoSuchFunction(f"{text} names no function; write python:module:function")
    here = search_here()
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise NoSuchFunction(
                f"{text}: there is no module {missing}, in {here} or installed; run from its folder, or install it"
            ) from None
        raise NoSuchFunction(f"{text}: its module raised {describe_raised(error)}; correct it") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        what = "is not there" if function is None else f"is of type {type(function).__name__}"
        raise NoSuchFunction(f"{text}: {name} of module {module_name} {what}; name a function of it")
    return function  # type: ignore[no-any-return]


def search_here() -> str:
    """Put the working directory first on the import path, and return it."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return here


def describe_raised(error: BaseException) -> str:
    """An error of the user's code: its type, its text if it has one, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    last = next((frame for frame in frames if not is_library(frame.filename)), None)
    where = "" if last is None else f" ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}{where}"


def describe_error(error: BaseException) -> str:
    """An error as a reason in a record. Rolltape's own errors have where and why in their text."""
    return str(error) if isinstance(error, RolltapeError) else describe_raised(error)


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit each call of the user's code within the block; one that takes longer raises UserCodeTimeout."""
    token = _TIME_LIMIT_S.set(seconds)
    try:
        yield
    finally:
        _TIME_LIMIT_S.reset(token)


def current_time_limit() -> float | None:
    """The limit set by `time_limit`, or None."""
    return _TIME_LIMIT_S.get()


async def call_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function and return its result: a coroutine function in the loop of its module, any other in a new thread.

    A thread cannot be ended. If this call is cancelled, the thread continues, but does not keep the process alive.
    """
    module, name = _find_home(function)
    if inspect.iscoroutinefunction(function):
        if module.partition(".")[0] == _OWN:
            return await function(*args, **kwargs)
        return await _call_in_loop(module, name, function, *args, **kwargs)
    given = await _limited(name, _call_in_thread(function, args, kwargs))
    return await _call_in_loop(module, name, lambda: given) if inspect.isawaitable(given) else given


async def call_environment(name: str, method: Callable[..., Any], /, *args: Any) -> Any:
    """Call a method of an environment or an episode, a coroutine function or not.

    Methods of one environment never run at the same time, unless they await. `name` is the environment's, for
    messages.
    """
    module, own_name = _find_home(method)
    if _runs_here(module, method):
        given = method(*args)
        return await given if inspect.isawaitable(given) else given
    return await _call_in_loop(module, f"{own_name} of environment {name}", method, *args)


def call_environment_from_thread(name: str, method: Callable[..., Any], /, *args: Any) -> Any:
    """Like `call_environment`, for an ordinary method and from a thread without an event loop."""
    module, own_name = _find_home(method)
    if _runs_here(module, method):
        return method(*args)
    return user_loop(module).call(f"{own_name} of environment {name}", method, *args)


def _runs_here(module: str, function: Callable[..., Any]) -> bool:
    """Whether a function is Rolltape's own and calls no code of the user, so that it needs no loop of its own."""
    owner = getattr(function, "__self__", None)
    return module.partition(".")[0] == _OWN and not getattr(owner, "calls_user_code", False)


def _find_home(function: Callable[..., Any]) -> tuple[str, str]:
    """The module and the name of a function."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    module = type(owner).__module__ if owner is not None and not inspect.ismodule(owner) else function.__module__
    return module or "", getattr(function, "__qualname__", type(function).__qualname__)


async def _call_in_loop(module: str, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    loop = user_loop(module)
    before_s = loop.watched.blocked_s
    try:
        return await _limited(label, loop.submit(label, function, *args, **kwargs))
    except asyncio.CancelledError as error:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        # Nobody cancelled this call: it would pass for a cancelled attempt, and end the collection.
        raise RuntimeError(f"{label} raised CancelledError") from error
    except UserCodeTimeout:
        if loop.watched.is_blocked:
            abandon_loop(module, loop)
        raise
    finally:
        blocked, blocked_s = ATTEMPT_BLOCKED.get(), loop.watched.blocked_s - before_s
        if blocked is not None and blocked_s > 0:
            blocked.add(blocked_s, loop.watched.culprit)


async def _limited(label: str, call: Any) -> Any:
    limit_s = _TIME_LIMIT_S.get()
    try:
        async with asyncio.timeout(limit_s) as clock:
            return await call
    except TimeoutError:
        if not clock.expired():
            raise
        raise UserCodeTimeout(f"{label} had not returned after {limit_s:g} s; see --score-timeout") from None


async def _call_in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(given: Any, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result((given, error))

    def work() -> None:
        given: Any = None
        error: Exception | None = None
        try:
            given = context.run(function, *args, **kwargs)
        except Exception as raised:  # noqa: BLE001 - it is raised where the call is awaited
            error = raised
        except BaseException as raised:  # noqa: BLE001 - there it would end the collection
            error = RuntimeError(f"it raised {describe_raised(raised)}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the call is no longer awaited
            loop.call_soon_threadsafe(settle, given, error)

    threading.Thread(target=work, name="rolltape-call", daemon=True).start()
    given, error = await ended
    if error is not None:
        raise error
    return given
