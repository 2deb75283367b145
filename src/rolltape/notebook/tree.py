"""A session's tree in a notebook: turns in columns, and why they fork."""

from collections.abc import Iterator, Sequence

from rolltape.notebook.html import div, framed, gap, span, text
from rolltape.records.fork import Fork
from rolltape.records.wording import plural, quoted
from rolltape.samples.spelling import Spell, spell_at, token_texts
from rolltape.tree import Tree, forks_of
from rolltape.tree.drawing import Drawn, drawn_turns, headline, turn_lines

_FIRST, _LAST, _FORKS = 120, 60, 120  # turns
_INDENT, _DEEPEST = 18, 14  # pixels a column; columns further out are drawn on the last
_MESSAGES = 2


def tree_html(tree: Tree) -> str:
    """A tree alone."""
    forks = forks_of(tree)
    return framed(
        div("title", f"{plural(len(tree.turns), 'turn')}, {plural(len(forks), 'fork')}"), tree_parts(tree, forks)
    )


def tree_parts(tree: Tree, forks: Sequence[Fork]) -> str:
    """The turns from top to bottom; of many the first, the last, and those that fork."""
    at = {fork.turn: fork for fork in forks}
    spell = spell_at(tree.tokenizers)
    return div("box", *_rows(list(drawn_turns(tree)), at, spell))


def _rows(drawn: Sequence[Drawn], forks: dict[str, Fork], spell: Spell | None) -> Iterator[str]:
    hidden = 0
    forked = 0
    for number, one in enumerate(drawn):
        fork = forks.get(one.placed.turn.id)
        forked += fork is not None
        if number < _FIRST or number >= len(drawn) - _LAST or (fork is not None and forked <= _FORKS):
            if hidden:
                yield div("left-out", gap(f"{plural(hidden, 'turn')} left out"))
            hidden = 0
            yield _row(one, fork, spell)
        else:
            hidden += 1


def _row(drawn: Drawn, fork: Fork | None, spell: Spell | None) -> str:
    placed = drawn.placed
    name, _, facts = headline(placed, None).partition("  ")
    parts = [span("title", f"turn {name}"), " ", span("quiet", facts)]
    if fork is not None:
        parts += [" ", span("cause", fork.cause.value), div("quiet rt-mono", text(_departure(fork, spell)))]
    parts += [div("mono", text(line)) for line in turn_lines(placed, _MESSAGES)]
    kind = "turn" if drawn.column == 0 else "turn rt-off"
    left = min(drawn.column, _DEEPEST) * _INDENT
    passing = f"padding-left:{left}px;background-size:{left}px 100%"
    return div("row" if placed.parent else "row rt-root", div(kind, *parts), style=passing)


def _departure(fork: Fork, spell: Spell | None) -> str:
    where = "" if fork.message_index is None else f" at message {fork.message_index}"
    difference = fork.tokens if fork.text is None else fork.text
    return (
        f"departs from turn {fork.departs_from.rpartition('.')[2]}{where}: "
        f"{_side(difference.before, spell)} → {_side(difference.after, spell)}"
    )


def _side(excerpt: str | tuple[int, ...], spell: Spell | None) -> str:
    if isinstance(excerpt, str):
        return quoted(excerpt, 40)
    return quoted(("" if spell else " ").join(token_texts(excerpt[:12], spell)), 40) if excerpt else "(end)"
