"""A function named on the command line: "python:module:function"."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rolltape.errors import NoSuchFunction

PREFIX = "python:"


def function_named(text: str) -> Callable[..., Any]:
    """The function that "python:module:function" names. The working directory is searched first, as `python -m` does.

    What the module itself raises while it is imported travels on.
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
