"""Python functions as agents."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

from agent_assignments import ScriptedEpisode, assigned, connected
from gateways import rig
from rolltape.collect.agents import AgentOutcome, Assignment, agent_named
from rolltape.collect.agents.function import FunctionAgent
from rolltape.collect.environments.protocol import AGENT, Ended
from rolltape.records.rollout import StopReason


async def outcome_of(place: Path, function: Any, **fields: Any) -> AgentOutcome:
    return await FunctionAgent("python:it:it", function).run(assigned(ScriptedEpisode(), place, **fields))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", Ended(stop_reason=StopReason.COMPLETED, text="text")),
        (None, Ended(stop_reason=StopReason.COMPLETED)),
        (Ended(stop_reason=StopReason.PARSE_ERROR), Ended(stop_reason=StopReason.PARSE_ERROR)),
    ],
)
async def test_what_it_returns_is_how_it_ended(tmp_path: Path, given: Any, expected: Ended) -> None:
    async def later(assignment: Assignment) -> Any:
        return given

    assert (await outcome_of(tmp_path, lambda assignment: given)).ended == {AGENT: expected}
    assert (await outcome_of(tmp_path, later)).ended == {AGENT: expected}


async def test_an_outcome_of_its_own_is_taken(tmp_path: Path) -> None:
    own = AgentOutcome(ended={}, broken="the sandbox")
    assert await outcome_of(tmp_path, lambda _: own) is own


async def test_something_else_is_broken(tmp_path: Path) -> None:
    outcome = await outcome_of(tmp_path, lambda _: 7)
    assert outcome.broken == "python:it:it returned 7; return text, an Ended or None"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (AgentOutcome(ended={}), "returned None for seat agent; return an Ended for each of agent"),
        (AgentOutcome(ended={AGENT: "4"}), "returned '4' for seat agent; return an Ended for each of agent"),  # type: ignore[dict-item]
        (Ended(stop_reason=StopReason.COMPLETED, text=4), "whose text is 4; give a text"),  # type: ignore[arg-type]
        (Ended(stop_reason="nonsense"), "'nonsense' is not a StopReason"),  # type: ignore[arg-type]
        (AgentOutcome(ended={}, broken=""), "an outcome that is broken"),
    ],
)
async def test_an_outcome_that_cannot_be_scored_is_broken_and_says_why(tmp_path: Path, given: Any, why: str) -> None:
    outcome = await outcome_of(tmp_path, lambda _: given)
    assert why in str(outcome.broken)


async def test_a_stop_reason_may_be_its_text(tmp_path: Path) -> None:
    outcome = await outcome_of(tmp_path, lambda _: Ended(stop_reason="completed", text="4"))  # type: ignore[arg-type]
    assert outcome.ended[AGENT].stop_reason is StopReason.COMPLETED


async def test_a_cancellation_of_its_own_is_broken_and_is_not_taken_for_that_of_the_attempt(tmp_path: Path) -> None:
    async def cancels_itself(_: Assignment) -> None:
        work = asyncio.ensure_future(asyncio.sleep(60))
        work.cancel()
        await work

    outcome = await outcome_of(tmp_path, cancels_itself)
    assert "raised CancelledError" in str(outcome.broken)


async def test_what_it_raises_is_broken(tmp_path: Path) -> None:
    outcome = await outcome_of(tmp_path, lambda assignment: assignment.task["x"])
    assert re.fullmatch(rf"python:it:it raised KeyError: 'x' \({Path(__file__).name}, line \d+\)", str(outcome.broken))


async def test_the_time_limit_holds_for_both_kinds(tmp_path: Path) -> None:
    async def sleeps(_: Assignment) -> None:
        await asyncio.sleep(60)

    for function in (sleeps, lambda _: time.sleep(2)):
        outcome = await outcome_of(tmp_path, function, timeout_s=0.1)
        assert (outcome.timed_out, outcome.ended[AGENT].stop_reason) == (True, StopReason.TIMEOUT)


async def test_the_turn_cap_is_an_outcome_in_an_sdk_too(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")

    async def for_ever(assignment: Assignment) -> None:
        seat = assignment.connections[AGENT]
        async with openai.AsyncOpenAI(base_url=seat.openai_base_url, api_key=seat.key) as client:
            while True:
                messages = [{"role": "user", "content": "Go."}]
                try:
                    await client.chat.completions.create(model=seat.model, messages=messages)
                except openai.APIError as error:
                    raise RuntimeError("it failed") from error

    async with rig(tmp_path / "run", lambda _: "ok") as it:
        session = await it.gateway.open_session(task_id="t", max_turns=1)
        capped = await outcome_of(tmp_path, for_ever, connections={AGENT: connected(session)})
        await session.finish()
        late = await outcome_of(tmp_path, for_ever, connections={AGENT: connected(session)})
    assert capped.ended[AGENT].stop_reason is StopReason.MAX_TURNS
    assert str(late.broken).startswith("python:it:it raised RuntimeError: it failed (")


def test_it_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_agent_module.py").write_text("def solve(assignment):\n    return assignment.task['question']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = agent_named("python:own_agent_module:solve")
    assert agent.name == "python:own_agent_module:solve"
    outcome = asyncio.run(agent.run(assigned(ScriptedEpisode(), tmp_path)))
    assert outcome.ended[AGENT].text == "Why?"
