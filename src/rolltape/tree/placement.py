"""Places each turn in its session's tree: which earlier turn its ids continue, and which its messages follow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rolltape.records.messages import Message, MessageChain, Role, Root
from rolltape.records.rollout import Session
from rolltape.records.turn import Delivery, Turn, TurnFlag
from rolltape.tree.places import IdPlace, IdTree, Node, SharedPrefix, with_turn

# If more turns than this have equal ids or messages, the earlier ones are found by an echoed id only.
_MOST_EQUALS = 64
Sampler = tuple[str | None, str | None]


@dataclass(slots=True, eq=False)
class PlacedTurn:
    """A turn in its tree."""

    turn: Turn
    prompt_node: Node
    known_depth: int  # how many of its prompt's messages the tree held before
    reply_node: Node | None = None  # None: it has no reply message
    id_place: IdPlace | None = None  # of its prompt; None: its ids are not the engine's, or it has no prompt
    asked_place: IdPlace | None = None  # the nearest place, at or above that, where an earlier task prompt ends
    reply_place: IdPlace | None = None  # of its prompt and reply, if it is of the task
    # By ids: the turn whose prompt and reply its prompt begins with, and the turns that continue it in this way.
    continues: "PlacedTurn | None" = None
    continuations: "Sequence[PlacedTurn]" = ()
    first_continuation: "PlacedTurn | None" = None  # of the task
    # By ids: the turn whose reply its prompt holds in part, from the reply's start, and how many ids they share.
    head_of: "PlacedTurn | None" = None
    head_tokens: int = 0
    # By messages: the turn whose reply is the last sampled one in its prompt, and the turns that hold its reply so.
    message_parent: "PlacedTurn | None" = None
    echoes: "Sequence[PlacedTurn]" = ()  # without those that also continue it by ids
    first_echo: "PlacedTurn | None" = None  # of the task, also if it continues this turn by ids
    rewritten: bool = False  # another message replaced its reply before any turn continued from the reply
    # `continues` or `message_parent`: the one that shares more ids with its prompt. None: it has neither.
    parent: "PlacedTurn | None" = None
    shared_tokens: int = 0  # leading ids that its prompt shares with its parent's prompt and reply

    @property
    def sequence(self) -> int:
        return self.turn.sequence

    @property
    def is_task(self) -> bool:
        """Whether it is a part of the task, and no auxiliary call."""
        return self.turn.facts.auxiliary is None

    @property
    def sampler(self) -> Sampler:
        """The model and the fingerprint of its tokenizer. Turns with different samplers never share a sample."""
        return (self.turn.facts.model, self.turn.facts.fingerprint)

    @property
    def tip(self) -> Node:
        """The end of its conversation: its reply, or its prompt if it has none."""
        return self.reply_node or self.prompt_node

    @property
    def children(self) -> "list[PlacedTurn]":
        """The turns whose parent it is, in order."""
        found = (one for one in (*self.continuations, *self.echoes) if one.parent is self)
        return sorted(found, key=lambda one: one.sequence)

    @property
    def came_back(self) -> bool:
        """Whether a later prompt holds its reply, by ids or as a message."""
        return bool(self.continuations or self.echoes)

    def had_ended(self, asked: Turn, *, shown: bool = False) -> bool:
        """Whether its reply had ended when a later turn was requested: by times, or by recorded order if unknown.

        `shown` means that the later prompt holds the reply. Then a start in whole seconds may lie anywhere within that
        second, because some programs cut off the fraction.
        """
        started_at, ended_at = asked.facts.started_at, self.turn.facts.ended_at
        if started_at is None or ended_at is None:
            return True
        return ended_at <= (_latest_start(started_at) if shown else started_at)

    def __repr__(self) -> str:
        return f"PlacedTurn({self.turn.id}, parent={self.parent and self.parent.turn.id})"


class Tree:
    """A session's turns by their ids and messages. It grows turn by turn; each turn costs only what is new in it."""

    def __init__(self, *, tool_ids_matter: bool = False, tokenizers: Sequence[str] = ()) -> None:
        self.turns: list[PlacedTurn] = []
        self.tokenizers = tokenizers  # where the text of its ids may be found, best first
        self.tool_ids_matter = tool_ids_matter
        self.roots: dict[bytes, Node] = {}  # by digest of tools and template options
        self.ids: dict[Sampler, IdTree] = {}  # ids of different models or tokenizers are never compared
        self._stamp = 0  # of the message nodes
        self._earliest_end = math.inf  # of all turns so far
        self._by_wire_id: dict[str, PlacedTurn | None] = {}  # of the first turns; None: several have that id
        self._wire_ids_read = 0  # how many turns these are
        # The nodes at the ends of the chains that later prompts are coded against; the turns keep the chains alive.
        self._ends: dict[tuple[int, bytes], Node] = {}

    def add(self, turn: Turn) -> PlacedTurn:
        """Find the places of a turn's prompt among messages and ids, find the turns it continues, and add its reply."""
        placed = PlacedTurn(turn, *self._prompt_node(turn))
        ids = None
        if len(turn.prompt_tokens) and TurnFlag.NOT_TOKEN_FAITHFUL not in turn.facts.flags:
            ids = self.ids.setdefault(placed.sampler, IdTree())
            placed.id_place = ids.place(turn.prompt_tokens)
            placed.continues = self._continued(placed, ids)
            placed.head_of, placed.head_tokens = self._head_of(placed, placed.id_place)
        placed.message_parent = self._message_parent(placed)
        _join_parents(placed)
        if not placed.prompt_node.depth:
            placed.asked_place = _nearest_asked(placed.id_place)
        if placed.is_task:
            parent, before = placed.message_parent, placed.continues
            _note_passed(placed.prompt_node, placed, parent, parent.prompt_node if parent else None)
            if placed.prompt_node.depth:
                placed.prompt_node.asked = with_turn(placed.prompt_node.asked, placed)
            if ids is not None and placed.id_place is not None:
                _note_passed(placed.id_place, placed, before, before.id_place if before else None)
                placed.id_place.asked = with_turn(placed.id_place.asked, placed)
                placed.reply_place = ids.add_reply(placed)
        if turn.reply is not None:
            node = placed.prompt_node
            placed.reply_node = node.child(turn.reply) or Node(node, turn.reply, turn)
            self._stamp += placed.reply_node.add_reply(placed)
        self._ends[id(turn.prompt), turn.root.digest] = placed.prompt_node
        self._ends[id(turn.messages), turn.root.digest] = placed.tip
        ended_at = turn.facts.ended_at
        self._earliest_end = min(self._earliest_end, -math.inf if ended_at is None else ended_at)
        self.turns.append(placed)
        return placed

    def take_apart(self) -> None:
        """Release everything. Nodes and turns refer to each other, so they would wait for the garbage collector."""
        for placed in self.turns:
            placed.parent = placed.continues = placed.head_of = placed.message_parent = placed.id_place = None
            placed.continuations = placed.echoes = ()
            placed.first_continuation = placed.first_echo = placed.asked_place = placed.reply_place = None
            node: Node | None = placed.tip
            while node is not None and node.parent is not None:
                above = node.parent
                node.let_go()
                node.rewrites = node.rewritten = None
                node = above
        for root in self.roots.values():
            root.let_go()
        for ids in self.ids.values():
            ids.take_apart()
        self.turns, self.roots, self.ids, self._ends, self._by_wire_id = [], {}, {}, {}, {}

    def _repr_html_(self) -> str:
        from rolltape.notebook import tree_html

        return tree_html(self)

    def _prompt_node(self, turn: Turn) -> tuple[Node, int]:
        """Return the node of a turn's whole prompt, made if it is new, and how many of its messages were known."""
        node, new_messages = self._known_start(turn)
        known = node.depth
        for message in new_messages:
            below = node.child(message) or Node(node, message, turn)
            if below.since is not turn:
                known = below.depth
            elif known == node.depth:
                _note_rewrite(node, below, message)
            node = below
        return node, known

    def _known_start(self, turn: Turn) -> tuple[Node, Sequence[Message]]:
        """The deepest node that the shared storage of messages proves, and the messages that follow it."""
        chain = turn.prompt
        end = self._ends.get((id(chain.parent), turn.root.digest)) if chain.parent is not None else None
        if end is not None:
            return end.ancestor(chain.keep), chain.own
        return self._root(turn.root), chain.to_list()

    def _root(self, root: Root) -> Node:
        found = self.roots.get(root.digest)
        if found is None:
            found = self.roots[root.digest] = Node(None, None, None, root.digest, self.tool_ids_matter)
        return found

    def _continued(self, placed: PlacedTurn, ids: IdTree) -> PlacedTurn | None:
        """The ended turn of the same sampler with the longest prompt and reply that this prompt begins with."""
        place = ids.sampled(placed.id_place) if self._any_ended(placed) else None
        while place is not None:
            if equals := self._ended(place.replies, placed):
                return max(equals, key=lambda one: _evidence(one, placed)) if len(equals) > 1 else equals[0]
            place = ids.sampled(place.parent)
        return None

    def _head_of(self, placed: PlacedTurn, prompt_end: IdPlace) -> tuple[PlacedTurn | None, int]:
        """The turn whose reply the prompt holds in part, from the reply's start, and how many ids they share.

        Only turns of the longest earlier prompt that this prompt extends are considered. If this prompt continues a
        reply to that earlier prompt, it holds that reply and no part of another.
        """
        held = len(placed.continues.turn.tokens) if placed.continues else 0
        place = prompt_end.parent
        while place is not None and not place.asked and place.length > held:
            place = place.parent
        if place is None or place.length < held or not place.asked:
            return None, 0
        prompt = placed.turn.prompt_tokens
        shared = [(one.turn.tokens.common_prefix(prompt), one) for one in self._ended(place.asked, placed)]
        begun = [(count, one) for count, one in shared if count > place.length]
        if not begun:
            return None, 0
        count, found = max(begun, key=lambda one: (one[0], _evidence(one[1], placed)))
        return found, count

    def _message_parent(self, placed: PlacedTurn) -> PlacedTurn | None:
        """The turn whose reply is the last sampled one in the prompt's conversation."""
        node = placed.prompt_node.sampled(self._stamp) if self._any_ended(placed) else None
        while node is not None:
            if equals := self._ended(node.replies, placed):
                return equals[0] if len(equals) == 1 else _echoed_twin(equals, placed)
            node = node.parent.sampled(self._stamp) if node.parent else None
        return None

    def _any_ended(self, placed: PlacedTurn) -> bool:
        """Whether any turn had ended when this one was requested. If a clock is wrong, possibly none had."""
        started_at = placed.turn.facts.started_at
        return started_at is None or _latest_start(started_at) >= self._earliest_end

    def _ended(self, equals: Sequence[PlacedTurn], placed: PlacedTurn) -> list[PlacedTurn]:
        """The turns of `equals` that had ended when `placed` was requested. Its prompt holds at least part of each.

        The latest come first. Only the latest `_MOST_EQUALS` are returned, and those that an echoed id names.
        """
        ended = list(islice((one for one in reversed(equals) if one.had_ended(placed.turn, shown=True)), _MOST_EQUALS))
        if len(ended) == _MOST_EQUALS:
            # A turn that an echoed id names is considered, however early it was.
            depth = equals[-1].prompt_node.depth
            message = message_at(placed.turn.prompt, depth) if depth < len(placed.turn.prompt) else None
            for wire_id in message.wire_ids if message else ():
                named = self._with_wire_id(wire_id)
                if named is None or named not in equals or named in ended:
                    continue
                if named.had_ended(placed.turn, shown=True):
                    ended.append(named)
        return ended

    def _with_wire_id(self, wire_id: str) -> PlacedTurn | None:
        """The only turn whose reply carries this id, or None if there is none or more than one."""
        for placed in islice(self.turns, self._wire_ids_read, None):
            for own in placed.turn.reply.wire_ids if placed.turn.reply else ():
                self._by_wire_id[own] = None if own in self._by_wire_id else placed
        self._wire_ids_read = len(self.turns)
        return self._by_wire_id.get(wire_id)


