"""`rolltape show`: show a rollout in the terminal, from its reward to its tokens."""

import enum
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from rolltape.cli.look.token_colors import Measure, MeasuredTokens, Painter, measure_tokens, plain_values
from rolltape.cli.look.tree import draw_trees
from rolltape.cli.options import CutOptions, JsonOption, OneRollout, RunArgument, TokenizerOption
from rolltape.cli.parameters import either, option
from rolltape.cli.runs import (
    SelectedRollouts,
    find_sample,
    open_run,
    open_spellings,
    report_problems,
    rollout_of_sample,
)
from rolltape.cli.screen import (
    cell_width,
    color_system,
    fold,
    note,
    number,
    plural,
    print_json,
    print_line,
    print_long,
    terminal_width,
    visible,
)
from rolltape.errors import RecordError, RolltapeError, UsageError
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Sample
from rolltape.samples import Linearized, linearize, spelling
from rolltape.samples.facts import fact_lines, title
from rolltape.samples.spelling import Spellings
from rolltape.traces import trace_of
from rolltape.traces.transcript import NOT_RECORDED, Passage, build_transcript
from rolltape.view.run.trainer import TokenRecords

_LABEL = 13
_LEAST_ROOM = 16
# At most so many characters of a line are laid out; the rest, which may be 10 MB, is only counted.
_LONGEST_LINE = 400
_STYLES = {"thinks": "dim", "error": "yellow", NOT_RECORDED: "yellow"}


class Section(enum.StrEnum):
    TREE = "tree"
    TRANSCRIPT = "transcript"
    TOKENS = "tokens"


