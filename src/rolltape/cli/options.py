"""The options that several commands share, and the policy that they spell."""

from typing import Annotated, Any

import typer

from rolltape.cli.exits import UsageError
from rolltape.errors import PolicyError
from rolltape.records.policy import Advantage, Branches, Credit, CutPolicy, RewardShare, cut_policy

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the URL of its shards.")]
RolloutArgument = Annotated[
    str | None, typer.Argument(metavar="[ROLLOUT]", help="A rollout id, or a beginning that only one has.")
]
TryOption = Annotated[
    int | None, typer.Option("--try", help="Which try of ROLLOUT; by default the latest that finished.")
]
StepOption = Annotated[int | None, typer.Option("--step", help="Only rollouts of this step.")]
GroupOption = Annotated[str | None, typer.Option("--group", help="Only rollouts of this group.")]
TaskOption = Annotated[str | None, typer.Option("--task", help="Only rollouts of this task id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, or a folder with one; by default the run's."),
]
PolicyOption = Annotated[str, typer.Option("--policy", help="exact, keep-head or slime.")]
RewardOption = Annotated[
    RewardShare | None, typer.Option("--reward", help="The whole reward to each sample, or an even share.")
]
AdvantageOption = Annotated[Advantage | None, typer.Option("--advantage", help="How a group's rewards are compared.")]
BranchesOption = Annotated[Branches | None, typer.Option("--branches", help="Which branches become samples.")]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Cut samples to this length.")]
StalenessOption = Annotated[
    int | None, typer.Option("--max-staleness", help="Mask tokens whose weights are more versions behind.")
]


def chosen_policy(
    name: str,
    *,
    branches: Branches | None = None,
    max_tokens: int | None = None,
    max_staleness: int | None = None,
    flag: str = "--policy",
) -> CutPolicy:
    """The cut policy that the options describe; `flag` is where its name was given."""
    choices: dict[str, Any] = {
        "branches": branches,
        "max_sample_tokens": max_tokens,
        "max_staleness": max_staleness,
    }
    flags = {"max_sample_tokens": "--max-tokens", "max_staleness": "--max-staleness"}
    try:
        return cut_policy(name, **{choice: value for choice, value in choices.items() if value is not None})
    except PolicyError as error:
        named = next((given for choice, given in flags.items() if choice in str(error)), flag)
        raise UsageError(f"{named}: {error}") from None


def chosen_credit(reward: RewardShare | None, advantage: Advantage | None) -> Credit:
    """The credit that the options describe."""
    default = Credit()
    return Credit(reward_share=reward or default.reward_share, advantage=advantage or default.advantage)
