"""`rolltape show`: show a rollout in the terminal, from its reward to its tokens."""

import enum
from typing import TYPE_CHECKING, Annotated

from rolltape.cli.look.measures import Measure
from rolltape.cli.options import CutOptions, JsonOption, OneRollout, RunArgument, TokenizerOption
from rolltape.cli.parameters import either, option
from rolltape.errors import UsageError

if TYPE_CHECKING:
    from rolltape.cli.look.sample_tokens import TokenPrinter
    from rolltape.samples import Linearized


class Section(enum.StrEnum):
    TREE = "tree"
    TRANSCRIPT = "transcript"
    TOKENS = "tokens"


def show(
    run: RunArgument,
    *,
    which: OneRollout,
    part: Annotated[
        list[Section] | None, option("--part PART", f"Show only this part: {either(Section)}; repeatable.")
    ] = None,
    color_by: Annotated[
        Measure,
        option("--color-by VALUE", f"Color tokens by {either(Measure)}; the last four need a trainer's token records."),
    ] = Measure.TRAINED,
    full: Annotated[bool, option("--full", "Do not fold long texts.")] = False,
    cut: CutOptions,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show a rollout: tree, transcript, and tokens in color.

    ROLLOUT may also be a sample id, to show only the tokens of that sample. In a pipe, and without colors, tokens are
    marked: «trained», ‹sampled but not trained here›, context plain. Long texts are folded on a terminal only. --json
    prints samples.
    """
    from rolltape.cli.look.sample_tokens import TokenPrinter
    from rolltape.cli.output.spelling import open_spellings
    from rolltape.cli.runs import SelectedRollouts, open_run, report_problems
    from rolltape.cli.sample_ids import find_sample, rollout_of_sample
    from rolltape.records.rollout import Status
    from rolltape.samples import linearize

    policy = cut.cut_policy()
    sample_id = which.rollout if which.rollout is not None and "@" in which.rollout else None
    sections = _sections(part, sample_id, as_json=as_json)
    tape = open_run(run)
    tokens = TokenPrinter(run, color_by, open_spellings(tokenizer, run), full=full, as_json=as_json)
    if sample_id is not None:
        which = OneRollout(*rollout_of_sample(sample_id))
    selected = SelectedRollouts(tape, which, counted_only=True)
    rollout = selected.only()
    with selected.named_in_errors():
        if sample_id is not None:
            tokens.print_one(rollout, find_sample(tape.run, rollout, policy, sample_id))
            return report_problems(tape)
        running = rollout.status is Status.RUNNING
        made = linearize(rollout, policy, versions=tape.run.versions(), as_if_finished=running)
        if Section.TOKENS in sections:
            tokens.check(made)
        if not as_json:
            _print_facts(made, title_only=part is not None)
        for section in sections:
            _print_section(section, made, tokens, full=full)
    return report_problems(tape)


def _sections(asked: list[Section] | None, sample_id: str | None, *, as_json: bool) -> list[Section]:
    why = "a sample id" if sample_id is not None else "--json" if as_json else None
    others = [one for one in asked or () if one is not Section.TOKENS]
    if why is not None and others:
        raise UsageError(f"--part {others[0]}: {why} shows only tokens; use `rolltape tree` or `rolltape trace`")
    return [Section.TOKENS] if why is not None else [one for one in Section if one in (asked or Section)]


def _print_facts(made: "Linearized", *, title_only: bool) -> None:
    from rolltape.cli.output.screen import print_long
    from rolltape.samples.facts import fact_lines, title

    print_long(title(made.rollout), style="bold")
    for line in () if title_only else fact_lines(made):
        print_long(line)


def _print_section(section: Section, made: "Linearized", tokens: "TokenPrinter", *, full: bool) -> None:
    from rolltape.cli.look.transcript import transcript_lines
    from rolltape.cli.look.tree import draw_trees
    from rolltape.cli.output.screen import print_line, print_long, terminal_width

    if section is Section.TOKENS:
        tokens.print_all(made)
        return
    print_line("")
    if section is Section.TREE:
        draw_trees(made.rollout, tokens.spellings)
        return
    width = terminal_width()
    for line, style in transcript_lines(made.rollout, width=width, full=full or width is None):
        print_long(line, style)
