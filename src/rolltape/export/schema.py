"""The columns of each export, and their versions. A column may be added; a change of meaning raises the version."""

import enum
from typing import Any

import pyarrow as pa

from rolltape.records.trace import TRACE_SCHEMA


class RowKind(enum.StrEnum):
    """What one row of an export is; the value is the `schema` field that each row or file carries."""

    SAMPLE = "rolltape.sample/1"
    ROLLOUT = "rolltape.rollout/1"
    TURN = "rolltape.turn/1"
    MESSAGE = "rolltape.message/1"
    TRACE = TRACE_SCHEMA


# The key of a Parquet file's metadata that holds the RowKind.
SCHEMA_KEY = b"rolltape.schema"
_JSON_KEY = b"rolltape.json"

_TEXT, _INT, _COUNT, _NUMBER, _FLAG = pa.string(), pa.int64(), pa.int32(), pa.float64(), pa.bool_()
_IDS, _MASK, _LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.bool_()), pa.list_(pa.float64())
_NUMBERS_BY_NAME = pa.map_(pa.string(), pa.float64())


def _json(name: str) -> "pa.Field[Any]":
    """A column of free-form JSON: text in Parquet, the value itself in a JSON line."""
    return pa.field(name, _TEXT, metadata={_JSON_KEY: b"1"})


def _columns(*fields: Any) -> pa.Schema:
    """A schema out of fields and (name, type) pairs."""
    return pa.schema([pa.field(*field) if isinstance(field, tuple) else field for field in fields])


def _records(*fields: Any) -> pa.DataType:
    """A list of structs out of fields and (name, type) pairs."""
    return pa.list_(pa.struct(list(_columns(*fields))))


_RANGES = _records(("start", _COUNT), ("stop", _COUNT))
_SIDE_COLUMNS = [("name", _TEXT), ("dtype", _TEXT), ("shape", pa.list_(pa.int64())), ("data", pa.binary())]
_TURN_SIDE = _records(*_SIDE_COLUMNS, ("counts", _IDS), ("start", _COUNT))
_SAMPLE_SIDE = _records(*_SIDE_COLUMNS, ("counts", _IDS), ("missing", _RANGES))

SAMPLE_COLUMNS = _columns(
    ("sample", _TEXT),
    ("rollout", _TEXT),
    ("try_index", _COUNT),
    ("group", _TEXT),
    ("session", _TEXT),
    ("policy", _TEXT),
    ("step", _INT),
    ("index", _COUNT),
    ("siblings", _COUNT),
    ("prompt_tokens", _COUNT),
    ("trained_tokens", _COUNT),
    ("reward", _NUMBER),
    ("rollout_reward", _NUMBER),
    ("advantage", _NUMBER),
    ("loss_weight", _NUMBER),
    ("turn_rewards", _NUMBERS_BY_NAME),
    ("truncated", _FLAG),
    ("uses_tools", _FLAG),
    ("ill_formed", _FLAG),
    ("ids", _IDS),
    ("trained_mask", _MASK),
    ("sampled_mask", _MASK),
    ("logprobs", _LOGPROBS),
    ("logprob_dtype", _TEXT),
    ("logprob_kind", _TEXT),
    ("version_index", _IDS),
    ("versions", _records(("first", _TEXT), ("last", _TEXT))),
    (
        "spans",
        _records(
            ("start", _COUNT),
            ("stop", _COUNT),
            ("origin", _TEXT),
            ("turn", _TEXT),
            ("turn_start", _COUNT),
            ("first_message", _COUNT),
            ("end_message", _COUNT),
            ("fate", _TEXT),
            ("temperature", _NUMBER),
            ("logprob_kind", _TEXT),
        ),
    ),
    ("side", _SAMPLE_SIDE),
)

