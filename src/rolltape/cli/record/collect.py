"""`rolltape collect`: run an agent on tasks through the gateway, and record the rollouts."""

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rolltape.cli.options import (
    EngineOptions,
    JudgeOptions,
    engine_option,
    request_limit,
    require_key,
    require_url,
    sampling_option,
)
from rolltape.cli.parameters import argument, name_flags, option, values_for
from rolltape.cli.record.cluster_options import ClusterOptions
from rolltape.cli.record.sandbox_options import SandboxOptions
from rolltape.collect.environments import ENVIRONMENT_NAMES
from rolltape.errors import CollectError, UsageError
from rolltape.traces import Capture

_task_option = partial(option, section="Tasks")
_run_option = partial(option, section="Run")
_agent_option = partial(option, section="Agent")
_pace_option = partial(option, section="Pace")
_limit_option = partial(option, section="Spending")
_gateway_option = partial(option, section="Gateway")


@dataclass(frozen=True)
class WorkOptions:
    """The tasks, the run, and the agent."""

    split: Annotated[str | None, _task_option("--split NAME", "Split of the source, such as train or test.")] = None
    limit: Annotated[int | None, _task_option("--limit N", "Maximum number of tasks.", min=1)] = None
    seed: Annotated[int | None, _task_option("--seed N", "Shuffle the tasks with this seed.")] = None
    source_name: Annotated[
        str | None, _task_option("--source-name NAME", "Source name in rollout ids (default: the file's name).")
    ] = None
    environment: Annotated[
        str,
        _task_option(
            "--environment NAME",
            f"Environment of tasks that do not name one: {', '.join(ENVIRONMENT_NAMES)}, verifiers:NAME, gymnasium:ID, "
            "openenv:URL, or python:module:Class.",
        ),
    ] = "problem"
    run: Annotated[Path, _run_option("--run RUN", "Run directory to record in.")] = Path("runs/collected")
    step: Annotated[int, _run_option("--step N", "Training step of the rollouts.", min=0)] = 0
    group_size: Annotated[
        int, _run_option("-g, --group-size N", "Attempts per task; may be larger with --resume.", min=1)
    ] = 8
    resume: Annotated[
        bool, _run_option("--resume", "Continue: grade ungraded rollouts, and run unfinished attempts.")
    ] = False
    accept_changed_tasks: Annotated[
        bool, _run_option("--accept-changed-tasks", "Resume even if tasks with the same ids have changed.")
    ] = False
    traces: Annotated[str, _run_option("--traces WHICH", "Rollouts to trace: all, off, or a share: sampled:0.1.")] = (
        "all"
    )
    out: Annotated[
        Path | None,
        _run_option(
            "-o, --out FILE", "Append each rollout's record to this JSONL file as it ends; --resume adds missing ones."
        ),
    ] = None
    as_json: Annotated[bool, _run_option("--json", "Print one JSON event per line.")] = False
    agent: Annotated[
        str,
        _agent_option(
            "--agent AGENT",
            "chat, claude-code[:PROGRAM], codex[:PROGRAM], command:PROGRAM …, or python:module:function.",
        ),
    ] = "chat"
    dry_run: Annotated[
        bool,
        _agent_option(
            "--dry-run", "Print what the agent would get for the first task (or --limit N tasks), and run nothing."
        ),
    ] = False
    max_turns: Annotated[int, _agent_option("--max-turns N", "Maximum turns per attempt.", min=1)] = 16
    timeout_s: Annotated[float, _agent_option("--timeout SECONDS", "Maximum time per attempt.")] = 600.0
    allow_tool: Annotated[list[str] | None, _agent_option("--allow-tool NAME", "Offer only this tool; repeatable.")] = (
        None
    )
    deny_tool: Annotated[list[str] | None, _agent_option("--deny-tool NAME", "Never offer this tool; repeatable.")] = (
        None
    )


@dataclass(frozen=True)
class ModelOptions:
    """The model, and its sampling parameters."""

    model: Annotated[
        str | None,
        engine_option("--model MODEL", "Folder with the model or only its tokenizer; for openai:URL also a name."),
    ] = None
    temperature: Annotated[float, sampling_option("--temperature X", "Sampling temperature (overrides the agent).")] = (
        1.0
    )
    top_p: Annotated[float | None, sampling_option("--top-p X", "Top-p sampling (overrides the agent).")] = None
    top_k: Annotated[int | None, sampling_option("--top-k N", "Top-k sampling (overrides the agent).")] = None
    max_reply_tokens: Annotated[
        int | None, sampling_option("--max-reply-tokens N", "Maximum tokens per reply (overrides the agent).")
    ] = None
    context_budget: Annotated[
        int | None, sampling_option("--context-budget N", "Maximum tokens of prompt and reply together.", min=1)
    ] = None
    thinking: Annotated[
        bool | None,
        sampling_option("--force-thinking/--force-no-thinking", "Thinking on or off (overrides the agent)."),
    ] = None


