"""Agents in containers: what they find there, what is checked in the same container, and that no container is left."""

import asyncio
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import collected, command, finished_per_task, instant, rollouts, task_file
from commands import Cli
from podman import containers, needs_podman, podman
from rolltape.collect.results import RolloutResult
from rolltape.collect.sandboxes import ContainerOwner, ContainerSettings, SandboxKind, SandboxNetwork
from rolltape.collect.sandboxes import containers as sandbox_containers
from rolltape.collect.sandboxes.container_program import ContainerProgram
from rolltape.collect.sandboxes.containers import listen_in
from rolltape.errors import CollectError
from rolltape.records.rollout import Status, StopReason
from rolltape.tape.recording.tape import open_tape

ASKS = """
import json, os, socket, subprocess, sys, time, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"], "max_tokens": 8}).encode()
url = told["openai_base_url"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
"""
CALC = "def add(a, b):\n    return a + b\n"
TESTS = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
PYTEST: dict[str, Any] = {"command": "python3 -m pytest -q test_calc.py", "files": {"test_calc.py": TESTS}}
# For a check: no process of the agent is left, and the gateway is out of reach.
ALONE = """
import os, re, socket, sys
running = [open(f"/proc/{one}/cmdline").read() for one in os.listdir("/proc") if one.isdecimal()]
assert not any("left-behind" in one for one in running), running
try:
    socket.create_connection(("127.0.0.1", int(open("/tmp/port").read())), timeout=3)
except OSError:
    sys.exit(0)
sys.exit("the gateway is in reach")
"""


async def collect(
    place: Path, script: str, tasks: list[dict[str, Any]], kind: str = "podman", **settings: Any
) -> dict[str | None, RolloutResult]:
    """Collect one attempt at each task by an agent that is a script; the results by task."""
    given = {"image": needs_podman(), **settings.pop("container", {})}
    (place / "agent.py").write_text(ASKS + script)
    source = task_file(place, [{"prompt": "What is 3 + 1?", **task} for task in tasks])
    settings = {"agent": f"command:python3 {place / 'agent.py'}", "group_size": 1, "timeout_s": 120.0, **settings}
    async with instant() as engine:
        results = await collected(
            source, place / "run", engine, sandbox=kind, container=ContainerSettings(**given), **settings
        )
    assert left_of(place / "run") == []
    return {result.task: result for result in results}


def left_of(run: Path) -> list[str]:
    """The containers of a run."""
    return containers(f"rolltape.run={run}")


def printed(place: Path, result: RolloutResult) -> str:
    return (place / "run" / "logs" / result.rollout / "stdout.txt").read_text()


def reward_data(place: Path, result: RolloutResult) -> dict[str, Any]:
    (one,) = [one for one in rollouts(place / "run") if one.id == result.rollout]
    return dict(rolltape.trace_of(one).reward_data or {})


