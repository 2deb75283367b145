"""`rolltape collect`: an agent on tasks, through the gateway, onto a tape."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.record.engine_options import (
    ENGINE,
    SAMPLING,
    EngineKeyOption,
    EngineOption,
    ForceOption,
    LogprobsOption,
    RendererOption,
    RetentionOption,
    RoutedExpertsOption,
    chosen_retention,
    forced_sampling,
)

if TYPE_CHECKING:
    from rolltape.traces.capture import Capture

_TASKS, _RUN, _AGENT, _JUDGE, _PACE, _CLUSTER = "Tasks", "Run", "Agent", "Judge", "Pace", "Many machines"


def collect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .json, .jsonl or .parquet file, - (JSON lines on stdin), a dataset's folder or its name on the "
            "hub (owner/name or owner/name:configuration), or python:module:function. Its split is given by --split.",
        ),
    ],
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME",
            rich_help_panel=_TASKS,
            help="Split of the source: train, test, … Trackers show each split by itself.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, rich_help_panel=_TASKS, help="Take so many tasks.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", rich_help_panel=_TASKS, help="Shuffle the tasks by this seed.")
    ] = None,
    source_name: Annotated[
        str | None,
        typer.Option(
            "--source-name", metavar="NAME", rich_help_panel=_TASKS, help="In rollouts' ids; else the file's own name."
        ),
    ] = None,
    environment: Annotated[
        str,
        typer.Option(
            "--environment",
            metavar="NAME",
            rich_help_panel=_TASKS,
            help="Of tasks that name none: problem, distill, rubric, preference, message, game, python:module:Class.",
        ),
    ] = "problem",
    run: Annotated[
        Path, typer.Option("--run", metavar="RUN", rich_help_panel=_RUN, help="The run to record on.")
    ] = Path("runs/collected"),
    step: Annotated[
        int,
        typer.Option("--step", metavar="N", min=0, rich_help_panel=_RUN, help="The training step that they are for."),
    ] = 0,
    group_size: Annotated[
        int, typer.Option("--group-size", "-g", metavar="N", min=1, rich_help_panel=_RUN, help="Attempts at each task.")
    ] = 8,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=_RUN, help="Go on with what has not finished.")
    ] = False,
    traces: Annotated[
        str, typer.Option("--traces", metavar="WHICH", rich_help_panel=_RUN, help="all, sampled:0.1 (a tenth), or off.")
    ] = "all",
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", rich_help_panel=_RUN, help="Append each rollout's record as it ends (JSONL)."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_RUN, help="Events for scripts, one JSON object a line.")
    ] = False,
    agent: Annotated[
        str,
        typer.Option(
            "--agent",
            metavar="AGENT",
            rich_help_panel=_AGENT,
            help="chat, claude-code[:PROGRAM], codex[:PROGRAM], command:PROGRAM …, python:module:function.",
        ),
    ] = "chat",
    max_turns: Annotated[
        int, typer.Option("--max-turns", metavar="N", min=1, rich_help_panel=_AGENT, help="That an attempt may have.")
    ] = 16,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", rich_help_panel=_AGENT, help="That an attempt may take.")
    ] = 600.0,
    allow_tool: Annotated[
        list[str] | None,
        typer.Option("--allow-tool", metavar="NAME", rich_help_panel=_AGENT, help="Offer only these tools."),
    ] = None,
    deny_tool: Annotated[
        list[str] | None,
        typer.Option("--deny-tool", metavar="NAME", rich_help_panel=_AGENT, help="Never offer these tools."),
    ] = None,
    engine: EngineOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            rich_help_panel=ENGINE,
            help="Its folder, with the tokenizer alone where an engine elsewhere runs it; with openai:URL its name.",
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            metavar="NAME",
            rich_help_panel=ENGINE,
            help="In the record and for agents; else the engine's.",
        ),
    ] = None,
    engine_key: EngineKeyOption = None,
    logprobs: LogprobsOption = None,
    routed_experts: RoutedExpertsOption = False,
    renderer: RendererOption = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", rich_help_panel=SAMPLING, help="Whatever the agent asks for.")
    ] = 1.0,
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="X", rich_help_panel=SAMPLING, help="Likewise.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", rich_help_panel=SAMPLING, help="Likewise.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", rich_help_panel=SAMPLING, help="Of one reply.")
    ] = None,
    force: ForceOption = None,
    context_budget: Annotated[
        int | None,
        typer.Option(
            "--context-budget",
            metavar="N",
            min=1,
            rich_help_panel=SAMPLING,
            help="Tokens of prompt and reply together.",
        ),
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", rich_help_panel=SAMPLING, help="Whatever the agent asks."),
    ] = None,
    thinking_retention: RetentionOption = None,
    judge_url: Annotated[
        str | None,
        typer.Option(
            "--judge-url", metavar="URL", rich_help_panel=_JUDGE, help="OpenAI-compatible; for tasks that name none."
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option("--judge-model", metavar="NAME", rich_help_panel=_JUDGE, help="Which model it is.")
    ] = None,
    judge_key_env: Annotated[
        str | None,
        typer.Option(
            "--judge-key-env",
            metavar="VARIABLE",
            rich_help_panel=_JUDGE,
            help="Which holds its key; else ROLLTAPE_JUDGE_KEY.",
        ),
    ] = None,
    max_concurrent: Annotated[
        int, typer.Option("--max-concurrent", metavar="N", min=1, rich_help_panel=_PACE, help="Attempts at once.")
    ] = 32,
    max_ahead: Annotated[
        int | None,
        typer.Option(
            "--max-ahead",
            metavar="N",
            min=1,
            rich_help_panel=_PACE,
            help="Groups that a trainer (tape.groups) is not done with, above which no task is begun.",
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0.0,
            rich_help_panel=_PACE,
            help="For what runs when Ctrl-C comes; again cancels.",
        ),
    ] = 20.0,
    runner: Annotated[
        str,
        typer.Option("--runner", metavar="WHERE", rich_help_panel=_CLUSTER, help="local, or ray: on its nodes."),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", metavar="ADDRESS", rich_help_panel=_CLUSTER, help="Else as Ray finds it."),
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            "--publish",
            metavar="URL",
            rich_help_panel=_CLUSTER,
            help="A folder or fsspec URL that all nodes see; else RUN must be one.",
        ),
    ] = None,
    node_folder: Annotated[
        str | None,
        typer.Option(
            "--node-folder",
            metavar="FOLDER",
            rich_help_panel=_CLUSTER,
            help="For journals, on each node's own disk; else one for temporary files.",
        ),
    ] = None,
) -> int:
    """Run an agent on tasks and record what it did."""
    from rolltape.cli.record.collect_run import collected
    from rolltape.collect.environments.judge import Judge
    from rolltape.collect.runners.ray import ClusterSettings
    from rolltape.collect.settings import CollectSettings

    if runner not in ("local", "ray"):
        raise UsageError(f"--runner {runner}: local or ray")
    of_cluster = {"--ray-address": ray_address, "--publish": publish, "--node-folder": node_folder}
    if runner == "local" and (given := [flag for flag, value in of_cluster.items() if value is not None]):
        raise UsageError(f"{given[0]} goes with --runner ray")
    cluster = ClusterSettings(ray_address or "auto", publish, node_folder) if runner == "ray" else None
    capture, trace_fraction = chosen_capture(traces)
    if judge_key_env is not None and judge_key_env not in os.environ:
        raise UsageError(f"--judge-key-env {judge_key_env}: there is no such variable; set it to the judge's key")
    judge = Judge(base_url=judge_url, model=judge_model, key_env=judge_key_env)
    settings = CollectSettings(
        source=source,
        split=split,
        limit=limit,
        seed=seed,
        source_name=source_name,
        environment=environment,
        agent=agent,
        engines=tuple(engine or ["embedded"]),
        model=model,
        model_name=model_name,
        engine_key=engine_key,
        logprob_kind=logprobs,
        routed_experts=routed_experts,
        renderer=renderer,
        judge=None if judge == Judge() else judge,
        group_size=group_size,
        step=step,
        max_turns=max_turns,
        timeout_s=timeout_s,
        sampling=forced_sampling(force or [], temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens),
        thinking=thinking,
        thinking_retention=chosen_retention(thinking_retention),
        context_budget=context_budget,
        allowed_tools=tuple(allow_tool) if allow_tool else None,
        denied_tools=tuple(deny_tool or ()),
        capture=capture,
        trace_fraction=trace_fraction,
        with_records=out is not None,
        with_fates=True,
        max_concurrent=max_concurrent,
        grace_s=grace_s,
    )
    return collected(settings, run, out, cluster, resume=resume, as_json=as_json, max_ahead=max_ahead)


def chosen_capture(given: str) -> "tuple[Capture, float | None]":
    """Which rollouts --traces names, and of sampled ones which share."""
    from rolltape.traces.capture import Capture

    kind, colon, share = given.partition(":")
    with contextlib.suppress(ValueError):
        if not colon and kind in (Capture.ALL, Capture.OFF):
            return Capture(kind), None
        if kind == Capture.SAMPLED and 0 <= float(share) <= 1:
            return Capture.SAMPLED, float(share)
    raise UsageError(f"--traces {given}: all, off, or sampled with a share from 0 to 1, as sampled:0.1")
