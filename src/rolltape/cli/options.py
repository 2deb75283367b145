"""Options that several commands share, alone or in groups."""

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from rolltape.cli.parameters import argument, either, flag_of, given_flags, option
from rolltape.errors import PolicyError, UsageError
from rolltape.gateway.engines import ENGINE_SPELLINGS
from rolltape.records.policy import Advantage, Branches, Credit, CutPolicy, RewardShare, cut_policy
from rolltape.records.turn import LogprobKind

if TYPE_CHECKING:
    from rolltape.collect.environments.judge import Judge
    from rolltape.gateway.engines.request_limit import RequestLimit
    from rolltape.gateway.request import SamplingParams
    from rolltape.tape.run import RolloutRow

RunArgument = Annotated[str, argument("RUN", "Run directory, or URL of published shards.")]
RunFolderArgument = Annotated[str, argument("RUN", "Run directory.")]
RolloutArgument = Annotated[
    str | None, argument("ROLLOUT", "Rollout id, foreign id, or unique prefix; not needed if the run has one rollout.")
]
NamedRollout = Annotated[str | None, argument("ROLLOUT", "Rollout id, foreign id, or unique prefix.")]
TryOption = Annotated[int | None, option("--try N", "Try of ROLLOUT (default: the latest finished one).")]
TurnOption = Annotated[
    str | None, option("--turn TURN", "Only this turn: its id, or SESSION.TURN as in `rolltape trace`.")
]
StepOption = Annotated[int | None, option("--step N", "Only rollouts of this step.")]
NoBrowserOption = Annotated[bool, option("--no-browser", "Do not open a browser.")]
JsonOption = Annotated[bool, option("--json", "Print one JSON object per line.")]
DryRunOption = Annotated[bool, option("--dry-run", "Show what would change, and change nothing.")]
HostOption = Annotated[str, option("--host ADDRESS", "Address to listen on; all but loopback need a key.")]
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
    """Filters on the rollouts of a run."""

    step: StepOption = None
    group: Annotated[str | None, option("--group ID", "Only rollouts of this group.")] = None
    task: Annotated[str | None, option("--task ID", "Only rollouts of this task.")] = None
    tag: Annotated[
        str | None, option("--tag TAG", "Only rollouts that have this tag, or whose turns or tokens have it.")
    ] = None
    noted: Annotated[bool, option("--noted", "Only rollouts that have a note, or whose turns or tokens have one.")] = (
        False
    )

    def flags(self) -> str:
        """The flags as the user typed them, for an error."""
        values = {"--step": self.step, "--group": self.group, "--task": self.task, "--tag": self.tag}
        named = [f"{flag} {values[flag]}" for flag in given_flags(values)]
        return " ".join([*named, *(["--noted"] if self.noted else [])])

    def holds(self, row: "RolloutRow") -> bool:
        """Whether a rollout passes the filters."""
        return (
            self.step in (None, row.step)
            and self.task in (None, row.task_id)
            and (self.group is None or row.group.startswith(self.group))
            and (self.tag is None or self.tag in (*row.outcome.tags, *row.inner_tags))
            and (row.notes > 0 or not self.noted)
        )


@dataclass(frozen=True)
class OneRollout:
    """The options that select one rollout of a run, and one of its tries."""

    rollout: RolloutArgument = None
    try_index: TryOption = None


@dataclass(frozen=True)
class Selection(RolloutFilter, OneRollout):
    """One rollout, or all that match a filter."""

    rollout: Annotated[
        str | None, argument("ROLLOUT", "Rollout id, foreign id, or unique prefix (default: all rollouts).")
    ] = None


@dataclass(frozen=True)
class CutOptions:
    """The options of the cut policy, which makes samples of turns."""

    policy: PolicyOption = "exact"
    branches: Annotated[
        Branches | None, option("--branches WHICH", f"Branches that become samples: {either(Branches)}.")
    ] = None
    max_sample_tokens: Annotated[int | None, option("--max-sample-tokens N", "Cut samples to this length.")] = None
    max_staleness: Annotated[
        int | None, option("--max-staleness N", "Mask tokens sampled more than N weight versions ago.")
    ] = None

    def cut_policy(self, name: str | None = None, flag: str = "--policy") -> CutPolicy:
        """The policy that the options describe, or the preset `name` of `flag` with the same choices."""
        choices = {choice: getattr(self, choice) for choice in ("branches", "max_sample_tokens", "max_staleness")}
        given = {choice: value for choice, value in choices.items() if value is not None}
        try:
            return cut_policy(name or self.policy, **given)
        except PolicyError as error:
            wrong = next((choice for choice in given if choice in str(error)), None)
            raise UsageError(f"{flag_of(wrong) if wrong else flag}: {error}") from None


@dataclass(frozen=True)
class TrainingOptions(CutOptions):
    """The options of the cut policy, and of the credit of samples."""

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