def put_program(place: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a program on PATH, before all others."""
    (place / "bin").mkdir()
    (place / "bin" / name).write_text(script)
    (place / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=os.pathsep)


async def test_what_an_agent_does_to_its_container_is_tested_in_the_same_container(tmp_path: Path) -> None:
    script = """
open("calc.py", "w").write(told["task"]["calc"])
open("/srv-state", "w").write("kept")
open("/tmp/port", "w").write(told["openai_base_url"].split(":")[2].split("/")[0])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "left-behind"], start_new_session=True)
print(os.getcwd(), sorted(os.listdir(".")))
"""
    check: list[dict[str, Any]] = [
        PYTEST,
        {"command": "python3 alone.py", "files": {"alone.py": ALONE}},
        {"command": ["/bin/sh", "-c", '[ "$(cat /srv-state)" = kept ]']},
    ]
    tasks: list[dict[str, Any]] = [
        {"id": "right", "calc": CALC, "check": check, "files": {"notes.txt": "n"}},
        {"id": "wrong", "calc": CALC.replace("+", "-"), "check": check},
        {"id": "inside", "calc": CALC, "check": check, "files": {"a/b.txt": "n"}, "sandbox": {"workdir": "/srv/app"}},
    ]
    results = await collect(tmp_path, script, tasks)
    assert {task: (one.reason, one.reward) for task, one in results.items()} == {
        "right": (None, 1.0),
        "wrong": (None, 0.0),
        "inside": (None, 1.0),
    }
    assert printed(tmp_path, results["right"]) == "/workspace ['calc.py', 'notes.txt']\n"
    assert printed(tmp_path, results["inside"]) == "/srv/app ['a', 'calc.py']\n"
    failed, alone, kept = reward_data(tmp_path, results["wrong"])["checks"]
    assert "assert -1 == 5" in failed["stdout"]
    assert (alone["exit_code"], kept["exit_code"]) == (0, 0)


async def test_a_container_is_as_flags_and_tasks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
limit = [open(path).read().strip() for path in
         ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max") if os.path.exists(path)]
started = []
try:
    for _ in range(100):
        started.append(subprocess.Popen(["sleep", "60"]))
except OSError:
    pass
facts = {"user": os.getuid(), "limit": limit, "processes": len(started), "started": len(started) == 100}
facts |= {name: os.environ.get(name) for name in ("FROM_FLAG", "FROM_TASK", "PASSED", "SECRET")}
facts |= {"shown": open("/shown/file.txt").read(), "read": open(told["task"]["read"]).read()}
try:
    open("/shown/file.txt", "w")
except OSError as error:
    facts["write"] = error.strerror
print(json.dumps(facts))
os.makedirs("out/deep", exist_ok=True)
open("out/deep/answer.txt", "w").write("4")
os.symlink("/etc/hostname", "out/link")
"""
    for name in ("PASSED", "SECRET"):
        monkeypatch.setenv(name, "on")
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "file.txt").write_text("shown")
    (tmp_path / "read.txt").write_text("read")
    own = {"user": "1000:1000", "workdir": "/tmp/app", "env": {"FROM_TASK": "task"}, "fetch": ["/tmp/app/out"]}
    task = {
        "id": "t",
        "read": str(tmp_path / "read.txt"),
        "check": {"exact": "4", "file": "out/deep/answer.txt"},
        "sandbox": own | {"processes": 20, "memory": "200m"},
    }
    container = {
        "mounts": (f"{tmp_path / 'shown'}:/shown",),
        "env": {"FROM_FLAG": "flag", "FROM_TASK": "flag"},
        "memory": "1g",
        "cpus": 0.9,
    }
    results = await collect(
        tmp_path,
        script,
        [task],
        container=container,
        pass_env=("PASSED",),
        sandbox_read=(str(tmp_path / "read.txt"),),
    )
    facts = json.loads(printed(tmp_path, results["t"]))
    assert (facts["user"], facts["limit"], facts["started"]) == (1000, [str(200 * 2**20)], False)
    assert 0 < facts["processes"] < 20
    assert [facts[name] for name in ("FROM_FLAG", "FROM_TASK", "PASSED", "SECRET")] == ["flag", "task", "on", None]
    assert (facts["shown"], facts["read"], facts["write"]) == ("shown", "read", "Read-only file system")
    assert results["t"].reward == 1.0


async def test_a_file_that_is_too_large_to_be_fetched_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_containers, "_MAX_FETCHED_BYTES", 2**20)
    check = {"exact": "4", "file": "huge"}
    task = {"id": "t", "check": check, "sandbox": {"workdir": "/srv", "fetch": ["/srv/huge", "/srv/missing"]}}
    results = await collect(tmp_path, 'os.truncate(os.open("huge", os.O_CREAT | os.O_WRONLY), 2**40)\n', [task])
    assert (results["t"].reason, results["t"].reward) == (None, 0.0)
    assert reward_data(tmp_path, results["t"])["why"] == "huge cannot be read: No such file or directory"


