"""A gateway that is killed, and another one on the same run: sessions go on, and no reply is lost or given twice."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

import rolltape
from gateways import PATHS, Api, body_of, eventually, scripted, streamed_text_of, text_of, user
from rolltape.cli import run as rolltape_command
from rolltape.records.rollout import Rollout, Status
from rolltape.records.turn import Delivery, Finish
from rolltape.tape.journal import left_open
from rolltape.tiny import shipped_model
from scripted_engine import Asked, Json, Mishap, ScriptedEngine, Step
from served_gateways import client_of, free_port, served

pytestmark = pytest.mark.slow  # each starts several processes

# Runs the command, and stops each reply for good when its turn is durable.
STOPS_WHEN_DURABLE = """
import asyncio, sys
from rolltape.gateway.server.agents import Agents
ended = Agents._ended
async def stop(self, turn):
    await ended(self, turn)
    print("durable", file=sys.stderr, flush=True)
    await asyncio.Event().wait()
Agents._ended = stop
from rolltape.cli import main
sys.exit(main())
"""


def numbered(asked: Asked) -> Step:
    return Step(f"reply {asked.number}")


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """It has an event loop of its own: gateways are started and killed by calls that wait."""
    with scripted(numbered).in_thread() as started:
        yield started


def rollout_in(run: Path) -> Rollout:
    (found,) = rolltape.read(run).rollouts()
    return found


async def delivered(run: Path, count: int) -> None:
    """Wait until so many replies are recorded as delivered, which is a moment after their client has them."""
    await eventually(lambda: [turn.facts.delivery for turn in rollout_in(run).turns] == [Delivery.DELIVERED] * count)


def check_tape(run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The tape is sound, and what it trains on is what the engine gave."""
    assert rolltape_command(["check", str(run)]) == 0, capsys.readouterr()
    given = [(said.asked.prompt_ids, said.ids, said.logprobs) for said in engine.said]
    for turn in rollout_in(run).turns:
        if len(turn.sampled_ids):
            assert turn.logprobs is not None
            held = turn.prompt_ids.tolist()
            # What was aborted is a part of what the engine says that it gave.
            assert any(
                held == prompt and ids[: len(turn.sampled_ids)] == turn.sampled_ids.tolist() for prompt, ids, _ in given
            ), turn
    assert engine.violations == []


async def asked_with_sdk(api: Api, url: str, opened: Json, retries: int = 12) -> str:
    """A reply by a real SDK, which asks again by itself."""
    if api is Api.CHAT:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=opened["key"], max_retries=retries) as openai:
            reply = await openai.chat.completions.create(model="it", messages=[{"role": "user", "content": "hello"}])
            return reply.choices[0].message.content or ""
    async with AsyncAnthropic(base_url=url, api_key=opened["key"], max_retries=retries) as anthropic:
        said = await anthropic.messages.create(
            model="it", max_tokens=512, messages=[{"role": "user", "content": "hello"}]
        )
        return "".join(block.text for block in said.content if block.type == "text")


