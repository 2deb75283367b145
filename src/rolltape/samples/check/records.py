"""Finds the sample that a token record names, and compares them: ids, trained mask, logprobs, positions, versions."""

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.ids import last_turn_of, names_sample, sample_id
from rolltape.records.sample import Fate, Origin, Sample, Span
from rolltape.records.token_record import TokenRecord
from rolltape.records.wording import plural
from rolltape.samples.claims import equal_runs
from rolltape.samples.linearize import Linearized

CHECKED_COLUMNS = ("advantages", "rewards", "inference_logprobs")  # the optional columns that a check reads

Array = npt.NDArray[Any]

_CLOSE = 1e-5  # relative; the error that another program's float32 arithmetic may have
_BFLOAT16_BITS = 16  # of a float32 that bfloat16 drops


class TokenRule(enum.StrEnum):
    """What must hold for the token records of a step."""

    SAMPLE = "sample"  # a record names a sample of the tape
    OUTCOME = "outcome"  # its rollout may train
    ORIGIN = "origin"  # the record names its sample's rollout and group
    IDS = "ids"
    LENGTH = "length"
    TRAINED_MASK = "trained mask"
    LOGPROBS = "inference logprobs"
    POSITIONS = "position ids"
    VERSIONS = "weight versions"
    ADVANTAGE = "advantage"
    REWARD = "reward"
    LOSS_WEIGHT = "loss weight"
    TWICE = "trained once"  # no sample twice in an epoch, and no token in two samples
    MISSING = "complete"  # a group that trains does so with all its samples


class TokenDifference(NamedTuple):
    """Something in which a record and its sample disagree."""

    rule: TokenRule
    token: int | None  # position in the sequence; None: it is about the whole
    what: str  # the two facts
    advice: str


def compare_record(record: TokenRecord, sample: Sample) -> Iterator[TokenDifference]:
    """Every per-token difference between a record and its sample. Logprobs are compared where a token trains."""
    length = min(len(record), len(sample.ids))
    other_ids = np.flatnonzero(record.ids[:length] != sample.ids[:length])
    if len(other_ids):
        yield _ids_difference(record, sample, other_ids)
    if len(record) != len(sample.ids):
        yield _length_difference(record, sample)
    if len(other_ids) * 2 > length:
        return  # it is another sequence; what else differs follows from that
    other_mask = np.flatnonzero(record.trained_mask[:length] != sample.trained_mask[:length])
    if len(other_mask):
        yield _mask_difference(record, sample, other_mask)
    trained = np.flatnonzero(record.trained_mask[:length] & sample.trained_mask[:length])
    if record.inference_logprobs is not None and (found := _logprob_difference(record, sample, trained)):
        yield found
    wrong_places = np.flatnonzero(np.diff(record.position_ids, prepend=-1) != 1)
    if len(wrong_places):
        at = int(wrong_places[0])
        before = f"follows position {record.position_ids[at - 1]}" if at else "is the first, which is 0"
        yield TokenDifference(
            TokenRule.POSITIONS,
            at,
            f"position {record.position_ids[at]} {before}",
            "check where the packed batch's sequences begin and end, and that padding is not counted",
        )
    known = {name for pair in sample.versions for name in pair}
    unknown = [name for name in record.versions if known and name not in known]
    if unknown:
        yield TokenDifference(
            TokenRule.VERSIONS,
            None,
            f"weights {unknown[0]!r} in the record, sampled by {', '.join(map(repr, sorted(known)))} on the tape",
            "check that weight_versions belong to these sequences",
        )


def samples_named(made: Sequence[Linearized], record: TokenRecord) -> Iterator[Sample]:
    """The sample that a record names, by each policy that makes it; an id of 0.1.0 may mean several.

    The same tokens train in all of them. Turns that are context there may be others.
    """
    for one in made:
        named = [outline for outline in one.outlines if names_sample(record.sample or "", outline.id)]
        if named:
            yield one.sample(min(named, key=lambda outline: abs(outline.tokens - len(record))).index)


def samples_by_id(made: Sequence[Linearized], record: TokenRecord) -> Iterator[Sample]:
    """The samples of a record that was made under unknown limits, such as a staleness limit of that time.

    The sample id proves length and mask. The record's ids must begin a sample of one of the policies, and its trained
    tokens must train under that policy, possibly in another sample.
    """
    bounds = [(start, stop) for start, stop in equal_runs(record.trained_mask) if record.trained_mask[start]]
    last_turn = last_turn_of(record.sample or "")
    if record.sample != sample_id(last_turn, len(record), bounds):
        return
    length = len(record)
    for one in made:
        for outline in one.outlines:
            if outline.tokens < length or outline.session != last_turn.rpartition(".")[0]:
                continue
            sample = one.sample(outline.index)
            may_train = np.zeros(outline.tokens, np.bool_)
            for span in sample.spans:
                may_train[span.start : span.stop] = span.origin is Origin.SAMPLED and span.fate in (None, Fate.TRAINED)
            if np.array_equal(sample.ids[:length], record.ids) and may_train[:length][record.trained_mask].all():
                yield msgspec.structs.replace(
                    sample,
                    id=record.sample,
                    ids=sample.ids[:length],
                    trained_mask=record.trained_mask,
                    logprobs=sample.logprobs[:length],
                )


