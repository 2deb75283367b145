"""The latest turn of all that passed through a node, found in logarithmic time."""

from collections.abc import Iterable

from rolltape.tree.nodes import Node


class LatestUnder:
    """Turns are noted in their order; at any time the latest one at or below a node can be asked for."""

    def __init__(self, roots: Iterable[Node]) -> None:
        # A walk that numbers the nodes gives everything below a node as one range of numbers.
        self._first: dict[Node, int] = {}
        self._end: dict[Node, int] = {}
        stack = [(root, False) for root in roots]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                self._end[node] = len(self._first)
                continue
            self._first[node] = len(self._first)
            stack.append((node, True))
            stack.extend((child, False) for child in node.children.values())
        # A tree over those numbers in an array: each place holds the latest turn of the two places below it.
        self._size = len(self._first)
        self._latest = [-1] * (2 * self._size)

    def note(self, node: Node, turn: int) -> None:
        """A turn, later than all before, ends at this node."""
        place = self._first[node] + self._size
        while place:
            self._latest[place] = turn
            place //= 2

    def under(self, node: Node) -> int | None:
        """The latest turn noted at or below the node; None: there is none."""
        left, right = self._first[node] + self._size, self._end[node] + self._size
        latest = -1
        while left < right:
            if left % 2:
                latest = max(latest, self._latest[left])
                left += 1
            if right % 2:
                right -= 1
                latest = max(latest, self._latest[right])
            left //= 2
            right //= 2
        return None if latest < 0 else latest
