"""`rolltape check`: whether everything that may never break holds on a run."""

from rolltape.cli.exits import Exit
from rolltape.cli.options import JsonOption, RunArgument


def check(run: RunArgument, as_json: JsonOption = False) -> int:
    """Verify everything that may never break.

    Journals, shards and records, and the samples under every policy.
    """
    import rolltape
    from rolltape.cli.screen import count, plural, print_json, print_line, print_long, tracked
    from rolltape.errors import DamagedTapeError, TapeError
    from rolltape.records.policy import PRESETS
    from rolltape.samples.verify import verify_rollout

    tape = rolltape.read(run)
    found: list[tuple[str, str, str]] = []
    rollouts = turns = tokens = 0
    policies = list(PRESETS.values())
    try:
        for rollout in tracked(tape.rollouts(), "checking", len(tape.index())):
            rollouts += 1
            turns += len(rollout.turns)
            tokens += sum(len(turn.sampled_ids) for turn in rollout.turns)
            found.extend((breach.rule, breach.where, breach.what) for breach in verify_rollout(rollout, policies))
    except DamagedTapeError as error:
        found.append(("readable", run, str(error)))
    problems = [*tape.problems(), *tape.verify_shards()]
    found.extend(("readable", problem.where, problem.what) for problem in problems)
    if not rollouts and not found:
        raise TapeError(f"{run}: the run holds no rollouts yet")
    found = list(dict.fromkeys(found))
    if as_json:
        for rule, where, what in found:
            print_json({"rule": rule, "where": where, "what": what})
    else:
        for rule, where, what in found:
            print_long(f"{where}: {what} [{rule}]")
        seen = f"{plural(rollouts, 'rollout')}, {plural(turns, 'turn')}, {count(tokens)} sampled tokens"
        names = ", ".join(policy.name for policy in policies)
        print_line(f"{seen} checked under {names}: " + (f"{len(found):,} broken" if found else "all hold"))
    return Exit.BROKEN if found else Exit.OK
