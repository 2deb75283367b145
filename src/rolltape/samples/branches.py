"""Which turns follow which under a policy, and which of the branches become samples."""

from collections.abc import Iterator, Sequence, Set

from rolltape.records.policy import Branches, CutPolicy, OnRewrite
from rolltape.records.turn import Turn
from rolltape.samples.drift import Step, step_between
from rolltape.tree import Node, PlacedTurn, Tree


class Link:
    """A turn on its branches: the turn before it under the policy, and the step from there."""

    __slots__ = ("before", "followers", "step", "turn")

    def __init__(self, turn: Turn, before: "Link | None", step: Step | None) -> None:
        self.turn = turn
        self.before = before
        self.step = step  # None: nothing comes before
        self.followers: list[Link] = []

    @property
    def continues(self) -> "Link | None":
        """The turn before, if both are in one sample."""
        return self.before if self.step is not None and self.step.same_sample else None


class Branching:
    """A session's turns linked under a policy. `rewritten` are those that the policy demotes for a changed echo."""

    def __init__(self, links: dict[int, Link], rewritten: frozenset[int]) -> None:
        self.links = links  # by sequence number
        self.rewritten = rewritten

    def leaves(self, may_train: Set[int]) -> Iterator[Link]:
        """The last turn that may train on each branch, depth first; what leads to none is no branch."""
        leads_on: set[int] = set()
        for sequence in reversed(self.links):
            if sequence in may_train or any(link.turn.sequence in leads_on for link in self.links[sequence].followers):
                leads_on.add(sequence)
        stack = [link for link in reversed(self.links.values()) if link.before is None]
        while stack:
            link = stack.pop()
            followers = [follower for follower in link.followers if follower.turn.sequence in leads_on]
            if not followers and link.turn.sequence in leads_on:
                yield link
            stack.extend(reversed(followers))

    def main_end(self, may_train: Set[int]) -> Link | None:
        """The last turn that may train on the way to the session's last turn."""
        link = self.links[max(self.links)] if self.links else None
        while link is not None and link.turn.sequence not in may_train:
            link = link.before
        return link


def branching(tree: Tree, left_out: frozenset[int], policy: CutPolicy) -> Branching:
    """Link each turn to the one before it, absorbing rewritten replies as the policy says."""
    rewritten = _demoted(tree, policy)
    links: dict[int, Link] = {}
    for placed in tree.turns:
        if placed.sequence in left_out or placed.sequence in rewritten:
            continue
        before = _turn_before(placed, links, policy)
        step = step_between(before.turn, placed.turn, policy) if before else None
        link = links[placed.sequence] = Link(placed.turn, before, step)
        if before is not None:
            before.followers.append(link)
    return Branching(links, rewritten)


def chosen_leaves(branches: Branching, may_train: Set[int], policy: CutPolicy) -> list[Link]:
    """The ends of the branches that the policy wants, in the order in which they claim tokens."""
    if policy.branches is Branches.MAIN:
        end = branches.main_end(may_train)
        return [] if end is None else [end]
    leaves = list(branches.leaves(may_train))
    if policy.branches is Branches.ALL or not leaves:
        return leaves
    sampled: dict[int, int] = {}
    for sequence, link in branches.links.items():
        sampled[sequence] = len(link.turn.sampled_ids) + (sampled[link.before.turn.sequence] if link.before else 0)
    return [max(leaves, key=lambda leaf: (sampled[leaf.turn.sequence], -leaf.turn.sequence))]


def _demoted(tree: Tree, policy: CutPolicy) -> frozenset[int]:
    """Slime's merge: a short reply whose message came back changed stops training and leaves its branch."""
    if not policy.absorb_rewritten_messages or policy.on_rewrite is not OnRewrite.REPLACE_REPLY:
        return frozenset()
    return frozenset(
        placed.sequence
        for placed in tree.turns
        if placed.rewritten_by is not None and len(placed.turn.sampled_ids) < policy.max_reply_tokens
    )


def _turn_before(placed: PlacedTurn, links: dict[int, Link], policy: CutPolicy) -> Link | None:
    """The turn that this one follows: one whose rewritten reply the policy absorbs, else its parent."""
    absorbs = policy.absorb_rewritten_messages and policy.on_rewrite is not OnRewrite.REPLACE_REPLY
    node: Node | None = placed.prompt_node if absorbs else None
    while node is not None and not node.replies:
        changed = node.rewrites
        if changed is not None and changed.sequence in links and _is_small_loss(changed.turn, placed.turn, policy):
            return links[changed.sequence]
        node = node.parent
    parent = placed.parent
    while parent is not None and parent.sequence not in links:
        parent = parent.parent
    return links[parent.sequence] if parent is not None else None


def _is_small_loss(changed: Turn, following: Turn, policy: CutPolicy) -> bool:
    kept = changed.tokens.common_prefix(following.prompt_tokens)
    return kept >= len(changed.prompt_tokens) and len(changed.tokens) - kept <= policy.max_given_up_tokens


def path_to(link: Link) -> Sequence[Link]:
    """The turns from the first of a branch to this one."""
    path: list[Link] = []
    at: Link | None = link
    while at is not None:
        path.append(at)
        at = at.before
    return path[::-1]
