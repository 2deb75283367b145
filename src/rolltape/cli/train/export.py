"""`rolltape export`: samples, turns, rollouts or traces as files."""

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import (
    AdvantageOption,
    BranchesOption,
    GroupOption,
    MaxTokensOption,
    PolicyOption,
    RewardOption,
    RolloutArgument,
    RunArgument,
    StalenessOption,
    StepOption,
    TaskOption,
    TryOption,
    chosen_credit,
    chosen_policy,
)


class What(enum.StrEnum):
    SAMPLES = "samples"
    TURNS = "turns"
    ROLLOUTS = "rollouts"
    TRACES = "traces"


class Format(enum.StrEnum):
    """Our own two, and those of the frameworks."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    SLIME = "slime"
    VERL = "verl"
    PRIME_RL = "prime-rl"
    AREAL = "areal"
    TRL = "trl"
    TINKER = "tinker"


OWN_FORMATS = (Format.JSONL, Format.PARQUET)
_ENDINGS = {".parquet": Format.PARQUET, ".jsonl": Format.JSONL, ".ndjson": Format.JSONL, ".json": Format.JSONL}


def export(
    run: RunArgument,
    rollout: RolloutArgument = None,
    what: Annotated[What, typer.Option("--what", help="What a row is.")] = What.SAMPLES,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", help="By default what FILE ends in, else jsonl; or samples as a framework takes them."
        ),
    ] = None,
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="Where to; - is standard output.")] = "-",
    policy: PolicyOption = "exact",
    reward: RewardOption = None,
    advantage: AdvantageOption = None,
    branches: BranchesOption = None,
    max_tokens: MaxTokensOption = None,
    max_staleness: StalenessOption = None,
    whole_prompts: Annotated[
        bool, typer.Option("--whole-prompts", help="Turns or traces with whole prompts, not only what is new.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="For prime-rl: what replies were sampled at, whatever the turns say."),
    ] = None,
    without_logprobs: Annotated[
        bool, typer.Option("--without-logprobs", help="For slime and verl, where they compute the old ones themselves.")
    ] = False,
    step: StepOption = None,
    group: GroupOption = None,
    task: TaskOption = None,
    try_index: TryOption = None,
) -> int:
    """Write samples, turns, rollouts or traces to a file."""
    chosen_one = chosen_policy(
        policy,
        branches=branches,
        max_tokens=max_tokens,
        max_staleness=max_staleness,
    )
    credit = chosen_credit(reward, advantage)
    form = _format(form, out)
    _refuse_contradictions(
        form, what, out, temperature=temperature, without_logprobs=without_logprobs, whole_prompts=whole_prompts
    )

    from rolltape import export as files
    from rolltape.cli.output.screen import note, tracked
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.cli.sampling import samples_of
    from rolltape.traces import trace_of

    tape = opened(run)
    counted = what is What.SAMPLES
    chosen = Chosen(tape, rollout, try_index=try_index, step=step, group=group, task=task, counted_only=counted)
    parquet = form is Format.PARQUET
    with chosen.named_in_errors():
        if form not in OWN_FORMATS:
            from rolltape.cli.train.frameworks import write_for

            logprobs = not without_logprobs
            written = write_for(form, chosen, chosen_one, credit, out, temperature=temperature, logprobs=logprobs)
        elif what is What.SAMPLES:
            write_samples = files.samples_to_parquet if parquet else files.samples_to_jsonl
            written = write_samples(samples_of(chosen, chosen_one, credit), out)
        elif what is What.TURNS:
            write_turns = files.turns_to_parquet if parquet else files.turns_to_jsonl
            written = write_turns(tracked(chosen, "exporting", len(chosen)), out, whole_prompts=whole_prompts)
        elif what is What.TRACES:
            traces = map(trace_of, tracked(chosen, "exporting", len(chosen)))
            written = files.traces_to_jsonl(traces, out, whole_prompts=whole_prompts)
        else:
            write_rollouts = files.rollouts_to_parquet if parquet else files.rollouts_to_jsonl
            written = write_rollouts(tracked(chosen, "exporting", len(chosen)), out)
    if out != "-":
        note(f"{written:,} {what if written != 1 else what[:-1]} written to {out}")
    return ended(tape)


def _format(asked: Format | None, out: str) -> Format:
    """The format that was asked for, else the one that the file's name ends in; they may not contradict each other."""
    ending = Path(out).suffix
    named = _ENDINGS.get(ending)
    if asked is not None and asked not in OWN_FORMATS:
        return _of_framework(asked, out)
    if asked is not None and named is not None and asked is not named:
        raise UsageError(
            f"--format {asked} contradicts -o {out}, which ends in {ending}; leave out --format, or rename"
        )
    return asked or named or Format.JSONL


def _refuse_contradictions(
    form: Format, what: What, out: str, *, temperature: float | None, without_logprobs: bool, whole_prompts: bool
) -> None:
    """Options that do not go together are said before anything is read."""
    binary = {Format.PARQUET: "Parquet", Format.VERL: ".npz", Format.AREAL: ".npz"}
    if form in binary and out == "-" and sys.stdout.isatty():
        raise UsageError(f"-o: {binary[form]} is not for a terminal; name a file")
    if form not in OWN_FORMATS and what is not What.SAMPLES:
        raise UsageError(f"--format {form} is for samples, not for --what {what}")
    if temperature is not None and form is not Format.PRIME_RL:
        raise UsageError("--temperature goes with --format prime-rl")
    if without_logprobs and form not in (Format.SLIME, Format.VERL):
        raise UsageError("--without-logprobs goes with --format slime or verl")
    if whole_prompts and what not in (What.TURNS, What.TRACES):
        raise UsageError("--whole-prompts goes with --what turns or traces")
    if what is What.TRACES and form is Format.PARQUET:
        raise UsageError("--what traces: a trace is no row of columns; write JSON lines")


def _of_framework(asked: Format, out: str) -> Format:
    from rolltape.export.formats import FRAMEWORKS

    endings = FRAMEWORKS[asked].endings
    ending = Path(out).suffix
    if ending and ending not in endings and out != "-":
        raise UsageError(
            f"--format {asked} is written as {' or '.join(endings)}, but -o {out} ends in {ending}; rename"
        )
    return asked