def tree_of(session: Session) -> Tree:
    """The tree of a session's turns.

    Example:

        tree = rolltape.tree_of(rollout.sessions[0])
    """
    tree = Tree(tool_ids_matter=session.head.tool_ids_matter, tokenizers=session.tokenizers)
    for turn in session.turns:
        tree.add(turn)
    return tree


def _latest_start(started_at: float) -> float:
    """The latest time that a recorded start may stand for."""
    return started_at if started_at % 1 else math.nextafter(started_at + 1, 0)


def _evidence(one: PlacedTurn, placed: PlacedTurn) -> tuple[bool, bool, bool, int]:
    """The key that chooses among turns with equal ids: an echoed id, then messages, delivery, and the latest turn."""
    is_echoed = placed.prompt_node.ancestor(one.tip.depth) is one.tip
    is_delivered = one.turn.facts.delivery is Delivery.DELIVERED
    return (_is_named(one, placed.turn), is_echoed, is_delivered, one.sequence)


def _echoed_twin(twins: Sequence[PlacedTurn], placed: PlacedTurn) -> PlacedTurn:
    """Which of several turns with equal messages is echoed: by echoed id, else by ids, else the latest."""
    named = [twin for twin in twins if _is_named(twin, placed.turn)]
    if len(named) == 1:
        return named[0]
    if placed.continues is not None and placed.continues in (named or twins):
        return placed.continues
    prompt = placed.turn.prompt_tokens
    return max(named or twins, key=lambda twin: (twin.turn.tokens.common_prefix(prompt), twin.sequence))


