"""A session's tree as lines of text: the latest continuation goes straight down, earlier ones branch off."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rolltape.cli.output.screen import quoted, visible, writes_unicode
from rolltape.records.fork import Difference, Fork
from rolltape.samples.spelling import Spell, token_texts
from rolltape.tree import PlacedTurn, Tree
from rolltape.tree.lanes import headline, in_lanes, said_lines

_MESSAGES_SHOWN = 3
Line = tuple[str, str]


class _Strokes(NamedTuple):
    branch: str
    down: str
    dot: str
    arrow: str


_UNICODE = _Strokes("├─", "│ ", "●", "→")
_ASCII = _Strokes("|-", "| ", "*", "->")


def strokes_of_the_terminal() -> _Strokes:
    """Those that its encoding has."""
    return _UNICODE if writes_unicode() else _ASCII


def drawn_tree(tree: Tree, forks: Sequence[Fork], spell: Spell | None) -> Iterator[Line]:
    """Each line with its style."""
    strokes = strokes_of_the_terminal()
    fork_at = {fork.turn: fork for fork in forks}
    for placed, lane, branches_off in in_lanes(tree):
        fork = fork_at.get(placed.turn.id)
        # A branch's turns are drawn beside the line that it leaves, which goes on below.
        left = strokes.down * lane
        corner = strokes.down * (lane - 1) + strokes.branch if branches_off else left
        yield f"{corner}{strokes.dot} {headline(placed, fork)}", "bold yellow" if fork else "bold"
        goes_on = strokes.down if placed.children else "  "
        for line in _body(placed, fork, spell, strokes):
            yield f"{left}{goes_on}  {line}", "yellow" if line.startswith(("fork", "  ")) else ""


def _body(placed: PlacedTurn, fork: Fork | None, spell: Spell | None, strokes: _Strokes) -> Iterator[str]:
    if fork is not None:
        yield from _fork_lines(fork, spell, strokes)
    yield from said_lines(placed, _MESSAGES_SHOWN, strokes.arrow)


def _fork_lines(fork: Fork, spell: Spell | None, strokes: _Strokes) -> Iterator[str]:
    place = "" if fork.message_index is None else f" at message {fork.message_index}"
    yield f"fork: departs from turn {fork.departs_from.rpartition('.')[2]}{place}"
    if fork.text is not None:
        yield f"  text at {fork.text.at}: {_difference(fork.text, spell, strokes)}"
    yield f"  tokens at {fork.tokens.at}: {_difference(fork.tokens, spell, strokes)}"


def _difference(parted: Difference, spell: Spell | None, strokes: _Strokes) -> str:
    return f"{_side(parted.before, spell)} {strokes.arrow} {_side(parted.after, spell)}"


def _side(excerpt: str | tuple[int, ...], spell: Spell | None) -> str:
    if isinstance(excerpt, str):
        return quoted(excerpt, 32)
    if not excerpt:
        return "(end)"
    shown = [visible(text.replace(" ", "␣")) for text in token_texts(excerpt[:6], spell)]
    return " ".join(shown) + (" …" if len(excerpt) > 6 else "")
