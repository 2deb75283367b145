"""`rolltape tokens`: list, summarize, show, and check a trainer's token records."""

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

import rolltape
from rolltape.cli.exits import Exit
from rolltape.cli.options import CutOptions, JsonOption, RunArgument, TokenizerOption
from rolltape.cli.parameters import argument, either, given_flags, option
from rolltape.cli.screen import count, note, number, plural, print_json, print_line, print_table, tracked
from rolltape.cli.train import token_texts
from rolltape.cli.train.token_check import print_check
from rolltape.cli.train.token_texts import RecordJoiner, find_record, short_sample
from rolltape.errors import TapeError, UsageError
from rolltape.records.token_record import TOKEN_COLUMNS, TokenRecord
from rolltape.samples.check.credit import CheckedAdvantage
from rolltape.tokens import list_steps
from rolltape.tokens.files import read_step
from rolltape.tokens.steps import TokenStep
from rolltape.tokens.summary import QUANTILES, SUMMARY_COLUMNS, SequenceFigures, sequence_figures, summarize_step

_DEFAULT_COLUMNS = ["trainer_logprobs", "inference_logprobs", "ratio", "mismatch_kl", "masked"]
_WORST_TOKENS = 10


class TokenAction(enum.StrEnum):
    LIST = "list"  # steps, or the records of --step
    SUMMARY = "summary"  # figures per step
    SHOW = "show"  # one record by token
    TURNS = "turns"  # one record by turn
    WORST = "worst"  # the tokens with the largest mismatch
    CHECK = "check"  # compare with the tape


_OF_ONE_RECORD = (TokenAction.SHOW, TokenAction.TURNS)
# The actions that use an argument or flag, if not all do.
_USERS = {
    "RECORD": _OF_ONE_RECORD,
    "--rank": (TokenAction.LIST, TokenAction.SUMMARY, *_OF_ONE_RECORD, TokenAction.WORST),
    "--column": (TokenAction.SHOW, TokenAction.WORST),
    "--limit": (TokenAction.WORST,),
    "--advantage": (TokenAction.CHECK,),
    "--tokenizer": (*_OF_ONE_RECORD, TokenAction.WORST),
}


