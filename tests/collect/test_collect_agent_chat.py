"""The chat agent before a real gateway: every way in which it stops, its tools, its seats, and what is recorded."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rolltape
from agent_assignments import ScriptedEpisode, assigned, connected, sessions_of
from gateways import Rig, rig, scripted, slowly
from rolltape.collect.agents import AgentOutcome, StepRecord, agent_named
from rolltape.collect.environments.protocol import AGENT, Answer, Tool
from rolltape.records.rollout import StopReason
from rolltape.traces import TraceWriter, trace_of
from scripted_engine import Asked, Mishap, Script, Step, tool_call

AGAIN = Answer(messages=[{"role": "user", "content": "Again."}])
DONE = Answer(done=True)
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}


def shout(text: str) -> str:
    return text.upper()


def tool(function: Any = shout, name: str = "shout") -> Tool:
    return Tool(name, "Say it loud.", TEXT, function)


SHOUT = tool_call("shout", {"text": "hey"})


async def play(it: Rig, episode: ScriptedEpisode, spec: dict[str, Any] | None = None, **fields: Any) -> AgentOutcome:
    """Run the chat agent on an episode, each seat with a session of the rig's gateway."""
    sessions = await sessions_of(it.gateway, episode.seats, **(spec or {}))
    try:
        connections = {seat: connected(session) for seat, session in sessions.items()}
        return await agent_named("chat").run(assigned(episode, it.run.parent, connections=connections, **fields))
    finally:
        for session in sessions.values():
            await session.finish()


async def stopped(place: Path, script: Script, episode: ScriptedEpisode, **fields: Any) -> tuple[StopReason, str]:
    async with rig(place / "run", script) as it:
        outcome = await play(it, episode, **fields)
    assert outcome.broken is None
    return outcome.ended[AGENT].stop_reason, outcome.ended[AGENT].text


def said(outcome: AgentOutcome, seat: str = AGENT) -> list[tuple[str, str]]:
    return [(message["role"], message.get("content") or "") for message in outcome.ended[seat].messages]


async def test_it_goes_on_until_the_environment_is_done(tmp_path: Path) -> None:
    steps: list[tuple[str, StepRecord]] = []
    episode = ScriptedEpisode(AGAIN, Answer(done=True, reward=1.0))
    async with rig(tmp_path / "run", ["one", "two"], thinking_retention="all") as it:
        outcome = await play(it, episode, on_step=lambda seat, step: steps.append((seat, step)))
        turns = it.turns()
    assert outcome.ended[AGENT].stop_reason is StopReason.COMPLETED
    assert outcome.ended[AGENT].text == "two"
    assert said(outcome) == [("user", "Go."), ("assistant", "one"), ("user", "Again."), ("assistant", "two")]
    assert it.engine.violations == []
    assert [(seat, step.turn, step.stop_reason) for seat, step in steps] == [
        (AGENT, turns[0].id, None),
        (AGENT, turns[1].id, StopReason.COMPLETED),
    ]
    assert [step.answer.reward for _, step in steps if step.answer] == [0.0, 1.0]
    assert turns[0].facts.extra["model_asked"] == "the-model"


async def test_an_episode_that_is_over_stops_without_a_word(tmp_path: Path) -> None:
    assert await stopped(tmp_path, ["one"], ScriptedEpisode(AGAIN)) == (StopReason.COMPLETED, "one")
    assert await stopped(tmp_path / "b", ["one"], ScriptedEpisode()) == (StopReason.COMPLETED, "")


async def test_it_stops_after_its_turns(tmp_path: Path) -> None:
    stop = await stopped(tmp_path, ["one", "two", "three"], ScriptedEpisode(*[AGAIN] * 9), max_turns=2)
    assert stop == (StopReason.MAX_TURNS, "two")


async def test_the_cap_of_the_gateway_is_the_same(tmp_path: Path) -> None:
    stop = await stopped(tmp_path, ["one", "two"], ScriptedEpisode(*[AGAIN] * 9), spec={"max_turns": 1})
    assert stop == (StopReason.MAX_TURNS, "one")


async def test_a_prompt_so_far_above_the_budget_that_it_is_refused_stops_it(tmp_path: Path) -> None:
    long = Answer(messages=[{"role": "user", "content": "word " * 50_000}])
    stop = await stopped(tmp_path, ["one"], ScriptedEpisode(long, DONE), spec={"context_budget": 200})
    assert stop == (StopReason.CONTEXT_OVERFLOW, "one")


