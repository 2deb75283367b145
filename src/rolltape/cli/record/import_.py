"""`rolltape import`: turn another program's rollouts into a run."""

from pathlib import Path
from typing import Annotated

import rolltape
from rolltape.cli.exits import Exit
from rolltape.cli.options import JsonOption
from rolltape.cli.parameters import argument, given_flags, option
from rolltape.cli.screen import note, plural, print_json, print_line
from rolltape.errors import UsageError
from rolltape.importers import KINDS, ImportOptions, find_rollouts, guess, record_imported

_PRIME_RL = "prime-rl"
_SHOWN_PROBLEMS = 20


def import_(
    kind: Annotated[str | None, argument("KIND", f"What the source is: {', '.join(KINDS)}.")] = None,
    path: Annotated[str | None, argument("PATH", "File or folder to import.")] = None,
    run: Annotated[str | None, argument("RUN", "Run directory; created if missing.")] = None,
    *,
    guess_path: Annotated[
        str | None, option("--guess PATH", "Print the kind of a file or folder, and import nothing.")
    ] = None,
    source: Annotated[str | None, option("--source NAME", "Where the tasks come from.")] = None,
    split: Annotated[str | None, option("--split NAME", "Split of the source.")] = None,
    step: Annotated[int | None, option("--step N", "Training step (default: from the source, else 0).", min=0)] = None,
    model: Annotated[str | None, option("--model NAME", "Model that was sampled from.")] = None,
    tokenizer: Annotated[str | None, option("--tokenizer FOLDER", "Tokenizer that decodes the ids.")] = None,
    traces: Annotated[
        str | None, option("--traces FILE", "With prime-rl: verifiers traces to join token exports with.")
    ] = None,
    skip_broken: Annotated[bool, option("--skip-broken", "Skip entries that cannot be read, and name them.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Turn another program's rollouts into a run.

    A repeated import adds nothing. Token ids, logprobs, and weight versions that the source does not have are not
    made up.
    """
    if guess_path is not None:
        given = {"KIND": kind, "--source": source, "--split": split, "--step": step, "--model": model}
        given |= {"--tokenizer": tokenizer, "--traces": traces, "--skip-broken": skip_broken}
        if wrong := given_flags(given):
            raise UsageError(f"--guess takes only a path; leave out {wrong[0]}")
        return _print_guess(guess_path, as_json=as_json)
    if kind is None or path is None or run is None:
        raise UsageError("import needs KIND, PATH, and RUN, or --guess PATH")
    if traces is not None and kind != _PRIME_RL:
        raise UsageError(f"--traces: {kind} does not use it; leave it out, or import {_PRIME_RL}")
    options = ImportOptions(source=source, split=split, step=step, model=model, tokenizer=tokenizer, traces=traces)
    found = find_rollouts(kind, path, options, skip_broken=skip_broken)  # raises before a run is created
    with rolltape.open(run) as tape:
        report = record_imported(tape, kind, found, skip_broken=skip_broken)
    token_records = 0
    if kind == _PRIME_RL:
        from rolltape.cli.record.import_tokens import keep_token_records

        token_records = keep_token_records(Path(run), Path(path))
    if as_json:
        print_json({**report.to_json(), "token_records": token_records})
    else:
        known = f", {report.known:,} known already" if report.known else ""
        print_line(f"{plural(report.imported, 'rollout')} imported into {run}{known}")
        if token_records:
            print_line(f"  {plural(token_records, 'token record')} of its trainer: rolltape tokens {run}")
        for what, count in report.absent.items():
            print_line(f"  {what}: absent from {plural(count, 'rollout')}")
    for entry in report.broken[:_SHOWN_PROBLEMS]:
        note(f"skipped {entry.where}: {entry.problem}")
    if len(report.broken) > _SHOWN_PROBLEMS:
        note(f"skipped {len(report.broken) - _SHOWN_PROBLEMS:,} more")
    return Exit.OK


def _print_guess(path: str, *, as_json: bool) -> int:
    kinds = guess(path)
    if as_json:
        print_json(kinds)
    elif kinds:
        for kind, reason in kinds.items():
            print_line(f"{kind}: {reason}")
    else:
        print_line(f"{path} does not look like any of {', '.join(KINDS)}")
    return Exit.OK if kinds else Exit.USAGE
