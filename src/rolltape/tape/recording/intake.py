"""A caller's fields → a Turn: checked, copied, coded against an earlier turn. Nothing is stored here.

The choice of the earlier turn affects only the stored size: any choice is correct.
"""

import marshal
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Self, Unpack

import msgspec
import numpy as np

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.jsonable import as_float, shown
from rolltape.records.messages import Message, MessageChain, Role, Root
from rolltape.records.rollout import SessionHead
from rolltape.records.turn import (
    Delivery,
    Finish,
    Ids,
    LogprobKind,
    TokenChain,
    Turn,
    TurnFacts,
    TurnFlag,
    common_prefix,
    implausible_in,
)
from rolltape.tape.journal.entries import CodedTurn
from rolltape.tape.recording.fields import (
    Sampled,
    TurnFields,
    as_items,
    as_member,
    as_sampled,
    as_settings,
    as_side_arrays,
    as_text,
    as_whole_numbers,
    ids_or_none,
)

_FIELDS = frozenset(TurnFields.__annotations__)
# Fields that become facts without a change, once they are checked.
_FACTS: dict[str, Callable[[Any, str], object]] = {
    **dict.fromkeys(("auxiliary", "error", "fingerprint", "model", "renderer"), as_text),
    **dict.fromkeys(("ended_at", "reward", "started_at"), as_float),
    **dict.fromkeys(("extra", "sampling", "sampling_asked"), as_settings),
}


class Parent(NamedTuple):
    """The turn to code against, and how much of it the new prompt shares."""

    turn: Turn | None
    keep_messages: int = 0
    keep_tokens: int = 0


