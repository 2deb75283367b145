"""Rollouts → conversations: chains of turns whose messages follow each other, for formats with a list of messages.

A conversation needs no token ids. Each reply trains at most once, as text, and not if the agent abandoned it.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from rolltape.export.columns import (
    COUNT,
    INT,
    JSON,
    NUMBER,
    NUMBERS_BY_NAME,
    TEXT,
    TEXTS,
    Kind,
    Row,
    Table,
    records,
)
from rolltape.extras import pa
from rolltape.records.jsonable import encode_numbers
from rolltape.records.messages import Message, Role, call_parts, content_text, message_calls, reasoning_text
from rolltape.records.rollout import Rollout, Session, Status
from rolltape.records.turn import Turn
from rolltape.tree import Arrivals, arrivals_of, tree_of
from rolltape.tree.arrival import is_in_doubt

_WIRE_ONLY = ("id", "weight")  # of a message: the gateway's id, and the weight, which is written anew


class Conversation(NamedTuple):
    """A last turn and the turns whose replies its prompt holds, in order. A reply stands after its turn's prompt."""

    rollout: Rollout
    session: Session
    turns: tuple[Turn, ...]
    copied: int  # how many of the first turns are in an earlier conversation too
    training: frozenset[int]  # numbers of the turns whose replies train here, and in no other conversation

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    @property
    def replies(self) -> tuple[tuple[int, str], ...]:
        """The places of replies among the messages, and their turns."""
        return tuple((len(turn.prompt), turn.id) for turn in self.turns if turn.reply is not None)

    @property
    def recorded(self) -> list[Message]:
        """The last prompt and its reply as they came, with earlier replies as they were sampled."""
        messages = self.last.prompt.to_list()
        for turn in self.turns:
            if turn.reply is not None:
                messages[len(turn.prompt) : len(turn.prompt) + 1] = [turn.reply]
        return messages

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The same in OpenAI's chat form. The weight of an assistant message is 1 if it trains, else 0."""
        training = {len(turn.prompt) for turn in self.turns if turn.sequence in self.training}
        return [
            {**_plain(message.to_dict()), "weight": int(at in training)}
            if message.role is Role.ASSISTANT
            else _plain(message.to_dict())
            for at, message in enumerate(self.recorded)
        ]


def conversations_of(rollout: Rollout, *, with_auxiliary: bool = False) -> Iterator[Conversation]:
    """The conversations of a rollout: one for each turn whose reply is in no later prompt. Each turn is in one or more.

    Auxiliary calls are left out, unless `with_auxiliary` is set.
    """
    trains = rollout.status is Status.FINISHED and rollout.outcome.filtered is None
    for session in rollout.sessions:
        tree = tree_of(session)
        arrivals, faults = arrivals_of(tree), session.unstated_faults()
        placed = [one for one in tree.turns if one.is_task or with_auxiliary]
        continued = {one.message_parent.sequence for one in placed if one.message_parent is not None}
        shown: set[int] = set()
        for end in placed:
            if end.sequence in continued:
                continue
            line = [end]
            while (before := line[-1].message_parent) is not None:
                line.append(before)
            turns = tuple(one.turn for one in reversed(line) if one.is_task or with_auxiliary)
            copied = sum(turn.sequence in shown for turn in turns)
            new = [turn for turn in turns if turn.sequence not in shown]
            training = frozenset(
                turn.sequence
                for turn in new
                if trains and turn.sequence not in faults and _reply_trains(turn, arrivals)
            )
            shown.update(turn.sequence for turn in new)
            yield Conversation(rollout, session, turns, copied, training)
        tree.take_apart()


def _reply_trains(turn: Turn, arrivals: Arrivals) -> bool:
    """Whether the text of a reply trains. The rules are those for tokens, except those that concern only logprobs."""
    facts = turn.facts
    if turn.reply is None or facts.auxiliary is not None or facts.is_engine_fault:
        return False
    if "weight" in facts.extra:  # the imported file decides
        return bool(facts.extra["weight"])
    return turn.sequence not in arrivals.abandoned and not (turn.sequence in arrivals.unproven and is_in_doubt(turn))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in _WIRE_ONLY and value is not None}


def _calls_row(message: dict[str, Any]) -> list[Row]:
    """Tool calls with the fields of OpenAI's API. In a table, each call has all fields."""
    found = []
    for call in message_calls(message):
        name, arguments = map(_text, call_parts(call))
        about = {"id": _text(call.get("id")), "type": _text(call.get("type", "function"))}
        found.append({**about, "function": {"name": name, "arguments": arguments}})
    return found


def _text(value: Any) -> str | None:
    """A text as it is, and anything else as JSON: a column of a table holds only text."""
    return value if value is None or isinstance(value, str) else bytes(JSON.write(value)).decode()


def _message_row(message: dict[str, Any]) -> Row:
    calls = _calls_row(message)
    content = message.get("content")
    return {
        "role": message["role"],
        "content": None if content is None else content_text(content),
        "reasoning_content": reasoning_text(message) or None,
        "tool_calls": calls or None,
        "tool_call_id": _text(message.get("tool_call_id")),
        "name": _text(message.get("name")),
        "weight": message.get("weight"),
    }


def _messages_type() -> Any:
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)])
    texts = [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_call_id", "name")]
    return pa.list_(pa.struct([*texts, ("tool_calls", pa.list_(call)), ("weight", pa.int32())]))


_MESSAGES = Kind(_messages_type, write=lambda messages: [_message_row(message) for message in messages])
_REPLIES = records(dict, COUNT("message", itemgetter(0)), TEXT("turn", itemgetter(1)))

# In a table, a message has only text, and tools are JSON text: tools of two rows need not have one type.
CONVERSATION = Table(
    TEXT("rollout", "rollout.id"),
    COUNT("try_index", "rollout.head.try_index"),
    TEXT("session", "session.id"),
    TEXT("turn", "last.id"),
    INT("step", "rollout.head.step"),
    INT("attempt", "rollout.head.attempt"),
    TEXT("source", "rollout.head.source"),
    TEXT("task_id", "rollout.head.task_id"),
    JSON("task", "rollout.head.task"),
    TEXT("model", "rollout.head.model"),
    TEXT("agent", "rollout.head.agent"),
    TEXTS("launch_tags", lambda one: list(one.rollout.head.tags)),
    TEXT("stop_reason", "rollout.outcome.stop_reason"),
    TEXT("reason", "rollout.outcome.reason"),
    NUMBER("reward", "rollout.reward"),
    NUMBERS_BY_NAME("reward_terms", "rollout.outcome.reward_terms"),
    JSON("tools", "last.root.tools"),
    _MESSAGES("messages"),
    _REPLIES("replies"),
)


def conversation_line(conversation: Conversation) -> Row:
    """A conversation as a JSON line: messages as they came, without absent fields."""
    row = {name: value for name, value in CONVERSATION.row(conversation).items() if value is not None}
    return {**row, "messages": JSON.write(conversation.messages)}


def training_line(conversation: Conversation) -> bytes:
    """A conversation in the form that fine-tuning services accept: only its messages and tools."""
    tools = conversation.last.root.tools
    row = {"messages": conversation.messages, **({"tools": tools} if tools else {})}
    return encode_numbers(row, f"turn {conversation.last.id}") + b"\n"