async def test_a_reply_that_is_cut_stops_it(tmp_path: Path) -> None:
    episode = ScriptedEpisode(AGAIN)
    assert await stopped(tmp_path, [Step("one two", finish="length")], episode) == (StopReason.MAX_TOKENS, "one two")
    assert episode.replies == []


async def test_a_prompt_above_the_budget_stops_it(tmp_path: Path) -> None:
    steps: list[StepRecord] = []
    long = Answer(messages=[{"role": "user", "content": "word " * 500}])
    fields = {"spec": {"context_budget": 200}, "on_step": lambda _, step: steps.append(step)}
    stop = await stopped(tmp_path, ["one", "two"], ScriptedEpisode(long, DONE), **fields)
    assert stop == (StopReason.CONTEXT_OVERFLOW, "")
    assert [step.stop_reason for step in steps] == [None, StopReason.CONTEXT_OVERFLOW]
    assert steps[1].turn is not None


async def test_a_malformed_call_is_for_the_environment_to_judge(tmp_path: Path) -> None:
    episode = ScriptedEpisode(Answer(done=True, stop_reason=StopReason.PARSE_ERROR), tools=[tool()])
    broken = '<tool_call>\n{"name": "shout", "arguments": {"text": \n</tool_call>'
    reason, text = await stopped(tmp_path, [broken], episode)
    assert (reason, "<tool_call>" in text) == (StopReason.PARSE_ERROR, True)
    ((_, reply),) = episode.replies
    assert reply["flags"] == ["malformed_call"]


async def test_a_call_of_a_denied_tool_is_text_too(tmp_path: Path) -> None:
    episode = ScriptedEpisode(DONE, tools=[tool()])
    await stopped(tmp_path, [SHOUT], episode, spec={"denied_tools": ["shout"]})
    ((_, reply),) = episode.replies
    assert reply["flags"] == ["denied_tool"]


async def test_tools_are_called_and_their_results_told(tmp_path: Path) -> None:
    async def later(text: str) -> str:
        await asyncio.sleep(0)
        return text[::-1]

    def fails(text: str) -> str:
        raise ValueError(f"no {text} here")

    calls = [
        SHOUT,
        tool_call("later", {"text": "abc"}),
        tool_call("fails", {"text": "luck"}),
        tool_call("shout", {"words": 1}),
        tool_call("whisper", {}),
    ]
    steps: list[StepRecord] = []
    tools = [tool(), tool(later, "later"), tool(fails, "fails")]
    async with rig(tmp_path / "run", ["Now.\n" + "\n".join(calls), "done"]) as it:
        outcome = await play(it, ScriptedEpisode(DONE, tools=tools), on_step=lambda _, step: steps.append(step))
    results = [text for role, text in said(outcome) if role == "tool"]
    assert results[:3] == ["HEY", "cba", "error: ValueError: no luck here"]
    assert results[3].startswith("error: TypeError: ")
    assert "words" in results[3]
    assert results[4] == "error: there is no tool 'whisper'; there are: shout, later, fails"
    assert [result["content"] for result in steps[0].tool_results] == results
    assert steps[0].answer is None
    assert outcome.ended[AGENT].text == "done"
    assert it.engine.violations == []


async def test_a_tool_ends_the_episode(tmp_path: Path) -> None:
    episode = ScriptedEpisode(DONE)

    def stop(text: str) -> str:
        episode.over = True
        return "so be it"

    episode._tools = [tool(stop)]
    async with rig(tmp_path / "run", [SHOUT]) as it:
        outcome = await play(it, episode)
    assert outcome.ended[AGENT].stop_reason is StopReason.TOOL_STOPPED
    assert said(outcome)[-1] == ("tool", "so be it")


async def test_one_tool_call_too_many_stops_it(tmp_path: Path) -> None:
    episode = ScriptedEpisode(DONE, tools=[tool()], max_tool_calls=3)
    async with rig(tmp_path / "run", [SHOUT + "\n" + SHOUT] * 2) as it:
        outcome = await play(it, episode)
    assert outcome.ended[AGENT].stop_reason is StopReason.MAX_TOOL_CALLS
    assert [role for role, _ in said(outcome)].count("tool") == 3


