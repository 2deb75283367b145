"""Where each turn hangs in its session's tree, and which earlier turn it continues."""

from collections.abc import Sequence

from rolltape.records.messages import Message, MessageChain, Role, Root
from rolltape.records.rollout import Session
from rolltape.records.turn import Turn
from rolltape.tree.nodes import Node


class PlacedTurn:
    """A turn in its tree."""

    __slots__ = (
        "children",
        "known_depth",
        "parent",
        "prompt_node",
        "reply_node",
        "rewritten_as",
        "rewritten_by",
        "shared_tokens",
        "turn",
    )

    def __init__(self, turn: Turn, parent: "PlacedTurn | None", prompt_node: Node, known_depth: int) -> None:
        self.turn = turn
        self.parent = parent  # the turn whose reply its conversation goes on from; None: it starts from nothing sampled
        self.children: list[PlacedTurn] = []
        self.prompt_node = prompt_node
        self.reply_node: Node | None = None  # None: it has no reply
        # Another message in the place of its reply, and the first turn whose prompt holds it; None: there is none.
        self.rewritten_as: Message | None = None
        self.rewritten_by: int | None = None
        self.known_depth = known_depth  # how many of its prompt's messages the tree held before
        self.shared_tokens = parent.turn.tokens.common_prefix(turn.prompt_tokens) if parent else 0

    @property
    def sequence(self) -> int:
        return self.turn.sequence

    @property
    def tip(self) -> Node:
        """The end of its conversation: its reply, or its prompt if it has none."""
        return self.reply_node or self.prompt_node

    @property
    def continued_by(self) -> int | None:
        """The latest turn whose prompt holds its reply, as it was or rewritten in its place."""
        return self.children[-1].sequence if self.children else self.rewritten_by

    @property
    def extends(self) -> bool:
        """Whether its prompt holds every id of the turn that it continues."""
        return self.parent is not None and self.shared_tokens == len(self.parent.turn.tokens)

    def __repr__(self) -> str:
        return f"PlacedTurn({self.turn.id}, parent={self.parent and self.parent.turn.id})"


class Tree:
    """A session's turns hung on its message nodes. Grows by one turn at a time, at the cost of what is new in it."""

    def __init__(self, *, tool_ids_matter: bool = False, tokenizers: Sequence[str] = ()) -> None:
        self.turns: list[PlacedTurn] = []
        self.tokenizers = tokenizers  # where the text of its ids may be found, best first
        self.roots: dict[bytes, Node] = {}  # by digest of tools and template options
        self._tool_ids_matter = tool_ids_matter
        self._by_conversation: dict[bytes, Node] = {}  # the latest node of each, under whatever tools
        # The nodes at the ends of the chains that later prompts are coded against; the turns keep the chains alive.
        self._ends: dict[tuple[int, bytes], Node] = {}

    def add(self, turn: Turn) -> PlacedTurn:
        """Hang a turn on the longest chain of message nodes that the session already knows."""
        start, new_messages = self._known_start(turn)
        node, known = start, start.depth
        for message in new_messages:
            count = len(node.children)
            below = self._below(node, message)
            if len(node.children) == count:
                known = below.depth
            elif known == node.depth:
                _note_rewrite(node, below, message, turn.sequence)
            node = below
        placed = PlacedTurn(turn, _continued(node, turn), node, known)
        if placed.parent is not None:
            placed.parent.children.append(placed)
        node.asked.append(placed)
        if turn.reply is not None:
            placed.reply_node = self._below(node, turn.reply)
            placed.reply_node.replies.append(placed)
        self._ends[id(turn.prompt), turn.root.digest] = node
        self._ends[id(turn.messages), turn.root.digest] = placed.tip
        self.turns.append(placed)
        return placed

    def take_apart(self) -> None:
        """Let go of everything: nodes and turns hold each other, and would wait for the garbage collector."""
        for placed in self.turns:
            placed.parent = None
            placed.children.clear()
            for node in (placed.prompt_node, placed.reply_node):
                while node is not None and node.children:
                    node.children = {}
                    node.asked, node.replies, node.rewrites, node.twin = [], [], None, None
                    node = node.parent
        self.turns, self.roots, self._by_conversation, self._ends = [], {}, {}, {}

    def _repr_html_(self) -> str:
        from rolltape.notebook import tree_html

        return tree_html(self)

    def _known_start(self, turn: Turn) -> tuple[Node, Sequence[Message]]:
        """The deepest node that equal stored messages prove, and the messages that follow it."""
        chain = turn.prompt
        end = self._ends.get((id(chain.parent), turn.root.digest)) if chain.parent is not None else None
        if end is not None:
            return end.ancestor(chain.keep), chain.own
        return self._root(turn.root), chain.to_list()

    def _root(self, root: Root) -> Node:
        found = self.roots.get(root.digest)
        if found is None:
            found = self.roots[root.digest] = Node(None, None, root.digest)
        return found

    def _below(self, node: Node, message: Message) -> Node:
        """The node below for this message, made if it is not there yet."""
        key = self._key(message)
        found = node.children.get(key)
        if found is None:
            found = node.children[key] = Node(node, message, key)
            found.twin = self._by_conversation.get(found.conversation)
            self._by_conversation[found.conversation] = found
        return found

    def _key(self, message: Message) -> bytes:
        return message.canonical_with_ids if self._tool_ids_matter else message.canonical


