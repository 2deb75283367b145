"""Checks a step's token records against the tape: did the trainer see each sample unchanged, once, in whole groups?"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from rolltape.records.ids import last_turn_of
from rolltape.records.policy import PRESETS, Advantage, CutPolicy
from rolltape.records.rollout import Rollout, RolloutHead, Status
from rolltape.records.sample import Span
from rolltape.records.token_record import StepFiles, TokenRecord
from rolltape.samples.check.credit import (
    Advantages,
    CheckedAdvantage,
    CreditedRecord,
    Key,
    check_advantages,
    check_rewards,
    check_weights,
)
from rolltape.samples.check.findings import StepCheck, TokenFinding, UnseenSample
from rolltape.samples.check.hindsight import (
    BY_LATER_EVENTS,
    PastRow,
    given_policies,
    had_ended,
    rollout_at,
    split_later,
    taken_at,
)
from rolltape.samples.check.records import (
    TokenDifference,
    TokenRule,
    compare_record,
    samples_by_id,
    samples_named,
    span_at,
)
from rolltape.samples.credit import advantages_of, counted_tries
from rolltape.samples.linearize import Linearized, linearize, linearize_under, pruned_tokens
from rolltape.tape.run import RolloutRow, Run

# What may come of another cut policy than the one that is tried first.
_BY_POLICY = (
    *(TokenRule.SAMPLE, TokenRule.OUTCOME, TokenRule.LOGPROBS, TokenRule.VERSIONS),
    *(TokenRule.LOSS_WEIGHT, TokenRule.REWARD, TokenRule.MISSING),
)


def check_step(
    run: Run,
    step: int,
    records: Iterable[TokenRecord],
    *,
    policy: CutPolicy | None = None,
    advantage: CheckedAdvantage = CheckedAdvantage.AUTO,
    files: StepFiles,
) -> StepCheck:
    """Compare the records of a step with the samples that they name.

    Samples are those of `policy`, of the policies by which groups were given to a trainer, and of the presets; an id
    that none of them makes is checked against its own turn.
    `files` describes what else was written, so that only a sample that should have a record counts as missing.
    `advantage` is the kind that the trainer uses.
    """
    held = list(records)
    first, *others = dict.fromkeys([*([policy] if policy else []), *given_policies(run), *PRESETS.values()])

    def checked(times: Mapping[str, int]) -> tuple[_CheckState, tuple[UnseenSample, ...]]:
        check = _CheckState(run, step, [first], times)
        unseen = check.go_through(held, advantage, files)
        if not check.is_explained:
            # Cutting by all policies takes longer, and is needed only where the first does not explain the step.
            check = _CheckState(run, step, [first, *others], times)
            unseen = check.go_through(held, advantage, files)
        return check, unseen

    check, unseen = checked({})
    findings, notes = check.findings, list[TokenFinding]()
    if files.written_at_ns is not None and any(finding.rule in BY_LATER_EVENTS for finding in findings):
        then, unseen_then = checked(taken_at(run, check.groups, files.written_at_ns))
        findings, notes = split_later(findings, then.findings)
        later = (one for one in unseen if _rollout_of(one.sample) not in then.tries)
        unseen = (*unseen_then, *(msgspec.structs.replace(one, why="came later") for one in later))
    order = list(TokenRule)
    return StepCheck(
        step=step,
        records=check.count,
        tokens=check.tokens,
        unnamed=check.unnamed,
        pruned=check.pruned,
        findings=tuple(sorted(findings, key=lambda one: order.index(one.rule))),
        notes=tuple(sorted(notes, key=lambda one: order.index(one.rule))),
        unseen=unseen,
        seen=frozenset(check.seen),
        groups=frozenset(check.groups),
    )


def find_unseen(
    run: Run, checks: Sequence[StepCheck], *, step: int | None = None, policy: CutPolicy | None = None
) -> Iterator[UnseenSample]:
    """The samples that no record of these steps names. With `step`, untouched groups count only if made for it."""
    seen = {sample for check in checks for sample in check.seen}
    groups = {group for check in checks for group in check.groups}
    for one in {one.sample: one for check in checks for one in check.unseen}.values():
        if one.sample not in seen:
            yield one
    rows = [row for row in counted_tries(run.index()) if row.group not in groups and step in (None, row.step)]
    advantages = advantages_of(rows, Advantage.CENTERED)
    versions = run.versions()
    for rollout in run.tape_index.load_each([row.key for row in rows]):
        made = linearize(rollout, policy or "exact", versions=versions)
        yield from (_unseen(rollout.head, outline.id, advantages[rollout.key]) for outline in made.outlines)
        made.take_apart()


class _Made(NamedTuple):
    """A rollout, and for each policy its samples with their numbers of trained tokens."""

    head: RolloutHead
    samples: Sequence[Mapping[str, int]]

    def is_known(self, sample: str) -> bool:
        return any(sample in made for made in self.samples)


class _ComparedRecord(NamedTuple):
    """A record, and the sample that it was compared with."""

    record: TokenRecord
    sample: str
    spans: Sequence[Span]
    reward: float | None
    made: _Made


class _CheckState:
    """The state of a step's check: its records by rollout, and what was found so far.

    `times` has, by group, the time up to which attempts, filters and grades count. Without a time, all count.
    """

    def __init__(self, run: Run, step: int, policies: Sequence[CutPolicy], times: Mapping[str, int]) -> None:
        self.count = self.tokens = self.unnamed = self.pruned = 0
        self.findings: list[TokenFinding] = []
        self.seen: set[str] = set()
        self._run = run
        self._step = step
        self._policies = policies
        self._times = times
        self._versions = run.versions()
        self._now: dict[str, list[RolloutRow]] = {}  # by group: its tries as they are now
        self._rows: dict[str, list[RolloutRow | PastRow]] = {}  # by group of the step: those that count
        self._group_of: dict[Key, str] = {}
        for row in run.index():
            self._now.setdefault(row.group, []).append(row)
            self._group_of[row.key] = row.group
        self._rollouts = {rollout for rollout, _ in self._group_of}
        self._records: dict[Key, list[TokenRecord]] = {}
        self._made: list[_Made] = []
        self._found: list[_ComparedRecord] = []
        self._counted: set[Key] = set()  # the tries that count
        self._unknown: set[str] = set()  # groups with samples that none of the policies makes
        self._credited: list[CreditedRecord] = []
        self._samples: list[tuple[RolloutHead, str]] = []  # those of the step's groups, as far as they are known

    @property
    def is_explained(self) -> bool:
        """Whether the policies make the samples that the records name, and no others."""
        return not self._unknown and not any(finding.rule in _BY_POLICY for finding in self.findings)

    @property
    def tries(self) -> set[Key]:
        """The tries of the step's groups that it looked at."""
        return {made.head.key for made in self._made}

    @property
    def groups(self) -> set[str]:
        return {self._group_of[key] for key in self._records}

    def go_through(
        self, records: Iterable[TokenRecord], advantage: CheckedAdvantage, files: StepFiles
    ) -> tuple[UnseenSample, ...]:
        """Check everything. Return the samples of the step's groups that no record names."""
        self.take(records)
        for group in sorted(self.groups):
            self.compare_group(group)
        self.choose_policy()
        advantages = self.check_credit(advantage)
        self.check_once()
        return tuple(self.find_missing(advantages, files))

    def take(self, records: Iterable[TokenRecord]) -> None:
        """Sort the records by the rollouts that their samples name."""
        for record in records:
            self.count += 1
            self.tokens += len(record)
            if record.sample is None:
                self.unnamed += 1
                continue
            self.seen.add(record.sample)
            key = _rollout_of(record.sample)
            if key in self._group_of:
                self._records.setdefault(key, []).append(record)
            else:
                what = f"sample {record.sample} in the record, no such rollout on the tape"
                self._find(record, _unknown(what, "give the ids of this run's samples as sample_ids"))

    def compare_group(self, group: str) -> None:
        """Compare the records of a group with its samples, and note which samples each policy makes of it."""
        at_ns = self._times.get(group)
        rows = self._rows[group] = [
            row for row in self._now[group] if at_ns is None or had_ended(row, at_ns) or row.key in self._records
        ]
        self._counted |= {row.head.key for row in counted_tries(rows)}
        keys = [row.head.key for row in rows]
        wanted = [key for key in keys if key in self._counted or key in self._records]
        for loaded in self._run.tape_index.load_each(wanted):
            is_trained = loaded.key in self._records
            rollout = loaded if at_ns is None else rollout_at(loaded, at_ns, is_trained=is_trained)
            rows[keys.index(rollout.key)] = PastRow(rollout.head, rollout.outcome)
            made = linearize_under(rollout, self._policies, versions=self._versions)
            self._made.append(
                _Made(
                    rollout.head,
                    [{outline.id: outline.trained_tokens for outline in one.outlines} for one in made],
                )
            )
            if is_trained:
                self._compare_rollout(rollout, made)
            for one in made:
                one.take_apart()

    def _compare_rollout(self, rollout: Rollout, made: Sequence[Linearized]) -> None:
        """Compare the records of a rollout with its samples."""
        records = self._records[rollout.key]
        if pruned_tokens(rollout):
            self.pruned += len(records)
            self._unknown.add(rollout.head.group)
            return
        if not any(len(one) for one in made):
            what = f"the record trains, but {_state(rollout)}"
            advice = "take samples from completed groups"
            for record in records:
                self._find(record, TokenDifference(TokenRule.OUTCOME, None, what, advice))
            return
        for record in records:
            named = list(samples_named(made, record))
            if not named:
                self._unknown.add(rollout.head.group)
                named = list(samples_by_id(made, record))
            if not named:
                what = f"sample {record.sample} in the record, no such sample on the tape"
                self._find(record, _unknown(what, "give the --policy and the limits that made it"))
                continue
            compared = [(sample, list(compare_record(record, sample))) for sample in named]
            sample, differences = min(compared, key=lambda one: len(one[1]))
            self.seen.add(sample.id)  # a record of 0.1.0 has another id for it
            for difference in chain(differences, self._compare_origin(record, rollout)):
                self._find(record, difference, sample.spans)
            self._found.append(_ComparedRecord(record, sample.id, sample.spans, rollout.reward, self._made[-1]))

    def choose_policy(self) -> None:
        """Decide which policy made the step's samples: the one that misses fewest of them and makes fewest others.

        If it does not make a record's sample, that sample was cut by another policy than the rest of the step.
        """
        missed = [0] * len(self._policies)
        others = [0] * len(self._policies)
        for found in self._found:
            if found.made.is_known(found.sample):
                for number, samples in enumerate(found.made.samples):
                    missed[number] += found.sample not in samples
        for made in self._made:
            if made.head.key in self._counted:
                for number, samples in enumerate(made.samples):
                    others[number] += len(samples.keys() - self.seen)
        best = min(range(len(self._policies)), key=lambda number: (missed[number], others[number]))
        for found in self._found:
            samples = found.made.samples[best]
            siblings = (list(samples).index(found.sample), list(samples.values())) if found.sample in samples else None
            head = found.made.head
            self._credited.append(CreditedRecord.of(found.record, head, found.spans, found.reward, siblings))
            if siblings is None and found.made.is_known(found.sample):
                name = self._policies[best].name
                what = f"the sample is made by another cut policy than the others of this step, {name}"
                advice = "use one cut policy for all samples of a step"
                self._find(found.record, TokenDifference(TokenRule.TWICE, None, what, advice))
        for made in self._made:
            # If a sample was made by an unknown policy, the other samples of its group are unknown too.
            if made.head.key in self._counted and made.head.group not in self._unknown:
                self._samples += [(made.head, sample) for sample in made.samples[best]]

    def _compare_origin(self, record: TokenRecord, rollout: Rollout) -> Iterator[TokenDifference]:
        # Trainers use their own names. A name is wrong only if another rollout or group of this run has it.
        if record.rollout != rollout.id and record.rollout in self._rollouts:
            what = f"rollout {record.rollout} in the record, {rollout.id} by its sample"
            yield TokenDifference(TokenRule.ORIGIN, None, what, "check that rollout_ids belong to these sequences")
        if record.group != rollout.head.group and record.group in self._now:
            what = f"group {record.group} in the record, {rollout.head.group} by its sample"
            yield TokenDifference(TokenRule.ORIGIN, None, what, "check that groups belong to these sequences")

    def check_credit(self, advantage: CheckedAdvantage) -> Advantages:
        """Compare rewards, weights and advantages with the tape. Return the advantages of the step's rollouts."""
        credited = self._credited
        odd = check_advantages(credited, self._rows, advantage)
        for one, difference in chain(check_rewards(credited), check_weights(credited), odd):
            self._find(one.record, difference, one.spans)
        kind = Advantage.NONE if advantage is CheckedAdvantage.NONE else Advantage.CENTERED
        return advantages_of(chain.from_iterable(self._rows.values()), kind)

    def check_once(self) -> None:
        """Find the samples that occur twice in one epoch of the step."""
        first: dict[tuple[int, str | None], TokenRecord] = {}
        for record in chain.from_iterable(self._records.values()):
            before = first.setdefault((record.epoch, record.sample), record)
            if before is not record:
                what = f"the sample is also in record {before.place}, in the same epoch"
                advice = (
                    "check how samples are dealt out to ranks; if the step makes several epochs, give epoch to export"
                )
                self._find(record, TokenDifference(TokenRule.TWICE, None, what, advice))

    def find_missing(self, advantages: Advantages, files: StepFiles) -> Iterator[UnseenSample]:
        """Samples of the step's groups that no record names. Those that should have a record become findings."""
        elsewhere: Collection[str] | None = None
        for head, sample in self._samples:
            if sample in self.seen:
                continue
            advantage = advantages.get(head.key)
            yield _unseen(head, sample, advantage)
            if not files.complete or not advantage or not files.includes(sample):
                continue
            elsewhere = files.elsewhere() if elsewhere is None else elsewhere
            if sample not in elsewhere:
                self.findings.append(
                    TokenFinding(
                        rule=TokenRule.MISSING,
                        step=self._step,
                        sample=sample,
                        rollout=head.id,
                        turn=last_turn_of(sample),
                        what="the sample is to train, but no record names it, though the step has others of its group",
                        advice="train on whole groups: advantages and loss weights count on it",
                    )
                )

    def _find(self, record: TokenRecord, difference: TokenDifference, spans: Sequence[Span] = ()) -> None:
        span = None if difference.token is None else span_at(spans, difference.token)
        self.findings.append(
            TokenFinding(
                rule=difference.rule,
                step=self._step,
                record=record.place,
                sample=record.sample,
                rollout=None if record.sample is None else _rollout_of(record.sample)[0],
                turn=None if span is None else span.turn,
                token=difference.token,
                what=difference.what,
                advice=difference.advice,
            )
        )


def _rollout_of(sample: str) -> Key:
    """The rollout and the try of a sample; a try of -1 if it is no sample's id."""
    parts = last_turn_of(sample).rsplit(".", 3)
    return (parts[0], int(parts[1])) if len(parts) == 4 and parts[1].isdecimal() else (sample, -1)


def _unknown(what: str, advice: str) -> TokenDifference:
    return TokenDifference(TokenRule.SAMPLE, None, what, advice)


def _state(rollout: Rollout) -> str:
    """Why nothing of a rollout trains."""
    outcome = rollout.outcome
    if outcome.status is not Status.FINISHED:
        reason = f" ({outcome.reason})" if outcome.reason else ""
        return f"its rollout is {outcome.status.value}{reason} on the tape"
    if outcome.filtered is not None:
        return f"its rollout is filtered on the tape ({outcome.filtered})"
    return "by the tape, no token of its rollout trains"


def _unseen(head: RolloutHead, sample: str, advantage: float | None) -> UnseenSample:
    why = "no reward" if advantage is None else "not exported" if advantage else "advantage 0"
    return UnseenSample(sample=sample, rollout=head.id, group=head.group, step=head.step, why=why)
