"""Gateways in processes of their own, and one who opens sessions, asks and finishes at any of them."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from gateways import PATHS, Answer, Api, body_of
from rolltape.gateway.admin_key import read_admin_key
from rolltape.tiny import shipped_model
from scripted_engine import Json, ScriptedEngine

COMMAND = [sys.executable, "-m", "rolltape.cli"]


class Served(NamedTuple):
    """A gateway in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str
    run: Path

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.communicate()


class Client:
    """One who opens sessions, asks and finishes, at any of the run's gateways."""

    def __init__(self, run: Path, http: aiohttp.ClientSession) -> None:
        self.run = run
        self.http = http

    async def call(self, method: str, url: str, body: Json | None = None, **headers: str) -> Answer:
        sent = {"Authorization": f"Bearer {read_admin_key(self.run)}"} | headers
        async with self.http.request(method, url, json=body, headers=sent) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def open(self, gateway: Served, **spec: Any) -> Json:
        answer = await self.call("POST", f"{gateway.url}/sessions", {"task_id": "t", **spec})
        assert answer.status == 200, answer.raw
        return answer.json

    async def ask(
        self, gateway: Served, opened: Json, messages: str | list[Json], api: Api = Api.CHAT, **kw: Any
    ) -> Answer:
        return await self.call("POST", f"{gateway.url}/s/{opened['key']}{PATHS[api]}", body_of(api, messages, **kw))

    async def finish(self, gateway: Served, opened: Json, **ending: Any) -> Json:
        answer = await self.call("POST", f"{gateway.url}/sessions/{opened['session']}/finish", ending)
        assert answer.status == 200, answer.raw
        return answer.json


@contextlib.contextmanager
def served(
    run: Path, engine: ScriptedEngine, *options: str, port: int = 0, command: list[str] = COMMAND
) -> Iterator[Served]:
    given = [str(run), "--engine", f"sglang:{engine.url}", "--model", str(shipped_model()), "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAPE_")}
    process = subprocess.Popen(
        [*command, "serve", *given, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), process.communicate()
        yield Served(process, url, run)
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def client_of(run: Path) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(run, http)
