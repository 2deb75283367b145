"""Live streams: text comes as it is sampled, calls when the turn is durable, and all of it equals the tape."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

import rolltape
from gateways import PATHS, Api, Rig, body_of, eventually, rig, scripted
from live_streams import (
    Live,
    Message,
    allow,
    allowing,
    hold_recording,
    said_streamed,
    said_whole,
    streaming,
    thinking,
    tools,
)
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Delivery, Finish
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tiny import shipped_model
from scripted_engine import Mishap, Step, tool_call

APIS = list(Api)
THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is 7."


@pytest.mark.parametrize("api", APIS)
async def test_reasoning_and_text_come_as_they_are_sampled(run: Path, api: Api) -> None:
    engine = allowing([THOUGHT])
    async with rig(run, engine) as it, streaming(it, await it.open(), api, **thinking(api)) as live:
        seen: list[Message] = []
        while not live.said.text.startswith("It is"):
            allow(engine, 1)
            await asyncio.sleep(0.01)
            seen.append(live.said)
        assert engine.said == []  # it has not ended
        assert Message("Let me see.", "", []) in seen
        assert Message("Let me", "", []) in seen
        allow(engine)
        await eventually(lambda: live.ended)
        assert live.said == Message("Let me see.", "It is 7.", [])


@pytest.mark.parametrize("api", APIS)
async def test_a_call_comes_when_the_turn_is_durable_and_not_before(
    run: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, may_record = hold_recording(monkeypatch)
    engine = scripted(["I compute. " + tool_call("calculator", {"expression": "1"})], incremental=True)
    async with rig(run, engine) as it, streaming(it, await it.open(), api, tools=tools(api)) as live:
        await recording.wait()
        await eventually(lambda: live.said.text == "I compute.")
        await asyncio.sleep(0.05)
        assert live.said == Message("", "I compute.", [])
        assert not {b"tool_call", b"function_call", b"tool_use", b"functionCall"} & set(live.raw.split(b'"'))
        assert it.turns() == []
        may_record.set()
        await eventually(lambda: len(live.said.calls) == 1)
        assert len(it.turns()) == 1


ODD = [
    "plain",
    "  spaces around  \n\n",
    THOUGHT,
    "<think>\nunclosed thinking",
    "<think>\n\n</think>\n\nempty thinking",
    "an emoji \U0001f9d1\u200d\U0001f680 and é in pieces",
    "text with < and <tool and </think> in it",
    "Before. " + tool_call("calculator", {"expression": "1"}),
    "Two. " + tool_call("calculator", {"expression": "1"}) + " between " + tool_call("calculator", {"expression": "2"}),
    'Broken. <tool_call>\n{"name": "calculator", "arguments": {"expression": ',
    "Broken. <tool_call>\nnot json\n</tool_call> and more",
    THOUGHT + " " + tool_call("calculator", {"expression": "3"}),
    "a\u2028b\u0085c",
    "",
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("text", ODD)
async def test_a_streamed_reply_equals_the_unstreamed_one_and_the_tape(run: Path, api: Api, text: str) -> None:
    fields = {"tools": tools(api), **thinking(api)}
    async with rig(run, scripted(lambda _: text, incremental=True)) as it:
        whole = await it.ask(await it.open(), "hello", api, **fields)
        streamed = await it.ask(await it.open(attempt=1), "hello", api, stream=True, **fields)
        assert said_streamed(api, streamed.events) == said_whole(api, whole.json)
        if api is Api.RESPONSES:
            assert said_whole(api, streamed.events[-1]["response"]) == said_whole(api, whole.json)
    first, second = (rollout.turns[0] for rollout in rolltape.read(run).rollouts())
    assert first.reply is not None
    assert second.reply is not None
    assert first.reply.canonical == second.reply.canonical


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
async def test_a_stop_string_is_not_shown_though_its_letters_come_one_by_one(run: Path, api: Api) -> None:
    stop = {"stop_sequences" if api is Api.MESSAGES else "stop": ["END"]}
    engine = allowing(lambda _: Step("some E EN END", "END"))
    async with rig(run, engine) as it, streaming(it, await it.open(), api, **stop) as live:
        seen = set()
        while not live.ended:
            allow(engine, 1)
            await asyncio.sleep(0.01)
            seen.add(live.said.text)
        assert live.said.text == "some E EN"
        assert all("some E EN".startswith(text) for text in seen)
        assert len(seen) > 2
    (turn,) = it.turns()
    assert turn.facts.finish is Finish.STOP_STRING


async def test_a_change_of_weights_in_the_middle_is_not_seen(run: Path) -> None:
    engine = allowing(lambda _: "one two three four five six")
    async with rig(run, engine) as it, streaming(it, await it.open(), Api.CHAT) as live:
        allow(engine, 4)
        await eventually(lambda: live.said.text != "")
        before = live.said.text
        await it.gateway.pause()
        engine.version = "v1"
        await it.gateway.resume("v1")
        allow(engine)
        await eventually(lambda: live.ended)
        assert live.said.text == "one two three four five six"
        assert live.said.text.startswith(before)
    (turn,) = it.turns()
    assert [segment.last_version for segment in turn.facts.segments] == ["v0", "v1"]
    assert turn.facts.delivery is Delivery.DELIVERED


async def test_an_engine_that_dies_is_replaced_and_the_stream_goes_on(run: Path) -> None:
    text = "one two three four five six"
    dying, other = scripted(lambda _: text, incremental=True), scripted(lambda _: " four five six", incremental=True)
    dying.mishaps[0] = Mishap.DIES
    async with (
        dying,
        other,
        Gateway(engine=[f"sglang:{dying.url}", f"sglang:{other.url}"], model=shipped_model(), tape=run) as gateway,
        aiohttp.ClientSession() as http,
    ):
        it = Rig(gateway, dying, run, http)
        answer = await it.ask(await it.open(), "hello", stream=True)
        sent = said_streamed(Api.CHAT, answer.events).text
        assert sent.endswith(" four five six")
        (turn,) = it.turns()
        assert turn.reply is not None
        assert turn.reply.text == sent
        assert len(turn.facts.segments) == 2


@pytest.mark.parametrize("api", APIS)
async def test_an_engine_that_dies_without_another_ends_the_stream_with_the_apis_error(run: Path, api: Api) -> None:
    engine = scripted(lambda _: "one two three four five six", incremental=True)
    engine.mishaps |= {0: Mishap.DIES} | dict.fromkeys(range(1, 99), Mishap.ERROR_500)
    async with rig(run, engine) as it:
        answer = await it.ask(await it.open(), "hello", api, stream=True)
        assert said_streamed(api, [one for one in answer.events if "error" not in one]).text.startswith("one")
        last = answer.events[-1]
        error = last["response"]["error"] if api is Api.RESPONSES else last["error"]
        assert "no engine gave a reply" in error["message"]
    (turn,) = it.turns()
    assert turn.facts.finish is Finish.ERROR


async def test_what_cannot_have_been_sampled_ends_a_stream_whose_beginning_was_shown(run: Path) -> None:
    engine = scripted(lambda _: "one two three", incremental=True)
    engine.mishaps |= dict.fromkeys(range(99), Mishap.TOO_MANY)
    async with rig(run, engine) as it:
        answer = await it.ask(await it.open(), "hello", stream=True, max_tokens=3)
        assert "error" in answer.events[-1]
    assert all(turn.facts.error for turn in it.turns())


@pytest.mark.parametrize("api", APIS)
async def test_a_retry_after_half_a_stream_gets_the_stream_from_its_start(run: Path, api: Api) -> None:
    engine = allowing(lambda _: "one two three four five six")
    async with rig(run, engine) as it:
        opened = await it.open()
        async with streaming(it, opened, api) as live:
            allow(engine, 4)
            await eventually(lambda: live.said.text != "")
        await eventually(lambda: it.gateway.service.pool.in_flight == 0)
        async with streaming(it, opened, api) as again:
            allow(engine, 1)
            await eventually(lambda: again.said.text.startswith(live.said.text))
            allow(engine)
            await eventually(lambda: again.ended)
            assert again.said.text == "one two three four five six"
        await it.finish(opened, reward=1.0)
    turns = it.turns()
    assert [turn.facts.finish for turn in turns] == [Finish.ABORT, Finish.STOP]
    (rollout,) = rolltape.read(run).rollouts()
    linearized = rolltape.linearize(rollout, "exact")
    assert sum(sample.trained_tokens for sample in linearized.samples()) == len(turns[1].tokens) - len(
        turns[0].prompt_tokens
    )


async def test_two_clients_of_one_turn_see_the_same_stream(run: Path) -> None:
    engine = allowing(lambda _: "one two three four five six")
    async with rig(run, engine) as it:
        opened = await it.open()
        async with streaming(it, opened, Api.CHAT) as first:
            allow(engine, 4)
            await eventually(lambda: first.said.text != "")
            url = f"{it.gateway.url}/s/{opened['key']}{PATHS[Api.CHAT]}"
            headers = {"x-stainless-retry-count": "1"}
            async with it.http.post(url, json=body_of(Api.CHAT, "hello", stream=True), headers=headers) as response:
                second = Live(Api.CHAT)
                reading = asyncio.ensure_future(second.read(response))
                await eventually(lambda: second.said.text == first.said.text)
                allow(engine)
                await reading
                await eventually(lambda: first.said.text == "one two three four five six")
                assert second.said == first.said
    assert len(it.turns()) == 1


async def test_a_client_that_hangs_up_has_the_engine_stop(run: Path) -> None:
    engine = allowing(lambda _: "one two three four five six")
    async with rig(run, engine) as it:
        opened = await it.open()
        async with streaming(it, opened, Api.CHAT) as live:
            allow(engine, 4)
            await eventually(lambda: live.said.text != "")
        await eventually(lambda: len(it.turns()) == 1)
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.UNDELIVERED)
    (turn,) = it.turns()
    assert turn.facts.finish is Finish.ABORT
    assert 0 < len(turn.sampled_ids) < 8


async def test_a_buffered_gateway_says_so_and_streams_at_the_end(run: Path) -> None:
    async with rig(run, scripted(lambda _: THOUGHT), renderer="default") as it:
        status = await it.call("GET", "/status")
        assert status.json["streams"].startswith("buffered: no safe rule")
        answer = await it.ask(await it.open(), "hello", stream=True)
        assert said_streamed(Api.CHAT, answer.events).text.endswith("It is 7.")
    async with rig(run) as it:
        assert (await it.call("GET", "/status")).json["streams"] == "live"


@pytest.mark.parametrize("api", APIS)
async def test_a_failure_of_the_gateway_itself_ends_a_stream_with_the_apis_error(
    run: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(SessionRecorder, "record_turn_async", fail)
    async with rig(run, scripted(lambda _: "one two three", incremental=True)) as it:
        async with asyncio.timeout(10):
            answer = await it.ask(await it.open(), "hello", api, stream=True)
        last = answer.events[-1]
        error = last["response"]["error"] if api is Api.RESPONSES else last["error"]
        assert error["message"] == "the gateway failed; its log has the error"
        assert b"surprise" not in answer.raw
