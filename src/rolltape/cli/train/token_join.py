"""Token records with the run that they came from: sample, turns, messages, text."""

from typing import TYPE_CHECKING

import msgspec

from rolltape.cli.exits import UsageError
from rolltape.cli.output.screen import note
from rolltape.cli.output.spelling import chosen_spellings
from rolltape.errors import RecordError, RolltapeError, TapeError
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout, Session
from rolltape.records.sample import Span
from rolltape.records.token_record import TokenRecord
from rolltape.samples.spelling import Spell

if TYPE_CHECKING:
    from rolltape.records.turn import Turn
    from rolltape.tape.run import Run


class Joined(msgspec.Struct, frozen=True, eq=False):
    """A record with what is known of it. Without a sample there are no spans, and perhaps no text."""

    record: TokenRecord
    spans: tuple[Span, ...]
    turns: "dict[str, Turn]"
    spell: Spell | None

    def span_at(self, at: int) -> Span | None:
        """Where a token came from."""
        return next((span for span in self.spans if span.start <= at < span.stop), None)

    def said_in(self, span: Span) -> str:
        """The messages that a span spells, in brief."""
        from rolltape.records.brief import said

        messages = self.turns[span.turn].messages.to_list()[slice(*span.messages)]
        return "  ".join(f"{message.role}: {said(message.to_dict())}" for message in messages)


class Joiner:
    """Finds the samples that records name, in the run that they lie in; what cannot be joined is said once."""

    def __init__(self, run: str, policy: CutPolicy, tokenizer: str | None) -> None:
        self._path = run
        self._policy = policy
        self._spellings = chosen_spellings(tokenizer, run)
        self._noted: set[str] = set()
        self._rollouts: dict[tuple[str, int], Rollout] = {}
        self._joined: dict[str, Joined] = {}  # by place; a record may be asked for once per token
        self._run = self._opened()

    def joined(self, record: TokenRecord) -> Joined:
        """The record with its sample's spans, as far as there is one."""
        if record.place not in self._joined:
            self._joined[record.place] = self._join(record)
        return self._joined[record.place]

    def _join(self, record: TokenRecord) -> Joined:
        from rolltape.cli.sample_ids import rollout_of_sample

        if self._run is not None and record.sample is not None:
            try:
                rollout = self._rollout(*rollout_of_sample(record.sample))
                session, spans = _source(self._run, rollout, self._policy, record, record.sample)
                turns = {turn.id: turn for turn in session.turns}
                return Joined(record, spans, turns, self._spellings.of(session))
            except (UsageError, RolltapeError) as error:
                self._note(str(error).removeprefix("ROLLOUT: "))
        return Joined(record, (), {}, self._spellings.given)

    def _rollout(self, name: str, try_index: int) -> Rollout:
        assert self._run is not None
        key = (name, try_index)
        if key not in self._rollouts:
            self._rollouts[key] = self._run.rollout(name, try_index=try_index)
        return self._rollouts[key]

    def _opened(self) -> "Run | None":
        import rolltape

        try:
            return rolltape.read(self._path)
        except TapeError as error:
            self._note(f"{error}; shown without turns and messages")
            return None

    def _note(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            note(what)


def _source(
    run: "Run", rollout: Rollout, policy: CutPolicy, record: TokenRecord, sample_id: str
) -> tuple[Session, tuple[Span, ...]]:
    """The session and the spans of a record's tokens."""
    from rolltape.cli.sample_ids import samples_named

    refused: RolltapeError = UsageError(f"there is no sample {sample_id}; give the policy that made it")
    for sample in samples_named(run, rollout, policy, sample_id):
        try:
            spans = record.spans_in(sample)
        except RecordError as error:
            refused = error
        else:
            return next(one for one in rollout.sessions if one.id == sample.session), spans
    raise refused
