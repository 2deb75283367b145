"""A rollout's transcript in lines that fit a terminal: text beside its label, long text folded."""

from collections.abc import Iterator

from rolltape.cli.output.columns import cell_width
from rolltape.cli.output.screen import visible
from rolltape.records.rollout import Rollout
from rolltape.traces import trace_of
from rolltape.traces.transcript import NOT_RECORDED, transcript_of

_LABEL = 13
_LEAST_ROOM = 16
_FIRST_LINES, _LAST_LINES = 12, 6
# Only this much of a line is laid out: one of 10 MB is just counted.
_LONGEST_LINE = 400
_STYLES = {"thinks": "dim", "error": "yellow", NOT_RECORDED: "yellow"}


def transcript_lines(rollout: Rollout, *, width: int | None, full: bool) -> Iterator[tuple[str, str]]:
    """Each line with its style; wrapped at `width` cells unless that is None, and folded unless `full`."""
    layout = _LabeledText(width, full=full)
    for passage in transcript_of(rollout, trace_of(rollout)):
        if passage.cause is None:
            yield passage.title, "bold"
        else:
            yield f"{passage.title}  [{passage.cause}]", "bold yellow"
        for kind, text in passage.parts:
            yield from layout.lines(kind, text, _STYLES.get(kind, ""))


class _LabeledText:
    """Lays text out beside a label."""

    def __init__(self, width: int | None, *, full: bool) -> None:
        self._room = None if width is None else max(width - _LABEL - 2, _LEAST_ROOM)
        self._full = full

    def lines(self, label: str, text: str, style: str) -> Iterator[tuple[str, str]]:
        """Lines with their style; the label is before the first."""
        shown = f"{visible(label):{_LABEL - 1}} "
        for line in self._folded(text):
            yield f"  {shown}{line}" if line else f"  {shown}".rstrip(), style
            shown = " " * _LABEL

    def _folded(self, text: str) -> Iterator[str]:
        lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
        hidden = len(lines) - _FIRST_LINES - _LAST_LINES
        if self._full or hidden < 2:
            yield from self._fitted(lines)
            return
        yield from self._fitted(lines[:_FIRST_LINES])
        characters = sum(map(len, lines[_FIRST_LINES:-_LAST_LINES])) + hidden
        yield f"… {hidden:,} lines, {characters:,} characters"
        yield from self._fitted(lines[-_LAST_LINES:])

    def _fitted(self, lines: list[str]) -> Iterator[str]:
        for line in lines:
            hidden = len(line) - _LONGEST_LINE
            kept = line if self._full or hidden <= 0 else line[:_LONGEST_LINE]
            yield from self._wrapped(visible(kept.expandtabs(4)))
            if kept is not line:
                yield f"… {hidden:,} characters"

    def _wrapped(self, line: str) -> Iterator[str]:
        if self._room is None or cell_width(line) <= self._room:
            yield line
            return
        start = 0
        while start < len(line):
            stop = start + _fitting(line[start : start + self._room], self._room)
            space = line.rfind(" ", start + 1, stop + 1) if stop < len(line) else -1
            if space > (start + stop) // 2:
                yield line[start:space]
                start = space + 1
            else:
                yield line[start:stop]
                start = stop


def _fitting(text: str, room: int) -> int:
    """How many characters of a text fit in `room` cells; at least one."""
    count = len(text)
    while count > 1 and cell_width(text[:count]) > room:
        count -= 1
    return count
