"""`rolltape serve --workers N`: one port, several processes, and any of them for every session."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

import rolltape
from gateways import PATHS, Api, body_of, eventually, scripted, streamed_text_of, text_of, user
from rolltape.cli import run as rolltape_command
from rolltape.gateway.metrics import Metrics, add_expositions
from rolltape.records.rollout import EventKind, Status
from rolltape.records.turn import Delivery
from scripted_engine import Asked, Json, ScriptedEngine, Step
from served_gateways import Client, Served, client_of, served

pytestmark = pytest.mark.slow  # each starts several processes


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    def script(asked: Asked) -> Step:
        return Step(f"reply {asked.number}")

    with scripted(script, conversation=lambda asked: asked.number).in_thread() as started:
        yield started


def workers_of(run: Path) -> dict[int, int]:
    """The process of each worker, by its number."""
    peers = []
    for path in (run / "gateways").glob("[!.]*.json"):
        with contextlib.suppress(FileNotFoundError):  # its worker has died, and another one removed it just now
            peers.append(json.loads(path.read_bytes()))
    return {peer["number"]: int(peer["writer"].split("-")[-2]) for peer in peers}


def owner_of(run: Path, opened: Json) -> int:
    """The process that opened a session, which its key names."""
    (path,) = (run / "journals").glob(f"*-{opened['key'][4:12]}.sqlite")
    return int(path.stem.split("-")[-2])


async def fresh(client: Client, gateway: Served, opened: Json, text: str, **fields: Any) -> str:
    """A reply over a connection of its own, which any worker may accept."""
    async with aiohttp.ClientSession() as http:
        answer = await Client(client.run, http).ask(gateway, opened, text, **fields)
    assert answer.status == 200, answer.raw
    return streamed_text_of(Api.CHAT, answer) if fields.get("stream") else text_of(Api.CHAT, answer)


def deliveries(run: Path) -> set[Delivery]:
    return {turn.facts.delivery for rollout in rolltape.read(run).rollouts() for turn in rollout.turns}


async def test_sessions_are_spread_over_workers_and_each_is_served_by_whoever_accepts(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(4)]  # over one connection
            owners = [owner_of(run, one) for one in opened]
            assert sorted(map(owners.count, set(owners))) == [2, 2]
            assert set(owners) == set(workers_of(run).values())
            said = [await fresh(client, gateway, one, "hello", stream=at % 2 == 0) for at in range(6) for one in opened]
            assert len(set(said)) == 24
            listed = (await client.call("GET", f"{gateway.url}/sessions")).json["sessions"]
            assert sorted(one["turns"] for one in listed) == [6] * 4
            status = (await client.call("GET", f"{gateway.url}/status")).json
            assert (status["workers"], status["sessions"], status["counts"]["turns"]) == (2, 4, 24)
            metrics = (await client.call("GET", f"{gateway.url}/metrics")).raw.decode()
            assert 'rolltape_turns_total{api="chat",finish="stop"} 24.0' in metrics
            assert "rolltape_engines_up 1.0" in metrics
            for one in opened:
                assert (await client.finish(gateway, one, reward=1.0, samples=False))["turns"] == 6
            await eventually(lambda: deliveries(run) == {Delivery.DELIVERED})
    rollouts = list(rolltape.read(run).rollouts())
    assert {(rollout.status, rollout.reward) for rollout in rollouts} == {(Status.FINISHED, 1.0)}
    assert rolltape_command(["check", str(run)]) == 0, capsys.readouterr()


async def test_a_connection_is_handed_to_the_worker_of_its_session(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = await client.open(gateway)
            other = next(pid for pid in workers_of(run).values() if pid != owner_of(run, opened))
            connections = [aiohttp.ClientSession() for _ in range(8)]  # each worker accepts some of them
            try:
                for http in connections:
                    assert (await Client(run, http).ask(gateway, opened, "hello")).status == 200
                os.kill(other, signal.SIGSTOP)
                for http in connections:
                    assert (await Client(run, http).ask(gateway, opened, "again")).status == 200
            finally:
                os.kill(other, signal.SIGCONT)
                for http in connections:
                    await http.close()


class Shared:
    """A client's connection that both workers have served sessions on, so that each has a copy."""

    def __init__(self, gateway: Served, opened: list[Json]) -> None:
        self.owners = [owner_of(gateway.run, one) for one in opened]
        assert len({*self.owners}) == 2
        self._keys = [one["key"] for one in opened]
        self._http = HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
        self._http.connect()
        self.socket: socket.socket = self._http.sock
        ports = f"0100007F:{self._http.port:04X} 0100007F:{self.socket.getsockname()[1]:04X}"
        for number in (0, 1, 0, 1):
            self.ask(number)
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        (self._inode,) = (line[9] for line in lines if " ".join(line[1:3]) == ports)

    def send(self, number: int, text: str = "hello", **fields: Any) -> None:
        """Ask in one of the sessions, and leave the reply for later."""
        body = json.dumps(body_of(Api.CHAT, text, **fields)).encode()
        head = f"POST /s/{self._keys[number]}{PATHS[Api.CHAT]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        self.socket.sendall(head.encode() + b"\r\n\r\n" + body)

    def receive(self) -> HTTPResponse:
        """The head of the next reply."""
        response = HTTPResponse(self.socket)
        response.begin()
        assert response.status == 200, response.read()
        return response

    def ask(self, number: int, text: str = "hello") -> str:
        """The session that answered."""
        self.send(number, text)
        with self.receive() as response:
            response.read()
            return response.headers["x-rolltape-session"]

    def holders(self) -> set[int]:
        """The workers that have a copy of it."""
        target = f"socket:[{self._inode}]"
        return {pid for pid in self.owners for fd in Path(f"/proc/{pid}/fd").iterdir() if is_link_to(fd, target)}

    def close(self) -> None:
        self._http.close()


