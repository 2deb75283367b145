"""Which turns follow which under a cut policy, and which of the branches become samples."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from rolltape.records.policy import Branches, CutPolicy, OnRewrite
from rolltape.records.turn import Finish, Turn
from rolltape.tree import PlacedTurn, Tree


class Step(NamedTuple):
    """The step from one turn to the next by messages: how many tokens stay, and what follows from that."""

    kept: int
    same_sample: bool
    replaces_reply: bool  # the earlier reply stops training as a whole


@dataclass(slots=True, eq=False)
class Link:
    """A turn on its branches: the turn that it follows, and the turn whose sample it continues."""

    turn: Turn
    before: "Link | None"  # None: it starts from nothing sampled
    kept: int  # leading ids that it shares with the turn before
    continues: "Link | None"  # None: its sample starts with its own prompt
    step: Step | None = None  # how it continues that sample although ids drift; None: nothing drifts
    ran_out: bool = False  # whether the next turn of its sample had no room for a reply
    extends: "Link | None" = field(init=False)  # the nearest turn of its sample that its ids extend

    def __post_init__(self) -> None:
        self.extends = self.continues.extends if self.continues and self.step else self.continues


class Branching:
    """A session's turns linked under a policy. `rewritten` turns are demoted: their message came back changed."""

    def __init__(self, links: dict[int, Link], ranks: dict[int, int], rewritten: Set[int]) -> None:
        self.links = links  # by sequence number
        self.rewritten = rewritten
        self._ranks = ranks  # order among turns that follow the same one

    def leaves(self, may_train: Set[int]) -> Iterator[Link]:
        """The last turn that may train on each branch, depth first. A path without such a turn is no branch."""
        followers: dict[int, list[Link]] = {}  # only those that lead to a turn which may train; -1: they follow none
        for sequence, link in reversed(self.links.items()):
            if sequence in may_train or sequence in followers:
                before = -1 if link.before is None else link.before.turn.sequence
                followers.setdefault(before, []).append(link)
        if self._ranks:
            for found in followers.values():
                found.sort(key=lambda link: -self._ranks[link.turn.sequence])
        stack = followers.get(-1, [])
        while stack:
            link = stack.pop()
            if link.turn.sequence in followers:
                stack.extend(followers[link.turn.sequence])
            else:
                yield link

    def ends(self, may_train: Set[int]) -> dict[int, Link | None]:
        """For each turn, the nearest turn at or above it on its branch that may train. A draft ends there."""
        found: dict[int, Link | None] = {}
        for sequence, link in self.links.items():
            above = found[link.before.turn.sequence] if link.before else None
            found[sequence] = link if sequence in may_train else above
        return found


def branching(tree: Tree, left_out: Set[int], heads: Mapping[int, int], policy: CutPolicy) -> Branching:
    """Link each turn to the one before it, absorbing rewritten replies if the policy does so.

    `heads` has, for replies that arrived in part, how many ids arrived. Turns that continue them leave out the rest.
    """
    demoted = _demoted(tree, heads, policy)
    links: dict[int, Link] = {}
    by_messages: dict[int, PlacedTurn | None] = {}  # for each turn the nearest linked one, itself or up its messages
    ranks: dict[int, int] = {}
    for placed in tree.turns:
        if demoted:
            ranks[placed.sequence] = _rank(placed, demoted, ranks)
        above = by_messages[placed.message_parent.sequence] if placed.message_parent else None
        if placed.sequence in left_out or placed.sequence in demoted:
            by_messages[placed.sequence] = above
            continue
        link = _after_head(placed, links, heads) or _linked(placed, links, above, policy)
        links[placed.sequence] = link
        by_messages[placed.sequence] = placed
        if link.continues and not len(link.turn.sampled_ids) and link.turn.facts.finish is Finish.LENGTH:
            link.continues.ran_out = True
    return Branching(links, ranks, demoted)


def chosen_leaves(
    branches: Branching, may_train: Set[int], ends: Mapping[int, Link | None], policy: CutPolicy
) -> list[Link]:
    """The ends of the branches that the policy wants, in the order in which they claim tokens."""
    if policy.branches is Branches.MAIN:
        end = ends[max(ends)] if ends else None
        return [] if end is None else [end]
    leaves = list(branches.leaves(may_train))
    if policy.branches is Branches.ALL or not leaves:
        return leaves
    sampled: dict[int, int] = {}
    for sequence, link in branches.links.items():
        sampled[sequence] = len(link.turn.sampled_ids) + (sampled[link.before.turn.sequence] if link.before else 0)
    return [max(leaves, key=lambda leaf: (sampled[leaf.turn.sequence], -leaf.turn.sequence))]


