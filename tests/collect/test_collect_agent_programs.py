"""Programs as agents: what they are told, how they end, and that nothing of them is left."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from agent_assignments import NOWHERE, ROLLOUT, ScriptedEpisode, assigned
from rolltape.collect.agents import AgentOutcome, agent_named, discard
from rolltape.collect.environments.protocol import AGENT, Answer, Tool
from rolltape.collect.sandboxes import running
from rolltape.collect.sandboxes.running import attempt_processes
from rolltape.errors import AgentError, NoSuchFunction
from rolltape.records.rollout import StopReason

CHILD = "import os, subprocess, sys, time\n"
SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(300)']"
DAEMON = f"""{CHILD}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execve(sys.executable, {SLEEPER}, {{}})
    os._exit(0)
os.wait()
"""
DEAF = "import signal\nfor one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(one, signal.SIG_IGN)\n"
ENDLESS = "import time\nprint('up', flush=True)\ntime.sleep(300)\n"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.3)


async def run(place: Path, code: str, *, files: dict[str, str] | None = None, **fields: object) -> AgentOutcome:
    """Run a Python program as the agent `command`."""
    script = place / "program.py"
    script.write_text(code)
    agent = agent_named(f"command:{sys.executable} {script}")
    return await agent.run(assigned(ScriptedEpisode(Answer(), files=files), place, **fields))


def printed(place: Path, name: str = "stdout") -> str:
    return (place / "logs" / f"{name}.txt").read_text()


def living(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_program_is_told_where_the_model_is_and_what_to_do(tmp_path: Path) -> None:
    code = """import json, os, sys
told = json.load(sys.stdin)
print(json.dumps({"told": told, "env": dict(os.environ), "file": open("in/data.txt").read()}))
open("out.txt", "w").write("done")
"""
    # What it is scored by is not for it: a shell of its model reads its stdin by /proc.
    scored = {
        "answer": 4,
        "check": {"command": "true", "files": {"hidden.py": ""}},
        "criteria": ["polite"],
        "judge": {},
    }
    task = {"question": "Why?", **scored}
    tools = {"allowed_tools": ("Bash",), "denied_tools": ("Web",)}
    outcome = await run(tmp_path, code, files={"in/data.txt": "é\n"}, task=task, **tools)
    ended = outcome.ended[AGENT]
    said = json.loads(ended.text)
    env = said["env"]
    assert said["told"] == {
        "version": 1,
        "rollout": ROLLOUT,
        "prompt": "Go.",
        "task": {"question": "Why?"},
        "messages": [{"role": "user", "content": "Go."}],
        "openai_base_url": NOWHERE.openai_base_url,
        "anthropic_base_url": NOWHERE.anthropic_base_url,
        "google_base_url": NOWHERE.google_base_url,
        "key": "key",
        "model": "the-model",
        "seed": 7,
        "max_turns": 20,
        "timeout_s": 60.0,
        "allowed_tools": ["Bash"],
        "denied_tools": ["Web"],
    }
    assert (env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"]) == (NOWHERE.openai_base_url, "key")
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_API_KEY"]) == (NOWHERE.anthropic_base_url, "key")
    assert (env["GOOGLE_GEMINI_BASE_URL"], env["GEMINI_API_KEY"]) == (NOWHERE.google_base_url, "key")
    assert env["ROLLTAPE_MODEL"] == "the-model"
    assert said["file"] == "é\n"
    assert ended.folder is not None
    assert (ended.folder / "out.txt").read_text() == "done"
    assert (outcome.exit_code, outcome.signal, outcome.timed_out, outcome.broken) == (0, None, False, None)
    assert (ended.stop_reason, ended.exit_code) == (StopReason.COMPLETED, 0)


async def test_its_home_is_its_own_and_goes_when_the_outcome_is_discarded(tmp_path: Path) -> None:
    code = """import os, pathlib
