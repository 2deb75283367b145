"""`rolltape tokens RUN check`: compare what a trainer saw with the tape, and print where they disagree."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

import rolltape
from rolltape.cli.exits import Exit
from rolltape.cli.screen import note, plural, print_json, print_line, print_long, print_rest, tracked
from rolltape.errors import TapeError
from rolltape.records.policy import CutPolicy
from rolltape.samples.check.credit import CheckedAdvantage
from rolltape.samples.check.findings import StepCheck, UnseenSample
from rolltape.samples.check.records import CHECKED_COLUMNS
from rolltape.samples.check.step import check_step, find_unseen
from rolltape.tape.run import Run
from rolltape.tokens.files import describe_files, read_step
from rolltape.tokens.steps import TokenStep

_MOST_PRINTED = 100


def print_check(
    path: str,
    steps: Sequence[TokenStep],
    policy: CutPolicy,
    advantage: CheckedAdvantage,
    *,
    only: int | None,
    as_json: bool,
) -> int:
    """Check steps and print the findings; `only` is the requested step."""
    run = rolltape.read(path)
    chosen = [step for step in steps if only in (None, step.step)]
    checks = list(tracked(check_steps(run, steps, chosen, policy, advantage), "steps", len(chosen)))
    records, unnamed = sum(check.records for check in checks), sum(check.unnamed for check in checks)
    if records and unnamed == records:
        raise TapeError(
            f"{path}: none of {plural(records, 'token record')} names a sample; give sample_ids in the batch"
        )
    unseen = list(find_unseen(run, checks, step=only, policy=policy))
    if as_json:
        _print_json(checks, unseen)
    else:
        _print_text(checks, unseen)
    return Exit.BROKEN if any(check.findings for check in checks) else Exit.OK


def check_steps(
    run: Run,
    steps: Sequence[TokenStep],
    chosen: Sequence[TokenStep],
    policy: CutPolicy | None = None,
    advantage: CheckedAdvantage = CheckedAdvantage.AUTO,
) -> Iterator[StepCheck]:
    """Check some of a run's steps, one after the other."""
    for step in chosen:
        yield check_step(
            run,
            step.step,
            read_step(step, columns=CHECKED_COLUMNS),
            policy=policy,
            advantage=advantage,
            files=describe_files(step, steps),
        )


def _print_json(checks: Sequence[StepCheck], unseen: Sequence[UnseenSample]) -> None:
    for check in checks:
        for finding in check.findings:
            print_json(msgspec.to_builtins(finding))
        for later in check.notes:
            fields = msgspec.to_builtins(later)
            print_json({"note": fields.pop("rule"), **fields})
    for one in unseen:
        print_json({"unseen": one.sample, **{name: getattr(one, name) for name in ("rollout", "group", "step", "why")}})
    counted = ("records", "tokens", "unnamed", "pruned", "disagreeing")
    print_json(
        {
            "steps": len(checks),
            **{name: sum(getattr(check, name) for check in checks) for name in counted},
            "findings": sum(len(check.findings) for check in checks),
            "notes": sum(len(check.notes) for check in checks),
            "unseen": len(unseen),
            "repeated": _count_repeated(checks),
        }
    )


def _count_repeated(checks: Sequence[StepCheck]) -> int:
    """How many samples have records in several steps. A trainer may do so, as after it went back to a checkpoint."""
    steps = Counter(sample for _, sample in {(check.step, sample) for check in checks for sample in check.seen})
    return sum(count > 1 for count in steps.values())


def _print_text(checks: Sequence[StepCheck], unseen: Sequence[UnseenSample]) -> None:
    findings = [finding for check in checks for finding in check.findings]
    for advice, alike in groupby(findings[:_MOST_PRINTED], key=lambda finding: finding.advice):
        for finding in alike:
            print_long(f"{finding.where}: {finding.what} [{finding.rule}]")
        print_long(f"    {advice}")
    print_rest(len(findings) - _MOST_PRINTED, hint="; --json lists them all")
    records = sum(check.records for check in checks)
    disagreeing = sum(check.disagreeing for check in checks)
    disagree = f"{plural(disagreeing, 'record')} {'disagrees' if disagreeing == 1 else 'disagree'}"
    found = f"{plural(len(findings), 'finding')}, {disagree}" if findings else "no findings"
    print_line(f"{plural(records, 'record')} of {plural(len(checks), 'step')} checked against the tape: {found}")
    if unseen:
        whys = Counter(one.why for one in unseen).most_common()
        listed = ", ".join(f"{count:,} {why}" for why, count in whys)
        print_line(f"{plural(len(unseen), 'sample')} never seen by the trainer: {listed}")
    if later := sum(len(check.notes) for check in checks):
        differences = plural(later, "difference")
        note(f"{differences} only since a filter, a grade or an attempt that came after the step; --json lists them")
    if repeated := _count_repeated(checks):
        note(f"{plural(repeated, 'sample')} {'has' if repeated == 1 else 'have'} records in several steps")
    for name, why in {"unnamed": "name no sample", "pruned": "are of rollouts whose turns were pruned"}.items():
        if count := sum(getattr(check, name) for check in checks):
            note(f"{plural(count, 'record')} {why}, and could not be checked")
