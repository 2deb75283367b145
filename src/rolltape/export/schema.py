"""The columns of exported samples and rollouts, each declared once, and the records that rows are made of.

A column may be added; a change of meaning raises the version in the name of the schema.
"""

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rolltape.export.columns import (
    COUNT,
    ENCODED_JSON,
    FLAG,
    IDS,
    INT,
    JSON,
    LOGPROBS,
    MASK,
    NUMBER,
    NUMBERS_BY_NAME,
    TEXT,
    TEXTS,
    Column,
    Kind,
    Row,
    Table,
    array_columns,
    array_of,
    built,
    column,
    records,
)
from rolltape.records.jsonable import encode_json
from rolltape.records.ledger import Fate
from rolltape.records.openfields import decode_record, encode_record
from rolltape.records.rollout import Event, Outcome, Rollout, RolloutHead, Session, SessionHead
from rolltape.records.sample import Sample, SampleSide, Span
from rolltape.records.trace import TRACE_SCHEMA
from rolltape.records.turn import Logprobs, Turn


class RowKind(enum.StrEnum):
    """What one row of an export is; the value is the `schema` field that each row or file carries."""

    SAMPLE = "rolltape.sample/1"
    ROLLOUT = "rolltape.rollout/1"
    TURN = "rolltape.turn/1"
    MESSAGE = "rolltape.message/1"
    TRACE = TRACE_SCHEMA


def logprob_columns() -> tuple[Column, ...]:
    """Logprobs of any width as doubles, and the width that they had."""
    dtype = column("logprob_dtype", TEXT, lambda of: None if of.logprobs is None else of.logprobs.dtype.name)
    return column("logprobs", LOGPROBS), dtype


def logprobs_of(values: dict[str, Any]) -> Logprobs | None:
    """The logprobs that `logprob_columns` wrote."""
    wide: Logprobs | None = values["logprobs"]
    return wide.astype(np.float32) if wide is not None and values["logprob_dtype"] == "float32" else wide


def side_kind(*columns: Column) -> Kind:
    """Side arrays by name: a list with the columns that any side array has, and others."""
    pairs = (column("name", TEXT, lambda pair: pair[0]), *array_columns(lambda pair: pair[1].values))
    listed = records(dict, *pairs, column("counts", IDS, lambda pair: pair[1].counts), *columns)
    return listed._replace(write=lambda sides: listed.write(sides.items()))


_RANGES = records(
    lambda values: (values["start"], values["stop"]),
    column("start", COUNT, lambda pair: pair[0]),
    column("stop", COUNT, lambda pair: pair[1]),
)

_SPANS = records(
    lambda values: built(Span, values, messages=(values["first_message"], values["end_message"])),
    column("start", COUNT),
    column("stop", COUNT),
    column("origin", TEXT),
    column("turn", TEXT),
    column("turn_start", COUNT),
    column("first_message", COUNT, lambda span: span.messages[0]),
    column("end_message", COUNT, lambda span: span.messages[1]),
    column("fate", TEXT),
    column("temperature", NUMBER),
    column("logprob_kind", TEXT),
)

SAMPLE = Table(
    column("sample", TEXT, "id"),
    column("rollout", TEXT),
    column("try_index", COUNT),
    column("group", TEXT),
    column("session", TEXT),
    column("policy", TEXT),
    column("step", INT),
    column("index", COUNT),
    column("siblings", COUNT),
    column("prompt_tokens", COUNT),
    column("trained_tokens", COUNT),
    column("reward", NUMBER),
    column("rollout_reward", NUMBER),
    column("advantage", NUMBER),
    column("loss_weight", NUMBER),
    column("turn_rewards", NUMBERS_BY_NAME),
    column("truncated", FLAG),
    column("uses_tools", FLAG),
    column("ill_formed", FLAG),
    column("ids", IDS),
    column("trained_mask", MASK),
    column("sampled_mask", MASK),
    *logprob_columns(),
    column("logprob_kind", TEXT),
    column("version_index", IDS),
    column(
        "versions",
        records(
            lambda values: (values["first"], values["last"]),
            column("first", TEXT, lambda pair: pair[0]),
            column("last", TEXT, lambda pair: pair[1]),
        ),
    ),
    column("spans", _SPANS),
    column("side", side_kind(column("missing", _RANGES, lambda pair: pair[1].missing))),
)


