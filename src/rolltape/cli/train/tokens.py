"""`rolltape tokens`: list, summarize, and show a trainer's token records."""

import enum
from typing import TYPE_CHECKING, Annotated

from rolltape.cli.exits import Exit
from rolltape.cli.options import CutOptions, JsonOption, RunArgument, TokenizerOption
from rolltape.cli.output.screen import note, plural
from rolltape.cli.parameters import argument, either, option
from rolltape.errors import TapeError, UsageError

if TYPE_CHECKING:
    from rolltape.tokens.steps import TokenStep

_DEFAULT_COLUMNS = ["trainer_logprobs", "inference_logprobs", "ratio", "mismatch_kl", "masked"]


class TokenAction(enum.StrEnum):
    LIST = "list"  # steps, or the records of --step
    SUMMARY = "summary"  # figures per step
    SHOW = "show"  # one record by token
    TURNS = "turns"  # one record by turn
    WORST = "worst"  # the tokens with the largest mismatch


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
    limit: Annotated[int, option("--limit N", "Only the N worst tokens.", min=1)] = 10,
    cut: CutOptions,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """List, summarize, and show a trainer's token records."""
    from rolltape.cli.train import token_tables, token_texts
    from rolltape.cli.train.token_join import RecordJoiner, find_record

    steps = _select_steps(run, step)
    if action is TokenAction.LIST and step is None:
        token_tables.print_steps(steps, as_json=as_json)
    elif action is TokenAction.LIST:
        token_tables.print_records(steps, rank, as_json=as_json)
    elif action is TokenAction.SUMMARY:
        token_tables.print_summary(steps, rank, as_json=as_json)
    else:
        joiner = RecordJoiner(run, cut.cut_policy(), tokenizer)
        if action is TokenAction.WORST:
            token_texts.print_worst(steps, rank, joiner, by=_one_column(column), limit=limit, as_json=as_json)
        elif action is TokenAction.SHOW:
            found = find_record(steps, rank, record)
            token_texts.print_record(found, joiner, _columns(column), as_json=as_json)
        else:
            token_texts.print_turns(find_record(steps, rank, record), joiner, as_json=as_json)
    for one in steps:
        missing = sum(done.dropped_records + done.lost_records for done in one.ranks)
        if missing:
            note(f"step {one.step}: {plural(missing, 'record')} dropped or lost while writing")
    return Exit.OK


def _select_steps(run: str, step: int | None) -> list["TokenStep"]:
    from rolltape.tokens import list_steps

    steps = list_steps(run)
    if not steps:
        raise TapeError(f"{run}: no token records; a trainer writes them with rolltape.TokenExporter")
    selected = [one for one in steps if step in (None, one.step)]
    if not selected:
        first, last = steps[0].step, steps[-1].step
        known = f"step {first}" if first == last else f"steps {first} to {last}"
        raise UsageError(f"--step {step}: no token records; the run has those of {known}")
    return selected


def _columns(asked: list[str] | None) -> list[str]:
    from rolltape.records.token_record import TOKEN_COLUMNS

    unknown = [name for name in asked or () if name not in TOKEN_COLUMNS]
    if unknown:
        raise UsageError(f"--column {unknown[0]}: unknown column; columns are {', '.join(TOKEN_COLUMNS)}")
    return asked or _DEFAULT_COLUMNS


def _one_column(asked: list[str] | None) -> str:
    if asked and len(asked) > 1:
        raise UsageError("--column: worst takes only one column")
    return _columns(asked)[0] if asked else "mismatch_kl"
