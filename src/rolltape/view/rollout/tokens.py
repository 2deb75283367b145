"""The tokens of a sample or of a turn for the page: a JSON header, then columns of numbers in binary form."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rolltape.records.rollout import Session
from rolltape.records.sample import Fate, LedgerEntry, Origin, Sample, Span
from rolltape.records.token_record import TokenRecord
from rolltape.records.turn import Ids, Turn
from rolltape.samples import Linearized
from rolltape.samples.spelling import Spell, spelled
from rolltape.tree import PlacedTurn
from rolltape.tree.placement import message_at
from rolltape.view.answers import encode_answer
from rolltape.view.rollout.detail import describe_span
from rolltape.view.rollout.masking import Mask
from rolltape.view.rollout.top_tokens import TopTokens, sample_top_tokens, turn_top_tokens
from rolltape.view.run.rows import Array
from rolltape.view.run.trainer import ExportedSample

_ALIGNED_TO = 8
_DOT = "•".encode()
# The page's names of a trainer's columns, and those of a token record.
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
    "trainer_trained": "trained_mask",
}
_SAMPLE_FACTS = (
    *("id", "index", "siblings", "policy", "prompt_tokens"),
    *("reward", "advantage", "loss_weight", "logprob_kind"),
)

PackedColumn = tuple[str, Array]  # its type, a key of _KINDS, and its values
_KINDS = {"i4": np.int32, "f4": np.float32, "u1": np.uint8}


class TurnTokens:
    """Aligned columns over the ids of a turn's prompt and reply, and the origin of each id."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.trained: Array = np.zeros(len(ids), np.bool_)
        self.sampled: Array = np.zeros(len(ids), np.bool_)
        self.logprobs: Array = np.full(len(ids), np.nan, np.float32)
        self.version_index: Array = np.full(len(ids), -1, np.int32)
        self.versions: list[tuple[str, str]] = []
        self.spans: list[Span] = []
        self.top = TopTokens(len(ids))


def read_turn(made: Linearized, turn_id: str) -> TurnTokens | None:
    """The tokens of a turn, or None if the rollout has no such turn."""
    placed = next((one for tree in made.trees for one in tree.turns if one.turn.id == turn_id), None)
    if placed is None:
        return None
    found = TurnTokens(placed.turn.tokens.to_numpy())
    entries: dict[str, list[LedgerEntry]] = {}
    for entry in made.ledger.entries:
        entries.setdefault(entry.turn, []).append(entry)
    at = 0
    parts: list[tuple[Turn, int, int]] = []
    for one, stop in _path_to(placed):
        for span in _turn_spans(one, at, stop, entries.get(one.turn.id, [])):
            found.spans.append(span)
            _fill(found, one, span)
        parts.append((one.turn, at, stop))
        at = max(at, stop)
    found.top = turn_top_tokens(len(found.ids), parts)
    return found


def _path_to(placed: PlacedTurn) -> list[tuple[PlacedTurn, int]]:
    """The turns up to this one, each with the position up to which it accounts for the ids."""
    path: list[tuple[PlacedTurn, int]] = []
    stop = len(placed.turn.tokens)
    at: PlacedTurn | None = placed
    while at is not None:
        path.append((at, min(stop, len(at.turn.tokens))))
        stop = min(stop, at.shared_tokens)
        at = at.parent
    return path[::-1]


def _turn_spans(placed: PlacedTurn, start: int, stop: int, entries: list[LedgerEntry]) -> Iterator[Span]:
    turn = placed.turn
    prompt = len(turn.prompt_tokens)
    first = 0 if placed.parent is None else min(len(placed.parent.turn.messages), len(turn.prompt))
    if start < min(prompt, stop):
        yield Span(start, min(prompt, stop), Origin.PROMPT, turn.id, start, (first, len(turn.prompt)), None)
    messages = (len(turn.prompt), len(turn.messages))
    for entry in entries:
        begin, end = max(prompt + entry.start, start), min(prompt + entry.stop, stop)
        if begin < end:
            yield Span(begin, end, Origin.SAMPLED, turn.id, begin - prompt, messages, entry.fate)


def _fill(found: TurnTokens, placed: PlacedTurn, span: Span) -> None:
    if span.origin is Origin.PROMPT:
        return
    turn, own = placed.turn, slice(span.turn_start, span.turn_start + span.stop - span.start)
    found.sampled[span.start : span.stop] = True
    found.trained[span.start : span.stop] = span.fate is Fate.TRAINED
    if turn.logprobs is not None:
        found.logprobs[span.start : span.stop] = turn.logprobs[own]
    for part in turn.facts.segments:
        begin, end = max(part.start, own.start), min(part.stop, own.stop)
        if part.first_version is None or part.last_version is None or begin >= end:
            continue
        name = (part.first_version, part.last_version)
        if name not in found.versions:
            found.versions.append(name)
        shift = span.start - span.turn_start
        found.version_index[begin + shift : end + shift] = found.versions.index(name)


def pack_sample(
    sample: Sample, session: Session, spell: Spell | None, exported: ExportedSample | None, mask: Mask | None = None
) -> bytes:
    """All columns of a sample in one answer; with a mask, tokens that spell a key are replaced."""
    columns = _columns(sample.ids, sample.trained_mask, sample.sampled_mask, sample.logprobs, sample.version_index)
    joined = {} if exported is None else _trainer_columns(sample, exported.record)
    header = {
        "n": len(sample.ids),
        "spans": _spans(sample.spans, session),
        "versions": [list(one) for one in sample.versions],
        "sample": _facts(sample),
        "trainer": None if exported is None else _trainer(exported, joined=bool(joined)),
        "missing": [name for name in TRAINER_COLUMNS if name not in joined],
    }
    return _with_text(header, columns | joined, sample.ids, sample_top_tokens(sample), session, spell, mask)