@dataclass(frozen=True)
class PaceOptions:
    """How fast and how far the collection goes, and the address of its gateway."""

    max_concurrent: Annotated[int, _pace_option("--max-concurrent N", "Maximum attempts at a time.", min=1)] = 32
    engine_at_once: Annotated[
        int | None, _pace_option("--engine-at-once N", "Maximum requests to an engine at a time.", min=1)
    ] = None
    engine_per_minute: Annotated[
        float | None,
        _pace_option("--engine-per-minute N", "Maximum requests to an engine per minute, evenly spaced."),
    ] = None
    max_ahead: Annotated[
        int | None,
        _pace_option(
            "--max-ahead N",
            "Start no task while the trainer has N groups that it has not finished.",
            min=1,
        ),
    ] = None
    grace_s: Annotated[
        float,
        _pace_option(
            "--grace SECONDS",
            "Time for running attempts to finish after Ctrl-C; a second Ctrl-C cancels them.",
            min=0.0,
        ),
    ] = 20.0
    max_failures: Annotated[
        int | None,
        _pace_option(
            "--max-failures N",
            "Stop after N failed attempts in a row, to be resumed (default: four groups, at least 32; 0: never).",
            min=0,
        ),
    ] = None
    max_sampled_tokens: Annotated[
        int | None,
        _limit_option("--max-sampled-tokens N", "Start no attempt once this many tokens are sampled.", min=1),
    ] = None
    max_cost: Annotated[
        float | None,
        _limit_option("--max-cost X", "Start no attempt once this much is spent, by the prices below."),
    ] = None
    max_time_s: Annotated[
        float | None,
        _limit_option("--max-time SECONDS", "Start no attempt once the command has collected for this long."),
    ] = None
    enough_groups: Annotated[
        int | None,
        _limit_option("--enough-groups N", "Start no task once the rewards of N groups differ.", min=1),
    ] = None
    price_in: Annotated[
        float | None,
        _limit_option(
            "--price-in X", "Price of a million prompt tokens (default: the cost that an openai: endpoint reports)."
        ),
    ] = None
    price_out: Annotated[float | None, _limit_option("--price-out X", "Price of a million sampled tokens.")] = None
    host: Annotated[
        str, _gateway_option("--host ADDRESS", "Address the gateway listens on; all but loopback need a key.")
    ] = "127.0.0.1"
    public_url: Annotated[
        str | None, _gateway_option("--public-url URL", "Address at which agents reach the gateway.")
    ] = None
    admin_key: Annotated[
        str | None,
        _gateway_option(
            "--admin-key KEY", "Key that the gateway requires to open sessions.", envvar="ROLLTAPE_ADMIN_KEY"
        ),
    ] = None


def collect(
    source: Annotated[
        str,
        argument(
            "SOURCE",
            "Tasks: a .json, .jsonl, or .parquet file, - (JSON lines on stdin), a dataset folder, a dataset on the "
            "Hugging Face hub (owner/name or owner/name:configuration), python:module:function, task folders "
            "(harbor:FOLDER), or an environment with its own tasks: verifiers:NAME, gymnasium:ID, openenv:URL.",
        ),
    ],
    *,
    work: WorkOptions,
    sandboxing: SandboxOptions,
    engines: EngineOptions,
    models: ModelOptions,
    judging: JudgeOptions,
    pace: PaceOptions,
    clustering: ClusterOptions,
) -> int:
    """Run an agent on tasks and record the rollouts."""
    from rolltape.cli.record.collect_run import print_previews, run_collection
    from rolltape.collect.agents import is_program
    from rolltape.collect.settings import CollectSettings
    from rolltape.gateway.engines.request_limit import RequestLimit

    cluster = clustering.settings()
    if cluster is not None and pace.public_url is not None:
        raise UsageError("--public-url: each node of a Ray cluster has a gateway of its own; leave it out")
    inside = sandboxing.sandbox != "none" and sandboxing.sandbox_network != "host"
    if pace.public_url is not None and inside and is_program(work.agent):
        raise UsageError(
            "--public-url: a program in a sandbox reaches the gateway only at its own address; leave it out, or give "
            "--sandbox none or --sandbox-network host"
        )
    require_key(pace.host, pace.admin_key, "--admin-key")
    require_url("--public-url", pace.public_url)
    if cluster is not None and cluster.engine is not None and engines.engine:
        raise UsageError("--engine: --ray-engine starts the engines; give one of them")
    capture, trace_fraction = _parse_traces(work.traces)
    if not work.timeout_s > 0:
        raise UsageError(f"--timeout {work.timeout_s:g}: give more than 0 seconds")
    fields: dict[str, Any] = {
        **values_for(CollectSettings, work, engines, models, judging, pace),
        "source": source,
        "engines": tuple(engines.engines),
        "engine_limit": request_limit("--engine", pace.engine_at_once, pace.engine_per_minute) or RequestLimit(),
        "judge": judging.judge(),
        "sampling": engines.forced_sampling(
            temperature=models.temperature, top_p=models.top_p, top_k=models.top_k, max_tokens=models.max_reply_tokens
        ),
        "allowed_tools": tuple(work.allow_tool) if work.allow_tool else None,
        "denied_tools": tuple(work.deny_tool or ()),
        "admin_key": pace.admin_key or None,
        "capture": capture,
        "trace_fraction": trace_fraction,
        "with_records": work.out is not None,
        "with_fates": True,
        **sandboxing.settings(),
    }
    try:
        settings = CollectSettings(**fields)
    except CollectError as error:
        raise UsageError(name_flags(str(error), CollectSettings.__struct_fields__)) from None
    if work.dry_run:
        return print_previews(settings, work.run, as_json=work.as_json)
    return run_collection(
        settings, work.run, work.out, cluster, resume=work.resume, as_json=work.as_json, max_ahead=pace.max_ahead
    )


def _parse_traces(given: str) -> tuple[Capture, float | None]:
    """Which rollouts --traces names, and the share if they are sampled."""
    kind, colon, share = given.partition(":")
    with contextlib.suppress(ValueError):
        if not colon and kind in (Capture.ALL, Capture.OFF):
            return Capture(kind), None
        if kind == Capture.SAMPLED and 0 <= float(share) <= 1:
            return Capture.SAMPLED, float(share)
    raise UsageError(f"--traces {given}: use all, off, or sampled with a share from 0 to 1, such as sampled:0.1")