async def test_what_is_fetched_replaces_a_link_that_the_agent_left_under_its_name(tmp_path: Path) -> None:
    script = """
os.mkdir("/out")
open("/out/answer.txt", "w").write("4")
os.symlink("/nowhere", "/out/link")
os.symlink("/etc", "out")
"""
    task = {"id": "t", "check": {"exact": "4", "file": "out/answer.txt"}, "sandbox": {"fetch": ["/out"]}}
    results = await collect(tmp_path, script, [task])
    assert (results["t"].reason, results["t"].reward) == (None, 1.0)


async def test_an_agent_that_runs_out_of_time_is_ended_and_what_it_left_is_tested(tmp_path: Path) -> None:
    script = """
open("calc.py", "w").write(told["task"]["calc"])
print("waits", flush=True)
time.sleep(600)
"""
    task = {"id": "t", "calc": CALC, "check": PYTEST, "unfinished": "check", "sandbox": {"timeout_s": 12}}
    results = await collect(tmp_path, script, [task])
    assert (results["t"].stop_reason, results["t"].reward) == (StopReason.TIMEOUT, 1.0)
    assert printed(tmp_path, results["t"]) == "waits\n"


async def test_a_network_can_be_less_than_the_collection_allows(tmp_path: Path) -> None:
    task = {"id": "t", "answer": 4, "sandbox": {"network": "none"}}
    results = await collect(tmp_path, "", [task])
    assert results["t"].status is Status.FAILED
    assert "ended with exit code 1 before it had asked the model anything" in str(results["t"].reason)
    rollout = results["t"].rollout
    assert "Connection refused" in (tmp_path / "run" / "logs" / rollout / "stderr.txt").read_text()


async def test_a_container_that_cannot_be_made_is_no_outcome_of_the_agent(tmp_path: Path) -> None:
    tasks = [
        {"id": "no image", "answer": 4, "sandbox": {"image": "localhost/rolltape-has-no-such-image"}},
        {"id": "no user", "answer": 4, "sandbox": {"user": "nobody-knows"}},
        {"id": "no build", "answer": 4, "sandbox": {"build": str(tmp_path)}},
    ]
    results = await collect(tmp_path, "print(4)", tasks)
    assert {one.status for one in results.values()} == {Status.FAILED}
    reasons = {task: str(one.reason) for task, one in results.items()}
    assert "localhost/rolltape-has-no-such-image: there is none here, and it cannot be pulled" in reasons["no image"]
    assert "the container could not be made" in reasons["no user"]
    assert "nobody-knows" in reasons["no user"]
    assert f"no image can be built from {tmp_path}" in reasons["no build"]


@pytest.mark.parametrize(
    ("wanted", "allowed", "says"),
    [
        ({}, "gateway", "its sandbox has neither an image nor a folder to build one from"),
        ({"image": "a", "build": "b"}, "gateway", "its sandbox has an image and a build"),
        ({"image": "a", "network": "host"}, "gateway", "wants the network host, and the collection allows gateway"),
        ({"image": "a", "mounts": ["/etc:/etc"]}, "host", "has mounts, which a task cannot ask for"),
        ({"image": "a", "imige": "b"}, "host", "its sandbox cannot be used: Object contains unknown field `imige`"),
        ({"image": "a", "memory": "much"}, "host", "the container's memory is 'much'"),
        ({"image": "a", "memory": "0g"}, "host", "the container's memory is '0g'; give more than 0"),
        ({"build": "--volume=/:/host"}, "host", "the container's build is '--volume=/:/host'; give one that does not"),
        ({"image": "--help"}, "host", "the container's image is '--help'; give one that does not begin with -"),
        ({"image": "a", "cpus": 0}, "host", "the container's cpus is 0.0; give more than 0"),
        ({"image": "a", "workdir": "app"}, "host", "the container's path 'app' is relative"),
        ({"image": "a", "env": {"A B": "c"}}, "host", "the container's env has the name 'A B'"),
        ("python", "host", "its sandbox is 'python'; give an object"),
    ],
)
def test_a_task_cannot_have_any_sandbox(wanted: Any, allowed: str, says: str) -> None:
    with pytest.raises(CollectError) as raised:
        ContainerSettings().for_task(wanted, SandboxNetwork(allowed))
    assert says in str(raised.value)


