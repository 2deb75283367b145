"""Where a request's history stands in its session: which held turn it ends in, and what is new after it."""

import enum
import marshal
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rolltape.capture.echo import EchoRule, is_text_of, rule_of
from rolltape.records.messages import Message, Role, Root
from rolltape.records.turn import Turn
from rolltape.tree.nodes import Node
from rolltape.tree.placement import Tree


class Unheld(enum.StrEnum):
    """Why a history does not end in a turn that the session holds."""

    FIRST_TURN = "first_turn"  # nothing was sampled in this session yet
    NO_REPLY = "no_reply"  # it holds no reply of the model: another conversation, or one that begins anew
    TOOLS_CHANGED = "tools_changed"  # under these tools and template options nothing was sampled
    REPLY_CHANGED = "reply_changed"  # the assistant message after the held part is not a reply as it was given
    HISTORY_CHANGED = "history_changed"  # a message before a reply is not what it was


class Place(NamedTuple):
    """A request's history, echoes read as the replies that they stand for."""

    root: Root
    messages: list[Message]
    turn: Turn | None  # the one whose reply it ends in, but for new messages that are no assistant's; None: see why
    new: int  # how many messages at the end are new after that turn
    why: Unheld | None
    echoes: tuple[EchoRule, ...]


class History:
    """The live tree of one session, asked before each turn and grown after it."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._messages: dict[bytes, Message] = {}  # by a digest of their value: most of a history came before
        self._roots: dict[bytes, Root] = {}
        self._aliases: dict[tuple[Node, bytes], tuple[Node, EchoRule]] = {}

    def add(self, turn: Turn) -> None:
        """Take a recorded turn in."""
        self._tree.add(turn)

    def forks(self) -> int:
        """How often the session departed from what it had: conversations begun beside the first."""
        return max(sum(placed.parent is None for placed in self._tree.turns) - 1, 0) + sum(
            max(len(placed.children) - 1, 0) for placed in self._tree.turns
        )

    def place(self, messages: Sequence[dict[str, Any]], tools: object, options: dict[str, Any]) -> Place:
        """Follow a request's messages from the root as far as the session knows them."""
        root = self._root(tools, options)
        given = [self._message(message, index) for index, message in enumerate(messages)]
        node = self._tree.roots.get(root.digest)
        if node is None:
            why = Unheld.TOOLS_CHANGED if self._tree.turns else Unheld.FIRST_TURN
            return Place(root, given, None, len(given), why, ())
        return self._followed(root, node, given)

    def _followed(self, root: Root, node: Node, given: list[Message]) -> Place:
        read: list[Message] = []
        rules: list[EchoRule] = []
        apart: list[Message] = []  # replies whose text is still to come as a message of its own
        held: tuple[Turn, int] | None = None
        known = True
        for message in given:
            text_of = next((reply for reply in apart if _is_assistant(message) and is_text_of(message, reply)), None)
            if text_of is not None:
                apart.remove(text_of)
                continue
            below = node.children.get(message.canonical) if known else None
            if below is None and known and _is_assistant(message):
                alias = self._echoed(node, message)
                if alias is not None:
                    below, rule = alias
                    rules.append(rule)
                    reply = below.replies[-1].turn.reply
                    assert reply is not None
                    if rule is EchoRule.TEXT_APART:
                        apart.append(reply)
                    message = reply
            read.append(message)
            known = below is not None
            if below is not None:
                node = below
                if node.replies:
                    held = (_continued(node, message), len(read))
        if held is not None and not any(_is_assistant(message) for message in read[held[1] :]):
            return Place(root, read, held[0], len(read) - held[1], None, tuple(rules))
        return Place(root, read, None, len(read), self._why(node, read), tuple(rules))

    def _why(self, node: Node, read: list[Message]) -> Unheld:
        """The first message that the session does not know says why."""
        if node.depth == len(read) or not any(map(_is_assistant, read)):
            return Unheld.NO_REPLY
        asked = node.asked and _is_assistant(read[node.depth])
        return Unheld.REPLY_CHANGED if asked else Unheld.HISTORY_CHANGED

    def _echoed(self, node: Node, message: Message) -> tuple[Node, EchoRule] | None:
        key = (node, message.canonical)
        if key not in self._aliases:
            for placed in reversed(node.asked):
                reply = placed.turn.reply
                rule = None if reply is None else rule_of(message, reply)
                if rule is not None and placed.reply_node is not None:
                    self._aliases[key] = (placed.reply_node, rule)
                    break
        return self._aliases.get(key)

    def _message(self, message: dict[str, Any], index: int) -> Message:
        key = _key(message)
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = Message.snapshot(message, f"message {index}")
        return found

    def _root(self, tools: object, options: dict[str, Any]) -> Root:
        key = _key((tools, options))
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = Root.snapshot(tools, options or None, "the request")
        return found


def _continued(node: Node, echo: Message) -> Turn:
    """Which of the turns with this reply is meant: by echoed id, else the latest."""
    named = [placed for placed in node.replies if placed.turn.reply and placed.turn.reply.wire_ids & echo.wire_ids]
    return (named or node.replies)[-1].turn


def _is_assistant(message: Message) -> bool:
    return message.role is Role.ASSISTANT


def _key(value: object) -> bytes:
    # Marshalling, version 2, gives the same bytes for the same value, at a tenth of the cost of encoding it.
    return blake2b(marshal.dumps(value, 2), digest_size=16).digest()  # type: ignore[arg-type]
