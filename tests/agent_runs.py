"""Unmodified agents before a gateway with a scripted engine: what they are run with, and what must then hold."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from tokenizers import Tokenizer

import rolltape
from qwen3_tokenizer import qwen3_folder
from rolltape.cli import run as rolltape_command
from rolltape.gateway.gateway import Gateway, GatewaySession
from rolltape.records.sample import Fate
from scripted_engine import Json, Script, ScriptedEngine, load_tokenizer, tool_call


def thinks(thought: str, text: str = "", *calls: tuple[str, Json]) -> str:
    """A reply as Qwen3 writes it."""
    return f"<think>\n{thought}\n</think>\n\n{text}" + "".join(f"\n{tool_call(*call)}" for call in calls)


class Ran(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str


class Stage:
    """A gateway with one open session, and a home and a folder for the agent."""

    def __init__(self, engine: ScriptedEngine, gateway: Gateway, session: GatewaySession, place: Path) -> None:
        self.engine = engine
        self.gateway = gateway
        self.session = session
        self.run = place / "run"
        self.home = place / "home"
        self.work = place / "work"
        for folder in (self.home, self.work):
            folder.mkdir()

    async def agent(self, command: Sequence[str | Path], env: Mapping[str, str]) -> Ran:
        """Run a program to its end; what it might say to anybody but loopback goes nowhere."""
        nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
        started = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **nowhere, **env},
            cwd=self.work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(90):
                out, err = await started.communicate()
        finally:
            with suppress(ProcessLookupError):
                started.kill()
        assert started.returncode is not None
        return Ran(started.returncode, out.decode(), err.decode())

    def refused(self) -> int:
        """How many requests were refused so far."""
        return int(self.gateway.status()["counts"].get("errors", 0))


@asynccontextmanager
async def stage(
    place: Path, script: Script, *, spec: Json | None = None, engine: Json | None = None, **settings: Any
) -> AsyncIterator[Stage]:
    """A scripted engine with Qwen3's own tokenizer and a gateway before it; the session is left for the test to end."""
    scripted = ScriptedEngine(_tokenizer(), script, **(engine or {}))
    async with scripted:
        address = f"sglang:{scripted.url}"
        async with Gateway(engine=address, model=qwen3_folder(), tape=place / "run", **settings) as gateway:
            session = await gateway.open_session(task_id="a task", **(spec or {}))
            yield Stage(scripted, gateway, session, place)


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(qwen3_folder())


async def cut_off(place: Path, script: Script, agent: Callable[[Stage], Awaitable[Ran]]) -> tuple[Stage, Ran]:
    """Run an agent whose connection breaks while the reply to its second request is under way."""
    async with Relay.listening() as relay, stage(place, script, public_url=relay.url) as it:
        relay.lead_to(it.gateway.url)
        relay.cut_at = 1
        ran = await agent(it)
        assert it.gateway.status()["counts"]["retries"] == 1
        await it.session.finish()
    return it, ran


def recorded(it: Stage) -> rolltape.Linearized:
    """What the tape says when all is over; it is whole."""
    assert rolltape_command(["check", str(it.run)]) == 0
    (rollout,) = rolltape.read(it.run).rollouts()
    return rolltape.linearize(rollout)


def assert_one_branch(it: Stage, turns: int) -> rolltape.Linearized:
    """Every prompt began with all that came before; nothing forked, and every sampled token trains as it was given."""
    made = recorded(it)
    assert it.engine.violations == []
    assert made.forks == []
    assert [turn.facts.extra["prompt"] for turn in made.rollout.turns] == ["rendered"] + ["bridged"] * (turns - 1)
    assert made.ledger.totals() == {Fate.TRAINED: made.ledger.sampled}
    (sample,) = made.samples()
    said = it.engine.said
    assert sample.ids[sample.trained_mask].tolist() == [token for one in said for token in one.ids]
    given = np.array([value for one in said for value in one.logprobs], dtype=sample.logprobs.dtype)
    assert np.array_equal(sample.logprobs[sample.trained_mask], given)
    return made


def echoes(made: rolltape.Linearized) -> set[str]:
    """By which rules the agent's echoes were read."""
    return {rule for turn in made.rollout.turns for rule in turn.facts.extra.get("echoes", ())}


class Relay:
    """Passes connections on, and cuts one when the reply to the chosen request has begun."""

    def __init__(self) -> None:
        self.url = ""
        self.cut_at = -1  # the number of the POST, from 0
        self._posts = 0
        self._to = 0

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator["Relay"]:
        """A relay at its own address; say later to which port it leads."""
        relay = cls()
        server = await asyncio.start_server(relay._connected, "127.0.0.1")
        relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield relay

    def lead_to(self, url: str) -> None:
        self._to = urlsplit(url).port or 0

    async def _connected(self, agent: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
        gateway, to_gateway = await asyncio.open_connection("127.0.0.1", self._to)
        cutting = asyncio.Event()

        async def upwards() -> None:
            while data := await agent.read(65536):
                for _ in range(data.count(b"POST /")):
                    if self._posts == self.cut_at:
                        cutting.set()
                    self._posts += 1
                to_gateway.write(data)
            to_gateway.close()

        async def downwards() -> None:
            while data := await gateway.read(65536):
                to_agent.write(data)
                if cutting.is_set():
                    break
            to_agent.close()
            to_gateway.close()

        with suppress(ConnectionError):
            await asyncio.gather(upwards(), downwards())
