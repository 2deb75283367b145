"""`rolltape check`: verify a run."""

from collections.abc import Iterator, Sequence

import rolltape
from rolltape.cli.exits import Exit
from rolltape.cli.options import JsonOption, RunArgument
from rolltape.cli.runs import describe
from rolltape.cli.screen import plural, print_json, print_line, print_long, tracked
from rolltape.cli.train.token_check import check_steps
from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.policy import PRESETS, CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.samples.verify import Breach, verify_rollout
from rolltape.tape.run import RolloutRow, Run
from rolltape.tokens.steps import TokenStep, list_steps
from rolltape.traces.verify import find_problems


def check(run: RunArgument, as_json: JsonOption = False) -> int:
    """Verify a run: files, records, samples, and token records.

    Samples are checked under every cut policy, and a trainer's token records against the samples that they name.
    """
    tape = rolltape.read(run)
    policies = list(PRESETS.values())
    found: list[Breach] = []
    try:
        rows = tape.index()
    except DamagedTapeError as error:
        rows, found = [], [Breach("readable", run, str(error))]
    rollouts = turns = tokens = 0
    for loaded in tracked(_each(tape, rows), "checking", len(rows)):
        rollouts += 1
        if isinstance(loaded, Breach):
            found.append(loaded)
            continue
        turns += len(loaded.turns)
        tokens += sum(len(turn.sampled_ids) for turn in loaded.turns)
        found.extend(_breaches(loaded, policies))
    found.extend(_problems(tape))
    steps = list_steps(run) if rows else []
    found.extend(_token_findings(tape, steps))
    if not rollouts and not found:
        raise TapeError(f"{run}: the run holds no rollouts yet")
    found = list(dict.fromkeys(found))
    names = [policy.name for policy in policies]
    if as_json:
        for breach in found:
            print_json({"rule": breach.rule, "where": breach.where, "what": breach.what})
        counts = {"rollouts": rollouts, "turns": turns, "sampled_tokens": tokens}
        print_json({**counts, "policies": names, "token_steps": len(steps), "breaches": len(found)})
    else:
        for breach in found:
            print_long(f"{breach.where}: {breach.what} [{breach.rule}]")
        seen = f"{plural(rollouts, 'rollout')}, {plural(turns, 'turn')}, {plural(tokens, 'sampled token')}"
        seen += f", {plural(len(steps), 'step')} of token records" if steps else ""
        print_line(
            f"{seen} checked under {', '.join(names)}: "
            + ("no breaches" if not found else "1 breach" if len(found) == 1 else f"{len(found):,} breaches")
        )
    return Exit.BROKEN if found else Exit.OK


def _each(tape: Run, rows: Sequence[RolloutRow]) -> Iterator[Rollout | Breach]:
    """Yield every rollout, or the breach that prevented its loading."""
    left = {row.key: row for row in rows}
    try:
        for rollout in tape.rollouts():
            left.pop(rollout.key, None)
            yield rollout
    except Exception as error:  # noqa: BLE001 - bad content can fail in any way, and is always a breach
        # The reader stops at the first failure. Loading one by one is slower, but reaches the rest.
        failed = False
        for rollout_id, try_index in left:
            try:
                yield tape.rollout(rollout_id, try_index=try_index)
            except Exception as its_own:  # noqa: BLE001 - as above
                failed = True
                yield Breach("readable", rollout_id, f"cannot be loaded: {describe(its_own)}")
        if not failed:
            yield Breach("readable", tape.location, f"a rollout cannot be loaded: {describe(error)}")


def _breaches(rollout: Rollout, policies: Sequence[CutPolicy]) -> list[Breach]:
    try:
        breaches = verify_rollout(rollout, policies)
        return breaches + [Breach("trace", rollout.id, what) for what in find_problems(rollout)]
    except Exception as error:  # noqa: BLE001 - as above
        return [Breach("samples", rollout.id, f"cannot be checked: {describe(error)}")]


def _token_findings(tape: Run, steps: Sequence[TokenStep]) -> Iterator[Breach]:
    """Yield where a trainer's records and the tape disagree. Records that name no sample are skipped."""
    for step in steps:
        try:
            for check in check_steps(tape, steps, [step]):
                for finding in check.findings:
                    yield Breach(f"trainer saw: {finding.rule}", finding.where, f"{finding.what}; {finding.advice}")
        except Exception as error:  # noqa: BLE001 - as above
            yield Breach("readable", f"token records of step {step.step}", f"cannot be checked: {describe(error)}")


def _problems(tape: Run) -> Iterator[Breach]:
    """Problems that the tape itself reports, or those found until it could not be read further."""
    for find in (tape.problems, tape.verify_shards):
        try:
            problems = find()
        except Exception as error:  # noqa: BLE001 - as above
            problems = tape.noticed()
            yield Breach("readable", tape.location, f"cannot be read completely: {describe(error)}")
        for problem in problems:
            yield Breach("readable", problem.where, problem.what)