def path_to(link: Link) -> Sequence[Link]:
    """The turns from the first of a branch to this one."""
    path: list[Link] = []
    at: Link | None = link
    while at is not None:
        path.append(at)
        at = at.before
    return path[::-1]


def _after_head(placed: PlacedTurn, links: dict[int, Link], heads: Mapping[int, int]) -> Link | None:
    """Link a turn to the sample of a reply that arrived in part and whose part its prompt holds, or return None."""
    cut, kept = placed.head_of, placed.head_tokens
    if cut is None or cut.sequence not in links or cut.continues is not placed.continues:
        return None
    if kept - len(cut.turn.prompt_tokens) != heads.get(cut.sequence):
        return None
    before = links[cut.sequence]
    return Link(placed.turn, before, kept, before, Step(kept, True, False))


def _linked(placed: PlacedTurn, links: dict[int, Link], above: PlacedTurn | None, policy: CutPolicy) -> Link:
    """Link a turn to the sample that its ids continue or, over a drift, to the one that its messages continue."""
    turn = placed.turn
    continued = placed.continues
    while continued is not None and continued.sequence not in links:
        continued = continued.continues
    held = links[continued.sequence] if continued else None
    by_messages = _message_link(placed, links, above, policy)
    if by_messages is None or by_messages is held:
        return Link(turn, held, len(held.turn.tokens) if held else 0, held)
    step = step_between(by_messages.turn, turn, policy)
    # Where nothing drifts, the turn that it continues has the same ids, or more of them.
    drifts = step.kept < len(by_messages.turn.tokens)
    if step.same_sample and (held is None or (drifts and len(held.turn.tokens) <= len(by_messages.turn.prompt_tokens))):
        return Link(turn, by_messages, step.kept, by_messages, step)
    if held is not None and (by_messages.extends is not held or step.kept <= len(held.turn.tokens)):
        return Link(turn, held, len(held.turn.tokens), held)
    return Link(turn, by_messages, step.kept, held)


def step_between(held: Turn, following: Turn, policy: CutPolicy) -> Step:
    """Compare a prompt with the turn before it and decide by the policy whether the sample continues."""
    kept = held.tokens.common_prefix(following.prompt_tokens)
    given_up = len(held.tokens) - kept
    if not given_up:
        return Step(kept, True, False)
    if kept < len(held.prompt_tokens):  # it rewrites history; ids of the generation prompt count as history
        return Step(kept, False, False)
    if policy.on_rewrite is OnRewrite.REPLACE_REPLY:
        goes_on = len(following.sampled_ids) < policy.max_reply_tokens
        return Step(kept, goes_on, goes_on)
    return Step(kept, policy.on_rewrite is OnRewrite.KEEP_HEAD and given_up <= policy.max_given_up_tokens, False)


def _message_link(
    placed: PlacedTurn, links: dict[int, Link], above: PlacedTurn | None, policy: CutPolicy
) -> Link | None:
    """The turn that this one follows by its messages: one whose rewritten reply the policy absorbs, else its parent."""
    node = placed.prompt_node.rewritten
    if policy.absorb_rewritten_messages and policy.on_rewrite is OnRewrite.KEEP_HEAD and node is not None:
        changed = node.rewrites
        if (
            changed is not None
            and changed.sequence in links
            and changed.sampler == placed.sampler
            and not placed.prompt_node.is_answered_below(node)
            and step_between(changed.turn, placed.turn, policy).same_sample
        ):
            return links[changed.sequence]
    return links[above.sequence] if above is not None and above.sampler == placed.sampler else None


def _demoted(tree: Tree, heads: Mapping[int, int], policy: CutPolicy) -> Set[int]:
    """Slime's merge: a short reply whose message came back changed, with other ids, stops training and is left out."""
    if not policy.absorb_rewritten_messages or policy.on_rewrite is not OnRewrite.REPLACE_REPLY:
        return frozenset()
    return {
        placed.sequence
        for placed in tree.turns
        if placed.rewritten
        and not placed.continuations
        and placed.sequence not in heads
        and len(placed.turn.sampled_ids) < policy.max_reply_tokens
    }


def _rank(placed: PlacedTurn, demoted: Set[int], ranks: dict[int, int]) -> int:
    """The place of a turn among its siblings. A turn that continues a demoted one takes its place, as in slime."""
    node = placed.prompt_node.rewritten
    changed = node.rewrites if node is not None else None
    if changed is None or node is None or changed.sequence not in demoted:
        return placed.sequence
    return placed.sequence if placed.prompt_node.is_answered_below(node) else ranks[changed.sequence]