class SessionIntake:
    """One session's turns so far, as far as the next one needs them. Not thread-safe."""

    def __init__(
        self,
        head: SessionHead,
        *,
        tools: object = None,
        template_options: Mapping[str, Any] | None = None,
        model: str | None = None,
        renderer: str | None = None,
        fingerprint: str | None = None,
        logprob_kind: LogprobKind | str | None = None,
    ) -> None:
        """What is given applies to turns without their own, and is stored in the head for a writer that resumes."""
        where = f"session {head.id}"
        self.root = Root.snapshot(tools, template_options, where)
        self._knows_root = True
        kind = as_member(LogprobKind, logprob_kind, where) if logprob_kind else None
        defaults = {"model": model, "renderer": renderer, "fingerprint": fingerprint, "logprob_kind": kind}
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        self.head = msgspec.structs.replace(head, root=self.root.raw_digest.hex(), defaults=self._defaults)
        self.turns: list[Turn] = []
        self._delta = DeltaCoder()
        # Messages of whole prompts by their marshalled bytes: most of the next prompt need not be encoded again.
        self._known: dict[bytes, Message] = {}

    @classmethod
    def restored(
        cls, head: SessionHead, root: Root | None, defaults: Mapping[str, Any], turns: Iterable[CodedTurn]
    ) -> Self:
        """A session with the turns that an earlier process recorded. If `root` is None, turns must give their own."""
        intake = cls(head, **defaults)
        intake.head, intake.root, intake._knows_root = head, root or intake.root, root is not None
        for coded in turns:
            intake.accept(coded)
        if intake.turns:
            intake._delta.look_at(intake.turns[-1])
        return intake

    def code(self, *, finish: Finish | str, **fields: Unpack[TurnFields]) -> CodedTurn:
        """Check one turn. Give the whole prompt (`prompt_messages`, `prompt_ids`), or `after` and what is new."""
        where = f"turn {self.head.id}.{len(self.turns)}"
        if not fields.keys() <= _FIELDS:
            unknown = ", ".join(sorted(fields.keys() - _FIELDS))
            raise RecordError(f"{where}: there is no field {unknown}; see TurnFields for those there are")
        ended = as_member(Finish, finish, where)
        faithful = fields.get("token_faithful", True)
        parent, messages, ids = self._new_in_prompt(fields, faithful, where)
        prompt = MessageChain(messages, parent.turn.messages if parent.turn else None, parent.keep_messages)
        prompt_tokens = TokenChain(ids, parent.turn.tokens if parent.turn else None, parent.keep_tokens)
        reply = _reply(fields.get("reply"), where)
        sampled = as_sampled(fields, faithful, where)
        message_starts = _message_starts(fields, prompt, prompt_tokens, where)
        is_repaired = any(message.repaired for message in messages) or (reply is not None and reply.repaired)
        turn = Turn(
            session=self.head.id,
            sequence=len(self.turns),
            root=self._root_of(fields, where),
            prompt=prompt,
            prompt_tokens=prompt_tokens,
            reply=reply,
            sampled_ids=sampled.ids,
            logprobs=sampled.logprobs,
            facts=self._facts(fields, ended, sampled, message_starts, is_repaired, where),
            side=as_side_arrays(fields.get("side_arrays"), len(prompt_tokens), len(sampled.ids), where),
        )
        sequence = None if parent.turn is None else parent.turn.sequence
        given_whole = fields.get("after") is None
        return CodedTurn(turn, sequence, parent.keep_tokens, parent.keep_messages, given_whole)

    def _new_in_prompt(self, fields: TurnFields, faithful: bool, where: str) -> tuple[Parent, list[Message], Ids]:
        """The turn that a prompt is coded against, and the messages and ids that follow the part kept of it."""
        after = fields.get("after")
        whole_messages, whole_ids = fields.get("prompt_messages"), fields.get("prompt_ids")
        new_messages, new_ids = fields.get("new_messages"), fields.get("new_prompt_ids")
        if after is not None:
            if whole_messages is not None or whole_ids is not None:
                raise RecordError(f"{where}: give `after` with the new messages or ids, or the whole prompt, not both")
            turn = self._earlier(after, where)
            messages = _snapshots(() if new_messages is None else new_messages, f"{where}: new message")
            ids = ids_or_none(new_ids, faithful, f"{where}: new_prompt_ids")
            return Parent(turn, len(turn.messages), len(turn.tokens)), messages, ids
        if new_messages is not None or new_ids is not None:
            raise RecordError(f"{where}: new messages or ids need `after`, the turn that they follow")
        if whole_messages is None:
            raise RecordError(f"{where}: no prompt; give prompt_messages, or `after` with new_messages")
        messages = _snapshots(whole_messages, f"{where}: prompt message", self._known)
        ids = ids_or_none(whole_ids, faithful, f"{where}: prompt_ids")
        parent = self._delta.best_parent(messages, ids)
        new = ids[parent.keep_tokens :].copy()  # a view would keep the whole prompt alive
        new.setflags(write=False)
        return parent, messages[parent.keep_messages :], new

    def _root_of(self, fields: TurnFields, where: str) -> Root:
        tools, options = fields.get("tools"), fields.get("template_options")
        if isinstance(tools, Root):
            return tools
        if tools is None and not self._knows_root:
            raise RecordError(f"{where}: the tools of its session are not on the tape; give tools, [] for none")
        if tools is None and options is None:
            return self.root
        tools = self.root.tools if tools is None else tools
        return Root.snapshot(tools, self.root.template_options if options is None else options, where)

    def _facts(
        self,
        fields: TurnFields,
        ended: Finish,
        sampled: Sampled,
        message_starts: tuple[int, ...] | None,
        is_repaired: bool,
        where: str,
    ) -> TurnFacts:
        facts: dict[str, Any] = {
            name: _FACTS[name](value, f"{where}: {name}")
            for name, value in fields.items()
            if name in _FACTS and value is not None
        }
        if kind := fields.get("logprob_kind"):
            facts["logprob_kind"] = as_member(LogprobKind, kind, where)
        for name, default in self._defaults.items():
            facts[name] = facts.get(name) or default
        if "delivery" in fields:
            facts["delivery"] = as_member(Delivery, fields["delivery"], where)
        flags = self._flags(fields, ended, sampled, is_repaired, where)
        known = TurnFacts(finish=ended, segments=sampled.segments, flags=flags, message_starts=message_starts, **facts)
        fault = implausible_in(self.head, known, sampled.ids, sampled.logprobs)
        if fault is None:
            return known
        flags = tuple(sorted({*flags, TurnFlag.IMPLAUSIBLE}))
        return msgspec.structs.replace(known, flags=flags, error=known.error or fault)

    def _flags(
        self, fields: TurnFields, ended: Finish, sampled: Sampled, is_repaired: bool, where: str
    ) -> tuple[TurnFlag, ...]:
        given = fields.get("flags")
        items = () if given is None else as_items(given, f"{where}: flags", "flags")
        flags = [as_member(TurnFlag, flag, where) for flag in items]
        if sampled.had_nan:
            flags.append(TurnFlag.NAN_LOGPROB)
        if not fields.get("token_faithful", True):
            flags.append(TurnFlag.NOT_TOKEN_FAITHFUL)
        if is_repaired:
            flags.append(TurnFlag.REPAIRED_UNICODE)
        stop_ids, ids = self.head.stop_ids, sampled.ids
        if ended is Finish.STOP and stop_ids and (not len(ids) or int(ids[-1]) not in stop_ids):
            flags.append(TurnFlag.MISSING_STOP_ID)
        return tuple(sorted(set(flags))) if flags else ()

    def accept(self, coded: CodedTurn) -> Turn:
        """Take a coded turn as part of the session."""
        self.turns.append(coded.turn)
        parent = None if coded.parent is None else self.turns[coded.parent]
        self._delta.accepted(coded.turn, parent, coded.keep_messages, given_whole=coded.given_whole)
        return coded.turn

    def take_back(self, count: int) -> None:
        """Keep only the first `count` turns of the session: the later ones could not be stored."""
        del self.turns[count:]
        self._delta.take_back(count)

    def _earlier(self, after: Turn | str, where: str) -> Turn:
        if isinstance(after, Turn) and after.sequence < len(self.turns) and self.turns[after.sequence] is after:
            return after
        if not isinstance(after, Turn | str):
            raise RecordError(f"{where}: `after` is {shown(after)}, a {type(after).__name__}; give a Turn, or its id")
        wanted = after if isinstance(after, str) else after.id
        sequence = wanted.rpartition(".")[2]
        if (
            sequence.isdecimal()
            and len(sequence) < 10
            and int(sequence) < len(self.turns)
            and self.turns[int(sequence)].id == wanted
        ):
            return self.turns[int(sequence)]
        raise RecordError(f"{where}: `after` names {wanted}, which is not an earlier turn of session {self.head.id}")


