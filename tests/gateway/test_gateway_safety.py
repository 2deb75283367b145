"""Who may do what, what is never said, and how quiet the log is."""

import asyncio
import contextlib
import hmac
import logging
from pathlib import Path

import aiohttp
import pytest

from gateways import PATHS, Api, Rig, body_of, rig, scripted, slowly, text_of
from rolltape.errors import NotAllowed
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.sessions import key_digest
from rolltape.gateway.wire.chat.dialect import ChatStream
from rolltape.tiny import shipped_model
from scripted_engine import Mishap

ADMIN = [
    ("POST", "/sessions"),
    ("GET", "/sessions"),
    ("GET", "/sessions/x"),
    ("POST", "/sessions/x/finish"),
    ("DELETE", "/sessions/x"),
    ("POST", "/weights"),
    ("POST", "/weights/pause"),
    ("POST", "/weights/resume"),
    ("GET", "/status"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_another_host_than_loopback_is_refused_without_an_admin_key(run: Path, host: str) -> None:
    with pytest.raises(NotAllowed, match="admin key"):
        Gateway(engine="tiny", model=shipped_model(), tape=run, host=host)


def test_an_open_gateway_is_for_loopback_alone(run: Path) -> None:
    with pytest.raises(NotAllowed, match="open"):
        Gateway(engine="tiny", model=shipped_model(), tape=run, host="0.0.0.0", admin_key="k", open=True)


async def test_by_default_it_listens_on_loopback(run: Path) -> None:
    async with rig(run) as it:
        assert it.gateway.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("given", ["topsecret", None])
async def test_what_runs_the_gateway_needs_the_admin_key(run: Path, method: str, path: str, given: str | None) -> None:
    async with rig(run, admin_key=given) as it:
        opened = await it.open()
        key, secret = opened["key"], it.gateway.admin_key
        wrong = [
            {"authorization": ""},
            {"authorization": f"Bearer {key}"},
            {"x_api_key": secret[:-1]},
            {"authorization": secret},
        ]
        own = path.replace("x", opened["session"])
        for headers in wrong:
            refused = await it.call(method, own, {}, **headers)
            assert refused.status == 401, refused.raw
            assert secret.encode() not in refused.raw
        assert (await it.call(method, f"/s/{key}{own}", {})).status in (401, 404)
        assert (await it.call(method, path, {})).status in (200, 400, 404)


async def test_the_admin_key_is_no_session_key(run: Path) -> None:
    async with rig(run, admin_key="topsecret") as it:
        answer = await it.call("POST", PATHS[Api.CHAT], body_of(Api.CHAT, "hello"), x_api_key="topsecret")
        assert answer.status == 401


async def test_keys_are_compared_in_constant_time_or_by_digest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spied(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", spied)
    async with rig(run, admin_key="topsecret") as it:
        opened = await it.call("POST", "/sessions", {"task_id": "t"}, authorization="Bearer topsecret")
        assert compared.pop() == (b"topsecret", b"topsecret")
        await it.ask(opened.json, "hello")
        # A session's key is looked up by its digest, and kept nowhere that a look-up compares.
        (digest,) = it.gateway.service.sessions._by_key
        assert digest == key_digest(opened.json["key"])


async def test_a_key_opens_its_own_session_alone(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        first, second = await it.open(attempt=0), await it.open(attempt=1)
        path = f"/s/{first['key']}{PATHS[Api.CHAT]}"
        answer = await it.call("POST", path, body_of(Api.CHAT, "hello"), x_api_key=second["key"])
        assert answer.headers["x-rolltape-session"] == first["session"]
        for key in (first["key"][:-1], first["key"] + "x", first["session"], "", "%00", "ü"):
            assert (await it.call("POST", f"/s/{key}{PATHS[Api.CHAT]}", {})).status in (401, 404)


async def test_one_sessions_errors_say_nothing_of_another(run: Path) -> None:
    engine = scripted(lambda _: "my secret reply")
    engine.mishaps |= dict.fromkeys(range(1, 4), Mishap.TRUNCATED)
    async with rig(run, engine) as it:
        first, second = await it.open(attempt=0), await it.open(attempt=1)
        await it.ask(first, "my secret question")
        failed = await it.ask(second, "hello")
        assert failed.status == 502
        for word in ("secret", first["session"], first["key"], second["key"]):
            assert word.encode() not in failed.raw


@pytest.mark.parametrize("api", list(Api))
async def test_a_body_over_the_limit_is_refused_in_the_apis_shape(run: Path, api: Api) -> None:
    async with rig(run, lambda _: "ok", max_body_mib=1) as it:
        opened = await it.open()
        large = await it.ask(opened, "x" * 2**20, api)
        assert (large.status, large.headers["x-should-retry"]) == (413, "false")
        assert "1 MiB" in large.error
        assert (large.json.get("type") == "error") is (api is Api.MESSAGES)
        assert (await it.ask(opened, "x" * 2**18, api)).status == 200


async def test_headers_over_the_limit_are_refused(run: Path) -> None:
    async with rig(run) as it:
        assert (await it.call("GET", "/health", None, x_long="x" * 20_000)).status == 400
        assert (await it.call("GET", "/health")).status == 200


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}])
async def test_a_page_in_a_browser_can_neither_run_the_gateway_nor_use_an_open_one(
    run: Path, headers: dict[str, str]
) -> None:
    async with rig(run, lambda _: "ok", open=True) as it:
        for method, path in ADMIN:
            assert (await it.call(method, path, {}, authorization="", **headers)).status == 401
        refused = await it.call("POST", PATHS[Api.CHAT], body_of(Api.CHAT, "hello"), **headers)
        assert (refused.status, "localhost" in refused.error) == (401, True)
        for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
            answer = await it.call("POST", PATHS[Api.CHAT], body_of(Api.CHAT, "hello"), host=host)
            assert answer.status == 200


async def test_the_log_is_silent_on_success_and_tells_failures_without_keys(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with rig(run, lambda _: "ok", max_body_mib=1) as it:
        opened = await it.open()
        await it.ask(opened, "hello")
        caplog.clear()
        await it.ask(opened, "hello")
        assert _said(caplog) == []
        await _fail_in_every_way(it, opened["key"], opened["session"])
        said = _said(caplog)
        assert len(said) >= 7
        assert [line for line in said if opened["key"] in line or "\n" in line] == []
        assert any(f"/s/…{PATHS[Api.CHAT]} 400" in line and opened["session"] in line for line in said)


async def test_no_key_of_another_form_is_logged_wherever_it_was_put(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-somebodys-own"
    async with rig(run, lambda _: "ok", open=True) as it:
        caplog.clear()
        await it.call("POST", f"/v1/{key}/chat/completions", {})
        await it.call("POST", f"/s/{key}/v1/nowhere", {})
        await it.call("POST", f"/v1beta/models/{key}:generateContent?key={key}", {})
        await it.call("POST", PATHS[Api.CHAT], {"model": "it", "messages": key}, authorization=f"Bearer {key}")
    said = _said(caplog)
    assert len(said) == 4
    assert [line for line in said if key in line] == []


async def _fail_in_every_way(it: Rig, key: str, session: str) -> None:
    path = f"/s/{key}{PATHS[Api.CHAT]}"
    await it.call("POST", path, b"{")
    await it.call("GET", path)
    await it.call("GET", f"/s/{key}/nowhere")
    await it.call("GET", f"/s/{key}/v1/forged%0Aline")
    await it.call("GET", f"/v1/s/{key}/nowhere")
    await it.call("POST", f"/v1beta/models/it:generateContent?key={key}x", b"{}")
    await it.call("POST", path, b"x" * 2**21)
    await it.call("POST", PATHS[Api.CHAT], b"{}", x_api_key=key + "x")
    await it.call("POST", f"/s/{key}/v1/chat/completions", body_of(Api.CHAT, "hi"), x_long=key + "x" * 20_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.gateway.url.rpartition(":")[2]))
    writer.write(f"POST /s/{key}/v1 HTTP/9.9.9\r\nx-api-key: {key}\r\n\r\n".encode())
    await reader.read()
    writer.close()
    await it.call("DELETE", f"/sessions/{session}", {})
    await it.call("POST", path, body_of(Api.CHAT, "hi"))


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the gateway logged; the client and the engine are in this process too."""
    mine = [record for record in caplog.records if record.name not in ("asyncio", "aiohttp.access")]
    return [record.getMessage() + repr(record.exc_info or "") for record in mine]


async def test_a_slow_request_is_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(run, slowly("a b c d", 0.02), slow_s=0.01) as it:
        opened = await it.open()
        assert text_of(Api.CHAT, await it.ask(opened, "hello")) == "a b c d"
        assert any("chat/completions 200" in line for line in _said(caplog))


async def test_a_client_that_left_is_in_the_log_once_and_is_no_error(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(*_: object) -> None:
        raise ConnectionResetError("Cannot write to closing transport")  # as aiohttp says it

    monkeypatch.setattr(ChatStream, "closing", left)
    async with rig(run) as it:
        opened = await it.open()
        with contextlib.suppress(aiohttp.ClientError):
            await it.ask(opened, "hello", stream=True)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name != "rolltape.gateway"]
    assert [level for level, _ in said] == ["WARNING"]
    assert said[0][1].endswith("the client disconnected")