async def test_time_is_over_while_the_model_speaks(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", slowly("one two three four", token_delay_s=1.0)) as it:
        outcome = await play(it, ScriptedEpisode(DONE), timeout_s=0.3)
    assert outcome.timed_out
    assert outcome.ended[AGENT].stop_reason is StopReason.TIMEOUT
    assert said(outcome) == [("user", "Go.")]


async def test_time_is_over_while_a_tool_blocks(tmp_path: Path) -> None:
    steps: list[StepRecord] = []
    going_on = threading.Event()

    def blocks(text: str) -> str:
        going_on.wait(20)
        return text

    episode = ScriptedEpisode(DONE, tools=[tool(blocks)])
    async with rig(tmp_path / "run", [SHOUT]) as it:
        began = time.monotonic()
        outcome = await play(it, episode, timeout_s=0.5, on_step=lambda _, step: steps.append(step))
        assert time.monotonic() - began < 10
    going_on.set()
    assert outcome.ended[AGENT].stop_reason is StopReason.TIMEOUT
    assert [step.stop_reason for step in steps] == [StopReason.TIMEOUT]
    assert steps[0].turn is not None


async def test_an_environment_that_does_not_answer_is_broken(tmp_path: Path) -> None:
    class Slow(ScriptedEpisode):
        async def answer(self, seat: str, reply: dict[str, Any]) -> Answer:
            await asyncio.sleep(60)
            return DONE

    async with rig(tmp_path / "run", ["one"]) as it:
        outcome = await play(it, Slow(DONE), timeout_s=0.5)
    assert outcome.ended == {}
    assert "the environment had not answered when 0.5 s were over" in str(outcome.broken)


async def test_what_an_environment_raises_travels(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", ["one"]) as it:
        with pytest.raises(TimeoutError, match="of its own"):
            await play(it, ScriptedEpisode(DONE, meddle=_raise))


def _raise(_: object) -> None:
    raise TimeoutError("of its own")


async def test_a_gateway_that_is_not_there_is_broken(tmp_path: Path) -> None:
    outcome = await agent_named("chat").run(assigned(ScriptedEpisode(DONE), tmp_path))
    assert outcome.ended == {}
    assert "the gateway cannot be reached" in str(outcome.broken)


async def test_an_engine_that_fails_is_broken(tmp_path: Path) -> None:
    engine = scripted(["one"])
    engine.mishaps = dict.fromkeys(range(50), Mishap.TRUNCATED)
    async with rig(tmp_path / "run", engine) as it:
        outcome = await play(it, ScriptedEpisode(DONE))
    assert outcome.ended == {}
    assert "the gateway answered 502" in str(outcome.broken)


async def test_a_session_that_has_ended_is_broken_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", ["one"]) as it:
        session = await it.gateway.open_session(task_id="t")
        await session.finish()
        connections = {AGENT: connected(session)}
        outcome = await agent_named("chat").run(assigned(ScriptedEpisode(DONE), tmp_path, connections=connections))
    assert "the gateway answered 503" in str(outcome.broken)
    assert "takes no more turns" in str(outcome.broken)


async def test_seats_take_turns_in_sessions_of_their_own(tmp_path: Path) -> None:
    def told(text: str) -> Answer:
        return Answer(messages=[{"role": "user", "content": text}])

    episode = ScriptedEpisode(told("x said a"), told("o said b"), Answer(done=True, reward=1.0), seats=("x", "o"))
    engine = scripted(["a", "b", "c"], conversation=lambda asked: "o" if "x said" in asked.prompt else "x")
    async with rig(tmp_path / "run", engine, thinking_retention="all") as it:
        outcome = await play(it, episode)
        turns = it.turns()
    assert [seat for seat, _ in episode.replies] == ["x", "o", "x"]
    assert said(outcome, "x") == [("user", "Go."), ("assistant", "a"), ("user", "o said b"), ("assistant", "c")]
    assert said(outcome, "o") == [("user", "Go."), ("user", "x said a"), ("assistant", "b")]
    assert sorted(turn.session[-1] for turn in turns) == ["0", "0", "1"]
    assert engine.violations == []


async def test_the_seat_that_brought_the_end_on_has_the_reason(tmp_path: Path) -> None:
    script: list[str | Step] = ["fine", Step("too lo", finish="length")]
    episode = ScriptedEpisode(AGAIN, DONE, seats=("x", "o"))
    engine = scripted(script, conversation=lambda asked: None)
    async with rig(tmp_path / "run", engine) as it:
        outcome = await play(it, episode)
    assert {seat: ended.stop_reason for seat, ended in outcome.ended.items()} == {
        "x": StopReason.COMPLETED,
        "o": StopReason.MAX_TOKENS,
    }


async def test_a_seat_without_turns_left_ends_it_for_all(tmp_path: Path) -> None:
    engine = scripted(["a", "b", "c"], conversation=lambda asked: None)
    async with rig(tmp_path / "run", engine) as it:
        outcome = await play(it, ScriptedEpisode(*[AGAIN] * 9, seats=("x", "o")), max_turns=1)
    assert (outcome.ended["x"].stop_reason, outcome.ended["o"].stop_reason) == (
        StopReason.MAX_TURNS,
        StopReason.COMPLETED,
    )


MEDDLED: list[tuple[str, list[str | Step], StopReason]] = [
    ("success", ["one", "two"], StopReason.COMPLETED),
    ("parse error", ["one", '<tool_call>\n{"name": \n</tool_call>'], StopReason.PARSE_ERROR),
    ("overflow", ["one", "two"], StopReason.CONTEXT_OVERFLOW),
    ("truncation", ["one", Step("two", finish="length")], StopReason.MAX_TOKENS),
    ("time-out", ["one", Step("two two two two", token_delay_s=2.0)], StopReason.TIMEOUT),
]


@pytest.mark.parametrize(("path", "script", "reason"), MEDDLED, ids=[path for path, *_ in MEDDLED])
async def test_a_mutating_environment_does_not_alter_what_is_recorded(
    tmp_path: Path, path: str, script: list[str | Step], reason: StopReason
) -> None:
    first = [{"role": "user", "content": "Go."}]
    more = [{"role": "user", "content": "Again. " + ("word " * 300 if path == "overflow" else "")}]
    expected_more = more[0]["content"]
    state = {"board": [1]}
    last = Answer(done=True, stop_reason=reason, env_state=state)

    def meddle(reply: dict[str, Any]) -> None:
        reply["content"] = "forged"
        first[0]["content"] = "forged"
        episode.messages[0]["content"] = "forged"

    episode = ScriptedEpisode(Answer(messages=more, env_state=state), last, meddle=meddle)
    async with rig(tmp_path / "run", script) as it:
        budget: dict[str, Any] = {"context_budget": 200} if path == "overflow" else {}
        session = await it.gateway.open_session(task_id="t", **budget)
        writer = TraceWriter(it.gateway.service.sessions.of_id(session.id).rollout)

        def on_step(seat: str, step: StepRecord) -> None:
            answer = step.answer
            writer.step(turn=step.turn, env_state=answer.env_state if answer else None, stop_reason=step.stop_reason)
            more[0]["content"] = "forged"
            state["board"].append(2)

        connections = {AGENT: connected(session)}
        limits = {"timeout_s": 1.0 if path == "time-out" else 60.0}
        outcome = await agent_named("chat").run(
            assigned(episode, tmp_path, connections=connections, on_step=on_step, **limits)
        )
        await session.finish()
    assert outcome.ended[AGENT].stop_reason is reason
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    trace = trace_of(rollout)
    prompt = trace.whole_prompt(1)
    assert isinstance(prompt, list)
    assert [message["content"] for message in prompt] == ["Go.", "one", expected_more]
    assert trace.steps[0].env_state == {"board": [1]}
    assert "forged" not in str(trace)
    assert "forged" not in str(outcome)


async def test_cancelling_drops_the_request(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", slowly("one two three four", token_delay_s=5.0)) as it:
        running = asyncio.ensure_future(play(it, ScriptedEpisode(DONE)))
        await it.requested(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(it.engine.aborted) == 1


async def test_many_attempts_with_blocking_tools_do_not_wait_for_each_other(tmp_path: Path) -> None:
    together = threading.Barrier(40)

    def meets(text: str) -> str:
        together.wait(20)
        return "met"

    def reply(asked: Asked) -> str:
        return "done" if "met" in asked.prompt else SHOUT

    async with rig(tmp_path / "run", scripted(reply, conversation=lambda asked: None)) as it:
        sessions = [await it.gateway.open_session(task_id=f"t{number}") for number in range(40)]
        episodes = [ScriptedEpisode(DONE, tools=[tool(meets)]) for _ in sessions]
        agent = agent_named("chat")
        outcomes = await asyncio.gather(
            *(
                agent.run(assigned(episode, tmp_path, connections={AGENT: connected(session)}))
                for episode, session in zip(episodes, sessions, strict=True)
            )
        )
    assert {outcome.ended[AGENT].text for outcome in outcomes} == {"done"}
