"""`rolltape collect`: an agent on tasks, through the gateway, onto a tape."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from rolltape.cli.exits import Exit, UsageError
from rolltape.cli.options import chosen_retention
from rolltape.cli.screen import count, note, number, plural, print_json, print_line, print_table

if TYPE_CHECKING:
    from rolltape.collect.attempt import Result
    from rolltape.collect.local import Collector
    from rolltape.collect.settings import CollectSettings
    from rolltape.collect.tally import Tally
    from rolltape.tape.tape import Tape

_SHOWN_TASKS = 20
_SHOWN_REASONS = 10
_LEDGER_ROLLOUTS = 2_000
_UNTOLD = ("ended", "place")  # of a result: for the collector alone


def collect(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Tasks: JSON, JSONL, -, Parquet, a dataset, python:module:function.")
    ],
    run: Annotated[Path, typer.Option("--run", metavar="RUN", help="The run to record on.")] = Path("runs/collected"),
    agent: Annotated[
        str, typer.Option("--agent", help="chat, claude-code, codex, command:…, python:module:function.")
    ] = "chat",
    environment: Annotated[
        str, typer.Option("--environment", help="Of tasks that name none: problem, distill, rubric, preference, …")
    ] = "problem",
    engine: Annotated[list[str] | None, typer.Option("--engine", help="As `rolltape serve` takes them.")] = None,
    model: Annotated[Path | None, typer.Option("--model", metavar="FOLDER", help="The tokenizer's folder.")] = None,
    model_name: Annotated[str | None, typer.Option("--model-name", help="In the record; the engine's if not.")] = None,
    group_size: Annotated[int, typer.Option("--group-size", "-g", min=1, help="Attempts at each task.")] = 8,
    step: Annotated[int, typer.Option("--step", min=0, help="The training step that they are for.")] = 0,
    split: Annotated[str | None, typer.Option("--split", help="Of the source.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="So many tasks.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Shuffle the tasks with it.")] = None,
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="Attempts at once.")] = 32,
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="Of an attempt.")] = 16,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that an attempt may take.")] = 600.0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="Whatever the agent asks.")] = 1.0,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Whatever the agent asks.")] = None,
    thinking_retention: Annotated[
        str | None, typer.Option("--thinking-retention", help="template, tool_cycle or all.")
    ] = None,
    allow_tool: Annotated[list[str] | None, typer.Option("--allow-tool", help="Only these.")] = None,
    deny_tool: Annotated[list[str] | None, typer.Option("--deny-tool", help="Not these.")] = None,
    capture: Annotated[str, typer.Option("--traces", help="all or off.")] = "all",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also each record here, as it ends (JSONL).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is not completed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events for scripts, one JSON object a line.")] = False,
) -> int:
    """Run an agent on tasks and record what it did."""
    from rolltape.capture.exchange import SamplingParams
    from rolltape.collect.settings import CollectSettings
    from rolltape.traces.capture import Capture

    if capture not in ("all", "off"):
        raise UsageError(f"--traces {capture}: all or off")
    settings = CollectSettings(
        source=source,
        split=split,
        limit=limit,
        seed=seed,
        environment=environment,
        agent=agent,
        engines=tuple(engine or ["embedded"]),
        model=None if model is None else str(model),
        model_name=model_name,
        group_size=group_size,
        step=step,
        max_turns=max_turns,
        timeout_s=timeout_s,
        sampling=SamplingParams(temperature=temperature),
        thinking=thinking,
        thinking_retention=chosen_retention(thinking_retention),
        allowed_tools=tuple(allow_tool) if allow_tool else None,
        denied_tools=tuple(deny_tool or ()),
        capture=Capture(capture),
        max_concurrent=max_concurrent,
    )
    return _collected(settings, run, out, resume=resume, as_json=as_json)


def _collected(settings: "CollectSettings", run: Path, out: Path | None, *, resume: bool, as_json: bool) -> int:
    from rolltape.capture.serve import loop_factory
    from rolltape.collect.local import Collector
    from rolltape.collect.tally import Tally
    from rolltape.tape.tape import open_tape

    with open_tape(run) as tape:
        tally = Tally()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            collector = Collector(settings, tape, resume=resume)
            with _Told(tally, tape, out, as_json=as_json) as told:
                whole = runner.run(_run(collector, told))
    if as_json:
        print_json({"event": "end", **tally.figures(), "whole": whole})
    else:
        _report(tally, run, settings.step)
    return Exit.OK if whole else Exit.INTERRUPTED


async def _run(collector: "Collector", told: "_Told") -> bool:
    """Collect until all is done, or somebody says that it is enough; whether all is done."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    signals = 0

    def end() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            main.cancel()
        else:
            note(f"ending: what runs has {collector.settings.grace_s:g} s, again to cancel it")
            collector.end()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    try:
        await collector.run(told.launched, told.results)
    except asyncio.CancelledError:
        if not signals:
            raise
    return signals == 0


