"""The page of commands: what each command's help prints."""

import contextlib
import io
import os

from rolltape.cli import run as rolltape_command
from rolltape.cli.app import STAGES

_COLUMNS = "100"
_HEAD = """\
# Commands

`python -m reference_docs` writes this page: each block is what the command prints for `--help`.
[The command line](command-line.md) explains what all commands share.
"""


def commands_page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for stage, commands in STAGES.items():
        listed = "\n".join(f"| [`{name}`](#{name}) | {about} |" for name, about in commands.items())
        parts.append(f"\n## Commands that {stage}\n\n| command | |\n| --- | --- |\n{listed}\n")
        parts += [f"\n### {name}\n\n```text\n{_help_of(name)}```\n" for name in commands]
    return "".join(parts)


def _help_of(name: str) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            rolltape_command([name, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return shown.getvalue()
