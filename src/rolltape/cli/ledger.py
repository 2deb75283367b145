"""`rolltape ledger`: where every sampled token went under a policy."""

from collections import Counter
from typing import Annotated

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
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.cli.sampling import linearized
    from rolltape.cli.screen import SHORT_ID, count, plural, print_json, print_line, print_table
    from rolltape.cli.tokenizer import Texts, excerpt

    chosen_one = chosen_policy(policy, branches=branches, max_tokens=max_tokens, max_staleness=max_staleness)
    tape = opened(run)
    texts = Texts(tokenizer, run)
    chosen = Chosen(tape, rollout, try_index=try_index, step=step, group=group, task=task, counted_only=True)
    totals: Counter[str] = Counter()
    lines: list[list[str]] = []
    for made in linearized(chosen, chosen_one):
        totals.update(made.ledger.totals())
        if as_json:
            row: dict[str, object] = {
                "rollout": made.ledger.rollout,
                "try_index": made.ledger.try_index,
                "policy": made.ledger.policy,
                "sampled": made.ledger.sampled,
                "totals": made.ledger.totals(),
            }
            if turns:
                row["entries"] = [
                    {"turn": entry.turn, "start": entry.start, "stop": entry.stop, "fate": entry.fate}
                    for entry in made.ledger.entries
                ]
            print_json(row)
        elif turns:
            held = {turn.id: (session, turn) for session in made.rollout.sessions for turn in session.turns}
            for entry in made.ledger.entries:
                session, turn = held[entry.turn]
                lines.append(
                    [
                        f"{made.rollout.id[:SHORT_ID]} {session.ordinal}.{turn.sequence}",
                        f"{entry.start}-{entry.stop}",
                        entry.fate,
                        excerpt(turn.sampled_ids[entry.start : entry.stop], texts.of(session)),
                    ]
                )
    if as_json:
        return ended(tape)
    if turns:
        print_table(["turn", "tokens", "fate", "text"], lines, left=["turn", "fate", "text"])
        print_line("")
    sampled = sum(totals.values())
    print_table(
        ["fate", "tokens", "share"],
        [[fate, count(tokens), f"{tokens / sampled:.1%}"] for fate, tokens in totals.most_common()],
        left=["fate"],
    )
    print_line(f"{plural(sampled, 'sampled token')} of {plural(len(chosen), 'rollout')} under {chosen_one.name}")
    return ended(tape)
