"""Finds token records by name, and joins them with the run: sample, turns, messages, text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rolltape.cli.output.screen import SHORT_ID, note
from rolltape.cli.output.spelling import open_spellings
from rolltape.cli.sample_ids import rollout_of_sample, samples_named
from rolltape.errors import RecordError, RolltapeError, TapeError, UsageError
from rolltape.records.ids import last_turn_of
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout, Session
from rolltape.records.sample import Span
from rolltape.records.token_record import TokenRecord
from rolltape.samples.spelling import Spell
from rolltape.tokens.files import read_step
from rolltape.tokens.steps import TokenStep

if TYPE_CHECKING:
    from rolltape.records.turn import Turn
    from rolltape.tape.run import Run


_LISTED = "`rolltape tokens RUN --step N` lists them"


class JoinedRecord(msgspec.Struct, frozen=True, eq=False):
    """A record with what is known about it. Without its sample there are no spans, and perhaps no text."""

    record: TokenRecord
    spans: tuple[Span, ...]
    turns: "dict[str, Turn]"
    spell: Spell | None

    def span_at(self, at: int) -> Span | None:
        """The span of a token."""
        return next((span for span in self.spans if span.start <= at < span.stop), None)

    def summary_of(self, span: Span) -> str:
        """The messages of a span, shortened."""
        from rolltape.records.wording import message_line

        messages = self.turns[span.turn].messages.to_list()[slice(*span.messages)]
        return "  ".join(f"{message.role}: {message_line(message.to_dict())}" for message in messages)


class RecordJoiner:
    """Joins records with the samples that they name. What cannot be joined is noted once."""

    def __init__(self, run: str, policy: CutPolicy, tokenizer: str | None) -> None:
        self._path = run
        self._policy = policy
        self._spellings = open_spellings(tokenizer, run)
        self._noted: set[str] = set()
        self._rollouts: dict[tuple[str, int], Rollout] = {}
        self._joined: dict[str, JoinedRecord] = {}  # by place; a record may be asked for once per token
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

    def _open(self) -> "Run | None":
        import rolltape

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
    run: "Run", rollout: Rollout, policy: CutPolicy, record: TokenRecord, sample_id: str
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
    """A sample id, whole and shortened, with and without its hash."""
    short = short_sample(sample)
    return sample, short, last_turn_of(sample), last_turn_of(short)
