"""One holder of a key sends all that it can: it is refused early, others are served meanwhile, and nothing is kept."""

import asyncio
import gzip
import json
import logging
import resource
import signal
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateways import PATHS, Answer, Api, Rig, body_of, rig, text_of, user
from rolltape.errors import BadRequest, PromptTooLong
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.request import check_request_size
from rolltape.gateway.server import answering, health
from rolltape.gateway.server.answering import unpack
from rolltape.gateway.sessions import SessionWork
from rolltape.gateway.turn.history import History, keyed
from rolltape.gateway.wire.chat.dialect import CHAT, ChatDialect

LARGE = "word " * 20_000  # above what is done on the event loop


def bomb(mib: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head, tail = json.dumps(body_of(Api.CHAT, "?")).encode().split(b"?")
    packed = [packer.compress(head), *(packer.compress(b"a" * 2**20) for _ in range(mib))]
    return b"".join([*packed, packer.compress(tail), packer.flush()])


@pytest.mark.parametrize("api", list(Api))
async def test_what_expands_beyond_the_limit_is_refused(run: Path, api: Api) -> None:
    async with rig(run, lambda _: "ok", max_body_mib=1) as it:
        path = f"/s/{(await it.open())['key']}{PATHS[api]}"
        refused = await it.call("POST", path, bomb(20), Content_Encoding="gzip")
        assert (refused.status, "1 MiB" in refused.error) == (413, True)
        small = gzip.compress(json.dumps(body_of(api, "hello")).encode())
        assert (await it.call("POST", path, small, Content_Encoding="gzip")).status == 200


def test_what_expands_is_not_made_before_it_is_refused() -> None:
    packed = bomb(256)
    tracemalloc.start()
    try:
        with pytest.raises(web.HTTPRequestEntityTooLarge):
            unpack(packed, "gzip", 4 * 2**20)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b"one ") + gzip.compress(b"two")),
        ("x-gzip", gzip.compress(b"one two")),
        ("deflate", zlib.compress(b"one two")),
        ("deflate", zlib.compress(b"one two")[2:-4]),  # without zlib's header, as some clients send it
    ],
    ids=["two parts", "an alias", "zlib", "raw"],
)
def test_what_clients_compress_is_read(encoding: str, packed: bytes) -> None:
    assert unpack(packed, encoding, 7) == b"one two"
    with pytest.raises(web.HTTPRequestEntityTooLarge):
        unpack(packed, encoding, 6)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "packed",
    [b"plain", gzip.compress(b"cut short")[:-9], b"\x78", bytes(40)],
    ids=["plain", "cut short", "a start", "zeros"],
)
def test_what_is_not_in_its_encoding_is_refused(encoding: str, packed: bytes) -> None:
    with pytest.raises(BadRequest, match=encoding):
        unpack(packed, encoding, 1000)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
@pytest.mark.parametrize("api", Api)
async def test_an_encoding_that_is_not_read_is_refused_with_those_that_are(run: Path, api: Api, encoding: str) -> None:
    async with rig(run) as it:
        path = f"/s/{(await it.open())['key']}{PATHS[api]}"
        refused = await it.call("POST", path, b"packed", Content_Encoding=encoding)
    assert (refused.status, refused.headers["Accept-Encoding"]) == (415, "gzip, deflate")
    assert refused.error == f"Content-Encoding is '{encoding}'; send gzip, deflate, or the body as it is"
    assert refused.headers["x-should-retry"] == "false"


