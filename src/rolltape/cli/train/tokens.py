"""`rolltape tokens`: what a trainer saw of a run, token by token."""

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import Exit, UsageError
from rolltape.cli.options import (
    BranchesOption,
    JsonOption,
    MaxTokensOption,
    PolicyOption,
    RunArgument,
    StalenessOption,
    TokenizerOption,
    chosen_policy,
)

if TYPE_CHECKING:
    from rolltape.tokens.steps import TokenStep


class Action(enum.StrEnum):
    LIST = "list"  # steps, or with --step records
    SUMMARY = "summary"  # figures per step
    SHOW = "show"  # one record, token by token
    TURNS = "turns"  # one record, turn by turn
    WORST = "worst"  # the tokens with the largest mismatch


def tokens(
    run: RunArgument,
    action: Annotated[
        Action,
        typer.Argument(metavar="[ACTION]", help="list, summary, show, turns or worst; by default list."),
    ] = Action.LIST,
    record: Annotated[
        str | None, typer.Argument(metavar="[RECORD]", help="Step, rank and number, as in 12.0.3, or a sample id.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only this step; list then shows its records.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", help="show: which columns; worst: by which one; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="worst: how many tokens.")] = 10,
    policy: PolicyOption = "exact",
    branches: BranchesOption = None,
    max_tokens: MaxTokensOption = None,
    max_staleness: StalenessOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """List, sum up and show what a trainer saw, token by token."""
    from rolltape.cli.train import token_tables, token_texts
    from rolltape.cli.train.token_join import Joiner
    from rolltape.cli.train.token_names import named_record

    steps = _chosen(run, step)
    if action is Action.LIST and step is None:
        token_tables.print_steps(steps, as_json=as_json)
        return _ended(steps)
    if action is Action.LIST:
        token_tables.print_records(steps, rank, as_json=as_json)
        return _ended(steps)
    if action is Action.SUMMARY:
        token_tables.print_summary(steps, rank, as_json=as_json)
        return _ended(steps)
    chosen = chosen_policy(policy, branches=branches, max_tokens=max_tokens, max_staleness=max_staleness)
    joiner = Joiner(run, chosen, tokenizer)
    if action is Action.WORST:
        by = _one_column(column)
        token_texts.print_worst(steps, rank, joiner, by=by, limit=limit, as_json=as_json)
        return _ended(steps)
    meant = named_record(steps, rank, record)
    if action is Action.SHOW:
        token_texts.print_record(meant, joiner, _columns(column), as_json=as_json)
    else:
        token_texts.print_turns(meant, joiner, as_json=as_json)
    return _ended(steps)


def _chosen(run: str, step: int | None) -> list["TokenStep"]:
    from rolltape.errors import TapeError
    from rolltape.tokens import list_steps

    steps = list_steps(run)
    if not steps:
        raise TapeError(f"{run}: no token records there; a trainer writes them with rolltape.tokens.TokenExporter")
    chosen = [one for one in steps if step in (None, one.step)]
    if not chosen:
        raise UsageError(f"--step {step}: no token records of it; there are those of {_range(steps)}")
    return chosen


def _range(steps: list["TokenStep"]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _columns(asked: list[str] | None) -> list[str]:
    from rolltape.records.token_record import TOKEN_COLUMNS

    unknown = [name for name in asked or () if name not in TOKEN_COLUMNS]
    if unknown:
        raise UsageError(f"--column: there is no column {unknown[0]}; known are {', '.join(TOKEN_COLUMNS)}")
    return asked or ["trainer_logprobs", "inference_logprobs", "ratio", "mismatch_kl", "masked"]


def _one_column(asked: list[str] | None) -> str:
    if asked and len(asked) > 1:
        raise UsageError("--column: worst goes by one column")
    return _columns(asked)[0] if asked else "mismatch_kl"


def _ended(steps: list["TokenStep"]) -> int:
    """What is missing of what was shown is said beside it."""
    from rolltape.cli.output.screen import note, plural

    for one in steps:
        missing = sum(done.dropped_records + done.lost_records for done in one.ranks)
        if missing:
            note(f"step {one.step}: {plural(missing, 'record')} dropped or lost while they were written")
    return Exit.OK
