"""`rolltape serve` as a process: killed, told to end, and started wrongly."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

import rolltape
from gateways import PATHS, Answer, Api, body_of, path_of, scripted, streamed_text_of, text_of
from rolltape.cli import run as rolltape_command
from rolltape.gateway.admin_key import read_admin_key
from rolltape.records.rollout import Status
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import shipped_model
from scripted_engine import Asked, Json, ScriptedEngine, Step

COMMAND = [sys.executable, "-m", "rolltape.cli"]


class Served(NamedTuple):
    """A gateway in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str
    run: Path

    def client(self) -> aiohttp.ClientSession:
        """One who may open sessions."""
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {read_admin_key(self.run)}"})

    def ended(self, within_s: float = 15.0) -> str:
        """What it said on standard error, once it has ended."""
        _, said = self.process.communicate(timeout=within_s)
        return said


@contextlib.contextmanager
def served(run: Path, engine: str, *options: str) -> Iterator[Served]:
    arguments = ["serve", str(run), "--engine", engine, "--model", str(shipped_model()), "--port", "0", *options]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), process.communicate()
        yield Served(process, url, run)
    finally:
        process.kill()
        process.communicate()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAPE_")}


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command fails."""
    assert rolltape_command(arguments) != 0
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    def script(asked: Asked) -> Step:
        return Step(f"reply {asked.number} " + "word " * (asked.number % 30), token_delay_s=0.001)

    with scripted(script, unusual=False, conversation=lambda asked: asked.number).in_thread() as started:
        yield started


async def _posted(http: aiohttp.ClientSession, url: str, body: Json) -> Answer:
    async with http.post(url, json=body) as response:
        return Answer(response.status, dict(response.headers), await response.read())


async def _agent(gateway: Served, name: str, received: list[str]) -> None:
    """Ask without end, streamed and not, by all APIs, and keep what came in full."""
    url = gateway.url
    async with gateway.client() as http:
        opened = (await _posted(http, f"{url}/sessions", {"task_id": name})).json
        for number in range(10_000):
            api, stream = list(Api)[number % len(Api)], number % 3 == 0
            path = f"{url}/s/{opened['key']}{path_of(api, stream=stream)}"
            answer = await _posted(http, path, body_of(api, f"{name} {number}", stream=stream))
            assert answer.status == 200, answer.raw
            received.append((streamed_text_of if stream else text_of)(api, answer))


async def _until_killed(gateway: Served, tag: str, enough: int) -> list[str]:
    """Load from several agents, then kill -9 in the middle of it; what they had received in full by then."""
    received: list[str] = []
    agents = [asyncio.ensure_future(_agent(gateway, f"{tag}-{index}", received)) for index in range(6)]
    async with asyncio.timeout(60):
        while len(received) < enough:
            await asyncio.sleep(0.005)
            assert not any(agent.done() for agent in agents), [agent for agent in agents if agent.done()]
    gateway.process.send_signal(signal.SIGKILL)
    ends = await asyncio.gather(*agents, return_exceptions=True)
    assert all(isinstance(end, aiohttp.ClientError | ConnectionError) for end in ends), ends
    return received


@pytest.mark.slow
def test_after_kill_9_every_reply_that_was_received_is_on_the_tape(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    received: list[str] = []
    for repeat in range(3):
        with served(run, f"sglang:{engine.url}") as gateway:
            received += asyncio.run(_until_killed(gateway, f"r{repeat}", 40 + 17 * repeat))
    assert rolltape_command(["check", str(run)]) == 0, capsys.readouterr()
    rollouts = list(rolltape.read(run).rollouts())
    taped = {turn.reply.to_dict()["content"] for rollout in rollouts for turn in rollout.turns if turn.reply}
    assert len(received) == len(set(received)) >= 171
    assert {text.strip() for text in received} <= taped
    assert {rollout.outcome.status for rollout in rollouts} == {Status.LOST}


async def _through(engine: ScriptedEngine, gateway: Served, signals: int) -> tuple[Answer, Answer, Answer]:
    """A reply in flight while the gateway is told to end; and what a new session and a new turn get then."""
    url = gateway.url
    async with gateway.client() as http:
        opened = (await _posted(http, f"{url}/sessions", {"task_id": "t"})).json
        path = f"{url}/s/{opened['key']}{PATHS[Api.CHAT]}"
        asking = asyncio.ensure_future(_posted(http, path, body_of(Api.CHAT, "hello")))
        while not engine.requests:
            await asyncio.sleep(0.01)
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        new_session = await _posted(http, f"{url}/sessions", {"task_id": "u"})
        new_turn = await _posted(http, path, body_of(Api.CHAT, "more"))
        for _ in range(signals - 1):
            gateway.process.send_signal(signal.SIGTERM)
        return await asking, new_session, new_turn


@pytest.mark.slow
def test_sigterm_lets_replies_in_flight_complete_and_refuses_new_ones(run: Path) -> None:
    with (
        scripted(lambda _: Step("a b c d e f g h i j", token_delay_s=0.1), unusual=False).in_thread() as engine,
        served(run, f"sglang:{engine.url}") as gateway,
    ):
        reply, new_session, new_turn = asyncio.run(_through(engine, gateway, 1))
        said = gateway.ended()
        assert gateway.process.returncode == 0
    assert text_of(Api.CHAT, reply) == "a b c d e f g h i j"
    assert (new_session.status, new_turn.status) == (503, 503)
    assert new_turn.headers["x-should-retry"] == "false"
    assert "Traceback" not in said
    (rollout,) = rolltape.read(run).rollouts()
    assert (rollout.outcome.status, [turn.facts.finish for turn in rollout.turns]) == (Status.FAILED, [Finish.STOP])


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once_and_what_was_sampled_is_recorded(run: Path) -> None:
    with (
        scripted(lambda _: Step("word " * 500, token_delay_s=0.05), unusual=False).in_thread() as engine,
        served(run, f"sglang:{engine.url}") as gateway,
    ):
        began = time.monotonic()
        reply, _, _ = asyncio.run(_through(engine, gateway, 2))
        said = gateway.ended()
        assert time.monotonic() - began < 10
        assert engine.aborted
    assert reply.status == 503
    assert "ended at once" in said
    assert "Traceback" not in said
    (rollout,) = rolltape.read(run).rollouts()
    (turn,) = rollout.turns
    assert (turn.facts.finish, len(turn.sampled_ids) > 0) == (Finish.ABORT, True)


@pytest.mark.slow
def test_what_an_engine_does_not_say_can_be_told(run: Path, engine: ScriptedEngine) -> None:
    async def ask(gateway: Served) -> None:
        async with gateway.client() as http:
            opened = (await _posted(http, f"{gateway.url}/sessions", {"task_id": "t"})).json
            path = f"{gateway.url}/s/{opened['key']}{PATHS[Api.CHAT]}"
            assert (await _posted(http, path, body_of(Api.CHAT, "hello"))).status == 200

    with served(run, f"sglang:{engine.url}", "--logprobs", "raw", "--engine-key", "secret") as gateway:
        asyncio.run(ask(gateway))
    (turn,) = next(rolltape.read(run).rollouts()).turns
    assert turn.facts.logprob_kind is LogprobKind.RAW


@pytest.mark.slow
def test_an_idle_gateway_ends_when_it_is_told_to(run: Path, engine: ScriptedEngine) -> None:
    with served(run, f"sglang:{engine.url}") as gateway:
        gateway.process.send_signal(signal.SIGINT)
        said = gateway.ended()
        assert gateway.process.returncode == 0
        assert "Traceback" not in said


@pytest.mark.slow
def test_it_raises_its_limit_of_open_files(run: Path, engine: ScriptedEngine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with served(run, f"sglang:{engine.url}") as gateway:
            limits = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == (min(hard, 2**16), hard)


def test_a_port_in_use_is_told_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = failed(capsys, "serve", str(run), "--engine", "tiny", "--port", port)
    assert port in said
    assert "in use" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "warp:9"], "warp:9"),
        (["--engine", "sglang:http://127.0.0.1:9", "--model", str(shipped_model())], "127.0.0.1:9"),
        (["--engine", "sglang:nonsense"], "nonsense"),
        (["--engine", "tiny:/nowhere"], "/nowhere"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--host", "0.0.0.0"], "--admin-key"),
        (["--host", "0.0.0.0", "--admin-key", "k", "--open"], "open gateway"),
        (["--public-url", "foo"], "--public-url foo: not a URL"),
        (["--force", "warmth=1"], "warmth"),
        (["--force", "temperature=hot"], "temperature"),
        (["--force", "temperature=-1"], "temperature"),
        (["--thinking-retention", "some"], "some"),
        (["--special-text", "some"], "some"),
        (["--renderer", "nobody"], "nobody"),
        (["--routed-experts"], "routed_experts is given, which tiny does not take"),
        (["--kept-ids"], "kept_ids is given, which tiny does not take"),
    ],
)
def test_what_cannot_start_says_why_in_a_line(
    run: Path, arguments: Sequence[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in failed(capsys, "serve", str(run), "--port", "0", *arguments)