def is_link_to(path: Path, target: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
        return str(path.readlink()) == target
    return False


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_connection_that_sessions_share_is_read_by_the_worker_of_each_request(
    run: Path, engine: ScriptedEngine
) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(2)]
            shared = await asyncio.to_thread(Shared, gateway, opened)
            owners = shared.owners
            assert shared.holders() == {*owners}
            for number, text in ((0, "hello"), (1, "hello"), (0, "long " * 60_000)):
                assert await asyncio.to_thread(shared.ask, number, text) == opened[number]["session"]
                with stopped(owners[1 - number]):
                    assert await asyncio.to_thread(shared.ask, number) == opened[number]["session"]
            with stopped(owners[1]):
                shared.socket.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                with await asyncio.to_thread(shared.receive) as response:
                    response.read()
                assert await asyncio.to_thread(shared.socket.recv, 1) == b""
            await eventually(lambda: not shared.holders())
            shared.close()
            assert gateway.process.poll() is None
    assert [len(rollout.turns) for rollout in rolltape.read(run).rollouts()] == [6, 4]


async def test_replies_on_a_connection_that_sessions_share_keep_their_order_and_end_when_it_is_closed(
    run: Path, engine: ScriptedEngine
) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(2)]
            shared = await asyncio.to_thread(Shared, gateway, opened)
            engine._script = lambda asked: Step("word " * 20, token_delay_s=0.05 if asked.number == 4 else 0.0)
            shared.send(0)
            await eventually(lambda: engine.requests == 5)
            shared.send(1)
            for number in range(2):
                with await asyncio.to_thread(shared.receive) as response:
                    response.read()
                assert response.headers["x-rolltape-session"] == opened[number]["session"]
            engine._script = lambda asked: Step("word " * 1000, token_delay_s=0.01)
            shared.send(0, stream=True)
            await asyncio.to_thread(shared.receive)
            shared.close()
            await eventually(lambda: len(engine.aborted) == 1)
            await eventually(lambda: not shared.holders())


async def test_a_worker_that_is_killed_ends_the_replies_that_it_gave_and_no_others(
    run: Path, engine: ScriptedEngine
) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            for killed, is_whole in ((0, False), (1, True)):
                engine._script = lambda asked: Step("word")
                before = workers_of(run)
                opened = [await client.open(gateway, attempt=2 * killed + number) for number in range(2)]
                shared = await asyncio.to_thread(Shared, gateway, opened)
                engine._script = lambda asked: Step("word " * 60, token_delay_s=0.02)
                shared.send(0, stream=True)
                with await asyncio.to_thread(shared.receive) as response:
                    os.kill(shared.owners[killed], signal.SIGKILL)
                    try:
                        came = await asyncio.to_thread(response.read)
                    except (HTTPException, ConnectionError):
                        came = b""
                assert (b"[DONE]" in came) == is_whole
                shared.close()
                await _replaced(run, before)
            assert gateway.process.poll() is None


