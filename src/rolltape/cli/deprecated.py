"""Flags under the names of an earlier release: they work for one more, with a line on standard error."""

from collections.abc import Sequence

_CUT = {"--max-tokens": "--max-sample-tokens"}
_TRAINING = {**_CUT, "--reward": "--reward-share"}

# For each command, old flags and what they are called now. Remove in 0.3.
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
RESPELLED = {("--advantage", "centred"): "centered"}


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
