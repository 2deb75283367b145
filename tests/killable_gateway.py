"""Gateways that stop dead at a chosen point of a turn, to be killed there, and agents that go on nevertheless.

`python tests/killable_gateway.py serve …` is the command line with such points in it. A file with the name of a point
in the folder POINTS_FOLDER arms it: the process that comes there first removes the file, writes its own id to another
one, and stops as by SIGSTOP.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai

from gateways import PATHS, Api, body_of, eventually
from rolltape.tiny import shipped_model
from scripted_engine import Json, ScriptedEngine

POINTS_FOLDER = "KILLABLE_GATEWAY_POINTS"
# Each is a moment after which a gateway has done one thing more for a turn, in order.
POINTS = ("received", "prompted", "showing", "generated", "committing", "durable", "sent")
# These come when a session is taken over from a worker that was killed.
TAKE_OVER_POINTS = ("taking over", "taken over")
_HELD = "held"
# What a stream that breaks off raises: newer SDKs speak by httpx2, older ones by httpx.
_LOST: tuple[type[Exception], ...] = tuple(
    importlib.import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)
)
_OPENAI_LOST: tuple[type[Exception], ...] = (*_LOST, openai.APIConnectionError, openai.InternalServerError)
_ANTHROPIC_LOST: tuple[type[Exception], ...] = (*_LOST, anthropic.APIConnectionError, anthropic.InternalServerError)


class KillableGateway:
    """`rolltape serve --workers N` on one run and one port, killed and started again as often as one likes."""

    def __init__(self, run: Path, engine: ScriptedEngine, port: int, workers: int) -> None:
        self.run = run
        self.url = f"http://127.0.0.1:{port}"
        self._points = run.parent / "points"
        self._points.mkdir()
        given = [str(run), "--engine", f"sglang:{engine.url}", "--model", str(shipped_model()), "--port", str(port)]
        self._command = [sys.executable, __file__, "serve", *given, "--workers", str(workers), "--admin-key", "admin"]
        self._log = run.parent / "gateway.log"

    @property
    def log(self) -> str:
        """What all of them have written to standard error."""
        return self._log.read_text()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAPE_")}
        environment |= {POINTS_FOLDER: str(self._points), "PYTHONPATH": os.pathsep.join(sys.path)}
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.url, self.log

    def workers(self) -> list[int]:
        """The processes that serve, or begin to."""
        assert self.process.poll() is None, self.log[-3000:]
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def kill_worker(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def arm(self, point: str) -> None:
        """Have the next worker that comes to a point stop there."""
        (self._points / point).touch()

    def disarm(self) -> None:
        """Have nobody stop any more."""
        for point in (*POINTS, *TAKE_OVER_POINTS):
            (self._points / point).unlink(missing_ok=True)

    async def kill_held(self, within_s: float) -> None:
        """Kill the worker that stops at the point that is armed; raises TimeoutError if none does."""
        held = self._points / _HELD
        await eventually(lambda: held.exists() and bool(held.read_text()), within_s)
        self.kill_worker(int(held.read_text()))
        held.unlink()

    def kill_all(self) -> None:
        """Kill the workers and their parent, who gets no time to replace them."""
        self.process.send_signal(signal.SIGSTOP)
        for pid in self.workers():
            self.kill_worker(pid)
        self.process.kill()
        self.process.communicate()

    def kill_parent(self) -> None:
        """Kill the workers' parent alone, and wait until they are gone as well."""
        self.process.kill()
        self.process.communicate()  # the workers have its standard output too

    def stop(self) -> int:
        """Have it end in order; its exit code."""
        self.process.terminate()
        self.process.communicate(timeout=60)
        return self.process.returncode


class Broken(Exception):
    """A reply did not come whole: it is to be asked for again."""


async def by_openai(url: str, key: str, messages: Any) -> str:
    """A streamed reply through OpenAI's SDK, which asks again by itself until the stream has begun."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        text, finish = "", None
        try:
            stream = await client.chat.completions.create(model="it", messages=messages, stream=True)
            async for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        except _OPENAI_LOST as error:
            raise Broken from error
        except openai.APIStatusError:
            raise
        except openai.APIError as error:  # within a stream
            raise Broken from error
    if finish is None:
        raise Broken
    return text


async def by_anthropic(url: str, key: str, messages: Any) -> str:
    """The same through Anthropic's SDK."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
        try:
            async with client.messages.stream(model="it", max_tokens=512, messages=messages) as stream:
                said = await stream.get_final_message()
        except _ANTHROPIC_LOST as error:
            raise Broken from error
        except anthropic.APIStatusError as error:
            if error.response.status_code == 200:  # within a stream
                raise Broken from error
            raise
    if said.stop_reason is None:
        raise Broken
    return "".join(block.text for block in said.content if block.type == "text")


async def by_itself(url: str, key: str, messages: list[Json]) -> str:
    """The same by an agent that knows HTTP alone, and never says that it asks again."""
    body = body_of(Api.CHAT, messages, stream=True)
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/s/{key}{PATHS[Api.CHAT]}", json=body) as response,
        ):
            raw = await response.read()
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Broken from error
    if response.status >= 500:
        raise Broken(raw)
    assert response.status == 200, raw
    events = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise Broken(raw[-300:])
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


Ask = Callable[[str, str, list[Json]], Awaitable[str]]


def _main() -> None:
    """The command line, with the points in it."""
    from rolltape.cli import main
    from rolltape.gateway.other_sessions import OtherSessions
    from rolltape.gateway.server.agents import Agents, _Sent
    from rolltape.gateway.turn.turn import Turns
    from rolltape.tape.journal.writing import Journal

    folder = Path(os.environ[POINTS_FOLDER])

    def stop(point: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folder / point).unlink()
            (folder / _HELD).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def after(owner: type, name: str, point: str) -> None:
        done = getattr(owner, name)

        @functools.wraps(done)
        async def awaited(*arguments: Any, **named: Any) -> Any:
            given = await done(*arguments, **named)
            stop(point)
            return given

        @functools.wraps(done)
        def called(*arguments: Any, **named: Any) -> Any:
            given = done(*arguments, **named)
            if given != b"":  # nothing to show yet
                stop(point)
            return given

        setattr(owner, name, awaited if inspect.iscoroutinefunction(done) else called)

    def before(owner: type, name: str, point: str) -> None:
        done = getattr(owner, name)

        @functools.wraps(done)
        def called(*arguments: Any, **named: Any) -> Any:
            stop(point)
            return done(*arguments, **named)

        setattr(owner, name, called)

    after(Agents, "_read", "received")
    after(Turns, "prompt", "prompted")
    after(_Sent, "more", "showing")
    after(Turns, "_generate", "generated")
    before(Journal, "_written", "committing")
    after(Turns, "_record", "durable")
    before(Turns, "delivered", "sent")
    before(OtherSessions, "_rebuilt", "taking over")
    after(OtherSessions, "_rebuilt", "taken over")
    main()


if __name__ == "__main__":
    _main()
