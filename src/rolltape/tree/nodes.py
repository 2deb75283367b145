"""Message nodes: a Merkle chain from tools and template options down to each message of each conversation."""

from hashlib import blake2b
from typing import TYPE_CHECKING

from rolltape.records.ids import digest_of
from rolltape.records.messages import Message

if TYPE_CHECKING:
    from rolltape.tree.placement import PlacedTurn


class Node:
    """A conversation up to one message. `asked` are the turns sampled from here, `replies` those whose reply it is."""

    __slots__ = (
        "asked",
        "children",
        "conversation",
        "depth",
        "jump",
        "message",
        "parent",
        "replies",
        "rewrites",
        "root",
        "twin",
    )

    parent: "Node | None"
    depth: int  # messages up to here
    conversation: bytes  # a hash of the messages alone: equal under any tools
    root: bytes  # the digest of tools and template options

    def __init__(self, parent: "Node | None", message: Message | None, key: bytes) -> None:
        self.parent = parent
        self.message = message  # as it first came; None: the root
        self.root = parent.root if parent else key
        self.conversation = blake2b(parent.conversation + key, digest_size=16).digest() if parent else b""
        self.depth = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Node] = {}  # by canonical message
        self.asked: list[PlacedTurn] = []
        self.replies: list[PlacedTurn] = []
        self.rewrites: PlacedTurn | None = None  # the turn whose reply this message replaced in its place
        self.twin: Node | None = None  # the same conversation under other tools, if it was there before
        # Jump pointers in skew-binary steps: any ancestor is found in logarithmic time, with one extra link a node.
        self.jump: Node = self
        if parent is not None:
            up = parent.jump
            self.jump = up.jump if parent.depth - up.depth == up.depth - up.jump.depth else parent

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
