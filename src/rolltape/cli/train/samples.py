"""`rolltape samples`: the training samples of a run under a policy, or two policies side by side."""

from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import (
    AdvantageOption,
    BranchesOption,
    GroupOption,
    JsonOption,
    MaxTokensOption,
    PolicyOption,
    RewardOption,
    RolloutArgument,
    RunArgument,
    StalenessOption,
    StepOption,
    TaskOption,
    TokenizerOption,
    TryOption,
    chosen_credit,
    chosen_policy,
)

if TYPE_CHECKING:
    from rolltape.cli.runs import Chosen
    from rolltape.records.policy import Credit, CutPolicy
    from rolltape.records.sample import Sample


def samples(
    run: RunArgument,
    rollout: RolloutArgument = None,
    policy: PolicyOption = "exact",
    reward: RewardOption = None,
    advantage: AdvantageOption = None,
    branches: BranchesOption = None,
    max_tokens: MaxTokensOption = None,
    max_staleness: StalenessOption = None,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="POLICY", help="Show where another policy differs.")
    ] = None,
    step: StepOption = None,
    group: GroupOption = None,
    task: TaskOption = None,
    try_index: TryOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """List training samples, or compare two policies."""
    from rolltape.cli.runs import Chosen, ended, opened

    names = [(policy, "--policy"), *([(compare, "--compare")] if compare is not None else [])]
    policies = [
        chosen_policy(
            name,
            branches=branches,
            max_tokens=max_tokens,
            max_staleness=max_staleness,
            flag=flag,
        )
        for name, flag in names
    ]
    if compare == policy:
        raise UsageError(f"--compare: {compare} is the policy itself; name another")
    tape = opened(run)
    chosen = Chosen(tape, rollout, try_index=try_index, step=step, group=group, task=task, counted_only=True)
    with chosen.named_in_errors():
        if compare is not None:
            from rolltape.cli.output.spelling import chosen_spellings
            from rolltape.cli.train.comparing import compare_policies

            spellings = chosen_spellings(tokenizer, run)
            compare_policies(chosen, policies[0], policies[1], spellings, as_json=as_json)
        else:
            _list(chosen, policies[0], chosen_credit(reward, advantage), as_json)
    return ended(tape)


def _list(chosen: "Chosen", policy: "CutPolicy", credit: "Credit", as_json: bool) -> None:
    from rolltape.cli.output.screen import SHORT_ID, count, number, plural, print_json, print_line, print_table
    from rolltape.cli.sampling import samples_of

    rows: list[list[str]] = []
    tokens = trained = 0
    for sample in samples_of(chosen, policy, credit):
        tokens += len(sample.ids)
        trained += sample.trained_tokens
        if as_json:
            print_json(_about(sample))
            continue
        turns = [int(span.turn.rpartition(".")[2]) for span in sample.spans]
        rows.append(
            [
                sample.rollout[:SHORT_ID],
                str(sample.index),
                sample.session.rpartition(".")[2],
                str(turns[0]) if turns[0] == max(turns) else f"{turns[0]}-{max(turns)}",
                count(len(sample.ids)),
                count(sample.prompt_tokens),
                count(sample.trained_tokens),
                number(sample.reward),
                number(sample.advantage),
                number(sample.loss_weight),
            ]
        )
    if as_json:
        return
    columns = "rollout sample session turns tokens prompt trained reward advantage weight"
    print_table(columns.split(), rows, left=["rollout"], spare=["session", "prompt", "weight", "turns"])
    print_line(
        f"{plural(len(rows), 'sample')} of {plural(len(chosen), 'rollout')} under {policy.name}: "
        f"{plural(tokens, 'token')}, {trained:,} trained"
    )


def _about(sample: "Sample") -> dict[str, object]:
    """A sample without its per-token arrays, which `rolltape export` writes."""
    from rolltape.export.rows import sample_row

    arrays = ("ids", "trained_mask", "sampled_mask", "logprobs", "version_index", "side", "logprob_dtype")
    row = {name: value for name, value in sample_row(sample).items() if name not in arrays}
    return {**row, "tokens": len(sample.ids), "sampled_tokens": int(sample.sampled_mask.sum())}
