"""The command line: one file per command; each parses, calls and prints."""

from rolltape.cli.app import main, run

__all__ = ["main", "run"]
