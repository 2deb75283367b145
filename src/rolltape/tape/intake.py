"""What a caller hands over → a Turn: checked, snapshotted, coded against an earlier turn. Nothing is stored here."""

import enum
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.jsonable import as_float, decode_numbers, encode_numbers
from rolltape.records.messages import Message, MessageChain, Role, Root
from rolltape.records.rollout import SessionHead
from rolltape.records.tokens import NO_IDS, Ids, TokenChain
from rolltape.records.turn import Delivery, Finish, LogprobKind, Logprobs, Segment, Turn, TurnFacts, TurnFlag
from rolltape.tape.arrays import as_ids, as_logprobs, as_side_arrays
from rolltape.tape.delta import DeltaCoder

E = TypeVar("E", bound=enum.StrEnum)

_PLAIN = frozenset({int, float, bool})


class CodedTurn(msgspec.Struct, frozen=True):
    """A turn and how it is coded: it keeps so many tokens and messages of an earlier turn of its session."""

    turn: Turn
    parent: int | None  # sequence number of that turn; None: it stands alone
    keep_tokens: int
    keep_messages: int
    given_whole: bool


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
        self.head = head
        where = f"session {head.id}"
        self.root = Root.snapshot(tools, template_options, where)
        self.defaults = {"model": model, "renderer": renderer, "fingerprint": fingerprint}
        self.logprob_kind = as_member(LogprobKind, logprob_kind, where) if logprob_kind else None
        self.turns: list[Turn] = []
        self._delta = DeltaCoder()

    def code(
        self,
        *,
        after: Turn | str | None = None,
        prompt_messages: Sequence[object] | None = None,
        new_messages: Sequence[object] | None = None,
        prompt_ids: object = None,
        new_prompt_ids: object = None,
        sampled_ids: object = None,
        logprobs: object = None,
        segments: Sequence[Mapping[str, Any]] | None = None,
        reply: object = None,
        finish: Finish | str,
        weight_version: object = None,
        tools: object = None,
        template_options: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        sampling_asked: Mapping[str, Any] | None = None,
        logprob_kind: LogprobKind | str | None = None,
        model: str | None = None,
        renderer: str | None = None,
        fingerprint: str | None = None,
        message_starts: object = None,
        side_arrays: Mapping[str, Any] | None = None,
        reward: object = None,
        delivery: Delivery | str = Delivery.DELIVERED,
        auxiliary: str | None = None,
        flags: Sequence[TurnFlag | str] = (),
        token_faithful: bool = True,
        error: str | None = None,
        started_at: float | None = None,
        ended_at: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> CodedTurn:
        """Check one turn. Give the whole prompt (`prompt_messages`, `prompt_ids`), or `after` and what is new."""
        where = f"turn {self.head.id}.{len(self.turns)}"
        found_flags = {as_member(TurnFlag, flag, where) for flag in flags}
        root = self.root
        if tools is not None or template_options is not None:
            root = Root.snapshot(
                tools if tools is not None else self.root.tools,
                template_options if template_options is not None else self.root.template_options,
                where,
            )
        if after is not None:
            if prompt_messages is not None or prompt_ids is not None:
                raise RecordError(f"{where}: give `after` with what is new, or the whole prompt, not both")
            parent: Turn | None = self._earlier(after, where)
            assert parent is not None
            messages = _snapshots(new_messages or (), f"{where}: new message")
            ids = _ids_or_none(new_prompt_ids, token_faithful, f"{where}: new_prompt_ids")
            keep_messages, keep_tokens = len(parent.messages), len(parent.tokens)
        else:
            if new_messages is not None or new_prompt_ids is not None:
                raise RecordError(f"{where}: new messages or ids need `after`, the turn that they follow")
            if prompt_messages is None:
                raise RecordError(f"{where}: no prompt; give prompt_messages, or `after` with new_messages")
            messages = _snapshots(prompt_messages, f"{where}: prompt message")
            ids = _ids_or_none(prompt_ids, token_faithful, f"{where}: prompt_ids")
            parent, keep_messages, keep_tokens = self._delta.best_parent(self.turns, messages, ids)
            messages, ids = messages[keep_messages:], ids[keep_tokens:]
        prompt = MessageChain(messages, parent.messages if parent else None, keep_messages)
        prompt_tokens = TokenChain(ids, parent.tokens if parent else None, keep_tokens)

        ended = as_member(Finish, finish, where)
        reply_message = None if reply is None else Message.snapshot(reply, f"{where}: reply")
        if reply_message is None and ended not in (Finish.ABORT, Finish.ERROR):
            raise RecordError(f"{where}: no reply though it ended by {ended}; only an aborted or failed turn has none")
        if reply_message is not None and reply_message.role is not Role.ASSISTANT:
            raise RecordError(f"{where}: the reply has the role {reply_message.role}; a reply is the assistant's")
        if segments is not None and (sampled_ids is not None or logprobs is not None or weight_version is not None):
            raise RecordError(f"{where}: give segments, or sampled_ids with logprobs and weight_version, not both")
        if segments is None:
            sampled, probabilities, had_nan = _sampled(sampled_ids, logprobs, token_faithful, where)
            parts: tuple[Segment, ...] = (Segment(0, len(sampled), *_versions(weight_version, where)),)
        else:
            sampled, probabilities, parts, had_nan = _joined(segments, token_faithful, where)
        side = as_side_arrays(side_arrays, len(prompt_tokens), len(sampled), where)

        if had_nan:
            found_flags.add(TurnFlag.NAN_LOGPROB)
        if not token_faithful:
            found_flags.add(TurnFlag.NOT_TOKEN_FAITHFUL)
        if any(message.repaired for message in messages) or (reply_message and reply_message.repaired):
            found_flags.add(TurnFlag.REPAIRED_UNICODE)
        stop_ids = self.head.stop_ids
        if ended is Finish.STOP and stop_ids and (not len(sampled) or int(sampled[-1]) not in stop_ids):
            found_flags.add(TurnFlag.MISSING_STOP_ID)

        facts = TurnFacts(
            finish=ended,
            segments=parts,
            sampling=as_settings(sampling, f"{where}: sampling"),
            sampling_asked=None if sampling_asked is None else as_settings(sampling_asked, f"{where}: sampling_asked"),
            logprob_kind=as_member(LogprobKind, logprob_kind, where) if logprob_kind else self.logprob_kind,
            model=(model and as_text(model, f"{where}: model")) or self.defaults["model"],
            renderer=(renderer and as_text(renderer, f"{where}: renderer")) or self.defaults["renderer"],
            fingerprint=(fingerprint and as_text(fingerprint, f"{where}: fingerprint")) or self.defaults["fingerprint"],
            message_starts=_message_starts(message_starts, prompt, prompt_tokens, after is not None, where),
            delivery=as_member(Delivery, delivery, where),
            auxiliary=auxiliary and as_text(auxiliary, f"{where}: auxiliary"),
            flags=tuple(sorted(found_flags)),
            reward=None if reward is None else as_float(reward, f"{where}: reward"),
            error=error and as_text(error, f"{where}: error"),
            started_at=None if started_at is None else as_float(started_at, f"{where}: started_at"),
            ended_at=time.time() if ended_at is None else as_float(ended_at, f"{where}: ended_at"),
            extra=as_settings(extra, f"{where}: extra"),
        )
        turn = Turn(
            session=self.head.id,
            sequence=len(self.turns),
            root=root,
            prompt=prompt,
            prompt_tokens=prompt_tokens,
            reply=reply_message,
            sampled_ids=sampled,
            logprobs=probabilities,
            facts=facts,
            side=side,
        )
        return CodedTurn(turn, parent.sequence if parent else None, keep_tokens, keep_messages, after is None)

    def accept(self, coded: CodedTurn) -> Turn:
        """Take a coded turn as part of the session, once it is stored."""
        self.turns.append(coded.turn)
        self._delta.accepted(coded.turn, given_whole=coded.given_whole)
        return coded.turn

    def _earlier(self, after: Turn | str, where: str) -> Turn:
        if isinstance(after, Turn) and after.sequence < len(self.turns) and self.turns[after.sequence] is after:
            return after
        wanted = after if isinstance(after, str) else after.id
        sequence = wanted.rpartition(".")[2]
        if sequence.isdigit() and int(sequence) < len(self.turns) and self.turns[int(sequence)].id == wanted:
            return self.turns[int(sequence)]
        raise RecordError(f"{where}: `after` names {wanted}, which is no earlier turn of session {self.head.id}")


def as_member(kind: type[E], value: str, where: str) -> E:
    """A member of a closed list, by itself or by its value."""
    if type(value) is kind:
        return value
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise RecordError(f"{where}: {value!r} is no {kind.__name__}; known are {known}") from None


def as_text(value: object, where: str) -> str | None:
    """A text or None; what is not valid Unicode in it is replaced."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise RecordError(f"{where} is {value!r}, a {type(value).__name__}; give a text")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _snapshots(messages: Sequence[object], where: str) -> list[Message]:
    if isinstance(messages, str | bytes | Mapping):
        raise RecordError(f"{where}s are a {type(messages).__name__}; give a list of messages")
    return [Message.snapshot(message, f"{where} {index}") for index, message in enumerate(messages)]


def _ids_or_none(value: object, token_faithful: bool, where: str) -> Ids:
    if value is None and token_faithful:
        raise RecordError(f"{where} is missing; an engine that gives no ids is recorded with token_faithful=False")
    return NO_IDS if value is None else as_ids(value, where)


def _sampled(
    sampled_ids: object, logprobs: object, token_faithful: bool, where: str
) -> tuple[Ids, Logprobs | None, bool]:
    """Ids and their logprobs (None: none given), and whether a NaN was among those."""
    ids = _ids_or_none(sampled_ids, token_faithful, f"{where}: sampled_ids")
    if logprobs is None:
        return ids, None, False
    given, had_nan = as_logprobs(logprobs, f"{where}: logprobs")
    if len(given) != len(ids):
        raise MisalignedError(
            f"{where}: {len(ids)} sampled ids but {len(given)} logprobs; ask the engine for logprobs on every token"
        )
    return ids, given, had_nan


def _joined(
    segments: Sequence[Mapping[str, Any]], token_faithful: bool, where: str
) -> tuple[Ids, Logprobs | None, tuple[Segment, ...], bool]:
    """A reply's segments as one array of ids, one of logprobs (None: none given at all), and their bounds."""
    ids: list[Ids] = []
    logprobs: list[Logprobs | None] = []
    parts: list[Segment] = []
    had_nan = False
    for index, segment in enumerate(segments):
        place = f"{where}, segment {index}"
        if not isinstance(segment, Mapping) or segment.keys() - {"sampled_ids", "logprobs", "weight_version"}:
            raise RecordError(f"{place}: a segment has sampled_ids, logprobs and weight_version, not {segment!r:.200}")
        own, own_logprobs, nan = _sampled(segment.get("sampled_ids"), segment.get("logprobs"), token_faithful, place)
        had_nan |= nan
        start = parts[-1].stop if parts else 0
        parts.append(Segment(start, start + len(own), *_versions(segment.get("weight_version"), place)))
        ids.append(own)
        logprobs.append(own_logprobs)
    joined_ids = np.concatenate([NO_IDS, *ids])
    joined_ids.setflags(write=False)
    if all(part is None for part in logprobs):
        return joined_ids, None, tuple(parts), had_nan
    joined: Logprobs = np.concatenate(
        [
            np.full(len(own), np.nan, np.float32) if part is None else part
            for own, part in zip(ids, logprobs, strict=True)
        ]
    )
    joined.setflags(write=False)
    return joined_ids, joined, tuple(parts), had_nan


def _versions(value: object, where: str) -> tuple[str | None, str | None]:
    """A weight version, a pair of versions that it lies between, or None where the engine did not say."""
    if value is None or (type(value) is str and value.isascii()):
        return value, value
    first, last = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    for version in (first, last):
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise RecordError(f"{where}: weight_version is {value!r}; give a string, or a pair that it lies between")
    return as_text(str(first), where), as_text(str(last), where)


def as_settings(value: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A private copy of settings, plain numbers for the scalars of numpy and torch."""
    if not value:
        return {}
    if type(value) is dict and all(
        type(key) is str and key.isascii() and key[:1] != "$" and (type(item) in _PLAIN or item is None)
        for key, item in value.items()
    ):
        return value.copy()
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is a {type(value).__name__}; give a mapping")
    settings: dict[str, Any] = decode_numbers(encode_numbers(value, where))
    return settings


def as_snapshot(value: object, where: str) -> Any:
    """A private copy of any JSON value, plain numbers for the scalars of numpy and torch."""
    return None if value is None else decode_numbers(encode_numbers(value, where))


def _message_starts(
    value: object, prompt: MessageChain, tokens: TokenChain, given_as_new: bool, where: str
) -> tuple[int, ...] | None:
    """Where each of the turn's own messages begins, counted from the start of the prompt."""
    if value is None:
        return None
    starts = as_ids(value, f"{where}: message_starts")
    messages = len(prompt.own) if given_as_new else len(prompt)
    if len(starts) != messages:
        raise MisalignedError(f"{where}: {messages} messages but {len(starts)} message_starts")
    absolute = starts + (tokens.keep if given_as_new else 0)
    if len(absolute) and (np.any(np.diff(absolute) < 0) or int(absolute[-1]) > len(tokens)):
        raise RecordError(f"{where}: message_starts must rise and stay within the prompt's {len(tokens)} ids")
    return tuple(int(start) for start in absolute[messages - len(prompt.own) :])