def tree_of(session: Session) -> Tree:
    """The tree of a session's turns.

    Example:

        tree = rolltape.tree_of(rollout.sessions[0])
    """
    tree = Tree(tool_ids_matter=session.head.tool_ids_matter, tokenizers=session.tokenizers)
    for turn in session.turns:
        tree.add(turn)
    return tree


def _continued(prompt_node: Node, turn: Turn) -> PlacedTurn | None:
    """The turn whose reply is the last sampled one in the prompt's conversation."""
    if prompt_node.asked and _resumes(prompt_node.asked[-1].turn, turn):
        return prompt_node.asked[-1]
    node: Node | None = prompt_node
    while node is not None and not node.replies:
        node = node.parent
    if node is None:
        return None
    if len(node.replies) == 1:
        return node.replies[0]
    return _told_apart(node.replies, message_at(turn.prompt, node.depth - 1), turn)


def _resumes(interrupted: Turn, turn: Turn) -> bool:
    """Whether a turn goes on in the middle of a reply: the same conversation, with what was sampled of it as prompt."""
    if interrupted.reply is not None or not len(interrupted.sampled_ids):
        return False
    return interrupted.tokens.common_prefix(turn.prompt_tokens) == len(interrupted.tokens)


def _told_apart(twins: Sequence[PlacedTurn], echo: Message, turn: Turn) -> PlacedTurn:
    """Which of several turns with equal messages is continued: by echoed id, else by tokens, else the latest."""
    named = [twin for twin in twins if twin.turn.reply is not None and twin.turn.reply.wire_ids & echo.wire_ids]
    if len(named) == 1:
        return named[0]
    return max(
        named or twins, key=lambda twin: (twin.turn.tokens.common_prefix(turn.prompt_tokens), twin.turn.sequence)
    )


def _note_rewrite(place: Node, below: Node, message: Message, sequence: int) -> None:
    """Tie a new assistant message to the reply it stands in for: the only one in its place, and not yet continued."""
    if message.role is not Role.ASSISTANT or len(place.asked) != 1:
        return
    turn = place.asked[0]
    others = (node for node in place.children.values() if node is not below and node is not turn.reply_node)
    if (
        turn.reply_node is None
        or turn.children
        or any(node.message and node.message.role is Role.ASSISTANT for node in others)
    ):
        return
    below.rewrites = turn
    turn.rewritten_as, turn.rewritten_by = message, sequence


def message_at(chain: MessageChain, index: int) -> Message:
    """The message in that place of a conversation."""
    link = chain
    while index < link.keep and link.parent is not None:
        link = link.parent
    return link.own[index - link.keep]
