"""Whether a reply arrived, and what becomes of one that did not: recorded, not trained, and there for a retry."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

import rolltape
from gateways import PATHS, Api, Rig, body_of, eventually, rig, scripted, slowly, streamed_text_of, text_of
from live_streams import allowing, used_up
from rolltape.cli import run as rolltape_command
from rolltape.records.turn import Delivery, Finish
from scripted_engine import Json, Mishap, Step

APIS = list(Api)
LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_on_the_tape_before_its_reply_ends_and_is_then_delivered(
    run: Path, api: Api, stream: bool
) -> None:
    async with rig(run) as it:
        opened = await it.open()
        answer = await it.ask(opened, "hello", api, stream=stream)
        (turn,) = it.turns()
        assert turn.reply is not None
        assert turn.reply.to_dict()["content"] == "ok"
        assert (streamed_text_of if stream else text_of)(api, answer) == "ok"
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.DELIVERED)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_the_engine_works_has_it_stop_and_nothing_trains(
    run: Path, api: Api, stream: bool
) -> None:
    async with rig(run, allowing(lambda _: LONG, 4)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello", api, stream=stream)
        await used_up(it.engine)
        asking.cancel()
        await eventually(lambda: len(it.engine.aborted) == 1)
        await eventually(lambda: len(it.turns()) == 1)
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.UNDELIVERED)
        (turn,) = it.turns()
        assert turn.facts.finish is Finish.ABORT
        assert turn.reply is None or (stream and LONG.startswith(turn.reply.text))  # what was seen coming
        assert turn.sampled_ids.tolist() == it.engine.said[0].ids
        done = await it.finish(opened)
        assert done["samples"] == []
        assert done["ledger"] == {"masked:aborted": len(turn.sampled_ids)}


async def test_a_client_that_leaves_within_its_own_request_leaves_nothing(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        body = json.dumps(body_of(Api.CHAT, "hello")).encode()
        _, writer = await _connected(it)
        writer.write(_request(opened, body)[:-5])
        await writer.drain()
        writer.close()
        assert (await it.ask(opened, "hello")).status == 200
        done = await it.finish(opened)
        assert (done["turns"], it.engine.requests) == (1, 1)


async def test_a_client_that_leaves_within_the_reply_did_not_get_it_and_a_retry_does(run: Path) -> None:
    long = "word " * 20_000
    async with rig(run, scripted([long, "another"], unusual=False), max_reply_tokens=10**6) as it:
        opened = await it.open()
        body = json.dumps(body_of(Api.CHAT, "hello", stream=True)).encode()
        reader, writer = await _connected(it)
        writer.write(_request(opened, body))
        await reader.readuntil(b'"role":"assistant"')
        await eventually(lambda: len(it.turns()) == 1)
        await asyncio.sleep(0.2)
        assert it.turns()[0].facts.delivery is Delivery.UNKNOWN
        writer.transport.abort()
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.UNDELIVERED)
        again = await it.ask(opened, "hello", stream=True)
        assert streamed_text_of(Api.CHAT, again).strip() == long.strip()
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.DELIVERED)
        assert it.engine.requests == 1


async def test_a_client_that_does_not_read_does_not_keep_a_session_from_ending(run: Path) -> None:
    async with rig(run, scripted(["word " * 20_000], unusual=False), max_reply_tokens=10**6) as it:
        opened = await it.open()
        reader, writer = await _connected(it)
        writer.write(_request(opened, json.dumps(body_of(Api.CHAT, "hello")).encode()))
        await eventually(lambda: len(it.turns()) == 1)
        done = await it.finish(opened, drain_s=0.1)
        assert (done["turns"], done["interrupted"], done["samples"]) == (1, 0, [])
        writer.transport.abort()
        del reader


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_takes_nothing_of_its_reply_is_disconnected_and_a_retry_gets_it(
    run: Path, stream: bool
) -> None:
    long = "word " * 20_000
    engine = scripted([long], unusual=False)
    async with rig(run, engine, max_reply_tokens=10**6, stall_s=2.0) as it:
        opened = await it.open()
        reader, writer = await _connected(it)
        writer.write(_request(opened, json.dumps(body_of(Api.CHAT, "hello", stream=stream)).encode()))
        await eventually(lambda: [turn.facts.delivery for turn in it.turns()] == [Delivery.UNDELIVERED])
        assert (await it.call("GET", "/status")).json["in_flight"] == 0
        again = await it.ask(opened, "hello", stream=stream)
        assert (streamed_text_of if stream else text_of)(Api.CHAT, again).strip() == long.strip()
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.DELIVERED)
        writer.transport.abort()
        del reader


async def test_a_client_that_reads_slowly_gets_all_of_its_reply(run: Path) -> None:
    async with rig(run, scripted(["word " * 20_000], unusual=False), max_reply_tokens=10**6, stall_s=1.0) as it:
        opened = await it.open()
        reader, writer = await _connected(it)
        writer.write(_request(opened, json.dumps(body_of(Api.CHAT, "hello")).encode()))
        began, got = time.monotonic(), b""
        while not got.endswith(b"}}"):
            got += await reader.read(2**16 if time.monotonic() - began > 2 else 512)
            await asyncio.sleep(0.02)
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.DELIVERED)
        writer.close()


async def test_a_client_that_does_not_read_does_not_delay_the_idle_end_of_an_open_session(run: Path) -> None:
    engine = scripted(["word " * 20_000], unusual=False)
    async with rig(run, engine, max_reply_tokens=10**6, open=True, open_idle_s=0.1) as it:
        reader, writer = await _connected(it)
        writer.write(_request({"key": "any"}, json.dumps(body_of(Api.CHAT, "hello")).encode()))
        await eventually(lambda: len(it.turns()) == 1)
        await eventually(lambda: len(it.gateway.service.sessions) == 0)
        writer.transport.abort()
        del reader


@pytest.mark.parametrize("api", APIS)
async def test_a_retry_by_its_own_word_gets_the_same_turn_again(run: Path, api: Api) -> None:
    async with rig(run, ["first", "second"]) as it:
        opened = await it.open(max_turns=1)
        first = await it.ask(opened, "hello", api)
        again = await it.ask(opened, "hello", api, retry=1)
        assert again.json == first.json
        assert again.headers["x-rolltape-turn"] == first.headers["x-rolltape-turn"]
        done = await it.finish(opened)
        assert (done["turns"], it.engine.requests) == (1, 1)


async def test_the_same_body_again_without_that_word_is_another_turn(run: Path) -> None:
    async with rig(run, ["first", "second"]) as it:
        opened = await it.open()
        assert [text_of(Api.CHAT, await it.ask(opened, "hello")) for _ in range(2)] == ["first", "second"]
        assert (await it.finish(opened))["turns"] == 2


async def test_a_retry_joins_the_turn_in_flight(run: Path) -> None:
    async with rig(run, slowly(LONG)) as it:
        opened = await it.open()
        first = it.asking(opened, "hello")
        await it.requested(1)
        second = it.asking(opened, "hello", retry=1)
        await eventually(lambda: it.gateway.status()["counts"].get("retries") == 1)
        first.cancel()
        assert text_of(Api.CHAT, await second) == LONG
        assert it.engine.aborted == []
        assert (await it.finish(opened))["turns"] == 1


@pytest.mark.parametrize("retry", [0, 1])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_retry_goes_on_from_what_was_sampled(run: Path, retry: int, at_once: bool) -> None:
    async with rig(run, slowly(LONG, 0.03)) as it:
        opened = await it.open(max_turns=1)
        for request in range(1, 3):
            asking = it.asking(opened, "hello", retry=retry)
            await it.requested(request)
            await asyncio.sleep(0.3)
            asking.cancel()
            if not at_once:
                await eventually(partial(_has_turns, it, request))
        answer = await it.ask(opened, "hello", retry=retry)
        assert text_of(Api.CHAT, answer) == LONG
        said = it.engine.said
        assert [len(one.ids) > 0 for one in said] == [True, True, True]
        assert said[2].asked.prompt_ids == said[0].asked.prompt_ids + said[0].ids + said[1].ids
        usage = answer.json["usage"]
        assert usage["prompt_tokens"] == len(said[0].asked.prompt_ids)
        assert usage["completion_tokens"] == sum(len(one.ids) for one in said)
        following = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": LONG}]
        assert (await it.ask(opened, [*following, {"role": "user", "content": "more"}])).status == 429
        done = await it.finish(opened)
        assert done["ledger"] == {"trained": usage["completion_tokens"]}
        (sample,) = done["samples"]
        assert sum(sample["trained_mask"]) == usage["completion_tokens"]
    assert [turn.facts.finish for turn in it.turns()] == [Finish.ABORT, Finish.ABORT, Finish.STOP]
    _check(run)


async def test_a_retry_of_what_was_given_up_before_it_began_starts_anew(run: Path) -> None:
    engine = scripted(["gone", "here"])
    engine.mishaps[0] = Mishap.HANG
    async with rig(run, engine) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        asking.cancel()
        await eventually(lambda: len(it.turns()) == 1)
        assert text_of(Api.CHAT, await it.ask(opened, "hello", retry=1)) in ("gone", "here")
        done = await it.finish(opened)
        assert done["turns"] == 2
    _check(run)


async def test_a_resumed_reply_may_be_given_up_before_it_goes_on(run: Path) -> None:
    engine = scripted(slowly(LONG, 0.03))
    engine.mishaps[1] = Mishap.HANG
    async with rig(run, engine) as it:
        opened = await it.open()
        for request in range(1, 3):
            asking = it.asking(opened, "hello")
            await it.requested(request)
            await asyncio.sleep(0.2)
            asking.cancel()
            await eventually(partial(_has_turns, it, request))
        answer = await it.ask(opened, "hello")
        assert text_of(Api.CHAT, answer) == LONG
        done = await it.finish(opened)
        assert done["ledger"] == {"trained": answer.json["usage"]["completion_tokens"]}
    assert [len(turn.sampled_ids) > 0 for turn in it.turns()] == [True, False, True]
    _check(run)


async def test_a_resumed_reply_that_is_full_already_is_given_as_it_is(run: Path) -> None:
    async with rig(run, slowly(LONG, 0.02)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello", max_tokens=500)
        await it.requested(1)
        await asyncio.sleep(0.2)
        asking.cancel()
        await eventually(lambda: len(it.turns()) == 1)
        sampled = len(it.turns()[0].sampled_ids)
        session = it.gateway.service.sessions.of_id(opened["session"])
        budget = len(it.turns()[0].tokens)
        session.spec = msgspec.structs.replace(session.spec, context_budget=budget)
        answer = await it.ask(opened, "hello", max_tokens=500)
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == sampled
        assert LONG.startswith(text_of(Api.CHAT, answer))
        assert text_of(Api.CHAT, answer)


async def test_a_retry_after_an_engines_error_is_a_new_turn(run: Path) -> None:
    engine = scripted(["ok"])
    engine.mishaps |= dict.fromkeys(range(3), Mishap.TRUNCATED)
    async with rig(run, engine) as it:
        opened = await it.open(max_turns=1)
        failed = await it.ask(opened, "hello")
        assert failed.status == 502
        assert "x-should-retry" not in failed.headers
        assert text_of(Api.CHAT, await it.ask(opened, "hello", retry=1)) == "ok"
        done = await it.finish(opened)
        assert done["turns"] == 2
    assert [turn.facts.finish for turn in it.turns()] == [Finish.ERROR, Finish.STOP]
    _check(run)


async def test_a_delivered_reply_that_came_back_trains_and_one_that_nobody_took_does_not(run: Path) -> None:
    async with rig(run, lambda asked: Step("ok" if asked.number else LONG, token_delay_s=0.03)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        asking.cancel()
        await eventually(lambda: len(it.turns()) == 1)
        await it.ask(opened, "something else")
        done = await it.finish(opened)
        assert done["ledger"]["trained"] == len(it.engine.said[1].ids)


def _has_turns(it: Rig, count: int) -> bool:
    return len(it.turns()) == count


async def _connected(it: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that takes in little before it is read."""
    address = ("127.0.0.1", int(it.gateway.url.rpartition(":")[2]))
    for number in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    if one.getsockname() == address:  # connections inherit it from the socket that listens
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(slow, address)
    return await asyncio.open_connection(sock=slow, limit=1024)


def _request(opened: Json, body: bytes) -> bytes:
    path = f"/s/{opened['key']}{PATHS[Api.CHAT]}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _check(run: Path) -> None:
    assert rolltape_command(["check", str(run)]) == 0
    assert rolltape.read(run).problems() == []
