"""Exit codes: what each means, and which one an error gets."""

import enum

from rolltape.errors import ExportError, LedgerError, NoSuchRollout, RolltapeError, SinkError, TapeError, TapeWriteError


class Exit(enum.IntEnum):
    OK = 0
    BROKEN = 1  # `check` found a breach, or `doctor` a fault
    USAGE = 2  # a flag, an id, a policy, or an SQL statement is wrong
    RUN = 3  # the run is missing, empty, damaged, or newer than this program
    OUTPUT = 4  # the output could not be written
    FAILED = 5  # attempts failed, or could not be graded; `collect --resume` runs or grades them again
    WARNED = 6  # `doctor` found warnings, and no fault
    LIMIT = 7  # `collect` reached a limit of what it may spend, and attempts are left
    INTERRUPTED = 130  # Ctrl-C, or the user answered no


EXIT_CODES = (
    "Exit codes: 0 success; 1 check found a breach, or doctor a fault; 2 wrong usage; 3 run missing, empty, damaged, "
    "or newer than this program; 4 output not written; 5 attempts failed or ungraded (collect --resume); "
    "6 doctor found warnings; 7 collect reached --max-sampled-tokens or --max-cost "
    "(--resume with a higher one); 130 interrupted."
)


def exit_code(error: RolltapeError) -> Exit:
    """The exit code for an error that ends a command."""
    match error:
        case NoSuchRollout():
            return Exit.USAGE
        case ExportError() | SinkError() | TapeWriteError():
            return Exit.OUTPUT
        case TapeError():
            return Exit.RUN
        case LedgerError():
            return Exit.BROKEN
        case _:
            return Exit.USAGE
