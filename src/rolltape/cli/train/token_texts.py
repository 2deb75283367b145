"""Prints token records with the turns and messages of their tokens: by token, by turn, and the largest values."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

import rolltape
from rolltape.cli.runs import open_spellings, rollout_of_sample, samples_named
from rolltape.cli.screen import SHORT_ID, count, note, number, plural, print_json, print_line, print_table
from rolltape.errors import RecordError, RolltapeError, TapeError, UsageError
from rolltape.records.ids import last_turn_of, short_turn
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout, Session
from rolltape.records.sample import Origin, Span
from rolltape.records.token_record import TokenRecord
from rolltape.records.turn import Turn
from rolltape.records.wording import message_line
from rolltape.samples.spelling import Spell, token_texts
from rolltape.tape.run import Run
from rolltape.tokens.files import read_step
from rolltape.tokens.steps import TokenStep
from rolltape.tokens.summary import ColumnStats, TokenOutlier, largest_tokens

_AROUND = 6  # tokens on each side

_LISTED = "`rolltape tokens RUN --step N` lists them"


class JoinedRecord(msgspec.Struct, frozen=True, eq=False):
    """A record with its sample's spans and texts. Without a sample it has no spans, and perhaps no text."""

    record: TokenRecord
    spans: tuple[Span, ...]
    turns: dict[str, Turn]
    spell: Spell | None

    def span_at(self, at: int) -> Span | None:
        """The span of a token."""
        return next((span for span in self.spans if span.start <= at < span.stop), None)

    def summary_of(self, span: Span) -> str:
        """The messages of a span, shortened."""
        messages = self.turns[span.turn].messages.to_list()[slice(*span.messages)]
        return "  ".join(f"{message.role}: {message_line(message.to_dict())}" for message in messages)