home = pathlib.Path.home()
(home / "locked").mkdir()
(home / "locked" / "file").write_text("x")
(home / "locked").chmod(0)
print(home, os.getcwd(), os.environ["TMPDIR"])
"""
    first, second = [await run(tmp_path, code) for _ in range(2)]
    places = [outcome.ended[AGENT].text.split() for outcome in (first, second)]
    assert not set(places[0]) & set(places[1])
    assert all(str(tmp_path / "scratch") in place for place in places[0])
    await discard(first)
    await discard(second)
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_secrets_of_the_collector_do_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    monkeypatch.setenv("PYTHONPATH", "hush")
    outcome = await run(tmp_path, "import os\nprint(os.environ)\n")
    assert "hush" not in outcome.ended[AGENT].text


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [("raise SystemExit(1)", 1, None), ("import os\nos.kill(os.getpid(), 9)", None, signal.SIGKILL)],
)
async def test_how_it_ended_by_itself_is_an_outcome_to_score(
    tmp_path: Path, code: str, exit_code: int | None, number: int | None
) -> None:
    outcome = await run(tmp_path, code)
    assert (outcome.exit_code, outcome.signal, outcome.broken) == (exit_code, number, None)
    assert outcome.ended[AGENT].stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize("code", [ENDLESS, DEAF + ENDLESS], ids=["hangs", "ignores SIGTERM"])
async def test_a_program_that_does_not_end_times_out(tmp_path: Path, code: str) -> None:
    outcome = await run(tmp_path, code, timeout_s=0.5)
    assert outcome.timed_out
    assert outcome.signal == (signal.SIGKILL if DEAF in code else signal.SIGTERM)
    ended = outcome.ended[AGENT]
    assert (ended.stop_reason, ended.text) == (StopReason.TIMEOUT, "up\n")
    assert attempt_processes(ROLLOUT) == []


async def test_children_that_it_leaves_are_ended(tmp_path: Path) -> None:
    code = f"{CHILD}child = subprocess.Popen({SLEEPER})\nopen('{tmp_path}/pid', 'w').write(str(child.pid))\n"
    outcome = await run(tmp_path, code)
    assert outcome.exit_code == 0
    assert not living(tmp_path / "pid")
    assert attempt_processes(ROLLOUT) == []


async def test_a_daemon_that_left_group_session_and_environment_is_ended(tmp_path: Path) -> None:
    code = DAEMON.replace("os.execve", f"open('{tmp_path}/pid', 'w').write(str(os.getpid())); os.execve")
    outcome = await run(tmp_path, code)
    assert outcome.exit_code == 0
    assert not living(tmp_path / "pid")


async def test_a_time_out_ends_deaf_children_too(tmp_path: Path) -> None:
    deaf = DEAF + "import time\ntime.sleep(300)\n"
    code = f"{CHILD}{DEAF}for _ in range(3):\n    subprocess.Popen([sys.executable, '-c', {deaf!r}])\ntime.sleep(300)\n"
    outcome = await run(tmp_path, code, timeout_s=0.7)
    assert outcome.timed_out
    assert attempt_processes(ROLLOUT) == []


async def test_a_flood_is_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LOG_BYTES", 100_000)
    code = "import sys\nfor _ in range(1000): sys.stdout.write('x' * 9999 + '\\n')\nprint('the end')\n"
    outcome = await run(tmp_path, code)
    kept = (tmp_path / "logs" / "stdout.txt").stat().st_size
    assert kept < 200_000
    assert outcome.left_out_bytes == 1000 * 10_000 + len("the end\n") - 100_000 - 65_536
    assert f"{outcome.left_out_bytes} bytes left out" in printed(tmp_path)
    assert outcome.ended[AGENT].text.endswith("the end\n")


async def test_an_endless_flood_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LOG_BYTES", 100_000)
    code = DEAF + "import os\nwhile True:\n    os.write(1, b'y' * 65536)\n    os.write(2, b'n' * 65536)\n"
    outcome = await run(tmp_path, code, timeout_s=1.0)
    assert outcome.timed_out
    assert outcome.left_out_bytes > 0
    assert all((tmp_path / "logs" / name).stat().st_size < 200_000 for name in ("stdout.txt", "stderr.txt"))


async def test_cancelling_ends_it_and_removes_its_folders(tmp_path: Path) -> None:
    running = asyncio.ensure_future(run(tmp_path, f"{CHILD}subprocess.Popen({SLEEPER})\n{ENDLESS}"))
    async with asyncio.timeout(20):
        while len(attempt_processes(ROLLOUT)) < 2:
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert attempt_processes(ROLLOUT) == []
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_a_second_cancel_does_not_wait_and_all_ends_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE_S", 3.0)
    attempt = asyncio.ensure_future(run(tmp_path, DEAF + ENDLESS))
    async with asyncio.timeout(30):
        while not (tmp_path / "logs" / "stdout.txt").exists() or "up" not in printed(tmp_path):
            await asyncio.sleep(0.02)
        attempt.cancel()
        await asyncio.sleep(0.1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert attempt_processes(ROLLOUT), "it is deaf to SIGTERM, and its grace time is not over"
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.02)
    assert attempt_processes(ROLLOUT) == []


async def test_when_the_collector_is_killed_its_programs_end(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ENDLESS)
    collector = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from agent_assignments import ScriptedEpisode, assigned
from rolltape.collect.agents import agent_named
from rolltape.collect.environments.protocol import Answer
agent = agent_named("command:" + sys.executable + " {script}")
asyncio.run(agent.run(assigned(ScriptedEpisode(Answer()), Path({str(tmp_path)!r}), rollout={ROLLOUT!r})))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", collector)
    async with asyncio.timeout(30):
        while not attempt_processes(ROLLOUT):
            await asyncio.sleep(0.02)
        process.kill()
        await process.wait()
        while attempt_processes(ROLLOUT):
            await asyncio.sleep(0.02)


async def test_a_program_that_kills_its_supervisor_is_ended_and_broken(tmp_path: Path) -> None:
    code = f"{CHILD}{DEAF}os.kill(os.getppid(), 9)\ntime.sleep(300)\n"
    outcome = await run(tmp_path, code)
    assert outcome.ended == {}
    assert "was killed" in str(outcome.broken)
    async with asyncio.timeout(10):
        while attempt_processes(ROLLOUT):
            await asyncio.sleep(0.02)


async def test_what_cannot_be_started_is_broken(tmp_path: Path) -> None:
    script = tmp_path / "no-interpreter"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    outcome = await agent_named(f"command:{script}").run(assigned(ScriptedEpisode(Answer()), tmp_path))
    assert outcome.ended == {}
    assert "No such file" in str(outcome.broken)


@pytest.mark.parametrize("name", ["../out.txt", "/etc/rolltape", "."])
async def test_a_file_outside_the_working_directory_is_refused(tmp_path: Path, name: str) -> None:
    outcome = await run(tmp_path, "", files={"fine.txt": "", name: "x"})
    assert "outside the working directory" in str(outcome.broken)
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_episodes_that_a_program_cannot_take_are_broken(tmp_path: Path) -> None:
    agent = agent_named(f"command:{sys.executable}")
    game = await agent.run(assigned(ScriptedEpisode(Answer(), seats=("x", "o")), tmp_path))
    assert "takes one seat, not x, o" in str(game.broken)
    tool = Tool("add", "", {}, lambda: "")
    tools = await agent.run(assigned(ScriptedEpisode(Answer(), tools=[tool]), tmp_path))
    assert "cannot call tools of an environment: add" in str(tools.broken)


def test_relative_paths_of_a_command_are_those_of_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("print(1 + 1)")
    outcome = asyncio.run(agent_named("command:python3 agent.py --fast").run(assigned(ScriptedEpisode(), tmp_path)))
    assert outcome.ended[AGENT].text == "2\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chatty", "there is no agent 'chatty'; known are chat, claude-code"),
        ("chat:x", "there is no agent 'chat:x'"),
        ("codex:", "has nothing after its colon"),
        ("command", "names no program"),
        ("command:no-such-program-here", "no-such-program-here is not on PATH"),
        ("command:./nowhere", "there is no program"),
        ("command:python3 'x", "quote it as for a shell"),
        ("claude-code:/no/claude", "there is no program /no/claude"),
    ],
)
def test_an_agent_that_is_not_there_is_named(text: str, says: str) -> None:
    with pytest.raises(AgentError, match=says):
        agent_named(text)


def test_a_script_that_is_not_executable_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    with pytest.raises(AgentError, match="is not executable; chmod"):
        agent_named(f"command:{tmp_path / 'agent.py'}")


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(NoSuchFunction, match="names no function"):
        agent_named("python")


def test_the_name_is_the_same_wherever_the_program_lies(tmp_path: Path) -> None:
    program_file = tmp_path / "claude"
    program_file.write_text("")
    program_file.chmod(0o755)
    assert agent_named(f"claude-code:{program_file}").name == "claude-code"
    assert agent_named(f"codex:{program_file}").name == "codex"
    assert agent_named("command:python3 -c pass").name == "command:python3 -c pass"
