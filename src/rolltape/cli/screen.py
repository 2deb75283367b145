"""Printing: tables that fit a width, lines and JSON to standard output, notes and progress bars to standard error."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rolltape.records.jsonable import encode_numbers
from rolltape.records.wording import SHORT_ID as SHORT_ID
from rolltape.records.wording import count as count
from rolltape.records.wording import number as number
from rolltape.records.wording import plural as plural
from rolltape.records.wording import quoted as quoted
from rolltape.records.wording import span as span
from rolltape.records.wording import visible as visible

if TYPE_CHECKING:
    from rich.color import ColorSystem

T = TypeVar("T")

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_FIRST_SHOWN, _LAST_SHOWN = 12, 6  # lines of a text, and turns of a rollout
_STYLES = {
    "bold": "1",
    "dim": "2",
    "green": "32",
    "yellow": "33",
    "bold yellow": "1;33",
    "bold red": "1;31",
}


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    flexible: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table without lines; columns are right-aligned unless named in `left`.

    On a narrow terminal `flexible` columns are shortened, then `spare` ones are left out, and a note names them.
    """
    names = [visible(column) for column in columns]
    # Nearly all text is printable, so whole rows are checked first.
    shown = [row if "".join(row).isprintable() else [visible(cell) for cell in row] for row in rows]
    (header, *lines), left_out = fit_columns(
        names, shown, left=left, flexible=flexible, spare=spare, width=terminal_width()
    )
    sys.stdout.write(f"{_styled(header, 'bold')}\n")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if left_out:
        sys.stdout.flush()
        note(f"columns left out to fit: {', '.join(left_out)}; use a wider terminal, a pipe, or --json")


def print_line(text: str, style: str = "") -> None:
    """Print a line, wrapped between words on a terminal."""
    width = terminal_width()
    for line in [visible(text)] if width is None else _wrapped(visible(text), width):
        print_long(line, style)


def print_long(text: str, style: str = "") -> None:
    """Print a line in one piece, such as a command or a path that users copy."""
    sys.stdout.write(f"{_styled(visible(text), style)}\n")


def print_preview(text: str, style: str = "") -> None:
    """Print a line of recorded text, cut at the terminal's edge; a pipe gets the whole line."""
    width = terminal_width()
    print_long(text if width is None else shorten(visible(text), width), style)


def print_hanging(mark: str, style: str, lead: str, text: str, text_style: str = "") -> None:
    """Print a mark in a style, a lead, and text that wraps on a terminal, its lines under each other."""
    width = terminal_width()
    lead = visible(lead)
    indent = cell_width(mark) + cell_width(lead)
    shown = visible(text)
    room = max((width or 0) - indent, _SHORTEST_TEXT * 4)
    lines = [shown] if width is None else _wrapped(shown, room, cut_words=True)
    for at, line in enumerate(lines):
        before = " " * indent if at else f"{_styled(mark, style)}{lead}"
        sys.stdout.write(f"{before}{_styled(line, text_style)}".rstrip() + "\n")
    sys.stdout.flush()


def print_rest(hidden: int, word: str = "", hint: str = "") -> None:
    """Print how many rows are not shown, if there are any."""
    if hidden > 0:
        print_line(f"… and {plural(hidden, f'more {word}') if word else f'{hidden:,} more'}{hint}")


def print_json(value: object) -> None:
    """Print one JSON object on a line, with NaN and infinity spelled out."""
    text = encode_numbers(value, "output").decode()
    if not writes_unicode():
        text = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Print a line for the user to standard error."""
    print(f"rolltape: {visible(text)}", file=sys.stderr)


def open_in_browser(address: str) -> None:
    """Open a page in the user's browser, if there is a screen."""
    if sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        import webbrowser

        webbrowser.open(address)


def arrow() -> str:
    """An arrow that the output's encoding has."""
    return "→" if writes_unicode() else "->"


def writes_unicode() -> bool:
    """Whether standard output can encode every character."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def discard_output() -> None:
    """Discard buffered output, which could not be flushed at exit either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Any]:
    """Show a progress bar on a terminal's standard error; yields a function that takes the number of items done."""
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
    """Yield the items while a progress bar counts them."""
    with progress(label, total) as advance:
        for item in items:
            yield item
            advance(1)


