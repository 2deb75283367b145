"""`rolltape export`: write samples, turns, rollouts, traces, conversations, or records to a file or folder."""

import enum
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from rolltape import export as files
from rolltape.cli.options import RunArgument, Selection, TrainingOptions, WholePromptsOption
from rolltape.cli.parameters import either, option
from rolltape.cli.runs import SelectedRollouts, open_run, report_problems
from rolltape.cli.screen import SHORT_ID, note, plural, tracked
from rolltape.collect.records import records_to_jsonl
from rolltape.errors import UsageError
from rolltape.export.formats import (
    FRAMEWORKS,
    Choices,
    write_dataset,
    write_inspect_log,
    write_samples_for,
    write_trajectories,
)
from rolltape.records.policy import Credit, CutPolicy
from rolltape.records.rollout import Status
from rolltape.records.sample import Sample
from rolltape.traces import trace_of


class ExportKind(enum.StrEnum):
    SAMPLES = "samples"
    TURNS = "turns"
    ROLLOUTS = "rollouts"
    TRACES = "traces"
    CONVERSATIONS = "conversations"  # messages, for SFT
    RECORDS = "records"  # as `rolltape collect -o` writes them


class ExportFormat(enum.StrEnum):
    """The formats besides those of training frameworks: Rolltape's own two, and those of other programs."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    MESSAGES = "messages"  # OpenAI's fine-tuning files
    DATASETS = "datasets"  # Hugging Face
    ATIF = "atif"  # Harbor
    INSPECT = "inspect"


class _FormatFacts(NamedTuple):
    """What a format can write, the first by default, and the endings of its files; none for a folder."""

    kinds: tuple[ExportKind, ...]
    endings: tuple[str, ...] = ()


_TABLES = (ExportKind.SAMPLES, ExportKind.TURNS, ExportKind.ROLLOUTS, ExportKind.CONVERSATIONS)
OWN_FORMATS: dict[str, _FormatFacts] = {
    ExportFormat.JSONL: _FormatFacts(tuple(ExportKind), (".jsonl", ".ndjson", ".json")),
    ExportFormat.PARQUET: _FormatFacts(_TABLES, (".parquet",)),
}
FORMATS: dict[str, _FormatFacts] = {
    **OWN_FORMATS,
    **{name: _FormatFacts((ExportKind.SAMPLES,), one.endings) for name, one in FRAMEWORKS.items()},
    ExportFormat.MESSAGES: _FormatFacts((ExportKind.CONVERSATIONS,), (".jsonl",)),
    ExportFormat.DATASETS: _FormatFacts((ExportKind.CONVERSATIONS, *_TABLES)),
    ExportFormat.ATIF: _FormatFacts((ExportKind.ROLLOUTS,)),
    ExportFormat.INSPECT: _FormatFacts((ExportKind.ROLLOUTS,), (".eval", ".json")),
}
_BINARY = {".parquet": "Parquet", ".npz": ".npz"}


def export(
    run: RunArgument,
    *,
    which: Selection,
    what: Annotated[
        ExportKind | None,
        option(
            "--what WHAT",
            f"What to write: {either(ExportKind)} (default: samples; conversations for messages and datasets, rollouts "
            "for atif and inspect).",
        ),
    ] = None,
    form: Annotated[
        str | None,
        option("--format FORMAT", f"{either(FORMATS)} (default: by the suffix of FILE, else jsonl)."),
    ] = None,
    out: Annotated[
        str,
        option(
            "-o, --out FILE",
            "Output file; - is stdout. A folder for atif and datasets; hf://datasets/OWNER/NAME pushes to the hub.",
        ),
    ] = "-",
    training: TrainingOptions,
    whole_prompts: WholePromptsOption = False,
    temperature: Annotated[
        float | None, option("--temperature X", "Sampling temperature to write for prime-rl (default: as recorded).")
    ] = None,
    without_logprobs: Annotated[
        bool, option("--without-logprobs", "Leave logprobs out for slime, verl or skyrl, which then compute their own.")
    ] = False,
) -> int:
    """Write samples, turns, traces, or conversations to a file.

    Export warns about fields that a framework's format drops.
    """
    policy, credit = training.cut_policy(), training.credit()
    form = _resolve_format(form, out)
    known, endings = FORMATS[form]
    binary = next((_BINARY[ending] for ending in endings if ending in _BINARY), None)
    if binary is not None and out == "-" and sys.stdout.isatty():
        raise UsageError(f"-o: {binary} cannot be written to a terminal; name a file")
    what = what or known[0]
    if what not in known and form == ExportFormat.PARQUET:
        raise UsageError(f"--what {what}: {what} have no Parquet form; use --format jsonl")
    if what not in known:
        raise UsageError(f"--format {form} writes {' or '.join(dict.fromkeys(known))}, not --what {what}")
    if out == "-" and (not endings or form == ExportFormat.INSPECT):
        raise UsageError(f"-o: --format {form} writes a {'log' if endings else 'folder'}; name one")
    if temperature is not None and form != "prime-rl":
        raise UsageError("--temperature needs --format prime-rl")
    if without_logprobs and not (form in FRAMEWORKS and FRAMEWORKS[form].form.optional_logprobs):
        optional = [name for name, one in FRAMEWORKS.items() if one.form.optional_logprobs]
        raise UsageError(f"--without-logprobs needs --format {either(optional)}")
    if whole_prompts and what not in (ExportKind.TURNS, ExportKind.TRACES):
        raise UsageError("--whole-prompts needs --what turns or --what traces")

    tape = open_run(run)
    selected = SelectedRollouts(tape, which, counted_only=what is ExportKind.SAMPLES)
    with selected.named_in_errors():
        if form not in FRAMEWORKS:
            left_out: list[str] = []
            write = partial(
                _write,
                what,
                selected=selected,
                policy=policy,
                credit=credit,
                whole_prompts=whole_prompts,
                left_out=left_out,
            )
            written = _write_rows(form, write, out)
            _note_left_out(what, left_out)
        else:
            choices = Choices(
                versions=tuple(tape.run.versions()),
                temperature=temperature,
                env_name=tape.run.name,
                logprobs=not without_logprobs,
            )
            written = _write_for_framework(form, selected.samples(policy, credit), out, choices)
    if out != "-":
        note(f"{plural(written, what[:-1])} written to {out}")
    return report_problems(tape)


def _resolve_format(asked: str | None, out: str) -> str:
    """The requested format, else that of the file's suffix. They must not contradict each other."""
    suffix = Path(out).suffix
    named = next((name for name, own in OWN_FORMATS.items() if suffix in own.endings), None)
    if asked is None:
        return named or ExportFormat.JSONL
    if asked not in FORMATS:
        raise UsageError(f"--format: {asked!r} is not a format; use {either(FORMATS)}")
    endings = FORMATS[asked].endings
    if asked in OWN_FORMATS and named not in (None, asked):
        raise UsageError(f"--format {asked} contradicts -o {out}, which ends in {suffix}; drop one of them")
    if asked not in OWN_FORMATS and endings and suffix and suffix not in endings and out != "-":
        raise UsageError(f"--format {asked} is written as {' or '.join(endings)}, but -o {out} ends in {suffix}")
    return asked


