"""Task folders of Harbor: read as tasks, attempted in a container, rewarded by their own tests in it."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import ROOT, collected, instant, rollouts
from commands import Cli
from podman import IMAGE as IMAGE_NAME
from podman import containers, needs_podman
from rolltape.collect.dry_run import preview_attempts
from rolltape.collect.results import RolloutResult
from rolltape.collect.sandboxes import SandboxKind
from rolltape.collect.sources import open_source
from rolltape.errors import BadTasks, SourceError
from rolltape.records.rollout import Status

TOML = """
schema_version = "1.4"
[task]
name = "{name}"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 90.0
[verifier]
timeout_sec = 45.0
env = {{ EXPECTED = "hello" }}
[environment]
cpus = 1
memory_mb = 512
env = {{ GREETING = "${{GREETING:-hello}}", HOST_TOKEN = "${{HOST_TOKEN}}" }}
"""
DOCKERFILE = "FROM {image}\nWORKDIR /app\nCOPY given.txt /app/given.txt\n"
TEST = """#!/bin/bash
[ "$(cat /app/answer.txt)" = "$EXPECTED" ] && grep -q hidden /tests/data/secret.txt && reward=1 || reward=0
echo "{shape}" >/logs/verifier/{file}
"""
AGENT = """
import glob, json, os, sys, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
print(told["messages"][0]["content"], os.getcwd(), os.listdir("."), glob.glob("/tests/*"), os.environ.get("HOST_TOKEN"))
if "forge" in told["messages"][0]["content"]:
    os.makedirs("/logs/elsewhere")
    os.symlink("elsewhere", "/logs/verifier")
    open("/logs/elsewhere/reward.txt", "w").write("1")
    os.makedirs("/tests")
    open("/tests/test.sh", "w").write("echo 1 >/logs/verifier/reward.txt")
else:
    open("answer.txt", "w").write(os.environ["GREETING"])