# What lists need: no column that grows with a rollout's turns.
ROLLOUT_SUMMARY_COLUMNS = _columns(
    ("rollout", _TEXT),
    ("try_index", _COUNT),
    ("group", _TEXT),
    ("run", _TEXT),
    ("step", _INT),
    ("attempt", _INT),
    ("source", _TEXT),
    ("task_id", _TEXT),
    _json("task"),
    ("model", _TEXT),
    ("agent", _TEXT),
    ("launch_tags", pa.list_(_TEXT)),
    _json("extra"),
    ("started_at_ns", _INT),
    ("status", _TEXT),
    ("stop_reason", _TEXT),
    ("reason", _TEXT),
    ("reward", _NUMBER),
    ("reward_terms", _NUMBERS_BY_NAME),
    ("rewarded_by", _TEXT),
    ("filtered", _TEXT),
    ("tags", pa.list_(_TEXT)),
    ("sessions", _COUNT),
    ("turns", _COUNT),
    ("sampled_tokens", _INT),
    _json("unknown"),
)

ROLLOUT_COLUMNS = _columns(
    *ROLLOUT_SUMMARY_COLUMNS,
    ("session_heads", _records(("session", _TEXT), _json("head"))),
    (
        "events",
        _records(
            ("writer", _TEXT),
            ("sequence", _INT),
            ("at_ns", _INT),
            ("kind", _TEXT),
            ("rollout", _TEXT),
            ("try_index", _COUNT),
            ("turn", _TEXT),
            ("by", _TEXT),
            _json("data"),
        ),
    ),
)

TURN_COLUMNS = _columns(
    ("turn", _TEXT),
    ("rollout", _TEXT),
    ("try_index", _COUNT),
    ("session", _TEXT),
    ("sequence", _COUNT),
    ("prompt_messages", _COUNT),
    ("prompt_tokens", _COUNT),
    ("sampled_tokens", _COUNT),
    ("finish", _TEXT),
    ("delivery", _TEXT),
    ("auxiliary", _TEXT),
    ("flags", pa.list_(_TEXT)),
    ("reward", _NUMBER),
    ("error", _TEXT),
    ("model", _TEXT),
    ("renderer", _TEXT),
    ("fingerprint", _TEXT),
    ("started_at", _NUMBER),
    ("ended_at", _NUMBER),
    _json("sampling"),
    _json("sampling_asked"),
    _json("root"),
    ("messages_from", _TEXT),
    ("kept_messages", _COUNT),
    ("new_messages", pa.list_(_json("message"))),
    _json("reply"),
    ("message_starts", _IDS),
    ("tokens_from", _TEXT),
    ("kept_tokens", _COUNT),
    ("new_prompt_ids", _IDS),
    ("sampled_ids", _IDS),
    ("logprobs", _LOGPROBS),
    ("logprob_dtype", _TEXT),
    ("logprob_kind", _TEXT),
    ("segments", _records(("start", _COUNT), ("stop", _COUNT), ("first_version", _TEXT), ("last_version", _TEXT))),
    ("side", _TURN_SIDE),
    _json("extra"),
    _json("unknown"),
)

MESSAGE_COLUMNS = _columns(
    ("turn", _TEXT),
    ("rollout", _TEXT),
    ("try_index", _COUNT),
    ("session", _TEXT),
    ("index", _COUNT),
    ("sampled", _FLAG),
    ("role", _TEXT),
    ("text", _TEXT),
    ("reasoning", _TEXT),
    ("tool_calls", _COUNT),
    _json("message"),
)

COLUMNS: dict[RowKind, pa.Schema] = {
    RowKind.SAMPLE: SAMPLE_COLUMNS,
    RowKind.ROLLOUT: ROLLOUT_COLUMNS,
    RowKind.TURN: TURN_COLUMNS,
    RowKind.MESSAGE: MESSAGE_COLUMNS,
}


def is_json(field: "pa.Field[Any]") -> bool:
    """Whether a column holds free-form JSON."""
    return bool(field.metadata) and _JSON_KEY in (field.metadata or {})
