"""Match a request's history with the turns of its session: which turn it continues, and what is new after it."""

import enum
import itertools
import marshal
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rolltape.gateway.request import ChatRequest
from rolltape.gateway.turn.echo import EchoRule, is_text_alone, match_echo, match_part
from rolltape.records.messages import Message, Role, Root
from rolltape.records.turn import NO_IDS, Delivery, Finish, Ids, Turn
from rolltape.tree.placement import PlacedTurn, Tree
from rolltape.tree.places import Node

if TYPE_CHECKING:
    from rolltape.gateway.turn.prompting import Prompt


class PrefixMiss(enum.StrEnum):
    """Why no turn of the session is a prefix of a request's history."""

    FIRST_TURN = "first_turn"  # no turn in this session yet
    NO_REPLY = "no_reply"  # the history has no reply: another conversation, or a new beginning
    TOOLS_CHANGED = "tools_changed"  # no turn has these tools and template options
    REPLY_CHANGED = "reply_changed"  # the assistant message after the known part equals no reply there
    HISTORY_CHANGED = "history_changed"  # a message before a reply has changed


class _Starts(NamedTuple):
    """Where the messages of a prompt begin: the first `kept` of an earlier turn, then its own."""

    base: Turn | None
    kept: int
    own: tuple[int, ...]


class HistoryMatch(NamedTuple):
    """A request's history, with each echo replaced by the reply that it stands for."""

    root: Root
    messages: list[Message]
    turn: Turn | None  # the turn that it continues: its last reply is that turn's; None: see prefix_miss
    new: int  # how many messages at the end are new after that turn
    replies: Mapping[int, Turn]  # by message index: the turns that sampled these messages
    prefix_miss: PrefixMiss | None
    echoes: tuple[EchoRule, ...]
    cut_from: Turn | None = None  # if a part of the reply came back: the turn in which that reply began


def keyed(request: ChatRequest, body_bytes: int = 0) -> ChatRequest:
    """A request with tool results in the order of their calls, the keys of its messages, and its digest."""
    messages = in_call_order(request.messages)
    keys = tuple(map(_key, messages))
    if request.prompt is not None:
        keys = (_key((request.prompt.text, request.prompt.ids, request.prompt.add_special_tokens)),)
    return msgspec.structs.replace(request, messages=messages, message_keys=keys, body_bytes=body_bytes).with_digest()