async def test_a_body_that_cannot_be_decoded_leaves_the_next_request_of_its_connection_alone(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        path = f"/s/{(await it.open())['key']}{PATHS[Api.CHAT]}"
        reader, writer = await asyncio.open_connection("127.0.0.1", _port(it))
        for garbage in (b"plain", bytes(200_000)):
            await _send(writer, path, garbage, "Content-Encoding: gzip")
            assert (await _answer(reader)).status == 400
            await _send(writer, path, json.dumps(body_of(Api.CHAT, "hello")).encode())
            assert text_of(Api.CHAT, await _answer(reader)) == "ok"
        writer.close()


async def test_a_request_that_is_half_sent_is_ended(run: Path) -> None:
    async with rig(run, idle_s=0.2, body_s=0.2) as it:
        path = f"/s/{(await it.open())['key']}{PATHS[Api.CHAT]}"
        async with asyncio.timeout(20):
            for half in (b"", b"POST /v1/", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Mo"):
                reader, writer = await asyncio.open_connection("127.0.0.1", _port(it))
                writer.write(half)
                assert await reader.read() == b""
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(it))
            writer.write(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{{".encode())
            answer = await _answer(reader)
            assert (answer.status, "had not come" in answer.error) == (408, True)
            writer.close()


async def test_more_messages_than_are_allowed_are_refused(run: Path) -> None:
    async with rig(run, lambda _: "ok", max_messages=4) as it:
        opened = await it.open()
        assert (await it.ask(opened, [user(str(n)) for n in range(4)])).status == 200
        refused = await it.ask(opened, [user(str(n)) for n in range(5)])
        assert (refused.status, "5, and 4 are allowed" in refused.error) == (400, True)


async def test_many_stop_strings_are_refused(run: Path) -> None:
    """Each is looked for at every token of a stream, on the event loop."""
    async with rig(run) as it:
        refused = await it.ask(await it.open(), "hello", stop=[str(number) for number in range(65)])
        assert (refused.status, "64 are allowed" in refused.error) == (400, True)


@pytest.mark.parametrize(
    ("api", "field", "value"),
    [
        (Api.CHAT, "metadata", {str(n): n for n in range(50_000)}),
        (Api.RESPONSES, "metadata", {"a": "x" * 300_000}),
        (Api.MESSAGES, "metadata", {"user_id": "x" * 300_000}),
        (Api.CHAT, "stop", ["x" * 300_000]),
        (Api.MESSAGES, "stop_sequences", ["x" * 300_000]),
        (Api.CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}),
    ],
)
async def test_a_large_field_that_is_no_part_of_the_prompt_is_refused(
    run: Path, api: Api, field: str, value: Any
) -> None:
    """Each turn would have it recorded and sent to the engine, on the event loop."""
    async with rig(run, lambda _: "ok") as it:
        refused = await it.ask(await it.open(), "hello", api, **{field: value})
        assert refused.status == 400
        assert refused.error.startswith("stop strings: " if "stop" in field else f"{field}: ")
        assert "262,144 are allowed" in refused.error


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b"[]," * 300_000 + b"[]]}",
        b'{"messages":' + b'[{"a":' * 120_000 + b"0" + b"}]" * 120_000 + b"}",
        b'{"messages":[' + b"1," * 3_100_000 + b"1]}",
    ],
    ids=["lists", "nested", "numbers"],
)
async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    run: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatDialect, "read", _must_not_run)
    async with rig(run) as it:
        opened = await it.open()
        refused = await it.call("POST", f"/s/{opened['key']}{PATHS[Api.CHAT]}", body)
        assert (refused.status, "are allowed" in refused.error) == (400, True)


