"""A gateway that is started before its engine: it lives, is not ready, and serves when it can."""

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from gateways import QUICK, eventually, scripted
from rolltape.cli import run as rolltape_command
from rolltape.errors import EngineUnreachable
from rolltape.gateway.gateway import Gateway
from rolltape.tiny import shipped_model
from scripted_engine import ScriptedEngine


async def _status(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with http.get(url) as response:
        return response.status, await response.text()


async def _engine_that_is_gone() -> ScriptedEngine:
    """One whose address is known, and that does not answer until `listen`."""
    engine = scripted(["ok"])
    await engine.listen()
    await engine.refuse()
    return engine


async def test_a_gateway_that_waits_for_its_engine_lives_and_becomes_ready(run: Path) -> None:
    engine = await _engine_that_is_gone()
    waiting = Gateway(engine=f"sglang:{engine.url}", model=shipped_model(), tape=run, wait_engine_s=30, patience=QUICK)
    starting = asyncio.ensure_future(waiting.__aenter__())
    try:
        await eventually(lambda: hasattr(waiting, "url"))
        async with aiohttp.ClientSession() as http:
            assert await _status(http, f"{waiting.url}/livez") == (200, "ok\n")
            for path in ("/readyz", "/health", "/v1/models"):
                status, said = await _status(http, waiting.url + path)
                assert (status, said) == (503, "not ready: no engine has answered yet\n")
            assert not starting.done()
            await engine.listen()
            async with asyncio.timeout(20):
                await starting
            assert await _status(http, f"{waiting.url}/readyz") == (200, "ok\n")
            await waiting.pause()
            assert await _status(http, f"{waiting.url}/readyz") == (200, "ok\n")
    finally:
        await starting
        await waiting.__aexit__(None, None, None)
        await engine.refuse()


async def test_a_gateway_without_an_engine_gives_up_when_its_time_is_over(run: Path) -> None:
    engine = await _engine_that_is_gone()
    gateway = Gateway(engine=f"sglang:{engine.url}", model=shipped_model(), tape=run, wait_engine_s=0.1)
    with pytest.raises(EngineUnreachable, match="no engine answers"):
        async with gateway:
            pass


async def test_readiness_ends_when_the_gateway_drains_and_liveness_does_not(run: Path) -> None:
    async with (
        scripted(["ok"]) as engine,
        Gateway(engine=f"sglang:{engine.url}", model=shipped_model(), tape=run) as gateway,
        aiohttp.ClientSession() as http,
    ):
        await gateway.service.drain()
        assert await _status(http, f"{gateway.url}/readyz") == (503, "not ready: the gateway is ending\n")
        assert await _status(http, f"{gateway.url}/livez") == (200, "ok\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "--admin-key"),
        (["--public-url", "http://h:1", "--agent", "command:agent"], "--sandbox"),
        (["--public-url", "http://h:1", "--runner", "ray"], "--public-url"),
    ],
)
def test_a_collector_whose_gateway_could_not_be_reached_as_told_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "prompt": "1 + 1?", "answer": "2"}\n')
    assert rolltape_command(["collect", str(tasks), "--run", str(tmp_path / "run"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_agents_of_a_collector_get_the_address_that_they_reach_it_by(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import os\nprint(os.environ['OPENAI_BASE_URL'])\n")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "prompt": "1 + 1?", "answer": "2"}\n')
    run = tmp_path / "run"
    where = ["--host", "0.0.0.0", "--admin-key", "k" * 40, "--public-url", "http://gateway.test:1/"]
    command = ["--agent", f"command:{sys.executable} {agent}", "--sandbox", "none", "-g", "1", "--max-failures", "0"]
    rolltape_command(["collect", str(tasks), "--run", str(run), *where, *command])
    logs = "".join(path.read_text() for path in (run / "logs").rglob("*") if path.is_file())
    assert "http://gateway.test:1/s/" in logs