def pack_turn(turn: TurnTokens, session: Session, spell: Spell | None) -> bytes:
    """The tokens of a turn's prompt and reply, in the same form."""
    columns = _columns(turn.ids, turn.trained, turn.sampled, turn.logprobs, turn.version_index)
    header = {
        "n": len(turn.ids),
        "spans": _spans(turn.spans, session),
        "versions": [list(one) for one in turn.versions],
        "sample": None,
        "trainer": None,
        "missing": list(TRAINER_COLUMNS),
    }
    return _with_text(header, columns, turn.ids, turn.top, session, spell, None)


def _columns(ids: Array, trained: Array, sampled: Array, logprobs: Array, version: Array) -> dict[str, PackedColumn]:
    return {
        "ids": ("i4", ids),
        "trained": ("u1", trained),
        "sampled": ("u1", sampled),
        "logprob": ("f4", logprobs),
        "version": ("i4", version),
    }


def _with_text(
    header: dict[str, Any],
    columns: dict[str, PackedColumn],
    ids: Ids,
    top: TopTokens,
    session: Session,
    spell: Spell | None,
    mask: Mask | None,
) -> bytes:
    offsets, text = spelled(ids, spell)
    if mask is not None:
        keys = _find_key_tokens(offsets, text, mask)
        kept = np.where(keys, -1, ids).astype(np.int32)
        offsets, text = spelled(kept, lambda token: _DOT if token < 0 else spell(token) if spell else b"")
        columns = {**columns, "ids": ("i4", kept)}
        top.hide(keys)
    columns = {**columns, "text_offsets": ("i4", offsets), "text_utf8": ("u1", text), **_top_columns(top, spell)}
    named = None if spell is None else {"offsets": "text_offsets", "utf8": "text_utf8"}
    return _pack({**header, "text": named, "session": session.id, "top": top.count}, columns)


def _top_columns(top: TopTokens, spell: Spell | None) -> dict[str, PackedColumn]:
    """The most likely tokens of all places in order, and the text of each different id."""
    if not top.count:
        return {}
    known = np.unique(top.ids)
    offsets, text = spelled(known, spell)
    return {
        "top_ids": ("i4", top.ids.ravel()),
        "top_logprobs": ("f4", top.logprobs.ravel()),
        "top_known": ("i4", known),
        "top_text_offsets": ("i4", offsets),
        "top_text_utf8": ("u1", text),
    }


def _find_key_tokens(offsets: Array, text: Array, mask: Mask) -> Array:
    """Which tokens contain a part of a key."""
    found: Array = np.zeros(len(offsets) - 1, np.bool_)
    for start, stop in mask.spans(text.tobytes().decode("latin-1")):  # one character per byte
        found |= (offsets[:-1] < stop) & (offsets[1:] > start)
    return found


def _spans(spans: Sequence[Span], session: Session) -> list[dict[str, Any]]:
    """Spans, each with the role of its first message."""
    turns = {turn.id: turn for turn in session.turns}
    return [
        {
            **describe_span(span),
            "turn_sequence": turns[span.turn].sequence,
            "session": session.id,
            "messages": list(span.messages),
            "role": _role(turns[span.turn], span),
        }
        for span in spans
    ]


def _role(turn: Turn, span: Span) -> str | None:
    first, end = span.messages
    return message_at(turn.messages, first).role.value if first < min(end, len(turn.messages)) else None


def _facts(sample: Sample) -> dict[str, Any]:
    return {
        **{name: getattr(sample, name) for name in _SAMPLE_FACTS},
        "tokens": len(sample.ids),
        "trained": sample.trained_tokens,
    }


def _trainer(exported: ExportedSample, *, joined: bool) -> dict[str, Any]:
    record = exported.record
    return {
        "step": record.step,
        "place": record.place,
        "sample": record.sample,
        "joined": joined,
        "tokens": len(record),
        "records": [{"step": step, "place": place} for step, place in exported.records],
    }


def _trainer_columns(sample: Sample, record: TokenRecord) -> dict[str, PackedColumn]:
    """The trainer's columns if its record has the sample's ids; NaN, or not masked, beyond a shorter record."""
    if not np.array_equal(record.ids, sample.ids[: len(record)]):
        return {}
    held = record.columns()
    found: dict[str, PackedColumn] = {}
    for name, column in TRAINER_COLUMNS.items():
        if column in held:
            kind = "u1" if held[column].dtype == np.bool_ else "f4"
            whole = np.full(len(sample.ids), 0 if kind == "u1" else np.nan, _KINDS[kind])
            whole[: len(record)] = held[column]
            found[name] = (kind, whole)
    return found


def _pack(header: dict[str, Any], columns: dict[str, PackedColumn]) -> bytes:
    """The header's length in 8 bytes, the header, and the columns, each at an offset that is a multiple of 8."""
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    at = 0
    for name, (kind, values) in columns.items():
        raw = np.ascontiguousarray(values, _KINDS[kind]).tobytes()
        described.append({"name": name, "dtype": kind, "offset": at, "length": len(values)})
        parts += [raw, bytes(-len(raw) % _ALIGNED_TO)]
        at += len(raw) + len(parts[-1])
    raw_header = encode_answer({**header, "columns": described})
    raw_header += b" " * (-len(raw_header) % _ALIGNED_TO)
    return b"".join([len(raw_header).to_bytes(8, "little"), raw_header, *parts])