class _Told:
    """Says how a collection goes: a live line on a terminal, plain lines in a log, events for a script."""

    def __init__(self, tally: "Tally", tape: "Tape", out: Path | None, *, as_json: bool) -> None:
        self._tally = tally
        self._tape = tape
        self._out: IO[bytes] | None = None if out is None else out.open("ab")
        self._as_json = as_json
        self._live = sys.stderr.isatty() and not as_json
        self._said_at = 0.0

    def __enter__(self) -> "_Told":
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            self._out.close()
        if self._live:
            sys.stderr.write("\n")

    def launched(self, launch: Any) -> None:
        self._tally.launch = launch
        if self._as_json:
            print_json({"event": "launch", **launch._asdict()})
        else:
            before = f", {count(launch.done_before)} done before" if launch.done_before else ""
            elsewhere = f", {count(launch.running_elsewhere)} running elsewhere" if launch.running_elsewhere else ""
            note(f"{plural(launch.tasks, 'task')}, {plural(launch.attempts, 'attempt')}{before}{elsewhere}")

    def results(self, results: "list[Result]") -> None:
        self._tally.add(results)
        for result in results:
            self._tell(result)
        if results and not self._as_json:
            self._say()

    def _tell(self, result: "Result") -> None:
        import msgspec

        record = {name: value for name, value in result._asdict().items() if name not in _UNTOLD and value is not None}
        if self._out is not None:
            self._out.write(msgspec.json.encode(record) + b"\n")
            self._out.flush()
        if self._as_json:
            print_json({"event": "rollout", **record})

    def _say(self) -> None:
        figures = self._tally.figures()
        if self._live:
            sys.stderr.write(f"\r\x1b[K{_line(figures)}")
            sys.stderr.flush()
        elif figures["seconds"] - self._said_at > 10:
            self._said_at = figures["seconds"]
            note(_line(figures))


def _line(figures: dict[str, Any]) -> str:
    reward = "" if figures["mean_reward"] is None else f", mean reward {number(figures['mean_reward'])}"
    left = "" if figures["seconds_left"] is None else f", {figures['seconds_left']:.0f} s left"
    failed = f", {count(figures['failed'])} failed" if figures["failed"] else ""
    return (
        f"{count(figures['done'])} done{failed}, {count(figures['left'])} to go{reward}, "
        f"{figures['tokens_per_s']:.0f} tokens/s{left}"
    )


def _report(tally: "Tally", run: Path, step: int) -> None:
    rows = [
        [name, count(one.count), number(one.mean), number(one.spread), f"{number(one.least)} to {number(one.most)}"]
        for name, one in tally.by_task[:_SHOWN_TASKS]
    ]
    if rows:
        print_table(["task", "rewards", "mean", "spread", "range"], rows, left=["task"], flexible=["task"])
        if len(tally.by_task) > _SHOWN_TASKS:
            print_line(f"… and {count(len(tally.by_task) - _SHOWN_TASKS)} more tasks")
        print_line("")
    for reason, times in tally.reasons.most_common(_SHOWN_REASONS):
        print_line(f"{count(times):>8}  {reason}")
    if len(tally.reasons) > _SHOWN_REASONS:
        print_line(f"… and {count(len(tally.reasons) - _SHOWN_REASONS)} more reasons")
    mean = f", mean reward {number(tally.rewards.mean)}" if tally.rewards.count else ""
    unrewarded = f", {count(tally.unrewarded)} without a reward" if tally.unrewarded else ""
    print_line(
        f"{count(tally.ended)} rollouts, {count(tally.turns)} turns, {count(tally.sampled_tokens)} sampled tokens"
        f"{mean}{unrewarded}"
    )
    _print_ledger(run, step)
    print_line(f"look at them: rolltape ls {run}, rolltape samples {run}, rolltape trace {run} ROLLOUT")


def _print_ledger(run: Path, step: int) -> None:
    """Where the sampled tokens of a step go, where that is quickly found out."""
    from collections import Counter

    from rolltape.samples import linearize
    from rolltape.tape.run import read

    totals: Counter[str] = Counter()
    with read(run).snapshot() as held:
        if not 0 < sum(row.head.step == step for row in held.index()) <= _LEDGER_ROLLOUTS:
            return
        for rollout in held.rollouts(step=step):
            totals.update({fate.value: tokens for fate, tokens in linearize(rollout).ledger.totals().items()})
    print_line("ledger (exact): " + ", ".join(f"{count(tokens)} {fate}" for fate, tokens in totals.most_common()))
