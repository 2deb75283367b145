"""Checks with a session through a gateway: what is recorded of an engine's replies, and the gateway's overhead."""

import tempfile
from pathlib import Path
from typing import Any

import aiohttp

import rolltape
from rolltape.doctor.engine.probing import REPLY_TIMEOUT_S
from rolltape.doctor.results import CheckResult, fault, named, note, ok, warning
from rolltape.errors import RolltapeError
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.gateway import Gateway, GatewaySession
from rolltape.gateway.settings import GatewaySettings
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, RolloutSummary
from rolltape.records.wording import plural
from rolltape.samples.summary import summarize

_TURNS = ("What is 17 + 25?", "And twice that?", "Are you sure?", "Thank you.")
_REPLY_TOKENS = 48
_SLOW_MS = 50.0


async def check_session(engine: Engine, model: Path | None, settings: GatewaySettings) -> list[CheckResult]:
    """Record four turns with an engine, and cut them into samples. The gateway closes the engine."""
    with tempfile.TemporaryDirectory(prefix="rolltape-doctor-") as place:
        run = Path(place) / "run"
        try:
            async with Gateway(engine=engine, model=model, tape=run, settings=settings) as gateway:
                session = await gateway.open_session(task_id="doctor")
                try:
                    error = await _converse(session)
                except (aiohttp.ClientError, TimeoutError) as failed:
                    error = f"the gateway gave no reply: {str(failed) or f'none in {REPLY_TIMEOUT_S:g} s'}"
                await session.finish(samples=False)
                rates = gateway.status()["rates"]
        except RolltapeError as failed:
            return [named("recording", fault(f"no gateway on this stack: {failed}", "see the faults above"))]
        (rollout,) = rolltape.read(run).rollouts()
    if error is not None:
        return [named("recording", fault(error, "see the faults above, and the engine's own log"))]
    return [
        named("recording", describe_recorded(rollout, summarize(rollout))),
        named("overhead", describe_overhead(rates)),
    ]


async def _converse(session: GatewaySession) -> str | None:
    """Ask the questions one by one. Return the error that ended the conversation, if any."""
    messages: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {session.key}"}
    timeout = aiohttp.ClientTimeout(total=REPLY_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as http:
        for question in _TURNS:
            messages.append({"role": "user", "content": question})
            body = {"model": "it", "messages": messages, "max_tokens": _REPLY_TOKENS, "temperature": 1.0, "seed": 1}
            body["chat_template_kwargs"] = {"enable_thinking": False}  # such a short reply would end within thinking
            async with http.post(f"{session.openai_base_url}/chat/completions", json=body) as response:
                answer = await response.json(content_type=None)
            if response.status != 200:
                return f"turn {len(messages) // 2 + 1} was answered with {response.status}: {str(answer)[:200]}"
            messages.append(answer["choices"][0]["message"])
    return None


def describe_recorded(rollout: Rollout, summary: RolloutSummary) -> CheckResult:
    """The fates of the sampled tokens of a session that never changes its history."""
    turns = rollout.turns
    sampled = sum(len(turn.sampled_ids) for turn in turns)
    exact = summary.policies["exact"]
    trained = exact.ledger.get(Fate.TRAINED, 0)
    faults = sum(turn.facts.is_engine_fault for turn in turns)
    bridged = sum(turn.facts.extra.get("prompt") == "bridged" for turn in turns)
    measured = (
        f"{plural(len(turns), 'turn')}, {bridged} bridged: {plural(exact.samples, 'sample')}, "
        f"{share(trained, sampled)} of {plural(sampled, 'sampled token')} trained"
    )
    figures = {
        "turns": len(turns),
        "bridged": bridged,
        "samples": exact.samples,
        "trained": trained,
        "sampled": sampled,
    }
    if faults:
        return fault(f"{measured}; {plural(faults, 'turn')} cannot have been sampled", "see the engine's faults")
    if trained < sampled:
        lost = ", ".join(f"{count:,} {fate}" for fate, count in exact.ledger.items() if fate != Fate.TRAINED)
        return warning(f"{measured} ({lost})", "see the faults above, and rolltape ledger", **figures)
    if exact.samples > 1:
        return note(measured, "see `bridging` for which turns do not extend the last", **figures)
    return ok(measured, **figures)


def describe_overhead(rates: dict[str, Any]) -> CheckResult:
    """The time that the gateway adds to a turn."""
    median = float(rates["added_ms_median"])
    measured = f"{median:.1f} ms per turn by the gateway"
    if median > _SLOW_MS:
        return note(measured, "this machine is busy, or the run is on a slow disk", median_ms=median)
    return ok(measured, median_ms=median)


def share(part: int, whole: int) -> str:
    """A share in percent, which is 100 % only for all of it."""
    if part == whole:
        return "100 %"
    return f"{min(part / whole * 100, 99.9):.1f} %" if whole else "0 %"
