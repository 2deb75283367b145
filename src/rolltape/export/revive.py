"""Rows → records: the inverse of `rows`, on rows whose free-form JSON is decoded."""

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.rows import Row
from rolltape.records.jsonable import decode_numbers, encode_json
from rolltape.records.ledger import Fate
from rolltape.records.messages import Message, MessageChain, Root
from rolltape.records.openfields import decode_record
from rolltape.records.rollout import Event, Rollout, RolloutHead, Session, SessionHead
from rolltape.records.sample import Origin, Sample, SampleSide, Span
from rolltape.records.tokens import Ids, TokenChain
from rolltape.records.trace import Trace
from rolltape.records.turn import LogprobKind, Logprobs, Segment, SideArray, Turn, TurnFacts

_HEAD_FIELDS = (
    "group",
    "run",
    "step",
    "attempt",
    "source",
    "task_id",
    "task",
    "model",
    "agent",
    "extra",
    "started_at_ns",
)
_SETTING_FIELDS = ("sampling", "sampling_asked", "logprob_kind", "model", "renderer", "fingerprint")
_COURSE_FIELDS = ("finish", "delivery", "auxiliary", "flags", "reward", "error", "started_at", "ended_at", "extra")


def sample_of(row: Row) -> Sample:
    """The sample that `sample_row` wrote."""
    return Sample(
        id=row["sample"],
        rollout=row["rollout"],
        try_index=row["try_index"],
        group=row["group"],
        session=row["session"],
        policy=row["policy"],
        step=row["step"],
        index=row["index"],
        siblings=row["siblings"],
        ids=_ids(row["ids"]),
        trained_mask=np.asarray(row["trained_mask"], dtype=np.bool_),
        sampled_mask=np.asarray(row["sampled_mask"], dtype=np.bool_),
        logprobs=_logprobs(row["logprobs"], row["logprob_dtype"]),
        version_index=_ids(row["version_index"]),
        versions=tuple((version["first"], version["last"]) for version in row["versions"]),
        spans=tuple(_span(span, row["logprob_kind"]) for span in row["spans"]),
        prompt_tokens=row["prompt_tokens"],
        trained_tokens=row["trained_tokens"],
        reward=_number(row["reward"]),
        rollout_reward=_number(row["rollout_reward"]),
        turn_rewards={turn: float(_number(reward)) for turn, reward in row["turn_rewards"].items()},
        advantage=_number(row["advantage"]),
        loss_weight=float(_number(row["loss_weight"])),
        truncated=row["truncated"],
        uses_tools=row["uses_tools"],
        ill_formed=row["ill_formed"],
        side={
            side["name"]: SampleSide(
                _array(side), _counts(side), tuple((gap["start"], gap["stop"]) for gap in side["missing"])
            )
            for side in row["side"]
        },
    )


def rollout_of(row: Row, turns: Iterable[Turn] = ()) -> Rollout:
    """The rollout that `rollout_row` wrote, with those of `turns` that are its own."""
    fields = {name: _revived(row[name]) for name in _HEAD_FIELDS}
    head = msgspec.convert(
        {
            **{name: value for name, value in fields.items() if value is not None},
            "id": row["rollout"],
            "try_index": row["try_index"],
            "tags": row["launch_tags"],
            "unknown": _revived(row["unknown"]),
        },
        RolloutHead,
    )
    by_session: dict[str, list[Turn]] = {held["session"]: [] for held in row["session_heads"]}
    for turn in turns:
        if turn.session in by_session:
            by_session[turn.session].append(turn)
    sessions = [
        Session(_session_head(held["head"], held["session"]), by_session[held["session"]])
        for held in row["session_heads"]
    ]
    events = [msgspec.convert({**event, "data": _revived(event["data"])}, Event) for event in row["events"]]
    return Rollout(head, sessions, events, writer_alive=row["status"] == "running")


def turns_of(rows: Iterable[Row]) -> Iterator[Turn]:
    """The turns that `turn_rows` wrote, in the order of the rows; a session's rows stand together."""
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
        turn = _turn(row, root, held)
        held[turn.id] = turn
        yield turn


