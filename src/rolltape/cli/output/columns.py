"""Lays rows out as padded columns that fit a width: long text is shortened first, then columns are left out."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
    texts = [list(cells) for cells in zip(columns, *rows, strict=True)]
    natural = [max(_widths(cells)) for cells in texts]
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
    padded = []
    for at, wide in zip(shown, widths, strict=True):
        cells = texts[at] if width is None else [shorten(text, wide) for text in texts[at]]
        padded.append(_padded(cells, wide, left_aligned=columns[at] in left))
    lines = [_GAP.join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return FittedTable(lines, [name for at, name in enumerate(columns) if at not in shown])


def _widths(texts: Sequence[str]) -> Iterable[int]:
    """How many terminal cells each text takes; for long columns at the cost of their lengths, where these are equal."""
    return map(len if "".join(texts).isascii() else cell_width, texts)


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


def _padded(texts: Sequence[str], width: int, *, left_aligned: bool) -> list[str]:
    paddings = [" " * (width - wide) for wide in _widths(texts)]
    sides = (texts, paddings) if left_aligned else (paddings, texts)
    return [before + after for before, after in zip(*sides, strict=True)]