def require_url(flag: str, url: str | None) -> None:
    """Refuse what is not the address of a web server."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageError(f"{flag} {url}: not a URL; give one like http://127.0.0.1:8400")


def request_limit(flags: str, at_once: int | None, per_minute: float | None) -> "RequestLimit | None":
    """The limit from a pair of flags, or None if both are unset."""
    from rolltape.gateway.engines.request_limit import RequestLimit

    if per_minute is not None and not 0 < per_minute < float("inf"):
        raise UsageError(f"{flags}-per-minute {per_minute:g}: give a number of requests above 0")
    limit = RequestLimit(at_once=at_once, per_minute=per_minute)
    return None if limit == RequestLimit() else limit


engine_option = partial(option, section="Engine")
judge_option = partial(option, section="Judge")
sampling_option = partial(option, section="Sampling")

EngineKeyOption = Annotated[
    str | None, engine_option("--engine-key KEY", "API key of the engines.", envvar="ROLLTAPE_ENGINE_KEY")
]
RendererOption = Annotated[
    str | None, engine_option("--renderer NAME", "Chat renderer, such as qwen3 (default: by the model).")
]
RetentionOption = Annotated[
    Literal["template", "tool_cycle", "all"] | None,
    sampling_option(
        "--thinking-retention HOW",
        "Earlier thinking that stays in prompts: template (as the template does), tool_cycle (until the next user "
        "message), or all (every prompt extends the last).",
    ),
]


@dataclass(frozen=True)
class JudgeOptions:
    """The judge for tasks that do not name one, and the time limit of user code."""

    judge_url: Annotated[
        str | None, judge_option("--judge-url URL", "OpenAI-compatible judge of tasks that do not name one.")
    ] = None
    judge_model: Annotated[str | None, judge_option("--judge-model NAME", "Judge model.")] = None
    judge_key_env: Annotated[
        str | None,
        judge_option("--judge-key-env VARIABLE", "Variable with the judge's key (default: ROLLTAPE_JUDGE_KEY)."),
    ] = None
    judge_at_once: Annotated[
        int | None, judge_option("--judge-at-once N", "Maximum requests to a judge at a time.", min=1)
    ] = None
    judge_per_minute: Annotated[
        float | None, judge_option("--judge-per-minute N", "Maximum requests to a judge per minute, evenly spaced.")
    ] = None
    score_timeout_s: Annotated[
        float,
        judge_option("--score-timeout SECONDS", "Maximum time per call of an environment, checker, or judge function."),
    ] = 300.0

    def judge_flags(self) -> dict[str, object]:
        """The flags of the judge, with their values."""
        return {flag_of(name): value for name, value in vars(self).items() if name.startswith("judge_")}

    def judge(self) -> "Judge | None":
        """The judge that the flags describe, or None."""
        from rolltape.collect.environments.judge import Judge

        if not self.score_timeout_s > 0:
            raise UsageError(f"--score-timeout {self.score_timeout_s:g}: give more than 0 seconds")
        variable = self.judge_key_env
        if variable is not None and variable not in os.environ:
            raise UsageError(f"--judge-key-env {variable}: this variable is not set; set it to the judge's key")
        limit = request_limit("--judge", self.judge_at_once, self.judge_per_minute)
        judge = Judge(base_url=self.judge_url, model=self.judge_model, key_env=variable, limit=limit)
        return None if judge == Judge() else judge


@dataclass(frozen=True)
class EngineOptions:
    """The engines, and the rendering of prompts for them."""

    engine: Annotated[
        list[str] | None,
        engine_option("--engine ENGINE", f"One of {ENGINE_SPELLINGS}; repeatable (default: tiny)."),
    ] = None
    engine_key: EngineKeyOption = None
    model_name: Annotated[
        str | None,
        engine_option("--served-model-name NAME", "Model name for agents and in records (default: the engine's)."),
    ] = None
    logprob_kind: Annotated[
        LogprobKind | None,
        engine_option(
            "--logprobs KIND",
            "raw, after_temperature, or after_truncation, for engines that do not say which they return.",
        ),
    ] = None
    routed_experts: Annotated[
        bool, engine_option("--routed-experts", "Record routed experts (SGLang engines that return them).")
    ] = False
    kept_ids: Annotated[
        bool, engine_option("--kept-ids", "Record the ids that top-p and top-k kept (SGLang with slime's patch).")
    ] = False
    engine_retry_s: Annotated[
        float,
        engine_option("--engine-retry SECONDS", "Time to retry an engine that is down, or answers 429 or 5xx.", min=0),
    ] = 60.0
    renderer: RendererOption = None
    thinking_retention: RetentionOption = None
    constrain: Annotated[
        Literal["none", "forced", "all"],
        sampling_option(
            "--constrain none|forced|all",
            "Constrained decoding where the agent demands it: never, for required calls and JSON schemas, or for "
            "strict tools too. Such turns do not train by default.",
        ),
    ] = "forced"
    force: Annotated[
        list[str] | None,
        sampling_option(
            "--force NAME=VALUE", "Force a sampling parameter, such as min_p=0.1 (overrides the agent); repeatable."
        ),
    ] = None

    @property
    def engines(self) -> list[str]:
        return self.engine or ["tiny"]

    def forced_sampling(self, **named: Any) -> "SamplingParams":
        """The parameters of --force, and those with their own flags that are not None."""
        from rolltape.gateway.request import SamplingParams

        given = self.force or []
        values: dict[str, object] = {name: value for name, value in named.items() if value is not None}
        for one in given:
            name, equals, value = one.partition("=")
            if not equals or name not in SamplingParams.__struct_fields__:
                known = ", ".join(SamplingParams.__struct_fields__)
                raise UsageError(f"--force {one}: give NAME=VALUE; names are {known}")
            values[name] = [value] if name == "stop" else value
        try:
            return msgspec.convert(values, SamplingParams, strict=False)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            name = where.rstrip("`").partition("[")[0]
            flag = "--max-reply-tokens" if name == "max_tokens" else flag_of(name)
            where = f"{flag} {named[name]}" if name in named else f"--force {' '.join(given)}"
            raise UsageError(f"{where}: {what}") from None