class History:
    """The live tree of one session: searched before each turn, extended after it."""

    def __init__(self, *, tool_ids_matter: bool, deliveries: Mapping[str, Delivery]) -> None:
        """`deliveries` has the known deliveries by turn id."""
        self._deliveries = deliveries
        self._tree = Tree(tool_ids_matter=tool_ids_matter)
        self._starts: dict[int, _Starts | None] = {}  # by sequence number; None if unknown
        self._rendered: tuple[Turn | None, tuple[int, ...]] = (None, ())  # the last turn rendered in full, its starts
        self._latest: tuple[Turn | None, Ids] = (None, NO_IDS)  # the last turn, and the ids of its prompt
        self._begun = 0  # turns that continue no other
        self._messages: dict[bytes, Message] = {}  # by a digest of their value, since histories repeat
        self._roots: dict[bytes, Root] = {}
        self._aliases: dict[tuple[Node, int, bytes], tuple[Node, tuple[EchoRule, ...]]] = {}

    def add(self, turn: Turn, prompt: "Prompt") -> bool:
        """Add a recorded turn. Return whether the session forked there."""
        self._starts[turn.sequence] = self._new_starts(turn, prompt)
        self._latest = turn, prompt.ids
        placed = self._tree.add(turn)
        if placed.parent is not None:
            return len(placed.parent.children) > 1
        self._begun += 1
        return self._begun > 1

    def held_ids(self, turn: Turn) -> list[Ids]:
        """The ids of a turn's prompt and reply, in one array or two."""
        # Most requests continue the last turn. Joining the pieces of a long chain takes longer than placing the turn.
        latest, prompt_ids = self._latest
        return [prompt_ids, turn.sampled_ids] if latest is turn else [turn.tokens.to_numpy()]

    def restore(self, turn: Turn) -> None:
        """Add a turn that an earlier gateway recorded. The starts of its messages are unknown."""
        self._starts[turn.sequence] = None
        self._begun += self._tree.add(turn).parent is None

    def message_starts(self, turn: Turn) -> list[int] | None:
        """Where each message of a turn's prompt begins, or None if unknown."""
        parts: list[Sequence[int]] = []
        at: Turn | None = turn
        wanted = len(turn.prompt)
        while at is not None and wanted:
            known = self._starts.get(at.sequence)
            if known is None:
                return None
            parts.append(known.own[: max(wanted - known.kept, 0)])
            at, wanted = known.base, min(wanted, known.kept)
            if at is not None and wanted > len(at.prompt):
                parts.append((len(at.prompt_tokens),))
                wanted = len(at.prompt)
        return list(itertools.chain.from_iterable(reversed(parts)))

    def _new_starts(self, turn: Turn, prompt: "Prompt") -> "_Starts | None":
        given, after, base = prompt.new.message_starts, prompt.after, prompt.base
        if given is None:
            return None
        if after is not None:
            return _Starts(after, len(after.messages), tuple(len(after.tokens) + start for start in given))
        if base is not None:
            return _Starts(base, len(base.prompt), given[len(base.prompt) :])
        # Successive prompts rendered in full mostly begin alike, so each stores only its new starts.
        (last, starts), self._rendered = self._rendered, (turn, given)
        shared = next((at for at, pair in enumerate(zip(starts, given, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(starts), len(given)) if shared is None else shared
        return _Starts(last, kept, given[kept:])

    def close(self) -> None:
        """Free the tree."""
        self._starts.clear()
        self._rendered = (None, ())
        self._latest = (None, NO_IDS)
        self._tree.take_apart()
        self._aliases.clear()

    def longest_held(self, ids: Ids) -> Turn | None:
        """The turn without messages whose ids are the longest prefix of these ids; the latest of equals.

        A turn with messages does not count, since the next turn would inherit its messages.
        """
        if not self._tree.turns:
            return None
        places = self._tree.ids.get(self._tree.turns[-1].sampler)
        held = (placed.turn for place in (places.held_in(ids) if places else ()) for placed in reversed(place.replies))
        return next((turn for turn in held if not len(turn.messages)), None)

    def place(self, request: ChatRequest, tools: object, options: dict[str, Any]) -> HistoryMatch:
        """Match a request's messages with the tree, from the root on."""
        root = self._root(tools, options)
        given = [self._message(*one) for one in zip(request.messages, request.message_keys, itertools.count())]
        node = self._tree.roots.get(root.digest)
        if node is None:
            miss = PrefixMiss.TOOLS_CHANGED if self._tree.turns else PrefixMiss.FIRST_TURN
            return HistoryMatch(root, given, None, len(given), {}, miss, ())
        return self._followed(root, node, given)

    def _followed(self, root: Root, node: Node, given: list[Message]) -> HistoryMatch:
        read: list[Message] = []
        rules: list[EchoRule] = []
        apart: Message | None = None  # a reply whose text is still to come, as the assistant's next message
        replies: dict[int, Turn] = {}
        parts: dict[int, PlacedTurn] = {}  # by message index: replies that came back in part
        known = True
        for message in given:
            if apart is not None and _is_assistant(message):
                text_of, apart = apart, None
                if is_text_alone(message, text_of):
                    continue
            below = node.child(message) if known else None
            if below is None and known and _is_assistant(message):
                alias = self._echoed(node, message)
                if alias is not None:
                    below, by = alias
                    rules += by
                    reply = _continued(below, message).reply
                    assert reply is not None
                    if EchoRule.TEXT_APART in by:
                        apart = reply
                    message = reply
            if known and _is_assistant(message) and (below is None or not below.replies):
                part = self._echoed_part(node, message)
                if part is not None:
                    parts[len(read)], by = part
                    replies[len(read)] = part[0].turn
                    rules += by
            read.append(message)
            known = below is not None
            if below is not None:
                node = below
                if node.replies:
                    replies[len(read) - 1] = _continued(node, message)
        last = max(replies, default=None)
        if last is not None and not any(map(_is_assistant, read[last + 1 :])):
            cut_from = _first_of_reply(parts[last]) if last in parts else None
            new = len(read) - last - 1
            return HistoryMatch(root, read, replies[last], new, replies, None, tuple(rules), cut_from)
        return HistoryMatch(root, read, None, len(read), replies, self._prefix_miss(node, read), tuple(rules))

    def _prefix_miss(self, node: Node, read: list[Message]) -> PrefixMiss:
        """Why the history departs from the session at `node`."""
        if node.depth == len(read) or not any(map(_is_assistant, read)):
            return PrefixMiss.NO_REPLY
        asked = node.asked and _is_assistant(read[node.depth])
        return PrefixMiss.REPLY_CHANGED if asked else PrefixMiss.HISTORY_CHANGED

    def _echoed(self, node: Node, message: Message) -> tuple[Node, tuple[EchoRule, ...]] | None:
        # Several replies may fit if they differ only in what the client left out. The echoed id decides, else the
        # latest, as in `_continued`.
        key = (node, len(node.asked), message.canonical_with_ids)
        if key not in self._aliases:
            named = [placed for placed in node.asked if _names(message, placed.turn.reply)]
            for placed in reversed(named or node.asked):
                reply = placed.turn.reply
                rules = None if reply is None else match_echo(message, reply)
                if rules is not None and placed.reply_node is not None:
                    self._aliases[key] = (placed.reply_node, rules)
                    break
        return self._aliases.get(key)

    def _echoed_part(self, node: Node, message: Message) -> tuple[PlacedTurn, tuple[EchoRule, ...]] | None:
        """The latest reply to this prompt that was cut short or not delivered, and that begins with this message."""
        for placed in reversed(node.asked):
            reply, facts = placed.turn.reply, placed.turn.facts
            delivery = self._deliveries.get(placed.turn.id, facts.delivery)
            in_doubt = facts.finish is Finish.ABORT or delivery is not Delivery.DELIVERED
            rules = match_part(message, reply) if in_doubt and reply is not None else None
            if rules is not None:
                return placed, rules
        return None

    def _message(self, message: dict[str, Any], key: bytes, index: int) -> Message:
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = Message.snapshot(message, f"message {index}")
        return found

    def _root(self, tools: object, options: dict[str, Any]) -> Root:
        key = _key((tools, options))
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = Root.snapshot(tools, options or None, "the request")
        return found


def _continued(node: Node, echo: Message) -> Turn:
    """The turn with this reply that an echo means: by the echoed id, else the latest."""
    replies = node.replies
    if len(replies) > 1:
        replies = [placed for placed in replies if _names(echo, placed.turn.reply)] or replies
    return replies[-1].turn


def _first_of_reply(placed: PlacedTurn) -> Turn:
    """The turn in which a reply began, if it was interrupted and resumed by retries."""
    while placed.continues is not None and placed.continues.prompt_node is placed.prompt_node:
        placed = placed.continues
    return placed.turn


def _names(echo: Message, reply: Message | None) -> bool:
    """Whether an echo has an id of the reply."""
    return reply is not None and not reply.wire_ids.isdisjoint(echo.wire_ids)


def _is_assistant(message: Message) -> bool:
    return message.role is Role.ASSISTANT


def _key(value: object) -> bytes:
    # Marshal version 2 writes the same bytes for the same value, at a tenth of the cost of JSON.
    return blake2b(marshal.dumps(value, 2), digest_size=16).digest()  # type: ignore[arg-type]


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages, with each run of tool results sorted in the order of the calls before it.

    Claude Code (2.1) sends the results of parallel calls in the order in which the calls ended.
    """
    if sum(message["role"] == "tool" for message in messages) < 2:
        return list(messages)
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    run: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        ordered += _sorted(run, places)
        run = []
        ordered.append(message)
        if message["role"] == "assistant":
            places = {call.get("id"): place for place, call in enumerate(message.get("tool_calls") or ())}
    return ordered + _sorted(run, places)


def _sorted(run: list[dict[str, Any]], places: dict[str, int]) -> list[dict[str, Any]]:
    """Tool results in the order of their calls; a result with an unknown call stays behind its predecessor."""
    if len(run) < 2:
        return run
    last, keys = -1, []
    for result in run:
        last = places.get(result.get("tool_call_id") or "", last)
        keys.append(last)
    return [result for _, result in sorted(zip(keys, run, strict=True), key=lambda pair: pair[0])]
