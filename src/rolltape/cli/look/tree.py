"""`rolltape tree`: draw the turns of a rollout as a tree, with the cause of each fork."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from rolltape.cli.options import JsonOption, OneRollout, RunArgument, TokenizerOption
from rolltape.cli.runs import SelectedRollouts, excerpt, open_run, open_spellings, report_problems
from rolltape.cli.screen import arrow, fold, plural, print_json, print_line, print_preview, quoted, writes_unicode
from rolltape.records.fork import Difference, Fork
from rolltape.records.rollout import Rollout, Session, pruned_of
from rolltape.samples.facts import title
from rolltape.samples.spelling import Spell, Spellings
from rolltape.tree import PlacedTurn, Tree, forks_of, tree_of
from rolltape.tree.drawing import Drawn, drawn_turns, headline, new_messages, turn_lines

_MESSAGES_SHOWN = 3


def tree(
    run: RunArgument,
    *,
    which: OneRollout,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Draw a rollout's turns, with the cause of each fork.

    Long texts are shortened; `rolltape show` prints them whole in a pipe, and --json has them too.
    """
    tape = open_run(run)
    spellings = open_spellings(tokenizer)
    selected = SelectedRollouts(tape, which, counted_only=True)
    rollout = selected.only()
    with selected.named_in_errors():
        if as_json:
            for session in rollout.sessions:
                grown = tree_of(session)
                print_json(_record(rollout, session, grown, forks_of(grown)))
        else:
            print_line(title(rollout), style="bold")
            draw_trees(rollout, spellings)
    return report_problems(tape)


def draw_trees(rollout: Rollout, spellings: Spellings, *, full: bool = True) -> None:
    """Print the tree of each session, with the middle turns of a long one folded unless `full`."""
    pruned = "turns" in pruned_of(rollout.events)
    for session in rollout.sessions:
        if pruned and not session.turns:
            print_line(f"session {session.ordinal}: its turns were pruned")
            continue
        grown = tree_of(session)
        forks = forks_of(grown)
        known = [len(turn.sampled_ids) for turn in session.turns if turn.has_ids]
        sampled = plural(sum(known), "sampled token") if known or not session.turns else "no token ids"
        print_line(
            f"session {session.ordinal}: {plural(len(session.turns), 'turn')}, {sampled}, {plural(len(forks), 'fork')}"
        )
        for line, style in _tree_lines(grown, forks, spellings.of(session), full=full):
            print_preview(line, style=style)


class _Strokes(NamedTuple):
    branch: str
    down: str
    dot: str


_UNICODE = _Strokes("├─", "│ ", "●")
_ASCII = _Strokes("|-", "| ", "*")


def _tree_lines(tree: Tree, forks: Sequence[Fork], spell: Spell | None, *, full: bool) -> Iterator[tuple[str, str]]:
    """Each line with its style. The latest continuation goes straight down; earlier ones branch off."""
    fork_at = {fork.turn: fork for fork in forks}
    first, hidden, last = fold(list(drawn_turns(tree)), full=full)
    for drawn in first:
        yield from _drawn_lines(drawn, fork_at.get(drawn.placed.turn.id), spell)
    if hidden:
        folded = sum(drawn.placed.turn.id in fork_at for drawn in hidden)
        among = f", among them {plural(folded, 'fork')}" if folded else ""
        yield f"… {plural(len(hidden), 'turn')}{among}; --full shows all", "bold"
    for drawn in last:
        yield from _drawn_lines(drawn, fork_at.get(drawn.placed.turn.id), spell)


def _drawn_lines(drawn: Drawn, fork: Fork | None, spell: Spell | None) -> Iterator[tuple[str, str]]:
    placed, column, branches_off = drawn
    strokes = _UNICODE if writes_unicode() else _ASCII
    # A branch is drawn beside the line that it leaves, and that line continues below.
    left = strokes.down * column
    corner = strokes.down * (column - 1) + strokes.branch if branches_off else left
    yield f"{corner}{strokes.dot} {headline(placed, fork)}", "bold yellow" if fork else "bold"
    below = strokes.down if placed.children else "  "
    for line in _turn_lines(placed, fork, spell):
        yield f"{left}{below}  {line}", "yellow" if line.startswith(("fork", "  ")) else ""


def _turn_lines(placed: PlacedTurn, fork: Fork | None, spell: Spell | None) -> Iterator[str]:
    if fork is not None:
        place = "" if fork.message_index is None else f" at message {fork.message_index}"
        yield f"fork: departs from turn {fork.departs_from.rpartition('.')[2]}{place}"
        if fork.text is not None:
            yield f"  text at {fork.text.at}: {_difference(fork.text, spell)}"
        yield f"  tokens at {fork.tokens.at}: {_difference(fork.tokens, spell)}"
    yield from turn_lines(placed, _MESSAGES_SHOWN, arrow())


def _difference(parted: Difference, spell: Spell | None) -> str:
    return f"{_side(parted.before, spell)} {arrow()} {_side(parted.after, spell)}"


def _side(part: str | tuple[int, ...], spell: Spell | None) -> str:
    if isinstance(part, str):
        return quoted(part, 32)
    return excerpt(part, spell, limit=6) if part else "(end)"


def _record(rollout: Rollout, session: Session, grown: Tree, forks: Sequence[Fork]) -> dict[str, object]:
    return {
        "rollout": rollout.id,
        "try_index": rollout.head.try_index,
        "session": session.id,
        "turns": [
            {
                "turn": placed.turn.id,
                "parent": None if placed.parent is None else placed.parent.turn.id,
                "prompt_tokens": len(placed.turn.prompt_tokens),
                "sampled_tokens": len(placed.turn.sampled_ids),
                "finish": placed.turn.facts.finish,
                "delivery": placed.turn.facts.delivery,
                "auxiliary": placed.turn.facts.auxiliary,
                "flags": placed.turn.facts.flags,
                "new_messages": [message.to_dict() for message in new_messages(placed)],
                "reply": None if placed.turn.reply is None else placed.turn.reply.to_dict(),
            }
            for placed in grown.turns
        ],
        "forks": [msgspec.to_builtins(fork) for fork in forks],
    }