async def test_a_request_that_comes_in_pieces_is_served_whoever_accepts_it(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = await client.open(gateway)
            body = json.dumps(body_of(Api.CHAT, "hello")).encode()
            head = f"POST /s/{opened['key']}{PATHS[Api.CHAT]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            for cut in (7, 30, len(whole) - 5) * 4:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
                writer.write(whole[:cut])
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.write(whole[cut:])
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()


async def test_weights_change_in_all_workers_and_are_announced_once(run: Path, engine: ScriptedEngine) -> None:
    engine._script = lambda asked: Step("word " * 40, token_delay_s=0.005)
    engine._conversation = lambda asked: asked.prompt.partition("hello ")[2][:1]
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(2)]
            texts = enumerate(opened)
            asking = [asyncio.ensure_future(fresh(client, gateway, one, f"hello {at}")) for at, one in texts]
            await eventually(lambda: engine.requests == 2)
            new = {"folder": "/checkpoints/1", "version": "v1"}
            updated = (await client.call("POST", f"{gateway.url}/weights/update", new)).json
            assert (updated["paused"], updated["interrupted"], updated["version"]) == (False, 2, "v1")
            assert engine.loaded == ["/checkpoints/1"]
            await eventually(lambda: engine.requests == 4)
            paused = (await client.call("POST", f"{gateway.url}/weights/pause")).json
            assert (paused["paused"], paused["interrupted"], paused["in_flight"]) == (True, 2, 0)
            engine.version = "v2"
            resumed = (await client.call("POST", f"{gateway.url}/weights/resume", {"version": "v2"})).json
            assert (resumed["paused"], resumed["version"]) == (False, "v2")
            assert {text.strip() for text in await asyncio.gather(*asking)} == {("word " * 40).strip()}
            before = workers_of(run)
            os.kill(before[1], signal.SIGKILL)
            await _replaced(run, before)
            await client.call("POST", f"{gateway.url}/weights", {"version": "v3"})
            for _ in range(4):
                async with aiohttp.ClientSession() as http:
                    status = await Client(run, http).call("GET", f"{gateway.url}/status")
                assert status.json["version"] == "v3"
    announced = [event.data["version"] for event in rolltape.read(run).events() if event.kind == EventKind.VERSION]
    assert announced == ["v0", "v1", "v2", "v3"]
    for rollout in rolltape.read(run).rollouts():
        assert [segment.first_version for segment in rollout.turns[0].facts.segments] == ["v0", "v1", "v2"]


async def _replaced(run: Path, before: dict[int, int]) -> None:
    """Wait until both workers live, and one of them is not who it was."""

    def is_replaced() -> bool:
        now = workers_of(run)
        return len(now) == 2 and now != before and all(Path(f"/proc/{pid}").exists() for pid in now.values())

    await eventually(is_replaced, within_s=60)


async def test_a_worker_that_is_killed_is_replaced_and_its_sessions_go_on(
    run: Path, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(4)]
            for one in opened:
                await fresh(client, gateway, one, "hello")
            killed = workers_of(run)[0]
            os.kill(killed, signal.SIGKILL)
            await eventually(lambda: not Path(f"/proc/{killed}").exists())
            for one in opened:  # the other one serves them, or has a successor of the dead one do so
                said = (await client.call("GET", f"{gateway.url}/sessions/{one['session']}")).json["turns"]
                assert len(said) == 1
            for one in opened:
                messages = [user("hello"), {"role": "assistant", "content": "?"}, user("more")]
                answer = await client.ask(gateway, one, messages)
                assert answer.status == 200, answer.raw
            assert gateway.process.poll() is None
    rollouts = list(rolltape.read(run).rollouts())
    assert sorted(rollout.head.epoch for rollout in rollouts) == [0, 0, 1, 1]
    assert [len(rollout.turns) for rollout in rollouts] == [2] * 4
    assert rolltape_command(["check", str(run)]) == 0, capsys.readouterr()