async def test_a_session_goes_on_between_two_turns(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(run) as client:
        with served(run, engine) as first:
            opened = await client.open(first, forced={"temperature": 0.5}, max_turns=2)
            said = text_of(Api.CHAT, await client.ask(first, opened, "one"))
            await delivered(run, 1)
            first.kill()
        with served(run, engine) as second:
            messages = [user("one"), {"role": "assistant", "content": said}, user("two")]
            answer = await client.ask(second, opened, messages)
            assert (answer.status, text_of(Api.CHAT, answer)) == (200, "reply 1")
            assert answer.headers["x-rolltape-session"] == opened["session"]
            assert (await client.ask(second, opened, [*messages, user("three")])).status == 429
            shown = (await client.call("GET", f"{second.url}/sessions/{opened['session']}")).json
            assert [turn["delivery"] for turn in shown["turns"]] == ["delivered", "delivered"]
            finished = await client.finish(second, opened, reward=1.0)
            assert (finished["turns"], len(finished["samples"])) == (2, 1)
    rollout = rollout_in(run)
    assert (rollout.status, rollout.reward) == (Status.FINISHED, 1.0)
    assert [turn.facts.extra["prompt"] for turn in rollout.turns] == ["rendered", "bridged"]
    assert [turn.temperature for turn in rollout.turns] == [0.5, 0.5]
    check_tape(run, engine, capsys)


async def test_a_reply_of_the_killed_gateway_can_be_named_instead_of_sent(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(run) as client:
        with served(run, engine) as first:
            opened = await client.open(first)
            said = (await client.ask(first, opened, "one", Api.RESPONSES, instructions="be brief")).json
            first.kill()
        with served(run, engine) as second:
            named = {"previous_response_id": said["id"], "instructions": "be brief"}
            answer = await client.ask(second, opened, "two", Api.RESPONSES, **named)
            assert (answer.status, text_of(Api.RESPONSES, answer)) == (200, "reply 1")
            await client.finish(second, opened)
    assert [turn.facts.extra["prompt"] for turn in rollout_in(run).turns] == ["rendered", "bridged"]
    check_tape(run, engine, capsys)


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
async def test_an_sdks_retry_gets_a_reply_when_the_gateway_is_killed_before_the_engine_answered(
    run: Path, engine: ScriptedEngine, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    engine.mishaps[0] = Mishap.HANG
    async with client_of(run) as client:
        with served(run, engine, port=port) as first:
            opened = await client.open(first)
            asking = asyncio.ensure_future(asked_with_sdk(api, first.url, opened))
            await eventually(lambda: engine.requests == 1)
            first.kill()
        with served(run, engine, port=port):
            assert await asking == "reply 1"
            await delivered(run, 1)
    check_tape(run, engine, capsys)


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
async def test_an_sdks_retry_gets_the_reply_that_was_durable_when_the_gateway_was_killed(
    run: Path, engine: ScriptedEngine, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    async with client_of(run) as client:
        with served(run, engine, port=port, command=[sys.executable, "-c", STOPS_WHEN_DURABLE]) as first:
            opened = await client.open(first)
            asking = asyncio.ensure_future(asked_with_sdk(api, first.url, opened))
            assert first.process.stderr is not None
            lines = first.process.stderr
            while await asyncio.to_thread(lines.readline) != "durable\n":
                assert first.process.poll() is None
            (turn,) = rollout_in(run).turns
            first.kill()
        assert turn.facts.delivery is Delivery.UNKNOWN
        with served(run, engine, port=port):
            assert await asking == "reply 0"
            await delivered(run, 1)
    assert engine.requests == 1
    check_tape(run, engine, capsys)


@pytest.mark.parametrize("api", list(Api))
async def test_a_reply_that_was_durable_is_given_again_to_the_letter(run: Path, api: Api) -> None:
    with scripted(["<think>\nhm\n</think>\n\nwell"]).in_thread() as engine:
        async with client_of(run) as client:
            with served(run, engine) as first:
                opened = await client.open(first)
                before = await client.ask(first, opened, "one", api)
                first.kill()
            with served(run, engine) as second:
                path = f"{second.url}/s/{opened['key']}{PATHS[api]}"
                retry = {"x-stainless-retry-count": "1"}
                after = await client.call("POST", path, body_of(api, "one"), **retry)
                streamed = await client.call("POST", path, body_of(api, "one", stream=True), **retry)
    assert (after.status, after.json) == (200, before.json)
    assert after.headers["x-rolltape-turn"] == before.headers["x-rolltape-turn"]
    assert streamed_text_of(api, streamed) == text_of(api, before)
    assert engine.requests == 1


async def test_a_reply_that_broke_off_in_its_stream_is_sampled_anew(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"word{number}" for number in range(200))
    engine._script = lambda asked: Step(words, token_delay_s=0.005)
    async with client_of(run) as client:
        with served(run, engine) as first:
            opened = await client.open(first)
            path = f"/s/{opened['key']}{PATHS[Api.CHAT]}"
            async with client.http.post(first.url + path, json=body_of(Api.CHAT, "one", stream=True)) as response:
                await response.content.readuntil(b"word")
                first.kill()
                with pytest.raises((aiohttp.ClientError, ConnectionError)):
                    await response.read()
        with served(run, engine) as second:
            answer = await client.ask(second, opened, "one", stream=True)
            assert streamed_text_of(Api.CHAT, answer) == words
            await delivered(run, 1)
    check_tape(run, engine, capsys)


async def test_a_reply_that_its_client_left_goes_on_from_what_was_sampled(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"word{number}" for number in range(300))
    engine._script = lambda asked: Step(words, token_delay_s=0.005)
    async with client_of(run) as client:
        with served(run, engine) as first:
            opened = await client.open(first)
            path = f"/s/{opened['key']}{PATHS[Api.CHAT]}"
            async with client.http.post(first.url + path, json=body_of(Api.CHAT, "one", stream=True)) as response:
                await response.content.readuntil(b"word9")
                response.close()
            await eventually(lambda: len(rollout_in(run).turns) == 1)
            first.kill()
        (cut,) = rollout_in(run).turns
        assert cut.facts.finish is Finish.ABORT
        assert len(cut.sampled_ids) > 5
        with served(run, engine) as second:
            answer = await client.ask(second, opened, "one", stream=True)
            assert streamed_text_of(Api.CHAT, answer) == words
    cut, whole = rollout_in(run).turns
    assert whole.prompt_ids.tolist() == cut.tokens.to_numpy().tolist()
    check_tape(run, engine, capsys)


async def test_a_session_is_taken_over_as_often_as_its_gateway_is_killed(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[Json] = [user("0")]
    async with client_of(run) as client:
        opened: Json = {}
        for number in range(4):
            with served(run, engine) as gateway:
                opened = opened or await client.open(gateway)
                answer = await client.ask(gateway, opened, messages)
                assert text_of(Api.CHAT, answer) == f"reply {number}"
                messages += [{"role": "assistant", "content": f"reply {number}"}, user(str(number + 1))]
                await delivered(run, number + 1)
                gateway.kill()
    rollout = rollout_in(run)
    assert rollout.head.epoch == 3
    assert [turn.facts.extra["prompt"] for turn in rollout.turns] == ["rendered", *["bridged"] * 3]
    assert {turn.facts.delivery for turn in rollout.turns} == {Delivery.DELIVERED}
    check_tape(run, engine, capsys)


async def test_two_gateways_of_a_run_serve_each_others_sessions(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(run) as client:
        with served(run, engine) as first, served(run, engine) as second:
            opened = await client.open(first)
            said = text_of(Api.CHAT, await client.ask(second, opened, "one"))
            messages = [user("one"), {"role": "assistant", "content": said}, user("two")]
            assert streamed_text_of(Api.CHAT, await client.ask(second, opened, messages, stream=True)) == "reply 1"
            beside = await client.call("POST", f"{second.url}/sessions", {"rollout": opened["rollout"]})
            assert beside.json["rollout"] == opened["rollout"]
            shown = await client.call("GET", f"{second.url}/sessions/{opened['session']}")
            assert [turn["delivery"] for turn in shown.json["turns"]] == ["delivered", "delivered"]
            dropped = await client.call(
                "DELETE", f"{second.url}/sessions/{beside.json['session']}", {"reason": "enough"}
            )
            assert dropped.status == 200
            assert (await client.finish(second, opened, reward=0.5))["turns"] == 2
            assert (await client.ask(second, opened, "three")).status == 503
    rollout = rollout_in(run)
    assert (rollout.reward, rollout.head.epoch) == (0.5, 0)
    assert [turn.facts.extra["prompt"] for turn in rollout.turns] == ["rendered", "bridged"]
    check_tape(run, engine, capsys)


async def test_a_reply_is_not_delivered_where_the_client_of_a_gateway_in_between_has_left(
    run: Path, engine: ScriptedEngine
) -> None:
    engine._script = lambda asked: Step("word " * 300, token_delay_s=0.005)
    async with client_of(run) as client:
        with served(run, engine) as first, served(run, engine) as second:
            opened = await client.open(first)
            path = f"/s/{opened['key']}{PATHS[Api.CHAT]}"
            async with client.http.post(second.url + path, json=body_of(Api.CHAT, "one", stream=True)) as response:
                await response.content.readuntil(b"word")
                response.close()
            await eventually(lambda: [turn.facts.delivery for turn in rollout_in(run).turns] == [Delivery.UNDELIVERED])
    (turn,) = rollout_in(run).turns
    assert turn.facts.finish is Finish.ABORT


async def test_a_gateway_takes_the_sessions_of_another_over_when_that_dies(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine) as first, served(run, engine) as second, served(run, engine) as third:
            opened = await client.open(first)
            said = text_of(Api.CHAT, await client.ask(second, opened, "one"))
            first.kill()
            messages = [user("one"), {"role": "assistant", "content": said}, user("two")]
            answers = await asyncio.gather(
                *(client.ask(one, opened, messages) for one in (second, third, second, third))
            )
            assert {answer.status for answer in answers} == {200}
            shown = await client.call("GET", f"{third.url}/sessions/{opened['session']}")
            assert len(shown.json["turns"]) == 5
    assert rollout_in(run).head.epoch == 1


async def test_unknown_keys_are_refused_without_reading_the_run_again(
    run: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(run) as client:
        with served(run, engine) as first:
            opened = await client.open(first)
            first.kill()
        read: list[Path] = []
        load = left_open.LeftOpen.__init__

        def reads(self: left_open.LeftOpen, path: Path) -> None:
            read.append(path)
            load(self, path)

        monkeypatch.setattr(left_open.LeftOpen, "__init__", reads)
        async with rolltape.Gateway(engine=f"sglang:{engine.url}", model=shipped_model(), tape=run) as gateway:
            path = f"{gateway.url}/s/{{}}{PATHS[Api.CHAT]}"
            wrong = [opened["key"][:12] + f"{number:032d}" for number in range(1000)]
            wrong += [f"rts-{number:040d}" for number in range(100)]
            answers = [await client.call("POST", path.format(key), {}) for key in wrong]
            assert {answer.status for answer in answers} == {401}
            assert len(read) == 1
            answer = await client.call("POST", path.format(opened["key"]), body_of(Api.CHAT, "one"))
            assert answer.status == 200


async def test_no_key_is_on_the_tape(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--open") as gateway:
            opened = await client.open(gateway)
            await client.ask(gateway, opened, "one")
            named = {"Authorization": "Bearer sk-somebodys-own-key", "x-rolltape-session": "a1"}
            answer = await client.call("POST", gateway.url + PATHS[Api.CHAT], body_of(Api.CHAT, "one"), **named)
            assert answer.status == 200
    files = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert opened["session"].encode() in files
    assert opened["key"].encode() not in files
    assert b"sk-somebodys-own-key" not in files


@pytest.mark.parametrize("headers", [{"x-rolltape-session": "a1"}, {}], ids=["named", "by its conversation"])
async def test_a_session_that_a_request_opened_is_found_again(
    run: Path, engine: ScriptedEngine, headers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"Authorization": "Bearer any", **headers}
    messages = [user("one")]
    async with client_of(run) as client:
        for number in range(3):
            with served(run, engine, "--open") as gateway:
                answer = await client.call("POST", gateway.url + PATHS[Api.CHAT], body_of(Api.CHAT, messages), **named)
                said = answer.json["choices"][0]["message"]
                assert said["content"] == f"reply {number}"
                messages += [{"role": "assistant", "content": said["content"]}, user("more")]
                gateway.kill()
    assert [turn.facts.extra["prompt"] for turn in rollout_in(run).turns] == ["rendered", "bridged", "bridged"]
    check_tape(run, engine, capsys)


async def test_a_session_that_ended_in_order_is_not_revived(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine) as first:
            opened = await client.open(first)
            first.process.terminate()
            await asyncio.to_thread(first.process.communicate)
        with served(run, engine) as second:
            assert (await client.ask(second, opened, "one")).status == 401
            finished = await client.call("POST", f"{second.url}/sessions/{opened['session']}/finish", {"reward": 1.0})
            assert finished.status == 404
    assert rollout_in(run).status is Status.FAILED
