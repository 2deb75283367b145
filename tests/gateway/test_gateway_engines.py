"""Engines that fail: the turn is recorded, the agent gets its API's own error, and nothing from before is lost."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rolltape
from gateways import PATHS, QUICK, Api, Rig, body_of, eventually, rig, scripted, text_of, user
from rolltape.cli import run as rolltape_command
from rolltape.errors import EngineUnreachable
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Finish, TurnFlag
from rolltape.tiny import shipped_model
from scripted_engine import Json, Mishap, Step

APIS = list(Api)
FAULTS = [Mishap.ERROR_500, Mishap.TRUNCATED, Mishap.WRONG_LENGTHS, Mishap.DIES]
LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize("mishap", FAULTS)
async def test_a_fault_that_passes_is_not_seen_by_the_agent(run: Path, mishap: Mishap) -> None:
    engine = scripted(["ok"])
    engine.mishaps[0] = mishap
    async with rig(run, engine) as it:
        opened = await it.open()
        assert text_of(Api.CHAT, await it.ask(opened, "hello")) == "ok"
        done = await it.finish(opened)
        assert done["ledger"] == {"trained": len(it.engine.said[-1].ids)}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mishap", FAULTS)
async def test_a_fault_that_stays_is_told_in_the_apis_shape_and_recorded(
    run: Path, api: Api, stream: bool, mishap: Mishap
) -> None:
    engine = scripted(["before", "after"])
    async with rig(run, engine, patience={**QUICK, "retry_s": 0.2}) as it:
        opened = await it.open()
        first = await it.ask(opened, "hello", api)
        engine.mishaps |= dict.fromkeys(range(1, 99), mishap)
        failed = await it.ask(opened, "go on", api, stream=stream)
        engine.mishaps.clear()
        if stream:
            assert failed.status == 200
            _assert_error_event(api, failed.events[-1])
        else:
            assert failed.status == 502
            assert "no engine gave a reply" in failed.error
            assert failed.json.get("type") == ("error" if api is Api.MESSAGES else None)
        assert engine.url.removeprefix("http://").encode() not in failed.raw
        assert text_of(api, await it.ask(opened, "go on", api, retry=1)) == "after"
        looked = (await it.call("GET", f"/sessions/{opened['session']}")).json
        assert [turn["finish"] for turn in looked["turns"]] == ["stop", "error", "stop"]
        await it.finish(opened)
    turns = it.turns()
    assert turns[0].id == first.headers["x-rolltape-turn"]
    assert turns[1].facts.finish is Finish.ERROR
    assert "errors of the engine" in (turns[1].facts.error or "")
    assert rolltape_command(["check", str(run)]) == 0


def _assert_error_event(api: Api, event: Json) -> None:
    match api:
        case Api.CHAT:
            assert event["error"]["type"] == "server_error"
        case Api.MESSAGES:
            assert (event["type"], event["error"]["type"]) == ("error", "api_error")
        case Api.RESPONSES:
            assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        case Api.GEMINI:
            assert (event["error"]["code"], event["error"]["status"]) == (502, "UNAVAILABLE")


async def test_what_an_engine_gave_before_it_failed_for_good_is_recorded(run: Path) -> None:
    engine = scripted([LONG])
    engine.mishaps |= {0: Mishap.ABORTED, **dict.fromkeys(range(1, 99), Mishap.ERROR_500)}
    async with rig(run, engine, patience={**QUICK, "retry_s": 0.2}) as it:
        opened = await it.open()
        assert (await it.ask(opened, "hello")).status == 502
        done = await it.finish(opened)
        assert done["ledger"] == {"masked:engine_error": len(engine.said[0].ids)}
    (turn,) = it.turns()
    assert turn.sampled_ids.tolist() == engine.said[0].ids


async def test_a_trimmed_stop_id_is_flagged_and_counted(run: Path) -> None:
    engine = scripted(["ok"])
    engine.mishaps[0] = Mishap.NO_STOP_ID
    async with rig(run, engine) as it:
        opened = await it.open()
        assert text_of(Api.CHAT, await it.ask(opened, "hello")) == "ok"
        assert it.gateway.status()["counts"]["stop_missing"] == 1
        await it.finish(opened)
    (turn,) = it.turns()
    assert TurnFlag.MISSING_STOP_ID in turn.facts.flags


async def test_an_engine_that_never_answers_is_given_up(run: Path) -> None:
    engine = scripted(["ok"])
    engine.mishaps |= dict.fromkeys(range(2), Mishap.HANG)
    patience = {**QUICK, "reply_s": 0.3, "faults": 2}
    async with rig(run, engine, patience=patience) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello")
        assert answer.status == 502
        assert "no reply within 0.3 s" in (it.turns()[0].facts.error or "")
        await eventually(lambda: len(engine.aborted) == 2)


async def test_an_engine_that_goes_away_and_comes_back_within_patience_is_waited_for(run: Path) -> None:
    engine = scripted(lambda _: "ok")
    async with rig(run, engine, patience={**QUICK, "retry_s": 10.0}) as it:
        opened = await it.open()
        await engine.refuse()
        asking = it.asking(opened, "hello")
        await asyncio.sleep(0.3)
        assert (await it.call("GET", "/health")).status == 503
        await engine.listen()
        assert text_of(Api.CHAT, await asking) == "ok"
        assert (await it.call("GET", "/health")).status == 200


@pytest.mark.parametrize("api", APIS)
async def test_without_any_engine_the_agent_is_told(run: Path, api: Api) -> None:
    async with rig(run, ["ok"], patience={**QUICK, "retry_s": 0.2}) as it:
        opened = await it.open()
        await it.engine.refuse()
        answer = await it.ask(opened, "hello", api)
        assert answer.status == 502
        assert "no engine gave a reply" in answer.error
        assert it.engine.url.removeprefix("http://").encode() not in answer.raw
        assert "x-should-retry" not in answer.headers


async def test_an_engine_that_dies_in_a_reply_and_no_longer_answers_is_noticed(run: Path) -> None:
    engine = scripted(lambda asked: Step("ok", token_delay_s=0 if asked.number else 5))
    async with rig(run, engine, patience={**QUICK, "retry_s": 10.0}) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        await engine.refuse()
        await engine.listen()
        assert text_of(Api.CHAT, await asking) == "ok"


async def test_sessions_keep_to_an_engine_and_move_when_it_dies(run: Path) -> None:
    first, second = scripted(lambda _: "first"), scripted(lambda _: "second")
    async with (
        first,
        second,
        Gateway(
            engine=[f"sglang:{first.url}", f"sglang:{second.url}"], model=shipped_model(), tape=run, patience=QUICK
        ) as gateway,
        aiohttp.ClientSession() as http,
    ):
        it = Rig(gateway, first, run, http)
        opened = [await it.open(attempt=attempt) for attempt in range(4)]
        for _ in range(2):
            told = [text_of(Api.CHAT, await it.ask(one, "hello")) for one in opened]
            assert told == ["first", "second", "first", "second"]
        status = gateway.status()
        assert [(engine["up"], engine["sessions"]) for engine in status["engines"]] == [(True, 2), (True, 2)]
        await second.refuse()
        assert [text_of(Api.CHAT, await it.ask(one, "hello")) for one in opened] == ["first"] * 4
        status = gateway.status()
        assert [(engine["up"], engine["sessions"]) for engine in status["engines"]] == [(True, 4), (False, 0)]
        assert (await it.call("GET", "/health")).status == 200
        await second.listen()
        await eventually(lambda: gateway.status()["engines"][1]["up"])
        late = await it.open(attempt=9)
        assert text_of(Api.CHAT, await it.ask(late, "hello")) == "second"
        for one in [*opened, late]:
            await it.finish(one)
    assert rolltape_command(["check", str(run)]) == 0


async def test_no_engine_at_the_start_is_an_error_that_names_it(run: Path) -> None:
    with pytest.raises(EngineUnreachable, match=r"no engine answers: sglang http://127\.0\.0\.1:9"):
        async with Gateway(engine="sglang:http://127.0.0.1:9", model=shipped_model(), tape=run):
            pass


@pytest.mark.parametrize("api", APIS)
async def test_a_malformed_call_is_told_as_the_text_that_it_is(run: Path, api: Api) -> None:
    text = 'I call.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": \n</tool_call>'
    async with rig(run, [text]) as it:
        opened = await it.open(thinking=False)
        answer = await it.ask(opened, [user("hello")], api, **_tools(api))
        assert "<tool_call>" in text_of(api, answer)
        await it.finish(opened)
    (turn,) = it.turns()
    assert TurnFlag.MALFORMED_CALL in turn.facts.flags


def _tools(api: Api) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}}
    match api:
        case Api.CHAT:
            return {"tools": [{"type": "function", "function": {"name": "calculator", "parameters": schema}}]}
        case Api.MESSAGES:
            return {"tools": [{"name": "calculator", "input_schema": schema}]}
        case Api.RESPONSES:
            return {"tools": [{"type": "function", "name": "calculator", "parameters": schema}]}
        case Api.GEMINI:
            return {"tools": [{"functionDeclarations": [{"name": "calculator", "parameters": schema}]}]}


async def test_a_rollout_on_the_tape_says_which_engine_and_what_it_gave(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        await it.call("POST", f"/s/{opened['key']}{PATHS[Api.CHAT]}", body_of(Api.CHAT, "hello"))
        await it.finish(opened)
    turn = rolltape.read(run).rollout(opened["rollout"]).turns[0]
    assert turn.facts.extra["engine"] == f"sglang {it.engine.url}"
    assert turn.facts.logprob_kind == "after_temperature"
    assert turn.facts.renderer
    assert turn.facts.fingerprint == it.gateway.service.prompts.fingerprint