@pytest.mark.parametrize("api", list(Api))
async def test_a_prompt_far_over_the_context_is_refused_untokenized_as_each_api_says_it(
    run: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open(context_budget=1000)
        assert (await it.ask(opened, "hello", api)).status == 200
        with monkeypatch.context() as patch:
            patch.setattr(ChatPrompts, "render", _must_not_run)
            refused = await it.ask(opened, [user(LARGE), user(LARGE)], api)
        assert refused.status == 400
        assert "prompt is too long" in refused.error
        assert refused.headers["x-should-retry"] == "false"
        if api in (Api.CHAT, Api.RESPONSES):
            assert refused.json["error"]["code"] == "context_length_exceeded"
        # A little over the context the reply ends at once, as it always did.
        over = await it.ask(opened, "word " * 1100, api)
        assert over.status == 200
    assert it.turns()[-1].facts.extra["over_budget"]


def test_the_length_of_a_prompt_is_estimated_by_its_own_tokens() -> None:
    """Tokenizers have a long run of spaces as one token, and a letter of some scripts as several."""
    ask = keyed(CHAT.read(json.dumps(body_of(Api.CHAT, [user("a" * 60_000), user(" " * 60_000)])).encode(), {}))
    check_request_size(ask, 10, 1000, lambda text: len(text) // 64)
    with pytest.raises(PromptTooLong, match=r"about (29|30|31),\d\d\d tokens, and the maximum context length is 1,000"):
        check_request_size(ask, 10, 1000, lambda text: len(text) // 4)
    check_request_size(ask, 10, None, len)


@pytest.mark.parametrize("where", ["unpack", "parse", "place", "render"])
async def test_long_work_of_one_session_makes_nobody_else_wait(
    run: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, let_go = threading.Event(), threading.Event()
    owner, name = {
        "unpack": (answering, "unpack"),
        "parse": (ChatDialect, "read"),
        "place": (History, "place"),
        "render": (ChatPrompts, "render"),
    }[where]
    real: Any = getattr(owner, name)

    def held(*args: Any, **kw: Any) -> Any:
        if LARGE[:50] in repr(args)[:4000] or where == "unpack" or any("word word" in str(one)[:4000] for one in args):
            entered.set()
            assert let_go.wait(20), "the event loop stood still"
        return real(*args, **kw)

    async with rig(run, lambda _: "ok") as it:
        first, other = await it.open(attempt=0), await it.open(attempt=1)
        monkeypatch.setattr(owner, name, held)
        packed = gzip.compress(json.dumps(body_of(Api.CHAT, LARGE)).encode())
        path = f"/s/{first['key']}{PATHS[Api.CHAT]}"
        asking = asyncio.ensure_future(it.call("POST", path, packed, Content_Encoding="gzip"))
        await asyncio.to_thread(entered.wait, 10)
        try:
            assert entered.is_set()
            assert (await it.call("GET", "/health")).status == 200
            assert text_of(Api.CHAT, await it.ask(other, "hello")) == "ok"
            assert not asking.done()
        finally:
            let_go.set()
        assert text_of(Api.CHAT, await asking) == "ok"


async def test_a_session_has_one_piece_of_long_work_done_at_a_time_even_if_its_client_leaves() -> None:
    work, let_go = SessionWork(), threading.Event()
    running = most = 0
    lock = threading.Lock()

    def long() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        let_go.wait(20)
        with lock:
            running -= 1

    tasks = [asyncio.ensure_future(work.run(long)) for _ in range(4)]
    while not running:
        await asyncio.sleep(0.001)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (running, most) == (1, 1)
    let_go.set()
    await asyncio.gather(*tasks[1:])
    assert (running, most) == (0, 1)


@pytest.fixture
def no_room() -> Iterator[Any]:
    """A function after which this process can write no file beyond a page."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(is_full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]) if is_full else limits)

    try:
        yield fill
    finally:
        fill(False)
        signal.signal(signal.SIGXFSZ, before)


async def test_a_gateway_whose_disk_is_full_is_not_healthy_until_there_is_room(
    run: Path, no_room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_FRESH_S", 0.0)
    async with rig(run, lambda _: "ok") as it:
        assert (await it.call("GET", "/health")).status == 200
        no_room(True)
        answer = await it.call("GET", "/health")
        assert (answer.status, b"cannot be written" in answer.raw, str(run).encode() in answer.raw) == (
            503,
            True,
            False,
        )
        no_room(False)
        assert (await it.call("GET", "/health")).status == 200
        assert [path.name for path in run.iterdir() if path.name.startswith(".probe")] == []


async def test_an_agent_is_told_no_path_of_what_failed_and_the_admin_is(
    run: Path, no_room: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open()
        no_room(True)
        with caplog.at_level(logging.WARNING):
            failed = await it.ask(opened, "hello")
        finishing = await it.call("POST", f"/sessions/{opened['session']}/finish", {})
        no_room(False)
        assert (failed.status, finishing.status) == (500, 500)
        assert str(run) not in failed.error
        assert str(run) in finishing.error
        assert str(run) in caplog.text


def _must_not_run(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was refused too late")


def _port(it: Rig) -> int:
    return int(it.gateway.url.rpartition(":")[2])


async def _send(writer: asyncio.StreamWriter, path: str, body: bytes, *headers: str) -> None:
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers])
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> Answer:
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return Answer(int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"])))
