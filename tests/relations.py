"""Which turn continues which, and what became of replies, by the words of the design: brute force over lists.

Knows no tree. Where the words leave room (what counts as a version of a message), it gives bounds.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile

from rolltape.records.messages import Message, Role
from rolltape.records.rollout import Rollout, Session
from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag


class Relations:
    """The turns of a rollout, each with the one that it continues."""

    def __init__(self, rollout: Rollout) -> None:
        self._session_of = {turn.id: session for session in rollout.sessions for turn in session.turns}
        self.tied = {turn.id: self._tied(turn) for turn in rollout.turns}
        self.continued = {
            turn.id: max(tied, key=lambda other, turn=turn: self._evidence(other, turn)) if tied else None  # type: ignore[misc]
            for turn in rollout.turns
            for tied in (self.tied[turn.id],)
        }
        self._head = {turn.id: self._head_in(turn) for turn in rollout.turns}

    def ends(self, turns: Iterable[Turn], cut_short: Collection[str]) -> list[Turn]:
        """Those turns that none of the others continues, directly or through any turn.

        What holds a beginning of a turn that was cut short goes on from there.
        """
        inner: set[str] = set()
        chosen = list(turns)
        for turn in chosen:
            before = self._before(turn, cut_short)
            while before is not None:
                inner.add(before.id)
                before = self._before(before, cut_short)
        return [turn for turn in chosen if turn.id not in inner]

    def _before(self, turn: Turn, cut_short: Collection[str]) -> Turn | None:
        before, cut = self.continued[turn.id], self._head[turn.id]
        if cut is None or cut.id not in cut_short or self.continued[cut.id] is not before:
            return before
        return cut if _shared(turn, cut) - len(cut.prompt_ids) == self.shown_head(cut) else before

    def shown_head(self, turn: Turn) -> int:
        """How many of the first ids of a reply that was cut short, or perhaps not delivered, later prompts show."""
        if turn.facts.finish is not Finish.ABORT and turn.facts.delivery is Delivery.DELIVERED:
            return 0
        showing = [later for later in self._later(turn) if self._head[later.id] is turn]
        return max((_shared(later, turn) - len(turn.prompt_ids) for later in showing), default=0)

    def _head_in(self, turn: Turn) -> Turn | None:
        """The turn of whose reply a prompt has most, of the replies to the longest prompt that it goes on from."""
        if not has_ids(turn):
            return None
        prompt, continued = turn.prompt_ids.tolist(), self.continued[turn.id]
        before = [
            other
            for other in self._session_of[turn.id].turns[: turn.sequence]
            if sampler(other) == sampler(turn)
            and other.facts.auxiliary is None
            and has_ids(other)
            and len(other.prompt_ids) < len(prompt)
            and _begins_with(prompt, other.prompt_ids.tolist())
        ]
        longest = max((len(other.prompt_ids) for other in before), default=0)
        if continued is not None and len(continued.tokens) > longest:
            return None
        begun = [
            other
            for other in before
            if len(other.prompt_ids) == longest
            and had_ended(other, turn, shown=True)
            and _shared(turn, other) > longest
        ]
        return max(begun, key=lambda other: (_shared(turn, other), self._evidence(other, turn)), default=None)

    def is_continued(self, turn: Turn) -> bool:
        return any(before is turn for before in self.continued.values())

    def may_be_abandoned(self, turn: Turn) -> bool:
        """Whether a later turn of the task asked from the same place or further on, and no prompt continues it."""
        went_on = any(
            had_ended(turn, later)
            and later.facts.auxiliary is None
            and (_begins_with(later.prompt_ids.tolist(), turn.prompt_ids.tolist()) or self._is_told_on(later, turn))
            for later in self._later(turn)
        )
        lost = any(turn in tied for tied in self.tied.values())
        return (went_on or lost) and not self.is_continued(turn)

    def must_be_abandoned(self, turn: Turn) -> bool:
        """Whether the same prompt was asked again after the reply had ended, and nothing later can show the reply."""
        asked_again = any(
            had_ended(turn, later)
            and later.facts.auxiliary is None
            and sampler(later) == sampler(turn)
            and (later.prompt_ids.tolist() == turn.prompt_ids.tolist() if has_ids(turn) and has_ids(later) else False)
            for later in self._later(turn)
        )
        shown = any(self._may_show(later, turn) for later in self._later(turn)) or self.shown_head(turn) > 0
        return asked_again and not shown

    def may_have_arrived(self, turn: Turn) -> bool:
        """Whether anything later can show the reply."""
        return any(self._may_show(later, turn) for later in self._later(turn))

    def carries_id_of(self, later: Turn, turn: Turn) -> bool:
        """Whether a prompt holds an id that a reply was given."""
        held = {wire_id for message in later.prompt.to_list() for wire_id in _carried(message)}
        return turn.reply is not None and bool(held & turn.reply.wire_ids)

    def spelled(self, turn: Turn, *, with_reply: bool = False) -> tuple[bytes, ...]:
        """The conversation of a turn as keys: tools and template options, then each message."""
        messages = turn.messages.to_list() if with_reply else turn.prompt.to_list()
        matter = self._session_of[turn.id].head.tool_ids_matter
        return turn.root.digest, *(one.canonical_with_ids if matter else one.canonical for one in messages)

    def turns_beside(self, turn: Turn) -> tuple[Turn, ...]:
        """The turns of the same session, itself included."""
        return self._session_of[turn.id].turns

    def _later(self, turn: Turn) -> list[Turn]:
        return [other for other in self._session_of[turn.id].turns if other.sequence > turn.sequence]

    def _tied(self, turn: Turn) -> list[Turn]:
        """The earlier turns with the longest ids that a turn's prompt begins with."""
        if not has_ids(turn):
            return []
        session: Session = self._session_of[turn.id]
        prompt = turn.prompt_ids.tolist()
        held = [
            other
            for other in session.turns
            if other.sequence < turn.sequence
            and had_ended(other, turn, shown=True)
            and sampler(other) == sampler(turn)
            and other.facts.auxiliary is None
            and has_ids(other)
            and _begins_with(prompt, other.tokens.to_numpy().tolist())
        ]
        longest = max((len(other.tokens) for other in held), default=0)
        return [other for other in held if len(other.tokens) == longest]

    def _evidence(self, other: Turn, turn: Turn) -> tuple[bool, bool, bool, int]:
        in_place = turn.prompt.to_list()[len(other.prompt) : len(other.prompt) + 1]
        named = other.reply is not None and any(other.reply.wire_ids & message.wire_ids for message in in_place)
        told = _begins_with(self.spelled(turn), self.spelled(other, with_reply=True))
        return named, told, other.facts.delivery is Delivery.DELIVERED, other.sequence

    def _is_told_on(self, later: Turn, turn: Turn) -> bool:
        return len(turn.prompt) > 0 and _begins_with(self.spelled(later), self.spelled(turn))

    def _may_show(self, later: Turn, turn: Turn) -> bool:
        """Whether a prompt begins with a turn's ids, has an assistant's message in its place, or an id of its reply."""
        if has_ids(turn) and _begins_with(later.prompt_ids.tolist(), turn.tokens.to_numpy().tolist()):
            return True
        in_place = later.prompt.to_list()[len(turn.prompt) : len(turn.prompt) + 1]
        answered = _begins_with(self.spelled(later), self.spelled(turn)) and any(
            message.role is Role.ASSISTANT for message in in_place
        )
        return answered or self.carries_id_of(later, turn)


