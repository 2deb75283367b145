"""Options that several commands share, alone or as groups, and how a group becomes options of a command."""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_type_hints

import typer

from rolltape.errors import PolicyError, UsageError
from rolltape.records.policy import Advantage, Branches, Credit, CutPolicy, RewardShare, cut_policy


def either(values: type[enum.StrEnum]) -> str:
    """The values of an enum in words, for a help text."""
    *names, last = (one.value for one in values)
    return f"{', '.join(names)}{',' if len(names) > 1 else ''} or {last}"


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or URL of published shards.")]
RolloutArgument = Annotated[
    str | None,
    typer.Argument(metavar="ROLLOUT", help="Rollout id or unique prefix; not needed if the run has one rollout."),
]
TryOption = Annotated[
    int | None, typer.Option("--try", metavar="N", help="Try of ROLLOUT (default: the latest finished one).")
]
StepOption = Annotated[int | None, typer.Option("--step", metavar="N", help="Only rollouts of this step.")]
GroupOption = Annotated[str | None, typer.Option("--group", metavar="ID", help="Only rollouts of this group.")]
TaskOption = Annotated[str | None, typer.Option("--task", metavar="ID", help="Only rollouts of this task.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")]
HostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; other than loopback needs a key.")
]
PortOption = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 picks a free one.")]
WholePromptsOption = Annotated[
    bool, typer.Option("--whole-prompts", help="Include each prompt's whole history, not only its new messages.")
]
PolicyOption = Annotated[str, typer.Option("--policy", metavar="NAME", help="Cut policy: exact, keep-head, or slime.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (default: the recorded one)."),
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
    """One rollout, or those that a filter leaves."""


@dataclass(frozen=True)
class CutOptions:
    """Which tokens form which samples."""

    policy: PolicyOption = "exact"
    branches: Annotated[
        Branches | None,
        typer.Option("--branches", metavar="WHICH", help=f"Branches that become samples: {either(Branches)}."),
    ] = None
    max_sample_tokens: Annotated[
        int | None, typer.Option("--max-sample-tokens", metavar="N", help="Cut samples to this length.")
    ] = None
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", metavar="N", help="Mask tokens sampled more than N weight versions ago."),
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
        RewardShare | None,
        typer.Option(
            "--reward-share", metavar="HOW", help="Give each sample the full reward, or split it (full, split)."
        ),
    ] = None
    advantage: Annotated[
        Advantage | None,
        typer.Option("--advantage", metavar="KIND", help=f"Advantages within a group: {either(Advantage)}."),
    ] = None

    def credit(self) -> Credit:
        """The credit that the options describe."""
        default = Credit()
        return Credit(
            reward_share=self.reward_share or default.reward_share, advantage=self.advantage or default.advantage
        )


def require_key(host: str, key: str | None, flag: str) -> None:
    """Refuse to listen beyond this machine without a key."""
    from rolltape.gateway.server.guard import is_loopback

    if not is_loopback(host) and not key:
        raise UsageError(f"--host {host}: not a loopback address, so anyone could connect; give {flag} as well")


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """The command with each parameter that is a group of options replaced by those options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: cast("type[Any]", hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += inspect.signature(groups[name]).parameters.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def called(**given: Any) -> int:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        return command(**given)

    flat = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    called.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in flat}
    return called