def _is_named(one: PlacedTurn, by: Turn) -> bool:
    """Whether the prompt's message in the place of a turn's reply carries an id of that reply."""
    place, reply = one.prompt_node.depth, one.turn.reply
    if reply is None or not reply.wire_ids or place >= len(by.prompt):
        return False
    return not reply.wire_ids.isdisjoint(message_at(by.prompt, place).wire_ids)


def _join_parents(placed: PlacedTurn) -> None:
    """Link a turn to the turns that it continues."""
    by_ids, by_messages = placed.continues, placed.message_parent
    shared_by_ids = len(by_ids.turn.tokens) if by_ids else 0
    placed.parent, placed.shared_tokens = by_ids, shared_by_ids
    if by_ids is not None:
        by_ids.continuations = with_turn(by_ids.continuations, placed)
        if by_ids.first_continuation is None and placed.is_task:
            by_ids.first_continuation = placed
    if by_messages is not None and by_messages.first_echo is None and placed.is_task:
        by_messages.first_echo = placed
    if by_messages is not None and by_messages is not by_ids:
        by_messages.echoes = with_turn(by_messages.echoes, placed)
        shared = by_messages.turn.tokens.common_prefix(placed.turn.prompt_tokens)
        if by_ids is None or shared > shared_by_ids:
            placed.parent, placed.shared_tokens = by_messages, shared