def sample_of(row: Row) -> Sample:
    """The sample in a row."""
    values = SAMPLE.values(row)
    named = {name: values[name] for name in Sample.__struct_fields__ if name in values}
    sides = {side["name"]: SampleSide(array_of(side), side["counts"], side["missing"]) for side in values["side"]}
    sample = Sample(**{**named, "id": values["sample"], "logprobs": logprobs_of(values), "side": sides})
    if row["spans"] and "logprob_kind" not in row["spans"][0]:
        return _with_kind_of_trained(sample, values["logprob_kind"])
    return sample


def _with_kind_of_trained(sample: Sample, kind: str | None) -> Sample:
    """A sample that 0.1.0 wrote: its one logprob kind is that of all its trained tokens."""
    spans = [
        msgspec.convert({**msgspec.structs.asdict(span), "logprob_kind": kind}, Span)
        if span.fate is Fate.TRAINED
        else span
        for span in sample.spans
    ]
    return msgspec.structs.replace(sample, spans=tuple(spans))


class ListedRollout(NamedTuple):
    """What a list of rollouts holds of each: no field grows with its turns."""

    head: RolloutHead
    outcome: Outcome
    sessions: int
    turns: int
    sampled_tokens: int


LISTED_ROLLOUT = Table(
    column("rollout", TEXT, "head.id"),
    column("try_index", COUNT, "head.try_index"),
    column("group", TEXT, "head.group"),
    column("run", TEXT, "head.run"),
    column("step", INT, "head.step"),
    column("attempt", INT, "head.attempt"),
    column("source", TEXT, "head.source"),
    column("task_id", TEXT, "head.task_id"),
    column("task", JSON, "head.task"),
    column("model", TEXT, "head.model"),
    column("agent", TEXT, "head.agent"),
    column("launch_tags", TEXTS, lambda listed: list(listed.head.tags)),
    column("extra", JSON, "head.extra"),
    column("started_at_ns", INT, "head.started_at_ns"),
    column("status", TEXT, "outcome.status"),
    column("stop_reason", TEXT, "outcome.stop_reason"),
    column("reason", TEXT, "outcome.reason"),
    column("reward", NUMBER, "outcome.reward"),
    column("reward_terms", NUMBERS_BY_NAME, "outcome.reward_terms"),
    column("rewarded_by", TEXT, "outcome.rewarded_by"),
    column("filtered", TEXT, "outcome.filtered"),
    column("tags", TEXTS, lambda listed: list(listed.outcome.tags)),
    column("sessions", COUNT),
    column("turns", COUNT),
    column("sampled_tokens", INT),
    column("unknown", JSON, "head.unknown"),
)

_EVENTS = records(
    lambda values: Event(**values),
    column("writer", TEXT),
    column("sequence", INT),
    column("at_ns", INT),
    column("kind", TEXT),
    column("rollout", TEXT),
    column("try_index", COUNT),
    column("turn", TEXT),
    column("by", TEXT),
    column("data", JSON),
)

_HELD = Table(
    column(
        "session_heads",
        records(dict, column("session", TEXT, "id"), column("head", ENCODED_JSON, lambda of: _encoded(of.head))),
        "sessions",
    ),
    column("events", _EVENTS),
)

ROLLOUT = Table(*LISTED_ROLLOUT.columns, *_HELD.columns)


def rollout_row(rollout: Rollout) -> Row:
    """A rollout's row: what lists hold of it, its sessions' heads and its events; turns are rows of their own."""
    sampled = sum(len(turn.sampled_ids) for turn in rollout.turns)
    counts = (len(rollout.sessions), len(rollout.turns), sampled)
    return {**LISTED_ROLLOUT.row(ListedRollout(rollout.head, rollout.outcome, *counts)), **_HELD.row(rollout)}


def rollout_of(row: Row, turns: Iterable[Turn] = ()) -> Rollout:
    """The rollout in a row, with those of `turns` that are its own."""
    values = ROLLOUT.values(row)
    head = built(RolloutHead, values, id=values["rollout"], tags=values["launch_tags"])
    by_session: dict[str, list[Turn]] = {held["session"]: [] for held in values["session_heads"]}
    for turn in turns:
        if turn.session in by_session:
            by_session[turn.session].append(turn)
    sessions = [
        Session(_session_head(held["head"], held["session"]), by_session[held["session"]])
        for held in values["session_heads"]
    ]
    return Rollout(head, sessions, values["events"], writer_alive=values["status"] == "running")


def _encoded(head: SessionHead) -> bytes:
    return encode_record(head, f"session {head.id}")


def _session_head(value: object, session: str) -> SessionHead:
    return decode_record(encode_json(value, session)[0], SessionHead, f"session {session}")