def _snapshots(messages: Iterable[object], where: str, known: dict[bytes, Message] | None = None) -> list[Message]:
    messages = as_items(messages, f"{where}s", "messages")
    if known is None:
        return [Message.snapshot(message, f"{where} {index}") for index, message in enumerate(messages)]
    return [_known_or_new(message, known, f"{where} {index}") for index, message in enumerate(messages)]


def _known_or_new(message: object, known: dict[bytes, Message], where: str) -> Message:
    """An earlier message that is exactly the same, or a new one. Marshalling costs a tenth of encoding."""
    try:
        # Version 2: the same value gives the same bytes, however often it is referred to.
        letter = marshal.dumps(message, 2)  # type: ignore[arg-type]
    except ValueError:
        return Message.snapshot(message, where)
    found = known.get(letter)
    if found is None:
        found = known[letter] = Message.snapshot(message, where)
    return found


def _reply(value: object, where: str) -> Message | None:
    """The reply's message, or None if it was not recorded or there was none."""
    if value is None:
        return None
    reply = Message.snapshot(value, f"{where}: reply")
    if reply.role is not Role.ASSISTANT:
        raise RecordError(f"{where}: the reply has the role {reply.role}; a reply is the assistant's")
    return reply


def _message_starts(fields: TurnFields, prompt: MessageChain, tokens: TokenChain, where: str) -> tuple[int, ...] | None:
    """Where each of the turn's own messages begins, counted from the start of the prompt, or None if unknown."""
    value = fields.get("message_starts")
    if value is None:
        return None
    given_as_new = fields.get("after") is not None
    starts = as_whole_numbers(value, f"{where}: message_starts", "a message's start")
    messages = len(prompt.own) if given_as_new else len(prompt)
    if len(starts) != messages:
        raise MisalignedError(f"{where}: {messages} messages but {len(starts)} message_starts")
    absolute = starts + (tokens.keep if given_as_new else 0)
    if len(absolute) and (np.any(np.diff(absolute) < 0) or int(absolute[-1]) > len(tokens)):
        raise RecordError(f"{where}: message_starts must rise and stay within the prompt's {len(tokens)} ids")
    return tuple(int(start) for start in absolute[messages - len(prompt.own) :])


