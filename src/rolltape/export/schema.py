"""The columns of exported samples and rollouts, each declared once, and the records that rows are made from.

A column may be added; a change of meaning raises the version in the name of the schema.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from rolltape.export.columns import (
    COUNT,
    ENCODED_JSON,
    FLAG,
    IDS,
    INT,
    JSON,
    MASK,
    NUMBER,
    NUMBERS_BY_NAME,
    TEXT,
    TEXTS,
    Row,
    Table,
    array_of,
    built,
    logprob_columns,
    logprobs_of,
    pair_columns,
    pairs,
    records,
    side_arrays,
)
from rolltape.records.jsonable import decode_record, encode_json, encode_record
from rolltape.records.rollout import Event, Outcome, Rollout, RolloutHead, Session, SessionHead
from rolltape.records.sample import Fate, Sample, SampleSide, Span
from rolltape.records.trace import TRACE_SCHEMA
from rolltape.records.turn import Turn


class RowKind(enum.StrEnum):
    """What one row of an export is. The value is the `schema` field of each row or file."""

    SAMPLE = "rolltape.sample/1"
    ROLLOUT = "rolltape.rollout/1"
    TURN = "rolltape.turn/1"
    MESSAGE = "rolltape.message/1"
    TRACE = TRACE_SCHEMA
    CONVERSATION = "rolltape.conversation/1"


_RANGES = pairs("start", "stop", COUNT)
_VERSIONS = pairs("first", "last", TEXT)

_SPANS = records(
    lambda values: built(Span, values, messages=(values["first_message"], values["end_message"])),
    COUNT("start"),
    COUNT("stop"),
    TEXT("origin"),
    TEXT("turn"),
    COUNT("turn_start"),
    *pair_columns("first_message", "end_message", COUNT, "messages"),
    TEXT("fate"),
    NUMBER("temperature"),
    TEXT("logprob_kind"),
)

SAMPLE = Table(
    TEXT("sample", "id"),
    TEXT("rollout"),
    COUNT("try_index"),
    TEXT("group"),
    TEXT("session"),
    TEXT("policy"),
    INT("step"),
    COUNT("index"),
    COUNT("siblings"),
    COUNT("prompt_tokens"),
    COUNT("trained_tokens"),
    NUMBER("reward"),
    NUMBER("rollout_reward"),
    NUMBER("advantage"),
    NUMBER("loss_weight"),
    NUMBERS_BY_NAME("turn_rewards"),
    FLAG("truncated"),
    FLAG("uses_tools"),
    FLAG("ill_formed"),
    IDS("ids"),
    MASK("trained_mask"),
    MASK("sampled_mask"),
    *logprob_columns(),
    TEXT("logprob_kind"),
    IDS("version_index"),
    _VERSIONS("versions"),
    _SPANS("spans"),
    side_arrays("side", _RANGES("missing")),
)


def sample_of(row: Row) -> Sample:
    values = SAMPLE.values(row)
    named = {name: values[name] for name in Sample.__struct_fields__ if name in values}
    sides = {side["name"]: SampleSide(array_of(side), side["counts"], side["missing"]) for side in values["side"]}
    sample = Sample(**{**named, "id": values["sample"], "logprobs": logprobs_of(values), "side": sides})
    if row["spans"] and "logprob_kind" not in row["spans"][0]:
        return _with_kind_of_trained(sample, values["logprob_kind"])
    return sample


def _with_kind_of_trained(sample: Sample, kind: str | None) -> Sample:
    """A sample that 0.1.0 wrote. Its one logprob kind applies to all its trained tokens."""
    spans = [
        msgspec.convert({**msgspec.structs.asdict(span), "logprob_kind": kind}, Span)
        if span.fate is Fate.TRAINED
        else span
        for span in sample.spans
    ]
    return msgspec.structs.replace(sample, spans=tuple(spans))


class ListedRollout(NamedTuple):
    """An entry of a list of rollouts. No field grows with the number of turns."""

    head: RolloutHead
    outcome: Outcome
    sessions: int
    turns: int
    sampled_tokens: int


LISTED_ROLLOUT = Table(
    TEXT("rollout", "head.id"),
    COUNT("try_index", "head.try_index"),
    TEXT("group", "head.group"),
    TEXT("run", "head.run"),
    INT("step", "head.step"),
    INT("attempt", "head.attempt"),
    TEXT("source", "head.source"),
    TEXT("task_id", "head.task_id"),
    JSON("task", "head.task"),
    TEXT("model", "head.model"),
    TEXT("agent", "head.agent"),
    TEXTS("launch_tags", lambda listed: list(listed.head.tags)),
    TEXTS("foreign_ids", lambda listed: list(listed.head.foreign_ids)),
    JSON("extra", "head.extra"),
    INT("started_at_ns", "head.started_at_ns"),
    TEXT("status", "outcome.status"),
    TEXT("stop_reason", "outcome.stop_reason"),
    TEXT("reason", "outcome.reason"),
    NUMBER("reward", "outcome.reward"),
    NUMBERS_BY_NAME("reward_terms", "outcome.reward_terms"),
    TEXT("rewarded_by", "outcome.rewarded_by"),
    TEXT("filtered", "outcome.filtered"),
    TEXTS("tags", lambda listed: list(listed.outcome.tags)),
    COUNT("sessions"),
    COUNT("turns"),
    INT("sampled_tokens"),
    JSON("unknown", "head.unknown"),
)

_EVENTS = records(
    lambda values: Event(**values),
    TEXT("writer"),
    INT("sequence"),
    INT("at_ns"),
    TEXT("kind"),
    TEXT("rollout"),
    COUNT("try_index"),
    TEXT("turn"),
    TEXT("by"),
    JSON("data"),
)

_SESSION_HEADS = records(
    dict,
    TEXT("session", "id"),
    ENCODED_JSON("head", lambda session: encode_record(session.head, f"session {session.id}")),
)

_HELD = Table(_SESSION_HEADS("session_heads", "sessions"), _EVENTS("events"))

ROLLOUT = Table(*LISTED_ROLLOUT.columns, *_HELD.columns)


def rollout_row(rollout: Rollout) -> Row:
    """A rollout's row: the fields of a list, its sessions' heads, and its events. Turns are separate rows."""
    sampled = sum(len(turn.sampled_ids) for turn in rollout.turns)
    counts = (len(rollout.sessions), len(rollout.turns), sampled)
    return {**LISTED_ROLLOUT.row(ListedRollout(rollout.head, rollout.outcome, *counts)), **_HELD.row(rollout)}


def rollout_of(row: Row, turns: Mapping[str, Sequence[Turn]]) -> Rollout:
    """The rollout in a row; `turns` has those of its sessions, by session."""
    values = ROLLOUT.values(row)
    head = built(RolloutHead, values, id=values["rollout"], tags=values["launch_tags"])
    sessions = [
        Session(_session_head(held["head"], held["session"]), turns.get(held["session"], ()))
        for held in values["session_heads"]
    ]
    return Rollout(head, sessions, values["events"], writer_alive=values["status"] == "running")


def _session_head(value: object, session: str) -> SessionHead:
    return decode_record(encode_json(value, session)[0], SessionHead, f"session {session}")