def _note_passed(
    place: SharedPrefix, placed: PlacedTurn, held: PlacedTurn | None, asked_at: SharedPrefix | None
) -> None:
    """Note at the nearest asked place above that `placed` passed it, unless it holds the reply of the only turn there.

    Places further up were passed by the turns that were asked in between.
    """
    at = None if place is asked_at else place.parent
    while at is not None and at is not asked_at and not at.asked:
        at = at.parent
    if at is not None and at.asked and (len(at.asked) > 1 or at.asked[0] is not held):
        at.passed = with_turn(at.passed, placed)


def _nearest_asked(place: IdPlace | None) -> IdPlace | None:
    while place is not None and not place.asked:
        place = place.parent
    return place


def _note_rewrite(place: Node, below: Node, message: Message) -> None:
    """Link a new assistant message to the reply it replaces, if that is the only one there and not yet continued."""
    if message.role is not Role.ASSISTANT or len(place.asked) != 1:
        return
    turn = place.asked[0]
    others = (node for node in place.below if node is not below and node is not turn.reply_node)
    if (
        turn.reply_node is None
        or turn.came_back
        or any(node.message and node.message.role is Role.ASSISTANT for node in others)
    ):
        return
    below.rewrites, below.rewritten, turn.rewritten = turn, below, True


def message_at(chain: MessageChain, index: int) -> Message:
    """The message in that place of a conversation."""
    link = chain
    while index < link.keep and link.parent is not None:
        link = link.parent
    return link.own[index - link.keep]