class _Whole(NamedTuple):
    """A turn with its conversation and ids in full, to compare the next whole prompt with."""

    turn: Turn
    digests: list[bytes]
    ids: Ids


class DeltaCoder:
    """Finds the turn that a whole prompt shares most with: the latest turn, or one found by its conversation."""

    def __init__(self) -> None:
        self._latest: _Whole | None = None
        self._by_conversation: dict[bytes, Turn] = {}
        self._ends: list[bytes] = []  # by sequence: the hash of each turn's conversation, reply included
        self._whole_prompt: tuple[list[bytes], Ids] | None = None

    def best_parent(self, messages: Sequence[Message], ids: Ids) -> Parent:
        """The better of the latest turn and the turn whose conversation is the longest beginning of this one."""
        digests = [message.digest for message in messages]
        self._whole_prompt = (digests, ids)
        parent = Parent(None)
        if self._latest is not None:
            parent = _shared(self._latest, digests, ids)
            if parent.keep_messages == len(self._latest.digests):
                return parent
        # A turn that was recorded with `after` is written out in full only if this conversation continues it.
        other = self._longest_beginning(digests)
        if other is not None and other is not parent.turn:
            parent = max(_shared(_spelled_out(other), digests, ids), parent, key=lambda found: found.keep_tokens)
        return parent

    def accepted(self, turn: Turn, parent: Turn | None, keep_messages: int, *, given_whole: bool) -> None:
        """Remember a turn. One that was given whole is kept in full for the next comparison."""
        digests = [message.digest for message in turn.prompt.own]
        start = b""
        if parent is not None and keep_messages == len(parent.messages):
            start = self._ends[parent.sequence]  # only what is new is hashed
        elif self._whole_prompt is not None:
            digests = self._whole_prompt[0]
        elif parent is not None:
            digests = [message.digest for message in turn.prompt.to_list()]
        self._latest = None
        if given_whole and self._whole_prompt is not None:
            reply = [turn.reply.digest] if turn.reply else []
            whole, ids = self._whole_prompt
            self._latest = _Whole(turn, whole + reply, np.concatenate([ids, turn.sampled_ids]))
        self._whole_prompt = None
        end = _hashes(start, digests)[-1] if digests else start
        self._by_conversation[end] = turn
        if turn.reply is not None:
            end = _hashes(end, [turn.reply.digest])[-1]
            self._by_conversation[end] = turn
        self._ends.append(end)

    def look_at(self, turn: Turn) -> None:
        """Keep an accepted turn in full for the next comparison."""
        self._latest = _spelled_out(turn)

    def take_back(self, count: int) -> None:
        """Forget all turns but the first `count`. A conversation that a forgotten turn shared with a kept one may be
        forgotten too; the next prompt is then coded against another turn."""
        del self._ends[count:]
        self._by_conversation = {end: turn for end, turn in self._by_conversation.items() if turn.sequence < count}
        if self._latest is not None and self._latest.turn.sequence >= count:
            self._latest = None

    def _longest_beginning(self, digests: list[bytes]) -> Turn | None:
        for end in reversed(_hashes(b"", digests)):
            if end in self._by_conversation:
                return self._by_conversation[end]
        return None


def _shared(whole: _Whole, digests: list[bytes], ids: Ids) -> Parent:
    keep = 0
    for held, new in zip(whole.digests, digests, strict=False):
        if held != new:
            break
        keep += 1
    return Parent(whole.turn, keep, common_prefix(whole.ids, ids))


def _spelled_out(turn: Turn) -> _Whole:
    return _Whole(turn, [message.digest for message in turn.messages.to_list()], turn.tokens.to_numpy())


def _hashes(start: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """The hash of a conversation after each of its next messages. `start` is the hash before them."""
    hashes = []
    for digest in digests:
        start = blake2b(start + digest, digest_size=16).digest()
        hashes.append(start)
    return hashes