def agree(value: float, expected: float, error: float = 0.0) -> bool:
    """Whether a trainer's number is the expected one up to an error, as float32 arithmetic or bfloat16 leaves it."""
    if value == expected or abs(value - expected) <= error + _CLOSE * max(abs(expected), _CLOSE):
        return True
    if math.isnan(value) or math.isnan(expected):
        return math.isnan(value) and math.isnan(expected)
    with np.errstate(over="ignore"):  # a reward may exceed float32
        seen, least, most = _to_bfloat16(np.array([value, expected - error, expected + error], np.float32))
    return bool(value == seen and least <= seen <= most)


def span_at(spans: Sequence[Span], at: int) -> Span | None:
    """The span that holds a token."""
    return next((span for span in spans if span.start <= at < span.stop), None)


def _ids_difference(record: TokenRecord, sample: Sample, differing: Array) -> TokenDifference:
    at = int(differing[0])
    more = f"; {len(differing):,} of {len(record):,} ids differ" if len(differing) > 1 else ""
    return TokenDifference(
        TokenRule.IDS,
        at,
        f"id {record.ids[at]} in the record, {sample.ids[at]} on the tape{more}",
        "check that sample_ids belong to these sequences and that nothing tokenizes the text again",
    )


def _length_difference(record: TokenRecord, sample: Sample) -> TokenDifference:
    at = min(len(record), len(sample.ids))
    lost = int(np.count_nonzero(sample.trained_mask[at:]))
    cut = f", {lost:,} of those cut off train" if lost else ""
    return TokenDifference(
        TokenRule.LENGTH,
        at,
        f"{plural(len(record), 'token')} in the record, {len(sample.ids):,} on the tape{cut}",
        "cut samples with max_sample_tokens of the cut policy, so that the ledger has what was cut"
        if len(record) < len(sample.ids)
        else "check where the packed batch's sequences begin and end",
    )


def _mask_difference(record: TokenRecord, sample: Sample, differing: Array) -> TokenDifference:
    at = int(differing[0])
    span = span_at(sample.spans, at)
    if not record.trained_mask[at]:
        what = "does not train in the record, trains on the tape"
    elif span is None or span.origin is Origin.PROMPT:
        what = "trains in the record, is a prompt token on the tape"
    else:
        fate = "trains in another sample" if span.fate is None else f"is {span.fate.value}"
        what = f"trains in the record, {fate} on the tape"
    more = f"; {plural(len(differing), 'token')} differ" if len(differing) > 1 else ""
    return TokenDifference(TokenRule.TRAINED_MASK, at, what + more, "train exactly where trained_mask is set")


def _logprob_difference(record: TokenRecord, sample: Sample, trained: Array) -> TokenDifference | None:
    """The trained token whose inference logprob is furthest from the engine's, or None if all agree."""
    assert record.inference_logprobs is not None
    seen = record.inference_logprobs[trained]
    held = sample.logprobs[trained].astype(np.float32)
    differs = (seen != held) & ~(np.isnan(seen) & np.isnan(held))
    if not differs.any() or np.array_equal(seen, _to_bfloat16(held), equal_nan=True):
        return None
    distance = np.where(differs, np.abs(seen - held), -1.0)
    worst = int(np.nan_to_num(distance, nan=np.inf).argmax())
    count = int(np.count_nonzero(differs))
    more = f"; {count:,} of {len(trained):,} trained tokens differ" if count > 1 else ""
    return TokenDifference(
        TokenRule.LOGPROBS,
        int(trained[worst]),
        f"logprob {seen[worst]:.6g} in the record, {held[worst]:.6g} by the engine{more}",
        "pass the sample's logprobs unchanged, each at the place of its id",
    )


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to the nearest bfloat16, ties to even, as trainers that compute in it do."""
    bits = values.view(np.uint32)
    half = (bits >> _BFLOAT16_BITS & 1) + np.uint32((1 << _BFLOAT16_BITS - 1) - 1)
    rounded: npt.NDArray[np.float32] = ((bits + half) >> _BFLOAT16_BITS << _BFLOAT16_BITS).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)