def tokens(
    run: RunArgument,
    action: Annotated[TokenAction, argument("ACTION", f"{either(TokenAction)} (default: list).")] = TokenAction.LIST,
    record: Annotated[
        str | None, argument("RECORD", "For show and turns: STEP.RANK.NUMBER, such as 12.0.3, or a sample id.")
    ] = None,
    *,
    step: Annotated[int | None, option("--step N", "Only this step; list then lists its records.")] = None,
    rank: Annotated[int | None, option("--rank N", "Only this rank.")] = None,
    column: Annotated[
        list[str] | None, option("--column NAME", "Column to show, or to rank by for worst; repeatable.")
    ] = None,
    limit: Annotated[int | None, option("--limit N", "For worst, how many tokens (default: 10).", min=1)] = None,
    advantage: Annotated[
        CheckedAdvantage | None,
        option(
            "--advantage KIND",
            f"For check, what the trainer's advantages are: {either(CheckedAdvantage)} (default: auto).",
        ),
    ] = None,
    cut: CutOptions,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """List, summarize, show, and check a trainer's token records.

    Check compares them with the samples of the tape, and exits with 1 if they disagree.
    """
    given = {"RECORD": record, "--rank": rank, "--column": column, "--limit": limit, "--advantage": advantage}
    _check_used(action, given_flags({**given, "--tokenizer": tokenizer}), step)
    every, steps = _select_steps(run, step)
    code: int = Exit.OK
    if action is TokenAction.LIST and step is None:
        print_steps(steps, as_json=as_json)
    elif action is TokenAction.LIST:
        print_records(steps, rank, as_json=as_json)
    elif action is TokenAction.SUMMARY:
        print_summary(steps, rank, as_json=as_json)
    elif action is TokenAction.CHECK:
        code = print_check(run, every, cut.cut_policy(), advantage or CheckedAdvantage.AUTO, only=step, as_json=as_json)
    else:
        joiner = RecordJoiner(run, cut.cut_policy(), tokenizer)
        if action is TokenAction.WORST:
            token_texts.print_worst(
                steps, rank, joiner, by=_one_column(column), limit=limit or _WORST_TOKENS, as_json=as_json
            )
        elif action is TokenAction.SHOW:
            found = find_record(steps, rank, record)
            token_texts.print_record(found, joiner, _columns(column), as_json=as_json)
        else:
            token_texts.print_turns(find_record(steps, rank, record), joiner, as_json=as_json)
    for one in steps:
        missing = sum(done.dropped_records + done.lost_records for done in one.ranks)
        if missing:
            note(f"step {one.step}: {plural(missing, 'record')} dropped or lost while writing")
    return code


def _check_used(action: TokenAction, given: Sequence[str], step: int | None) -> None:
    """Refuse flags that the action does not use."""
    for flag in given:
        if action not in _USERS[flag]:
            raise UsageError(f"{flag}: {action} does not use it; leave it out, or give {either(_USERS[flag])}")
    if action is TokenAction.LIST and step is None and "--rank" in given:
        raise UsageError("--rank: list needs --step to list the records of a rank")


def _select_steps(run: str, step: int | None) -> tuple[list[TokenStep], list[TokenStep]]:
    """All steps of a run with token records, and the selected ones of them."""
    steps = list_steps(run)
    if not steps:
        rolltape.read(run)  # raises if there is no run
        raise TapeError(f"{run}: no token records; a trainer writes them with rolltape.TokenExporter")
    selected = [one for one in steps if step in (None, one.step)]
    if not selected:
        first, last = steps[0].step, steps[-1].step
        known = f"step {first}" if first == last else f"steps {first} to {last}"
        raise UsageError(f"--step {step}: no token records; the run has those of {known}")
    return steps, selected


def _columns(asked: list[str] | None) -> list[str]:
    unknown = [name for name in asked or () if name not in TOKEN_COLUMNS]
    if unknown:
        raise UsageError(f"--column {unknown[0]}: unknown column; columns are {', '.join(TOKEN_COLUMNS)}")
    return asked or _DEFAULT_COLUMNS


def _one_column(asked: list[str] | None) -> str:
    if asked and len(asked) > 1:
        raise UsageError("--column: worst takes only one column")
    return _columns(asked)[0] if asked else "mismatch_kl"


def print_steps(steps: Sequence[TokenStep], *, as_json: bool) -> None:
    """Print a line per step."""
    rows = []
    for step in steps:
        files = [file for done in step.ranks for file in done.files]
        tokens = [file.tokens for file in files if file.tokens is not None]
        about: dict[str, Any] = {
            "step": step.step,
            "format": step.file_format,
            "stable": step.stable,
            "ranks": len(step.ranks),
            "writers": step.writers,
            "records": sum(file.records for file in files),
            "tokens": sum(tokens) if len(tokens) == len(files) else None,
            "bytes": sum(file.size for file in files),
            "dropped_records": sum(done.dropped_records for done in step.ranks),
            "lost_records": sum(done.lost_records for done in step.ranks),
            "partial_ranks": step.partial_ranks,
        }
        if as_json:
            print_json(about)
        rows.append(
            [
                str(step.step),
                _state(step),
                count(about["records"]),
                "" if about["tokens"] is None else count(about["tokens"]),
                f"{about['bytes'] / 1e6:,.1f} MB",
                count(about["dropped_records"] + about["lost_records"]),
            ]
        )
    if not as_json:
        print_table(["step", "state", "records", "tokens", "size", "missing"], rows, left=["state"])
        print_line(plural(len(steps), "step"))


def print_records(steps: Sequence[TokenStep], rank: int | None, *, as_json: bool) -> None:
    """Print a line per record."""
    rows = []
    for record in (record for step in steps for record in read_step(step, rank, ("mismatch_kl", "masked"))):
        figures = sequence_figures(record)
        if as_json:
            print_json({**msgspec.to_builtins(figures), **_facts(record)})
            continue
        rows.append(
            [
                figures.place,
                short_sample(record.sample),
                figures.env or "",
                number(figures.reward),
                count(figures.tokens),
                count(figures.trained_tokens),
                number(figures.mismatch_kl),
                number(figures.max_mismatch_kl),
                _share(figures.masked),
            ]
        )
    if not as_json:
        names = ["record", "sample", "env", "reward", "tokens", "trained", "mismatch KL", "max KL", "masked"]
        print_table(names, rows, left=["record", "sample", "env"], spare=["env", "sample"])
        print_line(plural(len(rows), "record"))


def print_summary(steps: Sequence[TokenStep], rank: int | None, *, as_json: bool) -> None:
    """Print figures per step, and the worst sequences of each."""
    rows = []
    worst: list[tuple[int, SequenceFigures]] = []
    for step in tracked(steps, "steps", len(steps)):
        figures = summarize_step(step.step, read_step(step, rank, SUMMARY_COLUMNS))
        worst += [(step.step, one) for one in figures.worst]
        if as_json:
            print_json({**msgspec.to_builtins(figures), "stable": step.stable})
            continue
        rows.append(
            [
                str(step.step),
                count(figures.records),
                count(figures.trained_tokens),
                number(figures.mismatch_kl),
                number(figures.max_mismatch_kl),
                *(_share(share) for share in (figures.masked, figures.masked_high, figures.masked_low)),
                number(figures.entropy),
                *(number(value) for value in figures.ratio_quantiles or [None] * len(QUANTILES)),
                count(figures.not_finite),
            ]
        )
    if as_json:
        return
    names = ["step", "records", "trained", "mismatch KL", "max KL", "masked", "high", "low", "entropy"]
    quantiles = [f"ratio {share:.0%}" for share in QUANTILES]
    print_table([*names, *quantiles, "not finite"], rows, spare=["records", "not finite", "max KL"])
    print_line("")
    print_table(
        ["step", "worst record", "sample", "mismatch KL", "max KL", "masked", "reward"],
        [
            [
                str(step),
                one.place,
                short_sample(one.sample),
                number(one.mismatch_kl),
                number(one.max_mismatch_kl),
                _share(one.masked),
                number(one.reward),
            ]
            for step, one in worst
        ],
        left=["worst record", "sample"],
        spare=["sample", "max KL"],
    )


def _facts(record: TokenRecord) -> dict[str, object]:
    names = ("step", "rank", "micro_step", "micro_sequence", "sequence", "rollout", "group", "versions", "loss")
    return {name: getattr(record, name) for name in names}


def _state(step: TokenStep) -> str:
    if step.stable:
        return "stable"
    half = f", {len(step.partial_ranks)} half-written" if step.partial_ranks else ""
    return f"not stable, {len(step.ranks)} of {step.writers or '?'} ranks{half}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
