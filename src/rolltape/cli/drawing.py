"""A session's tree as lines of text: the latest continuation goes straight down, earlier ones branch off."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rolltape.cli.screen import quoted, visible, writes_unicode
from rolltape.cli.tokenizer import TextOf
from rolltape.records.fork import Difference, Fork
from rolltape.records.messages import Message, content_text
from rolltape.tree import PlacedTurn, Tree

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


def drawn_tree(tree: Tree, forks: Sequence[Fork], text: TextOf | None) -> Iterator[Line]:
    """Each line with its style. No recursion: a session may have thousands of turns."""
    strokes = strokes_of_the_terminal()
    fork_at = {fork.turn: fork for fork in forks}
    # What is still to draw, next one last: a turn, the strokes to its left, and whether it branches off there.
    stack: list[tuple[PlacedTurn, str, bool]] = [
        (placed, "", False) for placed in reversed(tree.turns) if placed.parent is None
    ]
    while stack:
        placed, left, branches_off = stack.pop()
        fork = fork_at.get(placed.turn.id)
        # A branch's turns are drawn beside the line that it leaves, which goes on below.
        corner = left[: -len(strokes.down)] + strokes.branch if branches_off else left
        yield f"{corner}{strokes.dot} {_headline(placed, fork)}", "bold yellow" if fork else "bold"
        goes_on = strokes.down if placed.children else "  "
        for line in _body(placed, fork, text, strokes):
            yield f"{left}{goes_on}  {line}", "yellow" if line.startswith(("fork", "  ")) else ""
        if placed.children:
            *earlier, latest = placed.children
            stack.append((latest, left, False))
            stack.extend((child, left + strokes.down, True) for child in reversed(earlier))


def new_messages(placed: PlacedTurn) -> list[Message]:
    """The messages of a turn's prompt that the tree did not hold before."""
    fresh = list(islice(placed.turn.prompt.backwards(), len(placed.turn.prompt) - placed.known_depth))
    return fresh[::-1]


def _headline(placed: PlacedTurn, fork: Fork | None) -> str:
    turn, facts = placed.turn, placed.turn.facts
    versions = dict.fromkeys(_version(segment.first_version, segment.last_version) for segment in facts.segments)
    parts = [f"{turn.sequence}", f"prompt {len(turn.prompt_tokens)}", f"sampled {len(turn.sampled_ids)}", facts.finish]
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


def _body(placed: PlacedTurn, fork: Fork | None, text: TextOf | None, strokes: _Strokes) -> Iterator[str]:
    if fork is not None:
        yield from _fork_lines(fork, text, strokes)
    messages = new_messages(placed)
    hidden = len(messages) - _MESSAGES_SHOWN
    if hidden > 0:
        yield f"… {hidden} more messages"
    for message in messages[-_MESSAGES_SHOWN:]:
        yield f"{message.role}: {said(message.to_dict())}"
    if placed.turn.reply is not None:
        yield f"{strokes.arrow} {said(placed.turn.reply.to_dict())}"
    elif placed.turn.facts.error is not None:
        yield f"{strokes.arrow} error: {quoted(placed.turn.facts.error)}"


def _fork_lines(fork: Fork, text: TextOf | None, strokes: _Strokes) -> Iterator[str]:
    place = "" if fork.message_index is None else f" at message {fork.message_index}"
    yield f"fork: departs from turn {fork.departs_from.rpartition('.')[2]}{place}"
    if fork.text is not None:
        yield f"  text at {fork.text.at}: {_difference(fork.text, text, strokes)}"
    yield f"  tokens at {fork.tokens.at}: {_difference(fork.tokens, text, strokes)}"


def _difference(parted: Difference, text: TextOf | None, strokes: _Strokes) -> str:
    return f"{_side(parted.before, text)} {strokes.arrow} {_side(parted.after, text)}"


def _side(excerpt: str | tuple[int, ...], text: TextOf | None) -> str:
    if isinstance(excerpt, str):
        return quoted(excerpt, 32)
    if not excerpt:
        return "(end)"
    shown = [str(token) if text is None else visible(text(token).replace(" ", "␣")) for token in excerpt[:6]]
    return " ".join(shown) + (" …" if len(excerpt) > 6 else "")


def said(message: Mapping[str, Any]) -> str:
    """A message in brief: its thinking, its text, its calls."""
    parts = []
    text, calls = content_text(message.get("content")), message.get("tool_calls")
    if reasoning := content_text(message.get("reasoning_content") or message.get("reasoning")):
        parts.append(f"(thinks {quoted(reasoning, 32)})")
    if text or not calls:
        parts.append(quoted(text))
    parts.extend(_call(call) for call in calls or () if isinstance(call, dict))
    return " ".join(parts)


def _call(call: dict[str, Any]) -> str:
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    arguments = source.get("arguments")
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return visible(f"{source.get('name')}({spelled[:48]}{'…' if len(spelled) > 48 else ''})")
