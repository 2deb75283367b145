"""Diagnose a stack: run every check that applies to an engine, a model folder and an agent, and yield the results."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec

from rolltape.collect.agents import agent_named
from rolltape.doctor.agent.checks import check_agent
from rolltape.doctor.engine.checks import ENGINE_CHECKS, EngineCheck, check_engine
from rolltape.doctor.engine.pairing_checks import check_tokenizer, check_weights
from rolltape.doctor.engine.probing import EngineProbe
from rolltape.doctor.model_checks import ModelProbe, check_model
from rolltape.doctor.results import CheckResult, fault, named
from rolltape.doctor.session_checks import check_session
from rolltape.errors import CheckpointError, PromptError
from rolltape.gateway.engines.opening import open_engines, parse_spec, tiny_folder
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.chat import Retention
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.gateway.settings import GatewaySettings
from rolltape.records.turn import LogprobKind


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The stack to diagnose; the fields are named as in `rolltape serve` and `rolltape collect`."""

    engine: str | None = None  # None to check no engine
    model: Path | None = None  # None for the folder of a tiny engine, or no folder
    agent: str | None = None  # None to run no agent
    engine_key: str | None = None
    logprobs: LogprobKind | None = None
    renderer: str | None = None
    thinking_retention: Retention | None = None
    agent_timeout_s: float = 180.0
    gentle: bool = False  # skip the request that has crashed engines


async def diagnose(stack: Stack) -> AsyncIterator[CheckResult]:
    """Yield the results part by part: model, engine, session, agent.

    Example:

        async for result in diagnose(Stack(engine="sglang:http://127.0.0.1:30000", model=Path("/models/qwen3"))):
            print(result.part, result.check, result.verdict, result.measured)
    """
    agent = None if stack.agent is None else agent_named(stack.agent)
    folder = stack.model or (None if stack.engine is None else tiny_folder([stack.engine]))
    prompts: ChatPrompts | None = None
    if folder is not None:
        try:
            prompts = ChatPrompts(folder, renderer=stack.renderer, thinking_retention=stack.thinking_retention)
            model = ModelProbe(folder, prompts, FolderTokenizer(folder))
        except (CheckpointError, PromptError) as error:
            unusable = fault(str(error), "give the folder of the model, or another --renderer")
            yield _in("model", named("template", unusable))
            return
        for result in check_model(model):
            yield _in("model", result)
    if stack.engine is not None:
        probe = EngineProbe(_open(stack), prompts)
        async for result in _check_engine(stack, folder, probe):
            yield _in("engine", result)
        if probe.answers and folder is not None:
            for result in await check_session(_open(stack), folder, _settings(stack)):
                yield _in("session", result)
    if agent is not None:
        async for result in check_agent(agent, folder, _settings(stack), stack.agent_timeout_s):
            yield _in("agent", result)


async def _check_engine(stack: Stack, folder: Path | None, probe: EngineProbe) -> AsyncIterator[CheckResult]:
    """Run the kit, and the checks of engine and model folder together; the check that has crashed engines is last."""
    *checks, outside = ENGINE_CHECKS.items()
    chosen: dict[str, EngineCheck] = dict(checks)
    if stack.engine is not None and folder is not None and probe.prompts is not None:
        kind, place = parse_spec(stack.engine)
        chosen["tokenizer"] = partial(
            check_tokenizer, prompts=probe.prompts, kind=kind, url=place, api_key=stack.engine_key
        )
        chosen["weights"] = partial(check_weights, folder=folder)
    if not stack.gentle:
        chosen |= dict([outside])
    try:
        async for result in check_engine(probe, chosen):
            yield result
    finally:
        await probe.engine.close()


def _open(stack: Stack) -> Engine:
    assert stack.engine is not None
    (engine,) = open_engines([stack.engine], api_key=stack.engine_key, logprob_kind=stack.logprobs)
    return engine


def _settings(stack: Stack) -> GatewaySettings:
    return GatewaySettings(renderer=stack.renderer, thinking_retention=stack.thinking_retention)


def _in(part: str, result: CheckResult) -> CheckResult:
    return msgspec.structs.replace(result, part=part)
