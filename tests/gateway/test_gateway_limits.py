"""What a session may do: turns, tokens, tools, and how it samples."""

from pathlib import Path
from typing import Any

import pytest

from gateways import CALCULATOR, Api, rig, user
from rolltape.errors import BadRequest
from rolltape.records.turn import Finish, TurnFlag
from scripted_engine import tool_call

APIS = list(Api)


async def test_a_turn_over_the_cap_is_refused_for_good_and_side_requests_do_not_count(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open(max_turns=2)
        title = [{"role": "system", "content": "Generate a concise title of this session."}, user("hello")]
        for messages in (title, "one", title, "two", title):
            assert (await it.ask(opened, messages)).status == 200
        over = await it.ask(opened, "three")
        assert (over.status, over.headers["x-should-retry"]) == (429, "false")
        assert "maximum of turns (2)" in over.error
        done = await it.finish(opened)
        assert done["turns"] == 5
        assert done["ledger"].keys() == {"trained", "dropped:auxiliary"}


async def test_a_request_that_cannot_be_rendered_uses_up_no_turn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadRequest("the messages cannot be rendered")

    async with rig(run, lambda _: "ok") as it:
        opened = await it.open(max_turns=1)
        with monkeypatch.context() as patched:
            patched.setattr(it.gateway.service.prompts, "render", refuse)
            assert (await it.ask(opened, "one")).status == 400
        assert (await it.ask(opened, "one")).status == 200
        assert (await it.ask(opened, "two")).status == 429


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_budget_ends_with_length_and_nothing_is_sampled(
    run: Path, api: Api, stream: bool
) -> None:
    async with rig(run) as it:
        opened = await it.open(context_budget=10)
        answer = await it.ask(opened, "a question of more than ten tokens, since it goes on and on", api, stream=stream)
        assert answer.status == 200
        words = (b'"length"', b"max_output_tokens", b"model_context_window_exceeded", b"MAX_TOKENS")
        assert any(word in answer.raw for word in words)
        assert it.engine.requests == 0
        await it.finish(opened)
    (turn,) = it.turns()
    assert (turn.facts.finish, len(turn.sampled_ids), turn.facts.extra["over_budget"]) == (Finish.LENGTH, 0, True)


async def test_the_budget_limits_the_reply_too(run: Path) -> None:
    async with rig(run, ["a rather long reply that goes on for quite some tokens, and then some"]) as it:
        opened = await it.open(context_budget=24)
        answer = await it.ask(opened, "hi")
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.json["usage"]["total_tokens"] == 24


@pytest.mark.parametrize("spec", [{"denied_tools": ["calculator"]}, {"allowed_tools": ["search"]}])
async def test_a_denied_tool_is_not_offered_and_its_call_is_told_as_text_without_a_fork(
    run: Path, spec: dict[str, Any]
) -> None:
    script = ["Let me see. " + tool_call("calculator", {"expression": "1 + 1"}), "Two."]
    async with rig(run, script) as it:
        opened = await it.open(thinking=False, **spec)
        messages = [user("What is 1 + 1?")]
        first = await it.ask(opened, messages, tools=[CALCULATOR])
        assert "calculator" not in it.engine.said[0].asked.prompt
        assert "calculator is denied" in first.headers["x-rolltape-ignored-params"]
        reply = first.json["choices"][0]
        assert reply["finish_reason"] == "stop"
        assert "tool_calls" not in reply["message"]
        assert "<tool_call>" in reply["message"]["content"]
        messages += [reply["message"], user("You may not.")]
        await it.ask(opened, messages, tools=[CALCULATOR])
        assert it.engine.violations == []
        done = await it.finish(opened)
        assert len(done["samples"]) == 1
    first_turn, second = it.turns()
    assert TurnFlag.DENIED_TOOL in first_turn.facts.flags
    assert first_turn.facts.extra["denied"] == ["calculator"]
    assert second.facts.extra["prompt"] == "bridged"


async def test_nobody_can_force_a_call_of_a_denied_tool_whose_loading_is_deferred(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open(denied_tools=["search"])
        search = {"name": "search", "input_schema": {"type": "object"}, "defer_loading": True}
        choice = {"type": "tool", "name": "search"}
        answer = await it.ask(opened, "hello", Api.MESSAGES, tools=[search], tool_choice=choice)
        told = answer.headers["x-rolltape-ignored-params"]
        assert "search is denied in this session" in told
        assert "no such tool is offered" in told
        assert "structural_tag" not in it.engine.said[0].asked.body["sampling_params"]


async def test_sampling_is_the_agents_then_the_sessions_then_forced(run: Path) -> None:
    async with rig(run, lambda _: "ok", sampling={"top_k": 7}, forced={"min_p": 0.25}) as it:
        opened = await it.open(sampling={"temperature": 0.5, "top_p": 0.9}, forced={"max_tokens": 33})
        await it.ask(opened, "hello", temperature=0.75, max_tokens=5)
        await it.finish(opened)
        sent = it.engine.said[0].asked.body["sampling_params"]
    assert {name: sent[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")} == {
        "temperature": 0.75,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.25,
        "max_new_tokens": 33,
    }
    (turn,) = it.turns()
    assert turn.facts.sampling == {"temperature": 0.75, "top_p": 0.9, "top_k": 7, "min_p": 0.25, "max_tokens": 33}
    assert turn.facts.sampling_asked == {"temperature": 0.75, "max_tokens": 5}


async def test_a_top_p_of_0_is_applied_as_a_top_k_of_1_since_engines_refuse_it(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open()
        await it.ask(opened, "hello", top_p=0)
        await it.finish(opened)
        sent = it.engine.said[0].asked.body["sampling_params"]
    assert (sent["top_p"], sent["top_k"]) == (1.0, 1)
    (turn,) = it.turns()
    applied, asked = turn.facts.sampling, turn.facts.sampling_asked
    assert applied is not None
    assert (applied["top_p"], applied["top_k"]) == (1.0, 1)
    assert asked == {"top_p": 0.0}


async def test_thinking_is_as_the_session_says(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        for thinking in (True, False):
            opened = await it.open(thinking=thinking, attempt=int(thinking))
            await it.ask(opened, "hello", Api.MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
            ends_closed = it.engine.said[-1].asked.prompt.endswith("</think>\n\n")
            assert ends_closed is not thinking
