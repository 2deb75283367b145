"""`rolltape show`: a rollout in the terminal, from its reward to its tokens."""

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.look.by import By
from rolltape.cli.options import (
    BranchesOption,
    JsonOption,
    MaxTokensOption,
    PolicyOption,
    RolloutArgument,
    RunArgument,
    StalenessOption,
    TokenizerOption,
    TryOption,
    chosen_policy,
)

if TYPE_CHECKING:
    from rolltape.cli.look.sample_tokens import TokenPrinter
    from rolltape.samples import Linearized


class Part(enum.StrEnum):
    TREE = "tree"
    TRANSCRIPT = "transcript"
    TOKENS = "tokens"


def show(
    run: RunArgument,
    rollout: RolloutArgument = None,
    part: Annotated[
        list[Part] | None, typer.Option("--part", help="Only this part, may be repeated; by default all three.")
    ] = None,
    by: Annotated[
        By, typer.Option("--by", help="What colours the tokens; the last four are a trainer's.")
    ] = By.TRAINED,
    full: Annotated[bool, typer.Option("--full", help="Fold nothing, however long.")] = False,
    policy: PolicyOption = "exact",
    branches: BranchesOption = None,
    max_tokens: MaxTokensOption = None,
    max_staleness: StalenessOption = None,
    try_index: TryOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show a rollout: tree, transcript, tokens in colour.

    ROLLOUT may also be a sample id, for the tokens of that sample alone. In a pipe, and without colours, tokens are
    marked: «trained», ‹sampled but not trained here›, context plain. What is long is folded on a terminal only. --json
    prints samples.
    """
    from rolltape.cli.look.sample_tokens import TokenPrinter
    from rolltape.cli.output.spelling import chosen_spellings
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.cli.sample_ids import rollout_of_sample, sample_named
    from rolltape.records.rollout import Status
    from rolltape.samples import linearize

    chosen_one = chosen_policy(policy, branches=branches, max_tokens=max_tokens, max_staleness=max_staleness)
    sample_id = rollout if rollout is not None and "@" in rollout else None
    parts = _parts(part, sample_id, as_json=as_json)
    tape = opened(run)
    tokens = TokenPrinter(run, by, chosen_spellings(tokenizer, run), full=full, as_json=as_json)
    if sample_id is not None:
        rollout, try_index = rollout_of_sample(sample_id)
    chosen = Chosen(tape, rollout, try_index=try_index, counted_only=True)
    meant = chosen.only()
    with chosen.named_in_errors():
        if sample_id is not None:
            tokens.print_one(meant, sample_named(tape.run, meant, chosen_one, sample_id))
            return ended(tape)
        running = meant.status is Status.RUNNING
        made = linearize(meant, chosen_one, versions=tape.run.versions(), as_if_finished=running)
        if Part.TOKENS in parts:
            tokens.check(made)
        if not as_json:
            _print_facts(made, in_brief=part is not None)
        for one in parts:
            _print_part(one, made, tokens, full=full)
    return ended(tape)


def _parts(asked: list[Part] | None, sample_id: str | None, *, as_json: bool) -> list[Part]:
    alone = "a sample id shows tokens" if sample_id is not None else "--json prints samples" if as_json else None
    others = [one for one in asked or () if one is not Part.TOKENS]
    if alone is not None and others:
        raise UsageError(f"--part {others[0]}: {alone} alone; `rolltape tree` and `rolltape trace` have the rest")
    return [Part.TOKENS] if alone is not None else [one for one in Part if one in (asked or Part)]


def _print_facts(made: "Linearized", *, in_brief: bool) -> None:
    from rolltape.cli.output.screen import print_long
    from rolltape.samples.facts import fact_lines, title

    print_long(title(made.rollout), style="bold")
    for line in () if in_brief else fact_lines(made):
        print_long(line)


def _print_part(part: Part, made: "Linearized", tokens: "TokenPrinter", *, full: bool) -> None:
    from rolltape.cli.output.screen import print_line

    if part is Part.TOKENS:
        tokens.print_all(made)
        return
    print_line("")
    if part is Part.TREE:
        from rolltape.cli.look.tree import draw_trees

        draw_trees(made.rollout, tokens.spellings)
    else:
        _print_transcript(made, full=full)


def _print_transcript(made: "Linearized", *, full: bool) -> None:
    from rolltape.cli.look.layout import Labelled
    from rolltape.cli.look.transcript import transcript_lines
    from rolltape.cli.output.screen import print_long, terminal_width

    width = terminal_width()
    labelled = Labelled(width, full=full or width is None)
    for line, style in transcript_lines(made.rollout, labelled):
        print_long(line, style)