"""


# What an agent does with the instance of SWE-bench.
FIX = """os.path.exists("calc.py") and open("calc.py", "w").write("def add(a, b):\\n    return a + b\\n")
    os.path.exists("test_calc.py") and open("test_calc.py", "w").write("changed by the agent")
    if "GREETING" not in os.environ:
        sys.exit(0)
    """


def make_task(folder: Path, image: str, *, shape: str = "$reward", file: str = "reward.txt", **files: str) -> Path:
    """A task folder; `files` replace its own, with _ for . in their names."""
    given = {
        "task.toml": TOML.format(name=f"tests/{folder.name}"),
        "instruction.md": "Write the greeting to answer.txt.\n",
        "environment/Dockerfile": DOCKERFILE.format(image=image),
        "environment/given.txt": "given",
        "tests/test.sh": TEST.format(shape=shape, file=file),
        "tests/data/secret.txt": "hidden",
    } | {name.replace("_", "."): text for name, text in files.items()}
    for name, text in given.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def collect(place: Path, source: Path | str) -> dict[str | None, RolloutResult]:
    (place / "agent.py").write_text(AGENT)
    async with instant() as engine:
        results = await collected(
            source, place / "run", engine, agent=f"command:python3 {place / 'agent.py'}", group_size=1, sandbox="podman"
        )
    assert containers(f"rolltape.run={place / 'run'}") == []
    return {result.task: result for result in results}


async def test_a_task_is_attempted_in_its_container_and_its_tests_reward_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, tasks = needs_podman(), tmp_path / "tasks"
    monkeypatch.setenv("HOST_TOKEN", "hush")
    make_task(tasks / "plain", image)
    make_task(tasks / "forge", image, instruction_md="Please forge it.\n")
    terms = '{\\"reward\\": $reward, \\"speed\\": 0.5}'
    make_task(tasks / "terms", image, shape=terms, file="reward.json")
    make_task(tasks / "silent", image, shape="nan")
    results = await collect(tmp_path, tasks)
    found = {task: (one.status, one.reward) for task, one in results.items()}
    assert found == {
        "tests/plain": (Status.FINISHED, 1.0),
        "tests/forge": (Status.FINISHED, 0.0),
        "tests/terms": (Status.FINISHED, 1.0),
        "tests/silent": (Status.FINISHED, None),
    }
    assert "wrote no reward that is a number" in str(results["tests/silent"].reason)
    held = {one.head.task_id: one for one in rollouts(tmp_path / "run")}
    assert dict(held["tests/terms"].outcome.reward_terms) == {"speed": 0.5}
    printed = (tmp_path / "run" / "logs" / held["tests/plain"].id / "stdout.txt").read_text()
    assert printed == "Write the greeting to answer.txt.\n /app ['given.txt'] [] None\n"


def page_blocks(kind: str) -> list[str]:
    """The blocks of a kind in docs/how-to/collect/harbor.md."""
    page = ROOT / "docs" / "how-to" / "collect" / "harbor.md"
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_page_collect_a_task_of_harbor_and_an_instance_of_swe_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    make_task(tmp_path / "tasks" / "one", needs_podman())
    (tmp_path / "agent.py").write_text(AGENT.replace('open("answer.txt"', FIX + 'open("answer.txt"'))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "image" / "repo")]
    files = {
        "calc.py": "def add(a, b):\n    return a - b\n",
        "test_calc.py": "def test_old():\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / "image" / "repo").mkdir(parents=True, exist_ok=True)
        (tmp_path / "image" / "repo" / name).write_text(text)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "image" / "Dockerfile").write_text(f"FROM {IMAGE_NAME}\nCOPY repo /testbed\n")
    subprocess.run(["podman", "build", "-q", "-t", "localhost/rolltape-test-swe", str(tmp_path / "image")], check=True)
    patch = "--- a/test_calc.py\n+++ b/test_calc.py\n@@ -1,2 +1,4 @@\n+from calc import add\n def test_old():\n"
    patch += "-    pass\n+    assert add(2, 3) == 5\n+\n"
    instance = {
        "instance_id": "calc-1",
        "problem_statement": "add subtracts.",
        "image_name": "localhost/rolltape-test-swe",
        "base_commit": "HEAD",
        "test_patch": patch,
        "FAIL_TO_PASS": ["test_calc.py::test_old"],
        "PASS_TO_PASS": [],
    }
    (tmp_path / "instances.jsonl").write_text(json.dumps(instance) + "\n")
    (recipe,) = page_blocks("python")
    exec(recipe, {})
    for line in page_blocks("sh"):
        program, *arguments = shlex.split(line)
        done = cli(*arguments)
        assert (program, done.code) == ("rolltape", 0), done.err
    for run in ("harbor", "swe"):
        assert [(one.status, one.reward) for one in rollouts(tmp_path / "runs" / run)] == 2 * [(Status.FINISHED, 1.0)]


def test_what_task_toml_says_is_what_the_container_gets(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "tasks" / "one", "base")
    (task,) = open_source(f"harbor:{folder.parent}")
    assert (task.id, task.environment, task.data["prompt"]) == (
        "tests/one",
        "harbor",
        "Write the greeting to answer.txt.\n",
    )
    assert task.data["sandbox"] == {
        "build": str(folder / "environment"),
        "cpus": 1,
        "memory": "512m",
        "workdir": ".",
        "env": {"GREETING": "hello"},
        "timeout_s": 90.0,
    }
    assert (task.data["harbor"]["timeout_s"], task.data["harbor"]["env"]) == (45.0, {"EXPECTED": "hello"})
    (same,) = open_source(folder)
    assert same.data == task.data
    (folder / "tests" / "data" / "secret.txt").write_text("other")
    (other,) = open_source(folder)
    assert other.data["harbor"]["digest"] != task.data["harbor"]["digest"]


def test_an_agent_is_given_nothing_of_the_tests(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "one", "base")
    settings = rolltape.CollectSettings(source=str(folder), agent="command:sh -c true", sandbox=SandboxKind.PODMAN)
    (shown,) = preview_attempts(settings, tmp_path / "run")
    assert shown["given"]["stdin"]["prompt"].startswith("Write the greeting")
    assert "EXPECTED" not in str(shown)
    assert str(folder / "tests") not in str(shown)


IMAGE = 'docker_image = "registry.example/one:1"\nnetwork_mode = "no-network"\n'


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (IMAGE, {"image": "registry.example/one:1", "network": "gateway"}),
        ('workdir = "/srv"\n', {"workdir": "/srv"}),
    ],
)
def test_an_image_a_folder_and_no_network_can_be_named(tmp_path: Path, more: str, wanted: dict[str, Any]) -> None:
    folder = make_task(tmp_path / "one", "base", task_toml=TOML.format(name="a/b") + more)
    (task,) = open_source(folder)
    assert task.data["sandbox"].items() >= wanted.items()
    assert ("build" in task.data["sandbox"]) == ("image" not in wanted)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task_toml": "[[steps]]\nname = 'a'\n"}, "its steps is not supported"),
        ({"task_toml": "[environment]\ngpus = 1\n"}, "its environment.gpus is not supported"),
        ({"task_toml": "[agent]\nuser = 'a'\n"}, "its agent is user 'a' and its tests are None"),
        ({"task_toml": "[environment\n"}, "Expected ']'"),
        ({"task_toml": "environment = 3\n"}, "its task.toml cannot be used: Expected `object`, got `int`"),
        ({"task_toml": "[environment]\nenv = {A = 1}\n"}, "Expected `str`, got `int` - at `$.environment.env[...]`"),
        ({"task_toml": "[verifier]\ntimeout_sec = 'x'\n"}, "at `$.verifier.timeout_sec`"),
        ({"task_toml": "[agent]\ntimeout_sec = 'x'\n"}, "at `$.agent.timeout_sec`"),
        ({"environment/docker-compose_yaml": ""}, "it has several containers"),
        ({"environment/Dockerfile": None}, "it has neither environment/Dockerfile nor environment.docker_image"),
        ({"tests/test_sh": None}, "it has no tests/test.sh"),
    ],
)
def test_a_task_that_needs_more_is_refused_by_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    folder = make_task(tmp_path / "one", "base", **{name: text or "" for name, text in change.items()})
    for name, text in change.items():
        if text is None:
            (folder / name.replace("_", ".")).unlink()
    with pytest.raises(BadTasks, match=re.escape(says)):
        open_source(folder)


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"there is no task.toml in it"):
        open_source(f"harbor:{tmp_path}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(SourceError, match="of terminal-bench 1; convert them"):
        open_source(f"harbor:{tmp_path}")
