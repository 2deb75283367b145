"""Options that several commands share, alone or in groups."""

from dataclasses import dataclass
from typing import Annotated

from rolltape.cli.parameters import argument, either, option
from rolltape.errors import PolicyError, UsageError
from rolltape.records.policy import Advantage, Branches, Credit, CutPolicy, RewardShare, cut_policy

RunArgument = Annotated[str, argument("RUN", "Run directory, or URL of published shards.")]
RolloutArgument = Annotated[
    str | None, argument("ROLLOUT", "Rollout id or unique prefix; not needed if the run has one rollout.")
]
TryOption = Annotated[int | None, option("--try N", "Try of ROLLOUT (default: the latest finished one).")]
StepOption = Annotated[int | None, option("--step N", "Only rollouts of this step.")]
GroupOption = Annotated[str | None, option("--group ID", "Only rollouts of this group.")]
TaskOption = Annotated[str | None, option("--task ID", "Only rollouts of this task.")]
JsonOption = Annotated[bool, option("--json", "Print one JSON object per line.")]
DryRunOption = Annotated[bool, option("--dry-run", "Show what would change, and change nothing.")]
HostOption = Annotated[str, option("--host ADDRESS", "Address to listen on; other than loopback needs a key.")]
PortOption = Annotated[int, option("--port N", "Port; 0 picks a free one.", min=0, max=65535)]
WholePromptsOption = Annotated[
    bool, option("--whole-prompts", "Include each prompt's whole history, not only its new messages.")
]
PolicyOption = Annotated[str, option("--policy NAME", "Cut policy: exact, keep-head, or slime.")]
TokenizerOption = Annotated[
    str | None, option("--tokenizer PATH", "tokenizer.json or its folder (default: the recorded one).")
]


@dataclass(frozen=True)
class RolloutFilter:
    """Which rollouts of a run are meant."""

    step: StepOption = None
    group: GroupOption = None
    task: TaskOption = None

    def flags(self) -> str:
        """The flags as the user typed them, for an error."""
        given = {"--step": self.step, "--group": self.group, "--task": self.task}
        return " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)


@dataclass(frozen=True)
class OneRollout:
    """Which rollout of a run is meant, and which of its tries."""

    rollout: RolloutArgument = None
    try_index: TryOption = None


@dataclass(frozen=True)
class Selection(RolloutFilter, OneRollout):
    """One rollout, or all that match a filter."""

    rollout: Annotated[str | None, argument("ROLLOUT", "Rollout id or unique prefix (default: all rollouts).")] = None


@dataclass(frozen=True)
class CutOptions:
    """Which tokens form which samples."""

    policy: PolicyOption = "exact"
    branches: Annotated[
        Branches | None, option("--branches WHICH", f"Branches that become samples: {either(Branches)}.")
    ] = None
    max_sample_tokens: Annotated[int | None, option("--max-sample-tokens N", "Cut samples to this length.")] = None
    max_staleness: Annotated[
        int | None, option("--max-staleness N", "Mask tokens sampled more than N weight versions ago.")
    ] = None

    def cut_policy(self, name: str | None = None, flag: str = "--policy") -> CutPolicy:
        """The policy that the options describe; or another preset, which `flag` names, with the same choices."""
        choices = {choice: getattr(self, choice) for choice in ("branches", "max_sample_tokens", "max_staleness")}
        given = {choice: value for choice, value in choices.items() if value is not None}
        try:
            return cut_policy(name or self.policy, **given)
        except PolicyError as error:
            wrong = next((choice for choice in given if choice in str(error)), None)
            raise UsageError(f"{f'--{wrong}'.replace('_', '-') if wrong else flag}: {error}") from None


@dataclass(frozen=True)
class TrainingOptions(CutOptions):
    """Which tokens form which samples, and the credit that they get."""

    reward_share: Annotated[
        RewardShare | None, option("--reward-share HOW", "Give each sample the full reward, or split it (full, split).")
    ] = None
    advantage: Annotated[
        Advantage | None, option("--advantage KIND", f"Advantages within a group: {either(Advantage)}.")
    ] = None

    def credit(self) -> Credit:
        """The credit that the options describe."""
        default = Credit()
        return Credit(
            reward_share=self.reward_share or default.reward_share, advantage=self.advantage or default.advantage
        )


def require_key(host: str, key: str | None, flag: str) -> None:
    """Refuse to listen beyond this machine without a key."""
    from rolltape.serving import is_loopback

    if not is_loopback(host) and not key:
        raise UsageError(f"--host {host}: not a loopback address, so anyone could connect; give {flag} as well")
