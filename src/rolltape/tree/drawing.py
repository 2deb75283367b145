"""A tree in the order in which it is drawn: the latest continuation goes straight down, earlier ones branch off."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from rolltape.records.fork import Fork
from rolltape.records.messages import Message
from rolltape.records.wording import message_line, quoted
from rolltape.tree.placement import PlacedTurn, Tree


class Drawn(NamedTuple):
    """A turn, how many lines pass to its left, and whether it branches off the nearest of them."""

    placed: PlacedTurn
    column: int
    branches_off: bool


def drawn_turns(tree: Tree) -> Iterator[Drawn]:
    """The turns from top to bottom. No recursion: a session may have thousands of turns."""
    stack = [Drawn(placed, 0, False) for placed in reversed(tree.turns) if placed.parent is None]
    while stack:
        drawn = stack.pop()
        yield drawn
        if drawn.placed.children:
            *earlier, latest = drawn.placed.children
            stack.append(Drawn(latest, drawn.column, False))
            stack.extend(Drawn(child, drawn.column + 1, True) for child in reversed(earlier))


def new_messages(placed: PlacedTurn) -> list[Message]:
    """The messages of a turn's prompt that the tree did not hold before."""
    fresh = list(islice(placed.turn.prompt.backwards(), len(placed.turn.prompt) - placed.known_depth))
    return fresh[::-1]


def turn_lines(placed: PlacedTurn, most: int, arrow: str = "→") -> Iterator[str]:
    """Yield a line for each new message of a turn's prompt, at most `most`, and for its reply."""
    messages = new_messages(placed)
    if len(messages) > most:
        yield f"… {len(messages) - most} more messages"
    for message in messages[-most:]:
        yield f"{message.role}: {message_line(message.to_dict())}"
    if placed.turn.reply is not None:
        yield f"{arrow} {message_line(placed.turn.reply.to_dict())}"
    elif placed.turn.facts.error is not None:
        yield f"{arrow} error: {quoted(placed.turn.facts.error)}"


def headline(placed: PlacedTurn, fork: Fork | None) -> str:
    """A turn in a line: its number, lengths, how it ended, what is odd about it."""
    turn, facts = placed.turn, placed.turn.facts
    versions = dict.fromkeys(_version(segment.first_version, segment.last_version) for segment in facts.segments)
    lengths = [f"prompt {len(turn.prompt_tokens)}", f"sampled {len(turn.sampled_ids)}"]
    parts = [f"{turn.sequence}", *(lengths if turn.has_ids else ["no token ids"]), facts.finish]
    if any(versions):
        parts.append("weights " + ", then ".join(version or "unknown" for version in versions))
    if facts.delivery != "delivered":
        parts.append(facts.delivery)
    if facts.auxiliary is not None:
        parts.append(f"auxiliary: {facts.auxiliary}")
    parts.extend(flag.value for flag in facts.flags)
    return f"{parts[0]}  {', '.join(parts[1:])}" + (f"  [{fork.cause}]" if fork else "")


def _version(first: str | None, last: str | None) -> str:
    return first or "" if first == last else f"{first}..{last}"