async def test_a_worker_that_is_killed_while_it_starts_is_replaced(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = await client.open(gateway)
            children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children")
            for _ in range(2):
                killed = children.read_text().split()[-1]
                os.kill(int(killed), signal.SIGKILL)
                await eventually(lambda gone=killed: len({*children.read_text().split()} - {gone}) == 2)  # type: ignore[misc]
            assert await fresh(client, gateway, opened, "hello")
            assert gateway.process.poll() is None


async def test_a_gateway_is_announced_to_others_once_its_socket_accepts_connections(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = []
    start = web.UnixSite.start

    async def start_noting(site: web.UnixSite) -> None:
        announced.append(workers_of(run))
        await start(site)

    monkeypatch.setattr(web.UnixSite, "start", start_noting)
    async with rolltape.Gateway(engine="tiny", tape=run):
        assert announced == [{}]
        assert workers_of(run) == {0: os.getpid()}


async def test_sessions_go_on_after_the_parent_of_the_workers_was_killed(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(2)]
            for one in opened:
                await fresh(client, gateway, one, "hello")
            gateway.kill()  # ends when its workers have, who share its standard output
        with served(run, engine, "--workers", "2") as gateway:
            for one in opened:
                await fresh(client, gateway, one, "more")
    assert [len(rollout.turns) for rollout in rolltape.read(run).rollouts()] == [2, 2]


async def test_sessions_that_requests_open_stay_with_one_worker(run: Path, engine: ScriptedEngine) -> None:
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2", "--open") as gateway:
            for turn in range(3):
                for name in range(6):
                    async with aiohttp.ClientSession() as http:
                        headers = {"Authorization": "Bearer any", "x-rolltape-session": f"s{name}"}
                        path = gateway.url + PATHS[Api.CHAT]
                        answer = await Client(run, http).call(
                            "POST", path, body_of(Api.CHAT, f"turn {turn}"), **headers
                        )
                        assert answer.status == 200, answer.raw
            status = (await client.call("GET", f"{gateway.url}/status")).json
            assert (status["sessions"], status["counts"]["turns"]) == (6, 18)
    rollouts = list(rolltape.read(run).rollouts())
    assert [len(rollout.turns) for rollout in rollouts] == [3] * 6


async def test_sigterm_lets_the_turns_of_all_workers_finish(run: Path, engine: ScriptedEngine) -> None:
    engine._script = lambda asked: Step("word " * 60, token_delay_s=0.01)
    async with client_of(run) as client:
        with served(run, engine, "--workers", "2") as gateway:
            opened = [await client.open(gateway, attempt=number) for number in range(2)]
            asking = [asyncio.ensure_future(fresh(client, gateway, one, "hello")) for one in opened]
            await eventually(lambda: engine.requests == 2)
            workers = workers_of(run)
            gateway.process.terminate()
            assert len(await asyncio.gather(*asking)) == 2
            await asyncio.to_thread(gateway.process.communicate)
            assert gateway.process.returncode == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    assert not any((run / "gateways").iterdir())
    assert {rollout.status for rollout in rolltape.read(run).rollouts()} == {Status.FAILED}


def test_workers_without_an_engine_end_with_its_error(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", str(run), "--engine", "sglang:http://127.0.0.1:9", "--workers", "2", "--port", "0"]
    assert rolltape_command([*arguments, "--model", str(rolltape.tiny.shipped_model())]) == 1
    assert "127.0.0.1:9" in capfd.readouterr().err


def test_metrics_of_workers_add_up() -> None:
    def exposition(api: str, waits: list[float]) -> bytes:
        metrics = Metrics()
        metrics.gauge("paused", "1 while weights are changed", lambda: 1.0)
        metrics.gauge("open_sessions", "Sessions open now", lambda: 2.0)
        metrics.count("sessions")
        metrics.count("turns", "chat", "stop")
        metrics.count("turns", api, "length")
        for wait_s in waits:
            metrics._added_seconds.observe(wait_s)
        return metrics.exposition()

    one, two = exposition("messages", [0.002]), exposition("responses", [0.002, 7.0])
    families = list(text_string_to_metric_families(add_expositions([one, two]).decode()))
    assert [(family.name, family.type) for family in families] == [
        (family.name, family.type) for family in text_string_to_metric_families(one.decode())
    ]  # no sample stands apart from the others of its metric
    samples = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert samples["rolltape_turns_total", "chat", "stop"] == 2
    assert samples["rolltape_turns_total", "messages", "length"] == 1
    assert samples["rolltape_turns_total", "responses", "length"] == 1
    assert samples["rolltape_sessions_total",] == 2
    assert samples["rolltape_open_sessions",] == 4
    assert samples["rolltape_paused",] == 1
    assert samples["rolltape_added_seconds_bucket", "0.002"] == 2
    assert samples["rolltape_added_seconds_count",] == 3
    (created,) = (line for line in two.decode().splitlines() if line.startswith("rolltape_sessions_created"))
    assert samples["rolltape_sessions_created",] == float(created.rpartition(" ")[2])  # the later one