class RecordJoiner:
    """Joins records with the samples that they name. For those that cannot be joined, a note is printed once."""

    def __init__(self, run: str, policy: CutPolicy, tokenizer: str | None) -> None:
        self._path = run
        self._policy = policy
        self._spellings = open_spellings(tokenizer)
        self._noted: set[str] = set()
        self._rollouts: dict[tuple[str, int], Rollout] = {}
        self._joined: dict[str, JoinedRecord] = {}  # by place; a record may be requested once per token
        self._run = self._open()

    def joined(self, record: TokenRecord) -> JoinedRecord:
        """The record with the spans of its sample, if that is found."""
        if record.place not in self._joined:
            self._joined[record.place] = self._join(record)
        return self._joined[record.place]

    def _join(self, record: TokenRecord) -> JoinedRecord:
        if self._run is not None and record.sample is not None:
            try:
                rollout = self._rollout(*rollout_of_sample(record.sample))
                session, spans = _source(self._run, rollout, self._policy, record, record.sample)
                turns = {turn.id: turn for turn in session.turns}
                return JoinedRecord(record, spans, turns, self._spellings.of(session))
            except (UsageError, RolltapeError) as error:
                self._note(str(error).removeprefix("ROLLOUT: "))
        return JoinedRecord(record, (), {}, self._spellings.given)

    def _rollout(self, name: str, try_index: int) -> Rollout:
        assert self._run is not None
        key = (name, try_index)
        if key not in self._rollouts:
            self._rollouts[key] = self._run.rollout(name, try_index=try_index)
        return self._rollouts[key]

    def _open(self) -> Run | None:
        try:
            return rolltape.read(self._path)
        except TapeError as error:
            self._note(f"{error}; turns and messages are not shown")
            return None

    def _note(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            note(what)


def _source(
    run: Run, rollout: Rollout, policy: CutPolicy, record: TokenRecord, sample_id: str
) -> tuple[Session, tuple[Span, ...]]:
    """The session and the spans of a record's tokens."""
    refused: RolltapeError = UsageError(f"there is no sample {sample_id}; give the --policy that made it")
    for sample in samples_named(run, rollout, policy, sample_id):
        try:
            spans = record.spans_in(sample)
        except RecordError as error:
            refused = error
        else:
            return next(one for one in rollout.sessions if one.id == sample.session), spans
    raise refused


def find_record(steps: Sequence[TokenStep], rank: int | None, name: str | None) -> TokenRecord:
    """The record at that place or of that sample; the last one if a sample has several."""
    if name is None:
        raise UsageError(f"RECORD: name a record by its place or its sample ({_LISTED})")
    place = name if _is_place(name) else _last_place(steps, rank, name)
    step_number, its_rank, _ = map(int, place.split("."))
    for step in steps:
        if step.step == step_number:
            for record in read_step(step, its_rank):
                if record.place == place:
                    return record
    raise UsageError(f"RECORD {name}: no such token record; {_LISTED}")


def short_sample(sample: str | None) -> str:
    """A sample id with the rollout id shortened."""
    if sample is None:
        return ""
    rollout, dot, rest = sample.partition(".")
    return f"{rollout[:SHORT_ID]}{dot}{rest}"


def _is_place(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 3 and all(part.isdecimal() for part in parts)


def _last_place(steps: Sequence[TokenStep], rank: int | None, name: str) -> str:
    """The place of the last record of the one sample with that id or prefix."""
    found: dict[str, str] = {}
    for step in steps:
        for record in read_step(step, rank, columns=()):
            if record.sample is not None and any(one.startswith(name) for one in _spellings(record.sample)):
                found[record.sample] = record.place
    whole = [sample for sample in found if name in _spellings(sample)]
    meant = whole if len(whole) == 1 else list(found)
    if not meant:
        raise UsageError(f"RECORD {name}: no such token record; {_LISTED}")
    if len(meant) > 1:
        raise UsageError(f"RECORD {name}: matches {meant[0]} and {meant[1]}; give more of the id, or a record's place")
    return found[meant[0]]


def _spellings(sample: str) -> tuple[str, ...]:
    """The forms of a sample id: whole and shortened, with and without its hash."""
    short = short_sample(sample)
    return sample, short, last_turn_of(sample), last_turn_of(short)


def print_record(record: TokenRecord, joiner: RecordJoiner, columns: Sequence[str], *, as_json: bool) -> None:
    """Print a line per token, with the values of the columns."""
    joined = joiner.joined(record)
    held = record.columns()
    if as_json:
        print_json({**_about(joined), **{name: _plain(held.get(name)) for name in ("ids", "trained_mask", *columns)}})
        return
    _print_title(record)
    texts = token_texts(record.ids.tolist(), joined.spell)
    rows = [
        [
            count(at),
            _turn(joined.span_at(at)),
            _marked(text, trained),
            *(_cell(held.get(name), at) for name in columns),
        ]
        for at, (text, trained) in enumerate(zip(texts, record.trained_mask.tolist(), strict=True))
    ]
    print_table(["at", "turn", "token", *columns], rows, left=["turn", "token"], flexible=["token"])


def print_turns(record: TokenRecord, joiner: RecordJoiner, *, as_json: bool) -> None:
    """Print a line per prompt and reply of a record: its messages, and figures of its trained tokens."""
    joined = joiner.joined(record)
    spans = _join_replies(joined.spans)
    parts = [_part(joined, span) for span in spans]
    if as_json:
        print_json({**_about(joined), "spans": parts})
        return
    _print_title(record)
    figures = ("mismatch_kl", "masked", "entropy")
    print_table(
        ["turn", "tokens", "trained", *figures, "message"],
        [
            [
                _turn(span),
                f"{span.start}-{span.stop}",
                count(part["trained_tokens"]),
                *(number(part[name]) for name in figures),
                joined.summary_of(span),
            ]
            for span, part in zip(spans, parts, strict=True)
        ],
        left=["turn", "message"],
        flexible=["message"],
    )


def print_worst(
    steps: Sequence[TokenStep], rank: int | None, joiner: RecordJoiner, *, by: str, limit: int, as_json: bool
) -> None:
    """Print the tokens with the largest values of a column, with the text around them."""
    columns = {by, "inference_logprobs", "mismatch_kl", "ratio"}
    found = largest_tokens((record for step in steps for record in read_step(step, rank, columns)), by, limit)
    rows = []
    for one in found:
        joined = joiner.joined(one.record)
        span = joined.span_at(one.at)
        if as_json:
            print_json(_outlier(one, joined, span, by))
            continue
        rows.append(
            [
                one.record.place,
                count(one.at),
                _turn(span),
                _probability(one.record.inference_logprobs, one.at),
                _probability(one.record.trainer_logprobs, one.at),
                number(one.value),
                _around(one.record, one.at, joined.spell),
                "" if span is None else joined.summary_of(span),
            ]
        )
    if not as_json:
        names = ["record", "at", "turn", "inference", "trainer", by, "text around", "message"]
        flexible = ["text around", "message"]
        print_table(names, rows, left=["record", "turn", *flexible], flexible=flexible, spare=["message"])
        print_line(f"{plural(len(found), 'trained token')} with the largest {by}")


def _join_replies(spans: Sequence[Span]) -> list[Span]:
    """Join the spans of each reply, independent of the fates of its tokens."""
    whole: list[Span] = []
    for span in spans:
        last = whole[-1] if whole else None
        if last is not None and (last.turn, last.origin, last.messages) == (span.turn, span.origin, span.messages):
            whole[-1] = msgspec.structs.replace(last, stop=span.stop)
        else:
            whole.append(span)
    return whole


def _part(joined: JoinedRecord, span: Span) -> dict[str, Any]:
    part = slice(span.start, span.stop)
    trained = joined.record.trained_mask[part]
    held = joined.record.columns()
    means = {
        name: ColumnStats(held[name][part][trained]).mean if name in held else None
        for name in ("mismatch_kl", "masked", "masked_high", "masked_low", "entropy")
    }
    return {
        "turn": span.turn,
        "origin": span.origin,
        "start": span.start,
        "stop": span.stop,
        "trained_tokens": int(trained.sum()),
        **means,
        "messages": [
            message.to_dict() for message in joined.turns[span.turn].messages.to_list()[slice(*span.messages)]
        ],
    }


def _outlier(one: TokenOutlier, joined: JoinedRecord, span: Span | None, by: str) -> dict[str, Any]:
    record = one.record
    first = max(one.at - _AROUND, 0)
    return {
        **_about(joined),
        "at": one.at,
        "id": int(record.ids[one.at]),
        by: one.value,
        "trainer_logprob": float(record.trainer_logprobs[one.at]),
        "inference_logprob": None if record.inference_logprobs is None else float(record.inference_logprobs[one.at]),
        "turn": None if span is None else span.turn,
        "turn_offset": None if span is None else span.turn_start + one.at - span.start,
        "message": None if span is None else joined.summary_of(span),
        "first_around": first,
        "ids_around": record.ids[first : one.at + _AROUND + 1].tolist(),
        "text_around": _around(record, one.at, joined.spell),
    }


def _about(joined: JoinedRecord) -> dict[str, Any]:
    record = joined.record
    return {"record": record.place, "step": record.step, "sample": record.sample, "rollout": record.rollout}


def _print_title(record: TokenRecord) -> None:
    reward = "" if record.reward is None else f", reward {number(record.reward)}"
    whose = "" if record.sample is None else f", sample {record.sample}"
    print_line(
        f"record {record.place}: {plural(len(record), 'token')}, {record.trained_tokens:,} trained{reward}{whose}",
        style="bold",
    )


def _around(record: TokenRecord, at: int, spell: Spell | None) -> str:
    first, last = max(at - _AROUND, 0), min(at + _AROUND + 1, len(record))
    texts = token_texts(record.ids[first:last].tolist(), spell)
    shown = [_marked(text, first + place == at) for place, text in enumerate(texts)]
    return f"{'… ' if first else ''}{' '.join(shown)}{' …' if last < len(record) else ''}"


def _marked(text: str, marked: bool) -> str:
    spelled = text.replace(" ", "␣")
    return f"«{spelled}»" if marked else spelled


def _turn(span: Span | None) -> str:
    if span is None:
        return ""
    return f"{short_turn(span.turn)}{' prompt' if span.origin is Origin.PROMPT else ''}"


def _cell(values: Any, at: int) -> str:
    if values is None:
        return ""
    value = values[at]
    return ("yes" if value else "") if values.dtype == np.bool_ else number(value.item())


def _probability(logprobs: Any, at: int) -> str:
    return "" if logprobs is None else f"{np.exp(np.float64(logprobs[at])):.4f}"


def _plain(values: Any) -> Any:
    return None if values is None else values.tolist()
