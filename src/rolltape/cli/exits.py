"""Exit codes: what each means, and which one an error gets."""

import enum

from rolltape.errors import (
    ExportError,
    LedgerError,
    MissingExtra,
    NoSuchRollout,
    RolltapeError,
    SinkError,
    TapeError,
    TapeWriteError,
)


class Exit(enum.IntEnum):
    OK = 0
    BROKEN = 1  # `check` found a breach, or `doctor` a fault
    USAGE = 2  # a flag, an id, a policy, or an SQL statement is wrong, or a package of an extra is missing
    RUN = 3  # the run is missing, empty, damaged, or newer than this program
    OUTPUT = 4  # the output could not be written
    FAILED = 5  # attempts failed, or could not be graded; `collect --resume` runs or grades them again
    WARNED = 6  # `doctor` found warnings, and no fault
    LIMIT = 7  # `collect` reached a spending limit, and attempts are left
    INTERRUPTED = 130  # Ctrl-C, or the user answered no


_EVERY_COMMAND = {
    Exit.OK: "success",
    Exit.USAGE: "wrong usage, or a package is not installed",
    Exit.RUN: "run missing, empty, damaged, or newer than this program",
    Exit.OUTPUT: "output not written",
    Exit.INTERRUPTED: "interrupted",
}
_OF_COMMAND = {
    "check": {Exit.BROKEN: "a breach was found"},
    "tokens": {Exit.BROKEN: "check found a disagreement"},
    "doctor": {Exit.BROKEN: "a fault was found", Exit.WARNED: "warnings, and no fault"},
    "collect": {
        Exit.FAILED: "attempts failed or are ungraded (use --resume)",
        Exit.LIMIT: "--max-sampled-tokens, --max-cost or --max-time was reached (use --resume with a higher one)",
    },
    "score": {Exit.FAILED: "some rollouts are still ungraded"},
}


def exit_codes_of(command: str) -> str:
    codes = sorted((_EVERY_COMMAND | _OF_COMMAND.get(command, {})).items())
    return f"Exit codes: {'; '.join(f'{int(code)} {meaning}' for code, meaning in codes)}."


def exit_code(error: RolltapeError) -> Exit:
    match error:
        case NoSuchRollout() | MissingExtra():
            return Exit.USAGE
        case ExportError() | SinkError() | TapeWriteError():
            return Exit.OUTPUT
        case TapeError():
            return Exit.RUN
        case LedgerError():
            return Exit.BROKEN
        case _:
            return Exit.USAGE