def _write_rows(form: str, write: Callable[..., int], out: str) -> int:
    """Write in a format of `ExportFormat`. Return how many rows or files were written."""
    if form == ExportFormat.DATASETS:
        return write_dataset(lambda file: write(ExportFormat.PARQUET, str(file)), out)
    return write(form, out)


def _write(
    what: ExportKind,
    form: str,
    out: str,
    *,
    selected: SelectedRollouts,
    policy: CutPolicy,
    credit: Credit,
    whole_prompts: bool,
    left_out: list[str],
) -> int:
    """Write one file, or a folder of trajectories. Return how many rows or files were written."""
    parquet = form == ExportFormat.PARQUET
    if what is ExportKind.SAMPLES:
        write_samples = files.samples_to_parquet if parquet else files.samples_to_jsonl
        return write_samples(selected.samples(policy, credit), out)
    rollouts = tracked(selected, "exporting", len(selected))
    if what is ExportKind.TURNS:
        write_turns = files.turns_to_parquet if parquet else files.turns_to_jsonl
        return write_turns(rollouts, out, whole_prompts=whole_prompts)
    if what is ExportKind.TRACES:
        return files.traces_to_jsonl(map(trace_of, rollouts), out, whole_prompts=whole_prompts)
    if what is ExportKind.CONVERSATIONS:
        if parquet:
            return files.conversations_to_parquet(rollouts, out, left_out=left_out)
        return files.conversations_to_jsonl(rollouts, out, bare=form == ExportFormat.MESSAGES, left_out=left_out)
    if what is ExportKind.RECORDS:
        ended = (one for one in rollouts if one.status in (Status.FINISHED, Status.FAILED))
        return records_to_jsonl(ended, out)
    if form == ExportFormat.ATIF:
        return write_trajectories(rollouts, out, left_out)
    if form == ExportFormat.INSPECT:
        return write_inspect_log(rollouts, out, left_out)
    write_rollouts = files.rollouts_to_parquet if parquet else files.rollouts_to_jsonl
    return write_rollouts(rollouts, out)


def _note_left_out(what: ExportKind, left_out: list[str]) -> None:
    if left_out:
        why = "none of their replies trains" if what is ExportKind.CONVERSATIONS else "not ended, or without a reply"
        some = ", ".join(one[:SHORT_ID] for one in left_out[:5]) + (", …" if len(left_out) > 5 else "")
        note(f"{plural(len(left_out), 'rollout')} left out, {why}: {some}")


def _write_for_framework(framework: str, samples: Generator[Sample, None, None], out: str, choices: Choices) -> int:
    """Write samples in a framework's format, and print the fields that it drops. Return how many were written."""
    # Closed before an error is printed, since a progress bar runs with it.
    with closing(samples):
        written = write_samples_for(framework, samples, out, choices)
    for sentence in written.left_out:
        note(sentence)
    return written.samples