def terminal_width() -> int | None:
    """The terminal's width, or None if standard output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def color_system() -> "ColorSystem | None":
    """The colors that standard output supports, or None if it is not a terminal or colors are turned off."""
    if not _uses_color():
        return None
    from rich.color import ColorSystem
    from rich.console import Console

    name = Console().color_system
    return None if name is None else ColorSystem.STANDARD if name == "standard" else ColorSystem.EIGHT_BIT


def _uses_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _wrapped(text: str, width: int, *, cut_words: bool = False) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=cut_words) or [""]


def _styled(text: str, style: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and _uses_color() else text


_GAP = "  "
_SHORTEST_TEXT = 6
# One long cell must not pad every other row to its length.
_LONGEST_PADDING = 200


class FittedTable(NamedTuple):
    """The lines of a table, header first, and the columns that did not fit."""

    lines: list[str]
    left_out: list[str]


def fit_columns(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str],
    flexible: Sequence[str],
    spare: Sequence[str],
    width: int | None,
) -> FittedTable:
    """The table in `width` terminal cells, or unlimited if None.

    Columns in `flexible` are shortened first. Then columns are left out: those in `spare`, then from the right. The
    first column always stays.
    """
    texts = [columns, *rows]
    # Long tables: the width of ASCII text is its length, and needs no measuring.
    is_ascii = "".join(map("".join, texts)).isascii()
    measure = len if is_ascii else cell_width
    natural = [max([measure(cells[at]) for cells in texts]) for at in range(len(columns))]
    shown = list(range(len(columns)))
    if width is None:
        widths = [min(wide, _LONGEST_PADDING) for wide in natural]
    else:
        least = [_least(name, wide, flexible) for name, wide in zip(columns, natural, strict=True)]
        going = [columns.index(name) for name in spare] + list(range(len(columns) - 1, 0, -1))
        while len(shown) > 1 and _total([least[at] for at in shown]) > width:
            shown.remove(next(at for at in going if at in shown))
        room = max(width, _total([least[at] for at in shown]))
        widths = _shared([least[at] for at in shown], [natural[at] for at in shown], room)
        texts = [[shorten(cells[at], wide) for at, wide in zip(shown, widths, strict=True)] for cells in texts]
    sides = ["-" if columns[at] in left else "" for at in shown]
    if is_ascii:
        pattern = _GAP.join(f"%{side}{wide}s" for side, wide in zip(sides, widths, strict=True))
        lines = [(pattern % tuple(cells)).rstrip() for cells in texts]
    else:
        lines = [_GAP.join(map(_padded, cells, widths, sides)).rstrip() for cells in texts]
    return FittedTable(lines, [name for at, name in enumerate(columns) if at not in shown])


def fold(items: Sequence[T], *, full: bool) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """The first items, the middle ones to fold, and the last; a single one is not folded."""
    if full or len(items) - _FIRST_SHOWN - _LAST_SHOWN < 2:
        return items, (), ()
    return items[:_FIRST_SHOWN], items[_FIRST_SHOWN:-_LAST_SHOWN], items[-_LAST_SHOWN:]


def cell_width(text: str) -> int:
    """How many terminal cells a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shorten(text: str, width: int) -> str:
    """The text in at most `width` cells, with an ellipsis where it was cut."""
    if cell_width(text) <= width:
        return text
    if width < 1:
        return ""
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1).rstrip() + "…"


def _least(name: str, natural: int, flexible: Sequence[str]) -> int:
    return min(natural, max(_SHORTEST_TEXT, cell_width(name))) if name in flexible else natural


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _shared(least: Sequence[int], natural: Sequence[int], room: int) -> list[int]:
    """Widths between the least and the natural ones that fill the room; the widest columns are cut most."""
    widths = list(least)
    spare = room - _total(least)
    wanting = sorted((at for at in range(len(least)) if natural[at] > least[at]), key=lambda at: natural[at])
    for place, at in enumerate(wanting):
        given = min(natural[at] - least[at], spare // (len(wanting) - place))
        widths[at] += given
        spare -= given
    return widths


def _padded(text: str, width: int, side: str) -> str:
    padding = " " * (width - cell_width(text))
    return text + padding if side else padding + text
