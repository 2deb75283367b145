"""Tools of MCP servers: real processes and a real port, servers that misbehave, and what is left of them."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collecting import collected, collected_at_once, instant, rollouts, task_file
from rolltape.collect.environments import environment_named
from rolltape.collect.environments.protocol import AGENT, Ended
from rolltape.collect.results import RolloutResult
from rolltape.collect.tasks import Task
from rolltape.errors import TaskError, ToolServerError
from rolltape.records.rollout import Status, StopReason
from scripted_engine import Asked

TESTS = Path(__file__).parents[1]
PLAIN = [sys.executable, str(TESTS / "plain_mcp_server.py")]
OFFICIAL = [sys.executable, str(TESTS / "official_mcp_server.py")]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def collect_one(folder: Path, first: str, mcp: Any, **fields: Any) -> tuple[RolloutResult, list[str]]:
    """One attempt whose model replies `first`, and then "It is 5."; its result, and what the tools said."""

    def script(asked: Asked) -> str:
        return "It is 5." if "<tool_response>" in asked.prompt else first

    task = {"id": "sum", "prompt": "What is 2 + 3?", "answer": 5, "mcp": mcp, **fields}
    (result,) = collected_at_once(
        task_file(folder, [task]), folder / "run", script, group_size=1, environment="message"
    )
    (rollout,) = rollouts(folder / "run")
    last = rollout.turns[-1].prompt_messages if rollout.turns else []
    said = [message["content"] for message in last if message["role"] == "tool"]
    return result, said


def alive(pids: Path) -> list[int]:
    """The processes of a file that still run."""
    return [int(pid) for pid in pids.read_text().split() if runs(int(pid))]


def runs(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_is_started_for_each_attempt_and_is_gone_afterwards(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    result, said = collect_one(tmp_path, call("add", a=2, b=3), [{"command": [*PLAIN, "--pid", str(pids)]}])
    assert (result.reward, said) == (1.0, ["5"])
    assert len(pids.read_text().split()) == 1
    assert alive(pids) == []


@pytest.fixture
def served() -> Iterator[str]:
    """The URL of the official package's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = subprocess.Popen([*OFFICIAL, str(port)], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        assert any("Uvicorn running" in line for line in server.stderr)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.mark.slow
def test_servers_of_the_official_package_work_over_http_and_over_stdio(tmp_path: Path, served: str) -> None:
    mcp = [{"url": served, "tools": ["add"]}, {"command": OFFICIAL, "prefix": "local_"}]
    result, said = collect_one(tmp_path, call("add", a=2, b=3) + call("local_refuse", why="not today"), mcp)
    assert result.reward == 1.0
    assert said == ["5", "error: Error executing tool refuse"]


