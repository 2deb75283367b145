"""Places in ids: a radix tree of every prompt, and of every prompt with its reply, that a session holds."""

from typing import TYPE_CHECKING

from rolltape.records.turn import NO_IDS, Ids, TokenChain, common_prefix
from rolltape.tree.nodes import Place

if TYPE_CHECKING:
    from rolltape.tree.placement import PlacedTurn


class IdPlace(Place):
    """A beginning of ids: what its parent holds, then `ids`."""

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
    """Finds the place of a sequence at the cost of what it does not share with the one that it is stored against."""

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
        """Add a turn's reply where its ids end, and give that place."""
        place = self.place(placed.turn.tokens)
        self._stamp += place.add_reply(placed)
        return place

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
    """The place above that is so long. It lies within what one link of a chain added, so the way is short."""
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
