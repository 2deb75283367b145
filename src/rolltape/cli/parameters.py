"""Declares the parameters of commands: an option in one line, a group of options as a dataclass, and old flag names.

@dataclass(frozen=True)
class Paging:
    limit: Annotated[int, option("--limit N", "Maximum number of rows.", min=1)] = 10

def ls(run: Annotated[str, argument("RUN", "Run directory.")], *, paging: Paging) -> int: …
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, get_type_hints

import msgspec
import typer

_CUT = {"--max-tokens": "--max-sample-tokens"}
_TRAINING = {**_CUT, "--reward": "--reward-share"}
# For each command, old flags and their current names. Remove in 0.3.
RENAMED: dict[str, dict[str, str]] = {
    "collect": {
        "--max-tokens": "--max-reply-tokens",
        "--model-name": "--served-model-name",
        "--thinking": "--force-thinking",
        "--no-thinking": "--force-no-thinking",
    },
    "serve": {"--max-reply-tokens": "--default-max-reply-tokens"},
    "view": {"--no-open": "--no-browser"},
    "show": {**_CUT, "--by": "--color-by"},
    "tokens": _CUT,
    "ledger": _CUT,
    "samples": _TRAINING,
    "export": _TRAINING,
    "query": _TRAINING,
}
# Values that were spelled differently. Remove in 0.3.
RESPELLED = {("--advantage", "centred"): "centered", ("--engine", "embedded"): "tiny"}


def option(spelling: str, help: str, *, section: str | None = None, **more: Any) -> Any:  # noqa: A002 - as typer has it
    """An option, spelled as a user types it: `-o, --out FILE`. The help lists it under the heading `section`."""
    flags, _, metavar = spelling.partition(" ") if ", " not in spelling else spelling.rpartition(" ")
    return typer.Option(*flags.split(", "), metavar=metavar or None, help=help, rich_help_panel=section, **more)


def argument(name: str, help: str) -> Any:  # noqa: A002 - as typer has it
    """A positional argument."""
    return typer.Argument(metavar=name, help=help)


def either(values: Iterable[str]) -> str:
    """Values in words, such as those of an enum, for a help text."""
    *names, last = values
    return f"{', '.join(names)}{',' if len(names) > 1 else ''} or {last}" if names else last


def flag_of(setting: str) -> str:
    """The flag of a setting: `--max-turns` of max_turns, `--timeout` of timeout_s."""
    return "--" + setting.removesuffix("_s").replace("_", "-")


def name_flags(message: str, settings: Iterable[str]) -> str:
    """A message with the names of settings replaced by their flags, except in quotes."""
    return re.sub(rf"(?<![\w.'])({'|'.join(settings)})\b", lambda found: flag_of(found[0]), message)


def given_flags(values: Mapping[str, object]) -> list[str]:
    """The flags that the user set: those whose values are not None or False."""
    return [flag for flag, value in values.items() if value is not None and value is not False]


def values_for(settings: type[msgspec.Struct], *groups: object) -> dict[str, Any]:
    """The values of options that have the same names as fields of a settings class."""
    given = {name: value for group in groups for name, value in vars(group).items()}
    return {name: given[name] for name in settings.__struct_fields__ if name in given}


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """The command with each parameter that is a group of options replaced by those options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: cast("type[Any]", hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]

    @functools.wraps(command)
    def called(**given: Any) -> int:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        return command(**given)

    flat = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    called.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in flat}
    return called


def with_current_flags(command: str | None, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command with each old flag under its new name, and a warning for each that was old."""
    names = RENAMED.get(command or "", {})
    current: list[str] = []
    warnings: list[str] = []
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*current, *arguments[at:]], warnings
        flag, equals, value = argument.partition("=")
        if flag in names:
            warnings.append(f"{flag} is deprecated; use {names[flag]}")
        given = (flag, value) if equals else (arguments[at - 1] if at else "", argument)
        if given in RESPELLED:
            warnings.append(f"{' '.join(given)} is deprecated; use {RESPELLED[given]}")
            flag, value = (flag, RESPELLED[given]) if equals else (RESPELLED[given], value)
        current.append(f"{names.get(flag, flag)}{equals}{value}")
    return current, warnings
