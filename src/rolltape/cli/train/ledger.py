"""`rolltape ledger`: show the fate of every sampled token under a cut policy."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from rolltape.cli.options import CutOptions, JsonOption, RunArgument, Selection, TokenizerOption
from rolltape.cli.parameters import option
from rolltape.cli.runs import SelectedRollouts, excerpt, open_run, open_spellings, report_problems
from rolltape.cli.screen import SHORT_ID, count, plural, print_json, print_line, print_rest, print_table
from rolltape.samples import Linearized
from rolltape.samples.spelling import Spellings

_SHOWN_REASONS = 5


def ledger(
    run: RunArgument,
    *,
    which: Selection,
    cut: CutOptions,
    turns: Annotated[bool, option("--turns", "Also print a line for each token range of each turn.")] = False,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Account for every sampled token: trained, or why not."""
    policy = cut.cut_policy()
    tape = open_run(run)
    spellings = open_spellings(tokenizer)
    selected = SelectedRollouts(tape, which, counted_only=True)
    totals: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    lines: list[list[str]] = []
    without_ids = 0
    with selected.named_in_errors():
        for made in selected.linearized(policy):
            if as_json:
                print_json(_record(made, with_entries=turns))
                continue
            totals.update(made.ledger.totals())
            without_ids += sum(not turn.has_ids for turn in made.rollout.turns)
            if made.rollout.outcome.filtered is not None:
                filtered[made.rollout.outcome.filtered] += 1
            lines.extend(_entry_cells(made, spellings) if turns else ())
    if not as_json:
        if turns:
            print_table(["turn", "tokens", "fate", "text"], lines, left=["turn", "fate", "text"], flexible=["text"])
            print_line("")
        _print_totals(totals, filtered)
        sampled = plural(totals.total(), "sampled token")
        print_line(f"{sampled} of {plural(len(selected), 'rollout')} under {policy.name}")
        if without_ids:
            print_line(f"{plural(without_ids, 'turn')} without token ids: not trainable")
    return report_problems(tape)


def _record(made: Linearized, *, with_entries: bool) -> dict[str, object]:
    held = made.ledger
    row: dict[str, object] = {
        "rollout": held.rollout,
        "try_index": held.try_index,
        "policy": held.policy,
        "sampled": held.sampled,
        "totals": held.totals(),
    }
    if made.rollout.outcome.filtered is not None:
        row["filtered"] = made.rollout.outcome.filtered
    if with_entries:
        row["entries"] = [
            {"turn": entry.turn, "start": entry.start, "stop": entry.stop, "fate": entry.fate} for entry in held.entries
        ]
    return row


def _entry_cells(made: Linearized, spellings: Spellings) -> Iterator[list[str]]:
    held = {turn.id: (session, turn) for session in made.rollout.sessions for turn in session.turns}
    for entry in made.ledger.entries:
        session, turn = held[entry.turn]
        yield [
            f"{made.rollout.id[:SHORT_ID]} {session.ordinal}.{turn.sequence}",
            f"{entry.start}-{entry.stop}",
            entry.fate,
            excerpt(turn.sampled_ids[entry.start : entry.stop].tolist(), spellings.of(session)),
        ]


def _print_totals(totals: Counter[str], filtered: Counter[str]) -> None:
    sampled = totals.total()
    print_table(
        ["fate", "tokens", "share"],
        [[fate, count(tokens), f"{tokens / sampled:.1%}"] for fate, tokens in totals.most_common()],
        left=["fate"],
    )
    for reason, rollouts in filtered.most_common(_SHOWN_REASONS):
        print_line(f"filtered: {plural(rollouts, 'rollout')}, {reason}")
    print_rest(len(filtered) - _SHOWN_REASONS, "reason", "; `rolltape filter` lists them")