def test_tasks_and_flags_of_containers_are_refused_without_containers(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path, [{"id": "t", "prompt": "?", "answer": 4, "sandbox": {"image": "python:3.12"}}])
    how = (source, "--run", tmp_path / "run", "--agent", "command:true")
    assert "names an image; collect with --sandbox podman" in cli("collect", *how, "--sandbox", "none").err
    assert "--sandbox-cpus: only containers have this" in cli("collect", *how, "--sandbox-cpus", 2).err
    assert "--sandbox-env A: there is no value" in cli("collect", *how, "--sandbox-env", "A").err
    assert (
        "--sandbox-network bridge: only containers have one"
        in cli(*("collect", task_file(tmp_path), *how[1:], "--sandbox", "bwrap", "--sandbox-network", "bridge")).err
    )


UNSURE = """
import os
def unsure(task, ended):
    return 1.0 if os.environ.get("JUDGE_IS_UP") else 1 / 0
"""


def test_what_could_not_be_graded_is_graded_later_in_a_container_of_the_same_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "unsure_of_it.py").write_text(UNSURE)
    monkeypatch.syspath_prepend(tmp_path)
    check = [PYTEST, {"function": "python:unsure_of_it:unsure", "sandbox": False}]
    task = {"id": "t", "calc": CALC, "check": check}
    script = 'open("calc.py", "w").write(told["task"]["calc"])\n'
    results = asyncio.run(collect(tmp_path, script, [task]))
    assert "ZeroDivisionError" in str(results["t"].reason)
    monkeypatch.setenv("JUDGE_IS_UP", "1")
    outside = cli("score", tmp_path / "run", "--ungraded")
    assert f"its agent worked in a container of {needs_podman()}; grade it by collect" in outside.out + outside.err
    results = asyncio.run(collect(tmp_path, script, [task], resume=True))
    assert (results["t"].reason, results["t"].reward) == (None, 1.0)


FLAKY = """#!/bin/sh
if [ "$1" = rm ] && ! [ -e {mark} ]; then touch {mark}; echo "the disk is busy" >&2; exit 125; fi
exec {podman} "$@"
"""


async def test_a_container_that_cannot_be_removed_at_once_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_podman()
    put_program(tmp_path, monkeypatch, "podman", FLAKY.format(mark=tmp_path / "mark", podman=shutil.which("podman")))
    results = await collect(tmp_path, "print(4)", [{"id": "t", "answer": 4}])
    assert (tmp_path / "mark").exists()
    assert results["t"].reward == 1.0


FAKE_DOCKER = """#!/bin/sh
# podman under the name of docker; what docker does not know is an error.
for word in "$@"; do
  case "$word" in --pidfile*|--http-proxy*|--ignore*|*=seccomp=*) echo "unknown flag: $word" >&2; exit 125;; esac
done
echo "$1" >>{calls}
exec {podman} "$@"
"""


async def test_docker_is_called_as_it_wants_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_podman()
    docker = FAKE_DOCKER.format(calls=tmp_path / "calls", podman=shutil.which("podman"))
    put_program(tmp_path, monkeypatch, "docker", docker)
    task = {"id": "t", "calc": CALC, "check": PYTEST}
    results = await collect(tmp_path, 'open("calc.py", "w").write(told["task"]["calc"])\n', [task], "docker")
    assert (results["t"].reason, results["t"].reward) == (None, 1.0)
    calls = (tmp_path / "calls").read_text().split()
    assert {"ps", "image", "run", "inspect", "start", "rm"} <= set(calls)


