"""Which sandbox a collection uses, how it says so, and that nothing outlives the collector."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import rolltape
from bwrap import needs_bwrap
from collecting import collected, command, instant, task_file
from commands import Cli, Result, rows
from rolltape.collect.sandboxes.running import attempt_processes
from rolltape.errors import CollectError
from rolltape.records.rollout import EventKind
from rolltape.tiny import shipped_model

AGENT = """
import json, os, sys, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
print(4, flush=True)
"""
BROKEN = "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(AGENT)
    return f"command:{sys.executable} {tmp_path / 'agent.py'}"


def collect(cli: Cli, place: Path, agent: str, *flags: object) -> Result:
    source = task_file(place, [{"id": "t", "prompt": "What is 3 + 1?", "answer": 4}])
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 1, "--agent", agent)
        return cli("collect", source, "--run", place / "run", *how, *flags)


def recorded(run: Path) -> Any:
    (event,) = [one for one in rolltape.read(run).events() if one.kind == EventKind.COLLECT]
    return event.data["sandbox"]


def test_bubblewrap_is_used_where_it_works(tmp_path: Path, cli: Cli, agent: str) -> None:
    needs_bwrap()
    result = collect(cli, tmp_path, agent)
    assert result.code == 0, result.err
    assert "sandbox bwrap: agents see their workspace and a read-only system, and reach only the gateway" in result.err
    assert recorded(tmp_path / "run") == "bwrap"


@pytest.mark.parametrize(
    ("installed", "reason"),
    [(False, "bubblewrap is not installed"), (True, "the sandbox could not be made: bwrap: No permissions to create")],
    ids=["missing", "refused"],
)
def test_where_it_does_not_work_that_is_said_once_and_what_follows(
    tmp_path: Path, cli: Cli, agent: str, monkeypatch: pytest.MonkeyPatch, installed: bool, reason: str
) -> None:
    (tmp_path / "bin").mkdir()
    if installed:
        (tmp_path / "bin" / "bwrap").write_text(BROKEN)
        (tmp_path / "bin" / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    refused = collect(cli, tmp_path, agent, "--sandbox", "bwrap")
    assert refused.code == 2
    assert f"--sandbox bwrap: {reason}" in refused.err
    result = collect(cli, tmp_path, agent, "--json")
    assert result.code == 0, result.err
    assert result.err.count(reason) == 1
    assert "nothing keeps them from reading this run" in result.err
    assert "or from rewarding themselves" in result.err
    assert rows(result)[0]["sandbox"] == "none"
    assert recorded(tmp_path / "run") == "none"


def test_doing_without_is_said_too(tmp_path: Path, cli: Cli, agent: str) -> None:
    result = collect(cli, tmp_path, agent, "--sandbox", "none")
    assert result.code == 0
    assert "no sandbox (none was asked for): agents run as the collector's own user" in result.err


def test_an_agent_that_is_a_function_is_trusted_and_the_chat_agent_needs_no_sandbox(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_agents.py").write_text("def four(assignment):\n    return '4'\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = collect(cli, tmp_path, "python:own_agents:four", "--sandbox", "bwrap")
    assert "python:own_agents:four runs in the collector's own process: it is trusted" in own.err
    (tmp_path / "chat").mkdir()
    chat = collect(cli, tmp_path / "chat", "chat", "--json")
    assert "sandbox" not in chat.err
    assert "sandbox" not in rows(chat)[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--sandbox", "jail"), "'--sandbox': 'jail' is not one of 'auto', 'bwrap', 'podman', 'docker', 'none'"),
        (("--sandbox-network", "all"), "'--sandbox-network': 'all' is not one of 'none', 'gateway', 'bridge', 'host'"),
        (("--pass-env", "NO_SUCH_VARIABLE"), "--pass-env NO_SUCH_VARIABLE: this variable is not set"),
        (("--sandbox-read", "/no/such"), "--sandbox-read /no/such: there is no such file or folder"),
    ],
)
def test_a_flag_that_cannot_be_is_named(tmp_path: Path, cli: Cli, agent: str, flags: Any, says: str) -> None:
    if "--sandbox-read" in flags:
        needs_bwrap()
    result = collect(cli, tmp_path, agent, *flags)
    assert result.code == 2
    assert says in result.err


@pytest.mark.parametrize("name", ["a:b", "a, b"])
def test_a_run_whose_path_cannot_be_mounted_is_refused_in_words(
    tmp_path: Path, cli: Cli, agent: str, name: str
) -> None:
    (place := tmp_path / name).mkdir()
    result = collect(cli, place, agent, "--sandbox", "podman", "--sandbox-image", "any")
    assert result.code == 2
    assert f"podman cannot mount a path with {name[1]!r} in it; use another folder" in result.err


async def test_python_code_names_a_sandbox_by_text(tmp_path: Path, agent: str) -> None:
    source = task_file(tmp_path, [{"id": "t", "prompt": "What is 3 + 1?", "answer": 4}])
    async with instant() as engine:
        await collected(source, tmp_path / "run", engine, agent=agent, group_size=1, sandbox="none")
        assert recorded(tmp_path / "run") == "none"
        with pytest.raises(CollectError, match="'jail' is not a valid SandboxKind; there are auto, bwrap, podman"):
            await collected(source, tmp_path / "other", engine, agent=agent, group_size=1, sandbox="jail")


@pytest.mark.parametrize("with_supervisors", [False, True])
async def test_when_the_collector_is_killed_its_sandboxes_end(tmp_path: Path, with_supervisors: bool) -> None:
    needs_bwrap()
    (tmp_path / "agent.py").write_text(f"{AGENT}\nimport time\ntime.sleep(300)\n")
    source = task_file(tmp_path, [{"id": "t", "prompt": "What is 3 + 1?", "answer": 4}])
    process = command(
        *(source, "--run", tmp_path / "run", "-g", 1, "--sandbox", "bwrap"),
        *("--agent", f"command:{sys.executable} {tmp_path / 'agent.py'}"),
    )
    try:
        async with asyncio.timeout(60):
            while not (held := list((tmp_path / "run" / "logs").glob("*/stdout.txt"))) or not held[0].read_text():
                assert process.poll() is None
                await asyncio.sleep(0.05)
            rollout = held[0].parent.name
            assert attempt_processes(rollout)
            supervisors = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(signal.SIGKILL)
            for supervisor in supervisors if with_supervisors else ():
                os.kill(int(supervisor), signal.SIGKILL)
            while attempt_processes(rollout):
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
