"""`__getattr__` for modules: imports names on first use, and returns old names for one release with a warning."""

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any


def renamed(
    module: str, names: Mapping[str, str], lazy: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """A module's `__getattr__` that knows old names. `lazy` maps modules to the names to import from them on first use.

    __getattr__ = renamed(__name__, {"Room": "RunAheadLimit"})

    A new name with dots is in another module. An old name that is also a lazy one keeps its old meaning. A lazy name
    may differ from the name in its module: `open=open_tape`; `groups=` is the module itself.
    """
    homes: dict[str, tuple[str, str]] = {}
    for home, listed in lazy.items():
        for name, equals, own in (one.partition("=") for one in listed.split()):
            homes[name] = (home, own if equals else name)

    def take(name: str) -> Any:
        if name in names:
            warnings.warn(f"{module}.{name} is deprecated; use {names[name]}", DeprecationWarning, stacklevel=2)
            if name not in homes:
                home, _, new = names[name].rpartition(".")
                return getattr(import_module(home) if home else sys.modules[module], new)
        elif name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, own = homes[name]
        imported = import_module(home)
        for other, (place, there) in homes.items():
            # Other names of the module and of its packages are loaded now, so set them too.
            if there and other not in names and f"{home}.".startswith(f"{place}."):
                setattr(sys.modules[module], other, getattr(sys.modules[place], there))
        value = getattr(imported, own) if own else imported
        if name not in names:
            setattr(sys.modules[module], name, value)
        return value

    return take
