"""Printing: data to standard output, progress to standard error, nothing but text into a pipe."""

import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_PIPE_WIDTH = 100_000
SHORT_ID = 8


def screen() -> "Console":
    """Standard output: as wide as the terminal, and without limit into a file or a pipe."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """A table without lines; numbers to the right unless the column is named in `left`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        align: Any = "left" if column in left else "right"
        table.add_column(column, justify=align, no_wrap=True, overflow="ellipsis", min_width=min(len(column), 6))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console = screen()
    # A table is padded to its width; nothing of that belongs into a pipe.
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_line(text: str, style: str = "") -> None:
    """A line cut at the terminal's edge; whole in a pipe."""
    from rich.text import Text

    screen().print(Text(visible(text), style=style), no_wrap=True, overflow="ellipsis", crop=True)


def print_long(text: str) -> None:
    """A line that a terminal may wrap."""
    sys.stdout.write(visible(text) + "\n")


def print_json(value: object) -> None:
    """One JSON object on a line; numbers that are not finite spelled out."""
    from rolltape.records.jsonable import encode_numbers

    sys.stdout.write(encode_numbers(value, "output").decode() + "\n")


def note(text: str) -> None:
    """A word to the person at the terminal, beside the data."""
    print(f"rolltape: {visible(text)}", file=sys.stderr)


def visible(text: str) -> str:
    """Text in which nothing can steer a terminal: control and format characters as escapes."""
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def quoted(text: str, limit: int = 72) -> str:
    """Text in quotes on one line, shortened."""
    shown = visible(json.dumps(text[: limit * 2], ensure_ascii=False))
    return shown if len(text) <= limit and len(shown) <= limit + 2 else f'{shown[:limit].rstrip(chr(92))}…"'


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; None as nothing."""
    return "" if value is None else f"{value:.{digits}g}"


def count(value: int) -> str:
    return f"{value:,}"


def plural(value: int, word: str) -> str:
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Any]:
    """A bar on standard error while long work runs; called with the number of items done. Silent off a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done=1: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done=1: bar.advance(task, done)


def tracked(items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
    """The items, with a bar that counts them."""
    with progress(label, total) as advance:
        for item in items:
            yield item
            advance(1)


def _escaped(character: str) -> str:
    if character == " " or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\u{ord(character):04x}")
