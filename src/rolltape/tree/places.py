"""Places where prompts end and replies stand, in messages and in ids.

Message nodes are a Merkle chain from tools and template options down. Places in ids are a radix tree of every prompt,
and of every prompt with its reply, that a session holds.
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Self

from rolltape.records.ids import digest_of
from rolltape.records.messages import Message
from rolltape.records.turn import NO_IDS, Ids, TokenChain, Turn, common_prefix

if TYPE_CHECKING:
    from rolltape.tree.placement import PlacedTurn


def with_turn(turns: "Sequence[PlacedTurn]", placed: "PlacedTurn") -> "Sequence[PlacedTurn]":
    """Add a turn and return the list. Most of these lists stay empty, so a list is made only for the first turn."""
    if not isinstance(turns, list):
        return [placed]
    turns.append(placed)
    return turns


class SharedPrefix:
    """A prefix that prompts share, of messages or of ids, with the turns whose prompts or replies end here."""

    __slots__ = ("_child", "_children", "_sampled", "_stamp", "asked", "parent", "passed", "replies")

    def __init__(self, parent: Self | None) -> None:
        self.parent = parent
        # Nearly every place has one place below it. It needs no dict, and no key until there is a second one.
        self._child: Self | None = None
        self._children: dict[object, Self] | None = None  # by key; None: there is at most one child
        self.asked: Sequence[PlacedTurn] = ()  # the task's turns whose prompt ends here
        self.passed: Sequence[PlacedTurn] = ()  # the task's turns that continue here, perhaps without a reply
        self.replies: Sequence[PlacedTurn] = ()  # the turns whose reply ends here
        # The nearest place with replies at or above it, as it was found when the tree had this stamp.
        self._sampled: Self | None = None
        self._stamp = 0
        if parent is not None:
            self._sampled, self._stamp = parent if parent.replies else parent._sampled, parent._stamp

    @property
    def key(self) -> object:
        """Distinguishes it from the other places below its parent."""
        raise NotImplementedError

    @property
    def below(self) -> Collection[Self]:
        """The next places, in the order in which they were made."""
        return self._children.values() if self._children else (self._child,) if self._child else ()

    def adopt(self, place: Self) -> None:
        """Add a place below this one. It replaces a place with the same key."""
        if self._children is not None:
            self._children[place.key] = place
        elif self._child is None or self._child.key == place.key:
            self._child = place
        else:
            self._children = {self._child.key: self._child, place.key: place}

    def let_go(self) -> None:
        """Forget all turns and other places."""
        self.asked = self.passed = self.replies = ()
        self.parent = self._sampled = self._child = self._children = None

    def sampled(self, stamp: int) -> Self | None:
        """The nearest place with replies, at or above. The stamp changes whenever the result may have changed."""
        passed: list[Self] = []
        at: Self | None = self
        while at is not None and at._stamp != stamp and not at.replies:
            passed.append(at)
            at = at.parent
        found = at if at is None or at.replies else at._sampled
        for place in passed:
            place._sampled, place._stamp = found, stamp
        return found

    def add_reply(self, placed: "PlacedTurn") -> bool:
        """Add a turn whose reply ends here. Return whether this becomes the nearest such place for places below it."""
        is_news = not self.replies and bool(self.below)
        self.replies = with_turn(self.replies, placed)
        return is_news


class Node(SharedPrefix):
    """A conversation up to one message."""

    __slots__ = (
        "_conversation",
        "_jump",
        "depth",
        "ids_matter",
        "message",
        "rewrites",
        "rewritten",
        "root",
        "since",
    )

    depth: int  # messages up to here
    ids_matter: bool  # whether messages that differ in tool-call ids alone are different ones
    root: bytes  # the digest of tools and template options

    def __init__(
        self,
        parent: "Node | None",
        message: Message | None,
        since: Turn | None,
        root: bytes = b"",
        ids_matter: bool = False,
    ) -> None:
        super().__init__(parent)
        self.message = message  # as it first came; None: the root
        self.since = since  # the turn that it first came with; None: the root
        self.rewrites: PlacedTurn | None = None  # the turn whose reply this message replaced in its place
        self.rewritten: Node | None = None  # the nearest such node, at or above
        # Jump pointers in skew-binary steps: any ancestor is found in logarithmic time, with one extra link a node.
        self._jump: Node | None = None  # not itself: a cycle would outlive its session
        if parent is None:
            self.root, self.ids_matter, self.depth = root, ids_matter, 0
            self._conversation: bytes | None = b""  # None: not computed yet
            return
        self.root, self.ids_matter, self.depth = parent.root, parent.ids_matter, parent.depth + 1
        self._conversation, self.rewritten, up = None, parent.rewritten, parent.jump
        self._jump = up.jump if parent.depth - up.depth == up.depth - up.jump.depth else parent
        parent.adopt(self)

    @property
    def jump(self) -> "Node":
        """An earlier node some steps away; the first node itself where there is none."""
        return self if self._jump is None else self._jump

    @property
    def key(self) -> bytes:
        return b"" if self.message is None else self._key_of(self.message)

    def child(self, message: Message) -> "Node | None":
        """The node below for an equal message, or None if there is none yet."""
        if self._children is not None:
            return self._children.get(self._key_of(message))
        only = self._child
        if only is None or only.message is None or only.message.digest == message.digest:
            return only
        return only if only.key == self._key_of(message) else None

    def _key_of(self, message: Message) -> bytes:
        return message.canonical_with_ids if self.ids_matter else message.canonical

    @property
    def conversation(self) -> bytes:
        """A hash of the messages alone: equal under any tools."""
        waiting: list[Node] = []
        node: Node = self
        while node._conversation is None and node.parent is not None:
            waiting.append(node)
            node = node.parent
        found = node._conversation or b""
        for below in reversed(waiting):
            found = below._conversation = blake2b(found + below.key, digest_size=16).digest()
        return found

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

    def is_answered_below(self, above: "Node") -> bool:
        """Whether a reply ends at this node or on the way up to `above`, which is included."""
        node: Node | None = self
        while node is not None and node.depth >= above.depth:
            if node.replies:
                return True
            node = node.parent
        return False

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


class IdPlace(SharedPrefix):
    """A prefix of ids: the ids of its parent, then `ids`."""

    __slots__ = ("ids", "length")

    def __init__(self, parent: "IdPlace | None", ids: Ids) -> None:
        super().__init__(parent)
        self.ids = ids
        self.length: int = len(ids) + (parent.length if parent else 0)
        if parent is not None:
            parent.adopt(self)

    @property
    def key(self) -> int:
        return int(self.ids[0])

    def child(self, first: int) -> "IdPlace | None":
        """The place below whose ids begin with this one."""
        if self._children is not None:
            return self._children.get(first)
        return self._child if self._child is not None and self._child.ids[0] == first else None


class IdTree:
    """Finds the place of a sequence. Only the ids that it does not share with its chain's parent cost time."""

    def __init__(self) -> None:
        self.root = IdPlace(None, NO_IDS)
        self._stamp = 0
        self._ends: dict[int, IdPlace] = {}  # by the identity of a chain; turns and chains keep each other alive

    def place(self, chain: TokenChain) -> IdPlace:
        """The place where a sequence ends, made if it is not there yet."""
        new: list[TokenChain] = []
        link: TokenChain | None = chain
        while link is not None and id(link) not in self._ends:
            new.append(link)
            link = link.parent
        place = self.root if link is None else self._ends[id(link)]
        for link in reversed(new):
            place = self._ends[id(link)] = _below(_cut_at(place, link.keep), link.own)
        return place

    def add_reply(self, placed: "PlacedTurn") -> IdPlace:
        """Add a turn's reply where its ids end, and return that place."""
        place = self.place(placed.turn.tokens)
        self._stamp += place.add_reply(placed)
        return place

    def held_in(self, ids: Ids) -> list[IdPlace]:
        """The places with replies that a sequence begins with, the longest first. The sequence itself is not added."""
        place, found = self.root, []
        while place.length < len(ids):
            child = place.child(int(ids[place.length]))
            if child is None or common_prefix(child.ids, ids[place.length :]) < len(child.ids):
                break
            place = child
            if place.replies:
                found.append(place)
        return found[::-1]

    def sampled(self, place: IdPlace | None) -> IdPlace | None:
        """The nearest place with replies, at or above."""
        return place.sampled(self._stamp) if place is not None else None

    def take_apart(self) -> None:
        """Let go of all places and turns."""
        for end in self._ends.values():
            place: IdPlace | None = end
            while place is not None and place.parent is not None:
                above = place.parent
                place.let_go()
                place = above
        self.root, self._ends = IdPlace(None, NO_IDS), {}


def _cut_at(place: IdPlace, length: int) -> IdPlace:
    """The place of this length, at or above. It lies within the ids of one chain link, so the walk is short."""
    while place.parent is not None and place.parent.length >= length:
        place = place.parent
    if place.length == length or place.parent is None:
        return place
    return _split(place, length - place.parent.length)


def _below(place: IdPlace, ids: Ids) -> IdPlace:
    """The place after these further ids."""
    at = 0
    while at < len(ids):
        child = place.child(int(ids[at]))
        if child is None:
            return IdPlace(place, ids[at:])
        shared = common_prefix(child.ids, ids[at:])
        place = child if shared == len(child.ids) else _split(child, shared)
        at += shared
    return place


def _split(place: IdPlace, count: int) -> IdPlace:
    """A new place after the first `count` of a place's own ids."""
    middle = IdPlace(place.parent, place.ids[:count])
    place.ids, place.parent = place.ids[count:], middle
    middle.adopt(place)
    return middle
