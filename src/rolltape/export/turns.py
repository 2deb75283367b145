"""The columns of exported turns and messages. A turn's row holds what is new in it after an earlier turn."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rolltape.errors import ExportError
from rolltape.export.columns import (
    COUNT,
    ENCODED_JSON,
    FLAG,
    IDS,
    JSON,
    NUMBER,
    TEXT,
    TEXTS,
    Row,
    Table,
    array_of,
    built,
    lists_of,
    logprob_columns,
    logprobs_of,
    records,
    side_arrays,
)
from rolltape.records.jsonable import encode_json
from rolltape.records.messages import Message, MessageChain, Root
from rolltape.records.rollout import Rollout
from rolltape.records.turn import Ids, Segment, SideArray, TokenChain, Turn, TurnFacts


class PromptPart(NamedTuple):
    """What a row holds of a turn's prompt: the turns that it continues, and what follows them."""

    root: bytes | None  # None: as in the turn before
    messages_from: str | None
    kept_messages: int
    new_messages: Sequence[Message]
    tokens_from: str | None
    kept_tokens: int
    new_prompt_ids: Ids


class ExportedTurn(NamedTuple):
    """The data that a turn's row is made from."""

    rollout: Rollout
    turn: Turn
    prompt: PromptPart

    @property
    def logprobs(self) -> object:
        return self.turn.logprobs


_SEGMENTS = records(
    lambda values: built(Segment, values),
    COUNT("start"),
    COUNT("stop"),
    TEXT("first_version"),
    TEXT("last_version"),
)

TURN = Table(
    TEXT("turn", "turn.id"),
    TEXT("rollout", "rollout.id"),
    COUNT("try_index", "rollout.head.try_index"),
    TEXT("session", "turn.session"),
    COUNT("sequence", "turn.sequence"),
    COUNT("prompt_messages", lambda of: len(of.turn.prompt)),
    COUNT("prompt_tokens", lambda of: len(of.turn.prompt_tokens)),
    COUNT("sampled_tokens", lambda of: len(of.turn.sampled_ids)),
    TEXT("finish", "turn.facts.finish"),
    TEXT("delivery", "turn.facts.delivery"),
    TEXT("auxiliary", "turn.facts.auxiliary"),
    TEXTS("flags", lambda of: list(of.turn.facts.flags)),
    NUMBER("reward", "turn.facts.reward"),
    TEXT("error", "turn.facts.error"),
    TEXT("model", "turn.facts.model"),
    TEXT("renderer", "turn.facts.renderer"),
    TEXT("fingerprint", "turn.facts.fingerprint"),
    NUMBER("started_at", "turn.facts.started_at"),
    NUMBER("ended_at", "turn.facts.ended_at"),
    JSON("sampling", "turn.facts.sampling"),
    JSON("sampling_asked", "turn.facts.sampling_asked"),
    ENCODED_JSON("root", "prompt.root"),
    TEXT("messages_from", "prompt.messages_from"),
    COUNT("kept_messages", "prompt.kept_messages"),
    lists_of(ENCODED_JSON)("new_messages", lambda of: [message.raw for message in of.prompt.new_messages]),
    ENCODED_JSON("reply", lambda of: of.turn.reply and of.turn.reply.raw),
    IDS("message_starts", "turn.facts.message_starts"),
    TEXT("tokens_from", "prompt.tokens_from"),
    COUNT("kept_tokens", "prompt.kept_tokens"),
    IDS("new_prompt_ids", "prompt.new_prompt_ids"),
    IDS("sampled_ids", "turn.sampled_ids"),
    *logprob_columns(),
    TEXT("logprob_kind", "turn.facts.logprob_kind"),
    _SEGMENTS("segments", "turn.facts.segments"),
    side_arrays("side", COUNT("start"), source="turn.side"),
    JSON("extra", "turn.facts.extra"),
    JSON("unknown", "turn.facts.unknown"),
)


class ExportedMessage(NamedTuple):
    """The data that a message's row is made from: the first turn that holds it, and its place in the conversation."""

    rollout: Rollout
    turn: Turn
    place: int
    message: Message
    sampled: bool

    @property
    def tool_calls(self) -> int:
        calls = self.message.to_dict().get("tool_calls")
        return len(calls) if isinstance(calls, list) else 0


MESSAGE = Table(
    TEXT("turn", "turn.id"),
    TEXT("rollout", "rollout.id"),
    COUNT("try_index", "rollout.head.try_index"),
    TEXT("session", "turn.session"),
    COUNT("index", "place"),
    FLAG("sampled"),
    TEXT("role", "message.role"),
    TEXT("text", "message.text"),
    TEXT("reasoning", "message.reasoning"),
    COUNT("tool_calls"),
    ENCODED_JSON("message", "message.raw"),
)


