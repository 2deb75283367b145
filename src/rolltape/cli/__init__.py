"""The command line: one file per command; each parses, calls and prints."""

import sys
from collections.abc import Sequence

__all__ = ["main", "run"]


def main() -> None:
    """The entry point of the program. Importing it takes a moment, in which Ctrl-C must be answered, too."""
    try:
        from rolltape.cli.app import main as run_program
    except KeyboardInterrupt:
        print("rolltape: interrupted", file=sys.stderr)
        sys.exit(130)
    run_program()


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is one line on standard error."""
    from rolltape.cli.app import run as run_command

    return run_command(arguments)
