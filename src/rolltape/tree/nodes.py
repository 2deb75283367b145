"""Message nodes: a Merkle chain from tools and template options down to each message of each conversation."""

from typing import TYPE_CHECKING

from rolltape.records.ids import digest_of
from rolltape.records.messages import Message

if TYPE_CHECKING:
    from rolltape.tree.placement import PlacedTurn


class Node:
    """A conversation up to one message. `asked` are the turns sampled from here, `replies` those whose reply it is."""

    __slots__ = ("asked", "children", "depth", "id", "jump", "message", "parent", "replies", "rewrites")

    id: bytes
    parent: "Node | None"
    depth: int  # messages up to here

    def __init__(self, parent: "Node | None", message: Message | None, key: bytes) -> None:
        self.parent = parent
        self.message = message  # as it first came; None: the root
        self.id = digest_of(parent.id if parent else None, key)
        self.depth = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Node] = {}  # by canonical message
        self.asked: list[PlacedTurn] = []
        self.replies: list[PlacedTurn] = []
        self.rewrites: PlacedTurn | None = None  # the turn whose reply this message replaced in its place
        # Jump pointers in skew-binary steps: any ancestor is found in logarithmic time, with one extra link a node.
        self.jump: Node = self
        if parent is not None:
            up = parent.jump
            self.jump = up.jump if parent.depth - up.depth == up.depth - up.jump.depth else parent

    def child(self, key: bytes, message: Message) -> "Node":
        """The node below for this message, made if it is not there yet."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Node(self, message, key)
        return found

    def ancestor(self, depth: int) -> "Node":
        """The node at that depth on the way to the root; itself if it is not deeper."""
        node: Node = self
        while node.depth > depth and node.parent is not None:
            node = node.jump if node.jump.depth >= depth else node.parent
        return node

    def is_under(self, other: "Node") -> bool:
        """Whether the other is this node or one above it."""
        return self.ancestor(other.depth) is other