@pytest.mark.parametrize(
    ("called", "answer", "mishap"),
    [
        (call("add", a="two", b=3), "error: add: a and b must be whole numbers", "malformed"),
        (call("fail"), "error: out of order", "tool_error"),
        (call("hang"), "error: hang had not answered after 0.5 s", "tool_error"),
        (
            call("multiply", a=2),
            "error: there is no tool 'multiply'; there are: add, fail, hang, die, babble",
            "malformed",
        ),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_to_the_model(tmp_path: Path, called: str, answer: str, mishap: str) -> None:
    result, said = collect_one(tmp_path, called, [{"command": PLAIN, "timeout_s": 0.5}])
    assert (result.status, result.reward, said) == (Status.FINISHED, 1.0, [answer])


@pytest.mark.parametrize(("tool", "why"), [("die", "it printed: giving up"), ("babble", "ValidationError")])
def test_a_server_that_dies_or_breaks_the_protocol_has_broken_the_attempt(tmp_path: Path, tool: str, why: str) -> None:
    result, _ = collect_one(tmp_path, call(tool), [{"command": PLAIN, "timeout_s": 5.0}])
    assert (result.status, result.reward) == (Status.FAILED, None)
    assert why in str(result.reason)


def test_a_program_that_is_no_server_breaks_the_attempt_with_what_it_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no licence')"]
    result, _ = collect_one(tmp_path, "It is 5.", [{"command": command}])
    assert result.status is Status.FAILED
    assert "no licence" in str(result.reason)


def test_of_a_flood_on_stderr_the_end_alone_is_read(tmp_path: Path) -> None:
    flood = "import os, sys; os.ftruncate(2, 2**40); os.lseek(2, 0, os.SEEK_END); sys.exit('no licence')"  # a terabyte
    result, _ = collect_one(tmp_path, "It is 5.", [{"command": [sys.executable, "-c", flood]}])
    assert result.status is Status.FAILED
    assert "no licence" in str(result.reason)


def test_lines_that_are_no_messages_are_told_in_one_line_and_not_as_tracebacks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('hello\\n' * 3)"]
    task = {"prompt": "What is 2 + 3?", "answer": 5, "mcp": [{"command": command}]}
    arguments = ["--environment", "message", "--group-size", "1", "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "rolltape.cli", "collect", task_file(tmp_path, [task]), *arguments],
        capture_output=True,
        text=True,
    )
    assert "MCP server" in done.stderr
    assert "Traceback" not in done.stderr


THOUSAND = (f'{{"name": "t{n}", "inputSchema": {{}}}}' for n in range(1000))
HOSTILE = {
    "a name with special tokens": '[{"name": "<|im_end|>", "inputSchema": {"type": "object"}}]',
    "the same name twice": '[{"name": "a", "inputSchema": {}}, {"name": "a", "inputSchema": {}}]',
    "a schema that is no object": '[{"name": "a", "inputSchema": 7}]',
    "a number that is none": '[{"name": "a", "inputSchema": {"maximum": NaN}}]',
    "half a character": '[{"name": "a", "description": "half \\ud83d", "inputSchema": {}}]',
    "a schema of two megabytes": '[{"name": "a", "inputSchema": {"title": "' + "x" * 2_000_000 + '"}}]',
    "a thousand tools": f"[{', '.join(THOUSAND)}]",
    "a schema of great depth": '[{"name": "a", "inputSchema": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}]",
}


@pytest.mark.parametrize("tools", HOSTILE.values(), ids=HOSTILE)
def test_hostile_lists_of_tools_are_refused_and_the_process_is_ended(tmp_path: Path, tools: str) -> None:
    (tmp_path / "tools.json").write_text(tools)
    pids = tmp_path / "pids"
    command = [*PLAIN, "--pid", str(pids), "--tools", str(tmp_path / "tools.json")]
    episode = environment_named("message").begin(
        Task(data={"prompt": "?", "mcp": [{"command": command, "start_timeout_s": 5.0}]}), seed=1
    )

    async def go() -> None:
        try:
            await episode.open()  # type: ignore[attr-defined]
        finally:
            await episode.close()  # type: ignore[attr-defined]

    with pytest.raises(ToolServerError):
        asyncio.run(go())
    assert alive(pids) == []


def test_no_server_is_left_when_the_collection_is_cancelled(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    task = {"id": "sum", "prompt": "?", "answer": 5, "mcp": [{"command": [*PLAIN, "--pid", str(pids)]}]}

    async def go() -> None:
        asked = asyncio.Event()

        def script(_: Asked) -> str:
            asked.set()
            return call("hang")

        async with instant(script) as engine:
            how: dict[str, Any] = {"group_size": 2, "environment": "message"}
            collecting = asyncio.ensure_future(collected(task_file(tmp_path, [task]), tmp_path / "run", engine, **how))
            await asked.wait()
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

    asyncio.run(go())
    assert pids.read_text()
    assert alive(pids) == []


HOLDS = """
import asyncio, json, sys
from rolltape.collect.environments.mcp import McpServer, McpServerSpec

async def hold():
    await McpServer(McpServerSpec(command=json.loads(sys.argv[1]))).open()
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(hold())
"""


def test_a_server_dies_with_a_collector_that_is_killed_though_it_does_not_notice(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = json.dumps([*PLAIN, "--pid", str(pids), "--deaf"])
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, command], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        assert len(alive(pids)) == 1
        holder.kill()
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel kills it; nothing else tells when that is done
    assert alive(pids) == []


def test_a_server_that_does_not_end_with_its_stdin_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    mcp = [{"command": [*PLAIN, "--pid", str(pids), "--deaf"]}]
    result, _ = collect_one(tmp_path, call("add", a=2, b=3), mcp)
    assert (result.reward, alive(pids)) == (1.0, [])


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({}, 'a server has either "command" or "url"'),
        ({"command": "x", "url": "http://h"}, 'a server has either "command" or "url"'),
        ({"command": "no-such-program --x"}, "there is no program 'no-such-program'"),
        ({"command": "'open quote"}, "quote it as for a shell"),
        ({"url": "file:///etc/passwd"}, "is not a URL"),
        ({"command": "true", "pass_env": ["NO_SUCH_VARIABLE"]}, "the variable NO_SUCH_VARIABLE is not set"),
        ({"command": "true", "argz": 1}, "unknown field `argz`"),
    ],
)
def test_a_server_that_is_described_wrongly_is_named_before_anything_runs(server: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        environment_named("message").check(Task(data={"prompt": "?", "mcp": [server]}))


def test_variables_are_passed_by_name_and_never_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_PATH", str(tmp_path / "seen"))
    script = "import os, pathlib; pathlib.Path(os.environ['SECRET_PATH']).write_text(os.environ.get('HOME', ''))"
    server = {"command": [sys.executable, "-c", script], "pass_env": ["SECRET_PATH"]}
    collect_one(tmp_path, "It is 5.", [server])
    assert (tmp_path / "seen").read_text() == os.environ["HOME"]
    assert str(tmp_path / "seen") not in json.dumps([one.head.task for one in rollouts(tmp_path / "run")])


def test_calls_of_unknown_tools_count_as_malformed_in_the_score(tmp_path: Path) -> None:
    episode = environment_named("message").begin(
        Task(data={"prompt": "?", "mcp": [{"command": PLAIN}], "malformed": {"reward": -0.5}}), seed=1
    )
    calls = [{"function": {"name": "add"}}, {"function": {"name": "subtract"}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]

    async def go() -> float | None:
        await episode.open()  # type: ignore[attr-defined]
        try:
            ended = Ended(stop_reason=StopReason.COMPLETED, messages=messages)
            return (await episode.score(AGENT, ended)).reward
        finally:
            await episode.close()  # type: ignore[attr-defined]

    assert asyncio.run(go()) == -0.5
