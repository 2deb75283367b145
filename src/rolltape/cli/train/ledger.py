"""`rolltape ledger`: where every sampled token went under a policy."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.options import (
    BranchesOption,
    GroupOption,
    JsonOption,
    MaxTokensOption,
    PolicyOption,
    RolloutArgument,
    RunArgument,
    StalenessOption,
    StepOption,
    TaskOption,
    TokenizerOption,
    TryOption,
    chosen_policy,
)
from rolltape.cli.output.screen import SHORT_ID, count, plural, print_json, print_line, print_table

if TYPE_CHECKING:
    from rolltape.samples import Linearized
    from rolltape.samples.spelling import Spellings

_SHOWN_REASONS = 5


def ledger(
    run: RunArgument,
    rollout: RolloutArgument = None,
    policy: PolicyOption = "exact",
    branches: BranchesOption = None,
    max_tokens: MaxTokensOption = None,
    max_staleness: StalenessOption = None,
    turns: Annotated[bool, typer.Option("--turns", help="Also a line per stretch of each turn.")] = False,
    step: StepOption = None,
    group: GroupOption = None,
    task: TaskOption = None,
    try_index: TryOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Account for every sampled token."""
    from rolltape.cli.output.spelling import chosen_spellings
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.cli.sampling import linearized

    chosen_one = chosen_policy(policy, branches=branches, max_tokens=max_tokens, max_staleness=max_staleness)
    tape = opened(run)
    spellings = chosen_spellings(tokenizer, run)
    chosen = Chosen(tape, rollout, try_index=try_index, step=step, group=group, task=task, counted_only=True)
    with chosen.named_in_errors():
        if as_json:
            _print_records(linearized(chosen, chosen_one), turns)
        else:
            totals, filtered = _print_stretches(linearized(chosen, chosen_one), turns, spellings)
            _print_totals(totals, filtered, f"{plural(len(chosen), 'rollout')} under {chosen_one.name}")
    return ended(tape)


def _print_records(made: Iterable["Linearized"], turns: bool) -> None:
    for one in made:
        held = one.ledger
        row: dict[str, object] = {
            "rollout": held.rollout,
            "try_index": held.try_index,
            "policy": held.policy,
            "sampled": held.sampled,
            "totals": held.totals(),
        }
        if one.rollout.outcome.filtered is not None:
            row["filtered"] = one.rollout.outcome.filtered
        if turns:
            row["entries"] = [
                {"turn": entry.turn, "start": entry.start, "stop": entry.stop, "fate": entry.fate}
                for entry in held.entries
            ]
        print_json(row)


def _print_stretches(
    made: Iterable["Linearized"], turns: bool, spellings: "Spellings"
) -> tuple[Counter[str], Counter[str]]:
    """The tokens of each fate, and the rollouts of each filter; with `turns`, a table of the stretches before that."""
    totals: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    lines: list[list[str]] = []
    for one in made:
        totals.update(one.ledger.totals())
        filtered.update([] if one.rollout.outcome.filtered is None else [one.rollout.outcome.filtered])
        if turns:
            lines.extend(_stretches(one, spellings))
    if turns:
        print_table(["turn", "tokens", "fate", "text"], lines, left=["turn", "fate", "text"], flexible=["text"])
        print_line("")
    return totals, filtered


def _stretches(made: "Linearized", spellings: "Spellings") -> Iterator[list[str]]:
    from rolltape.cli.output.spelling import excerpt

    held = {turn.id: (session, turn) for session in made.rollout.sessions for turn in session.turns}
    for entry in made.ledger.entries:
        session, turn = held[entry.turn]
        yield [
            f"{made.rollout.id[:SHORT_ID]} {session.ordinal}.{turn.sequence}",
            f"{entry.start}-{entry.stop}",
            entry.fate,
            excerpt(turn.sampled_ids[entry.start : entry.stop], spellings.of(session)),
        ]


def _print_totals(totals: Counter[str], filtered: Counter[str], whose: str) -> None:
    sampled = sum(totals.values())
    print_table(
        ["fate", "tokens", "share"],
        [[fate, count(tokens), f"{tokens / sampled:.1%}"] for fate, tokens in totals.most_common()],
        left=["fate"],
    )
    for reason, rollouts in filtered.most_common(_SHOWN_REASONS):
        print_line(f"filtered: {plural(rollouts, 'rollout')}, {reason}")
    if len(filtered) > _SHOWN_REASONS:
        print_line(f"… and {plural(len(filtered) - _SHOWN_REASONS, 'more reason')}; `rolltape filter` lists them")
    print_line(f"{plural(sampled, 'sampled token')} of {whose}")