def turn_rows(rollout: Rollout, *, whole_prompts: bool = False) -> Iterator[Row]:
    """A row per turn, with only what is new after an earlier turn, or with whole prompts."""
    for session in rollout.sessions:
        held = _HeldChains()
        for turn in session.turns:
            part = _whole_prompt(turn) if whole_prompts else held.new_part(turn)
            yield TURN.row(ExportedTurn(rollout, turn, part))
            held.add(turn)


def message_rows(rollout: Rollout) -> Iterator[Row]:
    """A row per message, replies included, at the first turn that holds it in that place."""
    for session in rollout.sessions:
        held = _HeldChains()
        for turn in session.turns:
            part = held.new_part(turn)
            for index, message in enumerate(part.new_messages, part.kept_messages):
                yield MESSAGE.row(ExportedMessage(rollout, turn, index, message, sampled=False))
            if turn.reply is not None:
                yield MESSAGE.row(ExportedMessage(rollout, turn, len(turn.prompt), turn.reply, sampled=True))
            held.add(turn)


class _HeldChains:
    """The chains of a session's turns so far, to name the turn that a later chain continues."""

    def __init__(self) -> None:
        self._turns: dict[int, str] = {}
        self._alive: list[object] = []  # an id() is valid only while its object exists
        self._root: bytes | None = None

    def add(self, turn: Turn) -> None:
        for link in (turn.prompt_tokens, turn.tokens, turn.prompt, turn.messages):
            self._turns.setdefault(id(link), turn.id)
            self._alive.append(link)
        self._root = turn.root.raw

    def new_part(self, turn: Turn) -> PromptPart:
        """The part of a turn's prompt that no earlier turn holds in its place."""
        messages_from = self._turns.get(id(turn.prompt.parent))
        tokens_from = self._turns.get(id(turn.prompt_tokens.parent))
        kept_tokens = turn.prompt_tokens.keep if tokens_from else 0
        return PromptPart(
            turn.root.raw if turn.root.raw != self._root else None,
            messages_from,
            turn.prompt.keep if messages_from else 0,
            turn.prompt.own if messages_from else turn.prompt.to_list(),
            tokens_from,
            kept_tokens,
            turn.prompt_tokens.slice(kept_tokens),
        )


def _whole_prompt(turn: Turn) -> PromptPart:
    return PromptPart(turn.root.raw, None, 0, turn.prompt.to_list(), None, 0, turn.prompt_ids)


def turns_of(rows: Iterable[Row]) -> Iterator[Turn]:
    """The turns in rows, in their order. A session's rows must be consecutive."""
    session: str | None = None
    held: dict[str, Turn] = {}
    root: Root | None = None
    for row in rows:
        if row["session"] != session:
            session, held, root = row["session"], {}, None
        if row["root"] is not None:
            root = Root(encode_json(row["root"], "root")[0])
        if root is None:
            raise ExportError(
                f"turn {row['turn']}: its session's first turn, which gives the tools, is not in the file"
            )
        turn = _turn_of(row, root, held)
        held[turn.id] = turn
        yield turn


def _turn_of(row: Row, root: Root, held: dict[str, Turn]) -> Turn:
    values, where = TURN.values(row), f"turn {row['turn']}"
    messages = [Message.snapshot(message, where) for message in values["new_messages"]]
    goes_on, follows = _earlier(values, "messages_from", held), _earlier(values, "tokens_from", held)
    starts = values["message_starts"]
    return Turn(
        session=values["session"],
        sequence=values["sequence"],
        root=root,
        prompt=MessageChain(messages, goes_on.messages, values["kept_messages"]) if goes_on else MessageChain(messages),
        prompt_tokens=TokenChain(values["new_prompt_ids"], follows.tokens if follows else None, values["kept_tokens"]),
        reply=None if values["reply"] is None else Message.snapshot(values["reply"], where),
        sampled_ids=values["sampled_ids"],
        logprobs=logprobs_of(values),
        facts=built(TurnFacts, values, message_starts=None if starts is None else starts.tolist()),
        side={side["name"]: SideArray(side["start"], array_of(side), side["counts"]) for side in values["side"]},
    )


def _earlier(values: Row, column: str, held: dict[str, Turn]) -> Turn | None:
    """The turn that a row continues, or None if it stands alone."""
    if values[column] is not None and values[column] not in held:
        raise ExportError(f"turn {values['turn']}: continues turn {values[column]}, which is not before it in the file")
    return held.get(values[column])
