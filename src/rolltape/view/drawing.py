"""A session's tree laid out: which branch each turn is drawn on, and in which lane."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from rolltape.tree import PlacedTurn, Tree


class Branch(NamedTuple):
    """A way from the first turn to one that nothing follows."""

    turns: tuple[PlacedTurn, ...]
    main: bool  # it holds the session's last turn


class Layout(NamedTuple):
    """Per turn, by sequence number: its branch (the first that holds it), its lane, and how deep it lies."""

    branches: Sequence[Branch]
    branch: dict[int, int]
    lane: dict[int, int]
    depth: dict[int, int]


def laid_out(tree: Tree) -> Layout:
    """The main branch first and in lane 0, then the others as they end."""
    depth: dict[int, int] = {}
    for placed in tree.turns:
        depth[placed.sequence] = 0 if placed.parent is None else depth[placed.parent.sequence] + 1
    ends = [placed for placed in tree.turns if not placed.children]
    main = next((one for one in reversed(tree.turns) if one.turn.facts.auxiliary is None), None)
    while main is not None and main.children:
        main = main.children[-1]
    ends.sort(key=lambda end: (end is not main, end.sequence))
    branches = [Branch(_way_to(end), end is main) for end in ends]
    branch: dict[int, int] = {}
    own: list[list[int]] = []  # the turns of each branch that no earlier one holds
    for number, one in enumerate(branches):
        fresh = [placed.sequence for placed in one.turns if placed.sequence not in branch]
        own.append(fresh)
        branch.update(dict.fromkeys(fresh, number))
    lanes = _lanes(own)
    return Layout(branches, branch, {sequence: lanes[number] for sequence, number in branch.items()}, depth)


def _way_to(end: PlacedTurn) -> tuple[PlacedTurn, ...]:
    way: list[PlacedTurn] = []
    at: PlacedTurn | None = end
    while at is not None:
        way.append(at)
        at = at.parent
    return tuple(reversed(way))


def _lanes(own: Sequence[Sequence[int]]) -> dict[int, int]:
    """A lane for each branch: a lane is free again after the last turn that is drawn in it. The first keeps lane 0."""
    lanes = {0: 0}
    free: list[int] = []
    used: list[tuple[int, int]] = []  # the last turn in a lane, and the lane
    count = 1
    for number in sorted(range(1, len(own)), key=lambda one: own[one][0]):
        first, last = own[number][0], own[number][-1]
        while used and used[0][0] < first:
            heapq.heappush(free, heapq.heappop(used)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        lanes[number] = lane
        heapq.heappush(used, (last, lane))
    return lanes
