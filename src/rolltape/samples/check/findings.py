"""What a check of a step's token records finds: where a trainer and the tape disagree, and what it never saw."""

import msgspec

from rolltape.records.ids import short_turn
from rolltape.samples.check.records import TokenRule


class TokenFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A place where a trainer's records and the tape disagree."""

    rule: TokenRule
    step: int
    record: str | None = None  # its place; None: a sample has no record
    sample: str | None = None
    rollout: str | None = None
    turn: str | None = None
    token: int | None = None  # position in the sequence
    what: str  # the two facts
    advice: str

    @property
    def where(self) -> str:
        """Step, record, sample, turn and token, as far as they are known."""
        turn = None if self.turn is None else short_turn(self.turn)
        named = {"record": self.record, "sample": self.sample, "turn": turn, "token": self.token}
        return f"step {self.step}" + "".join(f", {name} {one}" for name, one in named.items() if one is not None)


class UnseenSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that no token record names."""

    sample: str
    rollout: str
    group: str
    step: int  # that its rollout was made for
    why: str


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a step."""

    step: int
    records: int
    tokens: int
    unnamed: int  # records that name no sample, and so cannot be checked
    pruned: int  # records of rollouts whose turns are no longer on the tape
    findings: tuple[TokenFinding, ...]
    notes: tuple[TokenFinding, ...]  # disagreements that a filter, a grade or an attempt after the step caused
    unseen: tuple[UnseenSample, ...]  # of the groups that the step trained
    seen: frozenset[str]  # the samples that its records name
    groups: frozenset[str]  # of those samples

    @property
    def disagreeing(self) -> int:
        """How many records have a finding."""
        return len({finding.record for finding in self.findings if finding.record is not None})
