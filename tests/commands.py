"""What a command line gave back."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any, NamedTuple

STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def rows(result: Result) -> list[dict[str, Any]]:
    """The JSON lines of a result."""
    return [strict_json(line) for line in result.out.splitlines()]


def strict_json(line: str) -> dict[str, Any]:
    """A line of JSON; a literal that is no JSON fails."""

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    value: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return value


def on_terminal(*arguments: object, columns: int, errors: bool = True, **environment: str) -> str:
    """What a command prints on a terminal of that width, with or without what it says beside its data."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("COLUMNS", "NO_COLOR", "COLORTERM", "FORCE_COLOR")
    own = {key: value for key, value in os.environ.items() if key not in unset} | {"TERM": "xterm"} | environment
    command = [sys.executable, "-m", "rolltape.cli", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs if errors else subprocess.DEVNULL, env=own)
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        printed += part
    process.wait()
    os.close(ours)
    return printed.decode()
