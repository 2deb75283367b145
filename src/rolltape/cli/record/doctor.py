"""`rolltape doctor`: check an engine, a model, an agent, or a gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from rolltape.cli.exits import Exit
from rolltape.cli.options import (
    EngineKeyOption,
    JsonOption,
    RendererOption,
    RetentionOption,
    engine_option,
    require_url,
)
from rolltape.cli.parameters import flag_of, given_flags, option
from rolltape.cli.screen import arrow, plural, print_hanging, print_json, print_line
from rolltape.errors import UsageError
from rolltape.gateway.engines import ENGINE_SPELLINGS
from rolltape.records.turn import LogprobKind

if TYPE_CHECKING:
    from rolltape.doctor.results import CheckResult

_STYLES = {"ok": "green", "note": "", "warning": "bold yellow", "fault": "bold red"}
_VERDICT, _CHECK = 7, 15  # widths of the longest of each
# The last line for a stack, and for a gateway, by the worst verdict.
_STACK = {
    "fault": "this stack does not train what it sampled",
    "warning": "this stack trains what it sampled, at a cost",
    "ok": "this stack trains what it sampled",
}
_GATEWAY = {
    "fault": "agents cannot work with this gateway",
    "warning": "some agents can work with this gateway, or all at a cost",
    "ok": "agents can work with this gateway",
}
_WITH_DEFAULTS = ("engine_key", "agent_timeout_s")  # options that may have a value although no flag is given


@dataclass(frozen=True)
class StackOptions:
    """The stack to check, with the names of `rolltape.doctor.Stack`."""

    engine: Annotated[
        str | None,
        engine_option("--engine ENGINE", f"Engine to check, one of {ENGINE_SPELLINGS}."),
    ] = None
    engine_key: EngineKeyOption = None
    model: Annotated[
        Path | None, engine_option("--model FOLDER", "Folder of the model that is served; weights are compared too.")
    ] = None
    logprobs: Annotated[
        LogprobKind | None,
        engine_option("--logprobs KIND", "Kind of logprobs that you give to serve and collect; doctor measures it."),
    ] = None
    renderer: RendererOption = None
    gentle: Annotated[
        bool,
        engine_option("--gentle", "Skip the prompt with an id outside the vocabulary, which crashes old engines."),
    ] = False
    thinking_retention: RetentionOption = None
    agent: Annotated[
        str | None,
        option(
            "--agent AGENT", "Agent to run on a scripted model, as for collect: claude-code, codex, command:PROGRAM, …."
        ),
    ] = None
    agent_timeout_s: Annotated[
        float, option("--agent-timeout SECONDS", "Maximum time for the agent's session.", min=1)
    ] = 180.0


def doctor(
    *,
    parts: StackOptions,
    gateway: Annotated[
        str | None,
        option("--gateway URL", "Check any OpenAI- or Anthropic-compatible gateway from the agent's side instead."),
    ] = None,
    key: Annotated[
        str | None, option("--key KEY", "API key of the gateway's session.", envvar="ROLLTAPE_SESSION_KEY")
    ] = None,
    gateway_model: Annotated[
        str | None, option("--gateway-model NAME", "Model name to ask the gateway for (default: its first one).")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check that an engine, a model, and an agent fit together.

    Each line has what was measured and, if something is wrong, what to change. Checks send real requests and examine
    the replies; they do not rely on how an engine is configured or described.
    """
    from rolltape.doctor import Stack, check_gateway, diagnose

    if gateway is not None:
        of_stack = {flag_of(name): value for name, value in vars(parts).items() if name not in _WITH_DEFAULTS}
        if given := given_flags(of_stack):
            raise UsageError(f"--gateway: a gateway is checked alone; leave out {' and '.join(given)}")
        require_url("--gateway", gateway)
        return _report(check_gateway(gateway, key=key, model=gateway_model), _GATEWAY, as_json)
    if gateway_model is not None:
        raise UsageError("--gateway-model needs --gateway")
    if parts.engine is None and parts.model is None and parts.agent is None:
        raise UsageError("nothing to check: give --engine, --model, --agent, or --gateway")
    if parts.engine is not None and "://" in parts.engine and parts.model is None:
        raise UsageError("--engine: give --model too, the folder with the tokenizer of the model that is served")
    return _report(diagnose(Stack(**vars(parts))), _STACK, as_json)


def _report(results: "AsyncIterator[CheckResult]", ends: dict[str, str], as_json: bool) -> int:
    """Print results as they come. Return the exit code for the worst of them."""
    counts = dict.fromkeys(_STYLES, 0)

    async def consume() -> None:
        part = ""
        async for result in results:
            counts[result.verdict] += 1
            if as_json:
                print_json(msgspec.to_builtins(result))
                continue
            if result.part != part:
                part = result.part
                print_line(part, "bold")
            _print(result)

    with _quiet():
        asyncio.run(consume())
    worst = next((name for name in ("fault", "warning") if counts[name]), "ok")
    if not as_json:
        found = ", ".join(plural(counts[name], name) for name in ("fault", "warning", "note") if counts[name])
        print_line("")
        print_line(f"{found or 'nothing to note'}: {ends[worst]}", "bold")
    return {"fault": Exit.BROKEN, "warning": Exit.WARNED, "ok": Exit.OK}[worst]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what a gateway logs at its start: the results have all of it."""
    log = logging.getLogger("rolltape")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _print(result: "CheckResult") -> None:
    mark, lead = f"  {result.verdict:{_VERDICT}}", f"  {result.check:{_CHECK}}"
    print_hanging(mark, _STYLES[result.verdict], lead, result.measured)
    if result.advice:
        print_hanging("", "", " " * (len(mark) + len(lead)), f"{arrow()} {result.advice}", "dim")
