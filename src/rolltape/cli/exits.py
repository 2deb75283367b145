"""What the exit code of a command means."""

import enum

from rolltape.errors import (
    ExportError,
    LedgerError,
    NoSuchRollout,
    PolicyError,
    RolltapeError,
    SinkError,
    TapeError,
    TapeWriteError,
)


class Exit(enum.IntEnum):
    OK = 0
    BROKEN = 1  # `check` found something that does not hold
    USAGE = 2  # a flag, an id, a policy or an SQL statement is wrong
    RUN = 3  # the run is missing, empty, newer than this program, or damaged
    OUTPUT = 4  # the result could not be written
    FAILED = 5  # `collect`: attempts failed, which `--resume` runs again
    INTERRUPTED = 130  # Ctrl-C, or the answer no


EXIT_CODES = (
    "Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 run missing, empty, damaged or newer than this program, "
    "4 output not written, 5 attempts failed (collect --resume runs them again), 130 interrupted."
)


class UsageError(RolltapeError):
    """What was asked for on the command line cannot be done; names the flag or the argument."""


def exit_of(error: RolltapeError) -> Exit:
    """The exit code for an error that ends a command."""
    match error:
        case UsageError() | PolicyError() | NoSuchRollout():
            return Exit.USAGE
        case ExportError() | SinkError() | TapeWriteError():
            return Exit.OUTPUT
        case TapeError():
            return Exit.RUN
        case LedgerError():
            return Exit.BROKEN
        case _:
            return Exit.USAGE
