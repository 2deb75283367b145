"""Places where prompts end and replies stand: message nodes. A Merkle chain from tools and template options down."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Self

from rolltape.records.ids import digest_of
from rolltape.records.messages import Message
from rolltape.records.turn import Turn

if TYPE_CHECKING:
    from rolltape.tree.placement import PlacedTurn


def with_turn(turns: "Sequence[PlacedTurn]", placed: "PlacedTurn") -> "Sequence[PlacedTurn]":
    """Turns and one more. Most of these lists stay empty: one is made with its first turn, and grows from then on."""
    if not isinstance(turns, list):
        return [placed]
    turns.append(placed)
    return turns


class Place:
    """A beginning that prompts share, of messages or of ids: which turns were asked here, and what came of it."""

    __slots__ = ("asked", "parent", "passed", "replies", "sampled")

    def __init__(self, parent: Self | None) -> None:
        self.parent = parent
        self.asked: Sequence[PlacedTurn] = ()  # the task's turns whose prompt ends here
        self.passed: Sequence[PlacedTurn] = ()  # the task's turns that went on from here, perhaps without a reply
        self.replies: Sequence[PlacedTurn] = ()  # the turns whose reply ends here
        self.sampled: Self | None = parent.sampled if parent else None  # the nearest place with replies, at or above

    def below(self) -> Iterable[Self]:
        """The next places."""
        raise NotImplementedError

    def add_reply(self, placed: "PlacedTurn") -> None:
        """A turn's reply ends here. What lies below and was here before has a nearer place with replies from now on."""
        self.replies = with_turn(self.replies, placed)
        if self.sampled is self:
            return
        before, stack = self.sampled, [self]
        while stack:
            place = stack.pop()
            if place.sampled is before:
                place.sampled = self
                stack.extend(place.below())


class Node(Place):
    """A conversation up to one message."""

    __slots__ = (
        "children",
        "conversation",
        "depth",
        "jump",
        "message",
        "rewrites",
        "rewritten",
        "root",
        "since",
        "twin",
    )

    depth: int  # messages up to here
    conversation: bytes  # a hash of the messages alone: equal under any tools
    root: bytes  # the digest of tools and template options

    def __init__(self, parent: "Node | None", message: Message | None, key: bytes, since: Turn | None = None) -> None:
        super().__init__(parent)
        self.children: dict[bytes, Node] = {}  # by canonical message
        self.message = message  # as it first came; None: the root
        self.since = since  # the turn that it first came with; None: the root
        self.root = parent.root if parent else key
        self.conversation = blake2b(parent.conversation + key, digest_size=16).digest() if parent else b""
        self.depth = parent.depth + 1 if parent else 0
        self.rewrites: PlacedTurn | None = None  # the turn whose reply this message replaced in its place
        self.rewritten: Node | None = parent.rewritten if parent else None  # the nearest such node, at or above
        self.twin: Node | None = None  # the same conversation under other tools, if it was there before
        # Jump pointers in skew-binary steps: any ancestor is found in logarithmic time, with one extra link a node.
        self.jump: Node = self
        if parent is not None:
            up = parent.jump
            self.jump = up.jump if parent.depth - up.depth == up.depth - up.jump.depth else parent

    def below(self) -> "Iterable[Node]":
        """The next messages."""
        return self.children.values()

    @property
    def id(self) -> bytes:
        """Names the whole conversation up to here, tools and template options included."""
        return digest_of(self.root, self.conversation)

    def ancestor(self, depth: int) -> "Node":
        """The node at that depth on the way to the root; itself if it is not deeper."""
        node: Node = self
        while node.depth > depth and node.parent is not None:
            node = node.jump if node.jump.depth >= depth else node.parent
        return node

    def shared_depth(self, other: "Node") -> int:
        """How many leading messages two conversations share, under whatever tools."""
        low, high = 0, min(self.depth, other.depth)
        if self.ancestor(high).conversation == other.ancestor(high).conversation:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            is_shared = self.ancestor(middle).conversation == other.ancestor(middle).conversation
            low, high = (middle, high) if is_shared else (low, middle - 1)
        return low