async def test_a_collector_that_may_not_enter_a_network_says_what_it_needs() -> None:
    needs_podman()
    os.seteuid(4242)
    try:
        with pytest.raises(OSError, match="its network may not be entered; run the collector as root"):
            await listen_in(1, 0)
    finally:
        os.seteuid(0)


async def test_only_containers_of_dead_collectors_are_swept(tmp_path: Path) -> None:
    image = needs_podman()
    with open_tape(tmp_path / "run") as tape, open_tape(tmp_path / "other") as other:
        owners = {
            "alive": (tmp_path / "run", tape.writer),
            "dead": (tmp_path / "run", "vm-1-00000000"),
            "of another run": (tmp_path / "other", other.writer),
            "of another dead run": (tmp_path / "third", "vm-1-00000000"),
        }
        made = {
            name: podman("create", f"--label=rolltape.run={run}", f"--label=rolltape.writer={writer}", image, "sh")
            for name, (run, writer) in owners.items()
        }
        ids = {name: done.stdout.strip() for name, done in made.items()}
        try:
            program = ContainerProgram(
                SandboxKind.PODMAN, "podman", ContainerOwner(tmp_path / "run", tape.writer), tmp_path
            )
            assert await program.sweep() == [ids["dead"]]
            left = set(containers("rolltape.run"))
            assert {name for name, one in ids.items() if one in left} == owners.keys() - {"dead"}
        finally:
            for one in ids.values():
                podman("rm", "--force", one)


async def test_a_cancelled_attempt_leaves_no_container(tmp_path: Path) -> None:
    running = asyncio.ensure_future(
        collect(tmp_path, 'print("waits", flush=True)\ntime.sleep(600)\n', [{"id": "t", "answer": 4}], grace_s=0.0)
    )
    async with asyncio.timeout(120):
        while not any(one.read_text() for one in (tmp_path / "run" / "logs").glob("*/stdout.txt")):
            assert not running.done()
            await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running})
    assert left_of(tmp_path / "run") == []
    (one,) = rollouts(tmp_path / "run")
    assert (one.status, one.outcome.reason) == (Status.FAILED, "cancelled before it had ended")


@pytest.mark.slow
def test_killed_five_times_it_leaves_no_container_and_every_attempt_once(tmp_path: Path, cli: Cli) -> None:
    attempts = int(os.environ.get("ROLLTAPE_CONTAINERS", "20"))
    image, run, chance = needs_podman(), tmp_path / "run", random.Random(5)
    (tmp_path / "agent.py").write_text(
        ASKS + 'open("calc.py", "w").write("def add(a, b):\\n    return a + b + %d\\n" % told["task"]["wrong"])\n'
    )
    tasks = [
        {"id": f"t{n}", "prompt": "Add.", "wrong": n % 2, "check": PYTEST, "sandbox": {"workdir": "/srv"}}
        for n in range(attempts // 2)
    ]
    arguments = [task_file(tmp_path, tasks), "--run", run, "-g", 2, "--max-concurrent", 4, "--json", "--timeout", 300]
    arguments += ["--sandbox", "podman", "--sandbox-image", image, "--agent", f"command:python3 {tmp_path}/agent.py"]
    for kill in range(5):
        process = command(*arguments, *(["--resume"] if kill else []))
        assert process.stdout is not None
        ended = 1 + chance.randrange(max(1, attempts // 8))
        while ended and (line := process.stdout.readline()):
            ended -= json.loads(line)["event"] == "rollout"
        time.sleep(chance.uniform(0.0, 1.0))
        process.kill()
        process.communicate()
    process = command(*arguments, "--resume")
    out, err = process.communicate(timeout=60 + 10 * attempts)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["whole"]
    assert finished_per_task(run) == {task["id"]: 2 for task in tasks}
    rewards = {(one.head.task_id, one.reward) for one in rollouts(run) if one.status is Status.FINISHED}
    assert rewards == {(task["id"], 1.0 - float(str(task["wrong"]))) for task in tasks}
    assert left_of(run) == []
    assert cli("check", run).code == 0