def _shared(later: Turn, turn: Turn) -> int:
    """How many leading ids a prompt shares with an earlier turn."""
    pairs = zip(later.prompt_ids.tolist(), turn.tokens.to_numpy().tolist(), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def had_ended(turn: Turn, asked: Turn, *, shown: bool = False) -> bool:
    """Whether a reply had ended when another was asked for; what is not known is so in recorded order.

    If the later prompt holds the reply, a start in whole seconds stands for any time in that second.
    """
    ended_at, started_at = turn.facts.ended_at, asked.facts.started_at
    if ended_at is None or started_at is None or ended_at <= started_at:
        return True
    return shown and started_at == int(started_at) and ended_at < started_at + 1


def has_ids(turn: Turn) -> bool:
    """Whether a turn has a prompt of the engine's own ids."""
    return len(turn.prompt_ids) > 0 and TurnFlag.NOT_TOKEN_FAITHFUL not in turn.facts.flags


def sampler(turn: Turn) -> tuple[str | None, str | None]:
    return turn.facts.model, turn.facts.fingerprint


def _carried(message: Message) -> set[str]:
    call = message.to_dict().get("tool_call_id")
    return set(message.wire_ids) | ({call} if isinstance(call, str) else set())


def _begins_with(whole: "list[int] | tuple[bytes, ...]", start: "list[int] | tuple[bytes, ...]") -> bool:
    return whole[: len(start)] == start
