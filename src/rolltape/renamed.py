"""`__getattr__` of modules: public names that have changed are given out for one more release, with a warning."""

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any


def renamed(
    module: str, names: Mapping[str, str], lazy: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """A module's `__getattr__` that takes old names. `lazy` has modules, each with names to import on first use.

    __getattr__ = renamed(__name__, {"Room": "RunAheadLimit"})

    A new name with dots is one of another module.
    """

    homes = {name: home for home, listed in lazy.items() for name in listed.split()}

    def take(name: str) -> Any:
        if name in names:
            warnings.warn(f"{module}.{name} is deprecated; use {names[name]}", DeprecationWarning, stacklevel=2)
            home, _, new = names[name].rpartition(".")
            return getattr(import_module(home) if home else sys.modules[module], new)
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return take