class TokenPrinter:
    """Prints samples of one run, colored by one measure."""

    def __init__(self, run: str, by: Measure, spellings: Spellings, *, full: bool, as_json: bool) -> None:
        self.spellings = spellings
        self._by = by
        self._as_json = as_json
        self._records = None if by.column is None else TokenRecords(Path(run))
        self._painter = Painter(color_system(), full=full)
        self._legend = ""  # the last one printed

    def check(self, made: Linearized) -> None:
        """Raise if no sample of the rollout has the measure."""
        refused: RolltapeError | None = None
        for sample in made.samples() if self._records is not None else ():
            try:
                self._measured(sample)
                return
            except (UsageError, RecordError) as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def print_all(self, made: Linearized) -> None:
        """Print every sample of a rollout; one that lacks the measure is colored by `trained`."""
        for sample in made.samples():
            try:
                given = self._measured(sample)
            except (UsageError, RecordError) as error:
                note(str(error))
                given = measure_tokens(sample, Measure.TRAINED, None)
            self._print_title(sample, made)
            self._print(made.rollout, sample, given)
        if not len(made) and not self._as_json:
            print_line("")
            print_line("No samples: nothing in this rollout trains; `rolltape ledger` shows why.")

    def print_one(self, rollout: Rollout, sample: Sample) -> None:
        self._print(rollout, sample, self._measured(sample))

    def _measured(self, sample: Sample) -> MeasuredTokens:
        found = None if self._records is None else self._records.find(sample)
        return measure_tokens(sample, self._by, None if found is None else found.record)

    def _print_title(self, sample: Sample, made: Linearized) -> None:
        if self._as_json:
            return
        fates: Counter[Fate] = Counter()
        for span in sample.spans:
            if span.fate is not None and span.fate is not Fate.TRAINED:
                fates[span.fate] += span.stop - span.start
        masked = "".join(f", {tokens:,} {fate}" for fate, tokens in fates.items())
        reward = "" if sample.reward is None else f", reward {number(sample.reward)}"
        print_line("")
        print_line(
            f"sample {sample.index} of {sample.siblings} ({made.policy.name}): {plural(len(sample.ids), 'token')}, "
            f"{sample.trained_tokens:,} trained{masked}{reward}",
            style="bold",
        )

    def _print(self, rollout: Rollout, sample: Sample, given: MeasuredTokens) -> None:
        spell = self.spellings.of(next(one for one in rollout.sessions if one.id == sample.session))
        if self._as_json:
            values = {} if given.by is Measure.TRAINED else {given.by.value: plain_values(given, sample.versions)}
            print_json({"sample": sample.id, "line": spelling.show(sample, spell), **values})
            return
        legend = self._painter.legend(given.by, sample.versions)
        if legend != self._legend:
            sys.stdout.write(f"{legend}\n")
            self._legend = legend
        sys.stdout.writelines(self._painter.tokens(sample, spell, given))
        sys.stdout.write("\n")


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
    full: Annotated[bool, option("--full", "Do not fold long texts and middle turns.")] = False,
    cut: CutOptions,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show a rollout: tree, transcript, and tokens in color.

    ROLLOUT may also be a sample id, to show only the tokens of that sample. In a pipe, and without colors, tokens are
    marked: «trained», ‹sampled but not trained here›, context plain. Long texts and the middle turns of a long rollout
    are folded on a terminal only. --json prints samples.
    """
    policy = cut.cut_policy()
    full = full or terminal_width() is None
    sample_id = which.rollout if which.rollout is not None and "@" in which.rollout else None
    sections = _sections(part, sample_id, as_json=as_json)
    tape = open_run(run)
    tokens = TokenPrinter(run, color_by, open_spellings(tokenizer), full=full, as_json=as_json)
    if sample_id is not None:
        which = OneRollout(*rollout_of_sample(sample_id))
    selected = SelectedRollouts(tape, which, counted_only=True)
    rollout = selected.only()
    with selected.named_in_errors():
        if sample_id is not None:
            tokens.print_one(rollout, find_sample(tape.run, rollout, policy, sample_id))
            return report_problems(tape)
        made = linearize(rollout, policy, versions=tape.run.versions(), as_if_finished=True)
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


def _print_facts(made: Linearized, *, title_only: bool) -> None:
    print_long(title(made.rollout), style="bold")
    for line in () if title_only else fact_lines(made):
        print_long(line)


def _print_section(section: Section, made: Linearized, tokens: TokenPrinter, *, full: bool) -> None:
    if section is Section.TOKENS:
        tokens.print_all(made)
        return
    print_line("")
    if section is Section.TREE:
        draw_trees(made.rollout, tokens.spellings, full=full)
        return
    for line, style in transcript_lines(made.rollout, width=terminal_width(), full=full):
        print_long(line, style)


def transcript_lines(rollout: Rollout, *, width: int | None, full: bool) -> Iterator[tuple[str, str]]:
    """Each line with its style; wrapped at `width` cells unless that is None, and folded unless `full`."""
    layout = _LabeledText(width, full=full)
    first, hidden, last = fold(list(build_transcript(rollout, trace_of(rollout))), full=full)
    yield from _passage_lines(first, layout)
    if hidden:
        kinds = Counter(passage.title.split()[0] for passage in hidden)  # turns, and steps without one
        yield f"… {', '.join(plural(many, kind) for kind, many in kinds.items())}; --full shows all", "bold"
    yield from _passage_lines(last, layout)


def _passage_lines(passages: Sequence[Passage], layout: "_LabeledText") -> Iterator[tuple[str, str]]:
    for passage in passages:
        if passage.cause is None:
            yield passage.title, "bold"
        else:
            yield f"{passage.title}  [{passage.cause}]", "bold yellow"
        for kind, text in passage.parts:
            yield from layout.lines(kind, text, _STYLES.get(kind, ""))


class _LabeledText:
    """Lays text out beside a label."""

    def __init__(self, width: int | None, *, full: bool) -> None:
        self._room = None if width is None else max(width - _LABEL - 2, _LEAST_ROOM)
        self._full = full

    def lines(self, label: str, text: str, style: str) -> Iterator[tuple[str, str]]:
        """Lines with their style; the label is before the first."""
        shown = f"{visible(label):{_LABEL - 1}} "
        for line in self._folded(text):
            yield f"  {shown}{line}" if line else f"  {shown}".rstrip(), style
            shown = " " * _LABEL

    def _folded(self, text: str) -> Iterator[str]:
        lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
        first, hidden, last = fold(lines, full=self._full)
        yield from self._fitted(first)
        if hidden:
            characters = sum(map(len, hidden)) + len(hidden)
            yield f"… {len(hidden):,} lines, {characters:,} characters"
        yield from self._fitted(last)

    def _fitted(self, lines: Sequence[str]) -> Iterator[str]:
        for line in lines:
            hidden = len(line) - _LONGEST_LINE
            kept = line if self._full or hidden <= 0 else line[:_LONGEST_LINE]
            yield from self._wrapped(visible(kept.expandtabs(4)))
            if kept is not line:
                yield f"… {hidden:,} characters"

    def _wrapped(self, line: str) -> Iterator[str]:
        if self._room is None or cell_width(line) <= self._room:
            yield line
            return
        start = 0
        while start < len(line):
            stop = start + _fitting(line[start : start + self._room], self._room)
            space = line.rfind(" ", start + 1, stop + 1) if stop < len(line) else -1
            if space > (start + stop) // 2:
                yield line[start:space]
                start = space + 1
            else:
                yield line[start:stop]
                start = stop


def _fitting(text: str, room: int) -> int:
    """How many characters of a text fit in `room` cells; at least one."""
    count = len(text)
    while count > 1 and cell_width(text[:count]) > room:
        count -= 1
    return count