def _turn(row: Row, root: Root, held: dict[str, Turn]) -> Turn:
    where = f"turn {row['turn']}"
    messages = [Message.snapshot(message, where) for message in row["new_messages"]]
    prompt, tokens = MessageChain(messages), TokenChain(_ids(row["new_prompt_ids"]))
    if row["messages_from"] is not None:
        prompt = MessageChain(messages, _earlier(row, "messages_from", held).messages, row["kept_messages"])
    if row["tokens_from"] is not None:
        earlier = _earlier(row, "tokens_from", held)
        tokens = TokenChain(_ids(row["new_prompt_ids"]), earlier.tokens, row["kept_tokens"])
    fields = {name: _revived(row[name]) for name in (*_SETTING_FIELDS, *_COURSE_FIELDS)}
    facts = msgspec.convert(
        {
            **{name: value for name, value in fields.items() if value is not None},
            "segments": [msgspec.convert(segment, Segment) for segment in row["segments"]],
            "message_starts": None if row["message_starts"] is None else tuple(map(int, row["message_starts"])),
            "unknown": _revived(row["unknown"]),
        },
        TurnFacts,
    )
    return Turn(
        session=row["session"],
        sequence=row["sequence"],
        root=root,
        prompt=prompt,
        prompt_tokens=tokens,
        reply=None if row["reply"] is None else Message.snapshot(row["reply"], where),
        sampled_ids=_ids(row["sampled_ids"]),
        logprobs=None if row["logprobs"] is None else _logprobs(row["logprobs"], row["logprob_dtype"]),
        facts=facts,
        side={side["name"]: SideArray(side["start"], _array(side), _counts(side)) for side in row["side"]},
    )


def trace_of(row: Row) -> Trace:
    """The trace in a row."""
    return msgspec.convert(_revived(row), Trace)


def _earlier(row: Row, column: str, held: dict[str, Turn]) -> Turn:
    if row[column] not in held:
        raise ExportError(f"turn {row['turn']}: goes on from {row[column]}, which is not before it in the file")
    return held[row[column]]


def _session_head(value: object, session: str) -> SessionHead:
    return decode_record(encode_json(value, session)[0], SessionHead, f"session {session}")


def _span(span: dict[str, Any], kind_of_trained: str | None) -> Span:
    fate = None if span["fate"] is None else Fate(span["fate"])
    # Release 0.1.0 gave one kind for the whole sample.
    kind = span.get("logprob_kind", kind_of_trained if fate is Fate.TRAINED else None)
    return Span(
        span["start"],
        span["stop"],
        Origin(span["origin"]),
        span["turn"],
        span["turn_start"],
        (span["first_message"], span["end_message"]),
        fate,
        _number(span.get("temperature")),
        None if kind is None else LogprobKind(kind),
    )


def _revived(value: object) -> Any:
    """A decoded JSON value with its non-finite numbers back."""
    return decode_numbers(encode_json(value, "value")[0]) if isinstance(value, dict | list) else value


def _number(value: object) -> Any:
    """None, a number, or the spelling of one that is not finite."""
    plain = _revived(value)
    return None if plain is None else float(plain)


def _ids(values: object) -> Ids:
    return np.asarray(values, dtype=np.int32)


def _logprobs(values: object, dtype: str) -> Logprobs:
    if isinstance(values, list):
        values = [np.nan if value is None else _number(value) for value in values]
    wide: npt.NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    return wide.astype(np.float32) if dtype == "float32" else wide


def _array(side: dict[str, Any]) -> npt.NDArray[Any]:
    data = base64.b64decode(side["data"]) if isinstance(side["data"], str) else side["data"]
    dtype = np.dtype(side["dtype"])
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(side["shape"])


def _counts(side: dict[str, Any]) -> npt.NDArray[np.int32] | None:
    return None if side["counts"] is None else _ids(side["counts"])
