"""A sample's tokens for the page: a JSON header, then columns of numbers, ready to be used as they arrive."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.records.rollout import Session
from rolltape.records.sample import Sample, Span
from rolltape.records.token_record import TokenRecord
from rolltape.records.turn import Ids, Turn
from rolltape.samples.spelling import Spell, spelled
from rolltape.tree.placement import message_at
from rolltape.view.answers import finite
from rolltape.view.branch import BranchTokens
from rolltape.view.masking import Mask
from rolltape.view.rows import Array
from rolltape.view.trainer import Exported

_ALIGNED_TO = 8
_DOT = "•".encode()
# As the page calls them, and as a trainer's record does.
TRAINER_COLUMNS = {
    "advantage": "advantages",
    "entropy": "entropy",
    "trainer_logprob": "trainer_logprobs",
    "log_ratio": "log_ratio",
    "ratio": "ratio",
    "mismatch_kl": "mismatch_kl",
    "masked": "masked",
    "masked_high": "masked_high",
    "masked_low": "masked_low",
    "reference_logprob": "reference_logprobs",
}
_KINDS = {"i4": np.int32, "f4": np.float32, "u1": np.uint8}


def sample_tokens(
    sample: Sample, session: Session, spell: Spell | None, exported: Exported | None, mask: Mask | None = None
) -> bytes:
    """All columns of a sample in one answer; with a mask, tokens that spell a key are put out."""
    columns = _columns(sample.ids, sample.trained_mask, sample.sampled_mask, sample.logprobs, sample.version_index)
    joined = {} if exported is None else _joined(sample, exported.record)
    header = {
        "n": len(sample.ids),
        "spans": _spans(sample.spans, session),
        "versions": [list(one) for one in sample.versions],
        "sample": _facts(sample),
        "trainer": None if exported is None else _trainer(exported, joined=bool(joined)),
        "missing": [name for name in TRAINER_COLUMNS if name not in joined],
    }
    return _with_text(header, columns | joined, sample.ids, session, spell, mask)


def turn_tokens(branch: BranchTokens, session: Session, spell: Spell | None) -> bytes:
    """The ids of a turn, prompt and reply, in the same form; they are no sample."""
    columns = _columns(branch.ids, branch.trained, branch.sampled, branch.logprobs, branch.version_index)
    header = {
        "n": len(branch.ids),
        "spans": _spans(branch.spans, session),
        "versions": [list(one) for one in branch.versions],
        "sample": None,
        "trainer": None,
        "missing": list(TRAINER_COLUMNS),
    }
    return _with_text(header, columns, branch.ids, session, spell, None)


Column = tuple[str, Array]


def _columns(ids: Array, trained: Array, sampled: Array, logprobs: Array, version: Array) -> dict[str, Column]:
    return {
        "ids": ("i4", ids),
        "trained": ("u1", trained),
        "sampled": ("u1", sampled),
        "logprob": ("f4", logprobs),
        "version": ("i4", version),
    }


def _with_text(
    header: dict[str, Any],
    columns: dict[str, Column],
    ids: Ids,
    session: Session,
    spell: Spell | None,
    mask: Mask | None,
) -> bytes:
    offsets, text = spelled(ids, spell)
    if mask is not None:
        keys = _key_tokens(offsets, text, mask)
        kept = np.where(keys, -1, ids).astype(np.int32)
        offsets, text = spelled(kept, lambda token: _DOT if token < 0 else spell(token) if spell else b"")
        columns = {**columns, "ids": ("i4", kept)}
    columns = {**columns, "text_offsets": ("i4", offsets), "text_utf8": ("u1", text)}
    named = None if spell is None else {"offsets": "text_offsets", "utf8": "text_utf8"}
    return packed({**header, "text": named, "session": session.id}, columns)


def _key_tokens(offsets: Array, text: Array, mask: Mask) -> Array:
    """The tokens that take part in a key."""
    found: Array = np.zeros(len(offsets) - 1, np.bool_)
    for start, stop in mask.spans(text.tobytes().decode("latin-1")):  # each byte stands for a character
        found |= (offsets[:-1] < stop) & (offsets[1:] > start)
    return found


def _spans(spans: Sequence[Span], session: Session) -> list[dict[str, Any]]:
    """Spans with the role of the first message that each spells."""
    turns = {turn.id: turn for turn in session.turns}
    return [
        {
            "start": span.start,
            "stop": span.stop,
            "origin": span.origin.value,
            "turn": span.turn,
            "turn_sequence": turns[span.turn].sequence,
            "turn_start": span.turn_start,
            "session": session.id,
            "messages": list(span.messages),
            "role": _role(turns[span.turn], span),
            "fate": None if span.fate is None else span.fate.value,
        }
        for span in spans
    ]


def _role(turn: Turn, span: Span) -> str | None:
    first, end = span.messages
    return message_at(turn.messages, first).role.value if first < min(end, len(turn.messages)) else None


def _facts(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "index": sample.index,
        "siblings": sample.siblings,
        "policy": sample.policy,
        "tokens": len(sample.ids),
        "prompt_tokens": sample.prompt_tokens,
        "trained": sample.trained_tokens,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "loss_weight": sample.loss_weight,
        "logprob_kind": sample.logprob_kind,
    }


def _trainer(exported: Exported, *, joined: bool) -> dict[str, Any]:
    record = exported.record
    return {
        "step": record.step,
        "place": record.place,
        "sample": record.sample,
        "joined": joined,
        "records": [{"step": step, "place": place} for step, place in exported.records],
    }


def _joined(sample: Sample, record: TokenRecord) -> dict[str, Column]:
    """The trainer's columns, where it saw these ids; what it cut off is NaN, or not masked."""
    if not np.array_equal(record.ids, sample.ids[: len(record)]):
        return {}
    held = record.columns()
    found: dict[str, Column] = {}
    for name, column in TRAINER_COLUMNS.items():
        if column in held:
            kind = "u1" if held[column].dtype == np.bool_ else "f4"
            whole = np.full(len(sample.ids), 0 if kind == "u1" else np.nan, _KINDS[kind])
            whole[: len(record)] = held[column]
            found[name] = (kind, whole)
    return found


def packed(header: dict[str, Any], columns: dict[str, Column]) -> bytes:
    """The header's length in 8 bytes, the header, and the columns, each beginning at a multiple of 8 of the whole."""
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    at = 0
    for name, (kind, values) in columns.items():
        raw = np.ascontiguousarray(values, _KINDS[kind]).tobytes()
        described.append({"name": name, "dtype": kind, "offset": at, "length": len(values)})
        parts += [raw, bytes(-len(raw) % _ALIGNED_TO)]
        at += len(raw) + len(parts[-1])
    raw_header = msgspec.json.encode(finite({**header, "columns": described}))
    raw_header += b" " * (-len(raw_header) % _ALIGNED_TO)
    return b"".join([len(raw_header).to_bytes(8, "little"), raw_header, *parts])
