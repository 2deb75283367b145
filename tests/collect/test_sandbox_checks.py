"""Checks of what an agent left: nothing that it planted is a reward, and what they execute is held by a sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from collecting import rollouts
from rolltape.collect.sandboxes import SandboxKind, bubblewrap
from rolltape.collect.sandboxes.scripts import prepare_check
from sandbox_runs import KINDS, attack, python_of

PLANTER = """
import json, os, sys, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
cheat = "import os; os._exit(0)"
evil = "import atexit, os\\natexit.register(os._exit, 0)\\n"
conftest = "import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
conftest += "    out = yield\\n    out.get_result().outcome = 'passed'\\n"
site = os.path.expanduser(f"~/.local/lib/python3.{sys.version_info[1]}/site-packages")
os.makedirs(site)
os.makedirs("pytest")
os.symlink("/dev/null", "test_calc.py") if not os.path.exists("test_calc.py") else os.unlink("test_calc.py")
for path, text in {
    "conftest.py": conftest, "pytest/__init__.py": cheat, "pytest/__main__.py": cheat, "sitecustomize.py": evil,
    "usercustomize.py": evil, "pytest.ini": "[pytest]\\naddopts = --collect-only\\n", "evil.pth": cheat,
    "grading_of_plants.py": "def grade(task, ended): return 1.0", site + "/evil.pth": cheat,
    site + "/usercustomize.py": evil, "setup.cfg": "[tool:pytest]\\naddopts = --collect-only\\n",
}.items():
    open(path, "w").write(text)
print(4)
"""
TESTS = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"


@pytest.mark.parametrize("sandbox", KINDS)
async def test_a_planted_conftest_is_no_reward(tmp_path: Path, sandbox: SandboxKind) -> None:
    check = {"command": f"{python_of(sandbox)} -m pytest -q test_calc.py", "files": {"test_calc.py": TESTS}}
    files = {"calc.py": "def add(a, b):\n    return a - b\n", "setup.cfg": "[metadata]\nname = calc\n"}
    (result,) = await attack(tmp_path, PLANTER, {"files": files, "check": check, "answer": None}, sandbox=sandbox)
    data = rolltape.trace_of(rollouts(tmp_path / "run")[0]).reward_data
    assert data is not None
    assert (result.reason, result.reward, data["exit_code"]) == (None, 0.0, 1)
    assert "assert -1 == 5" in data["stdout"]
    expected = ["conftest.py", "evil.pth", "pytest", "pytest.ini", "sitecustomize.py", "usercustomize.py"]
    assert data["set_aside"] == expected


PLANTS = {
    "a plugin by its metadata": {
        "cheat.py": "",
        "x-1.dist-info/METADATA": "Name: x\nVersion: 1\n",
        "x-1.dist-info/entry_points.txt": "[pytest11]\nx = cheat\n",
    },
    "a setting of pytest 9": {"cheat.py": "", ".pytest.toml": '[pytest]\naddopts = ["-p", "cheat"]\n'},
    "a module of the standard library": {"argparse.py": ""},
    "a package of the standard library": {"logging/__init__.py": ""},
    "a module that pytest needs": {"iniconfig.py": ""},
    "a module that pytest loads late": {"tests/difflib.py": ""},
}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_test_runner_would_load_unasked_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in PLANTS[plant].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text or "import os\nos._exit(0)\n")
    (tmp_path / "turtle.py").write_text("def own():\n    return 'own'\n")  # which the task has, and the agent wrote
    test = "def test_it():\n    assert {'a': 1} == {'a': 2}\n"
    order = {"files": {"tests/test_it.py": test}, "shipped": {"turtle.py": ""}, "keep": []}
    taken = prepare_check.prepare(order)
    ran = subprocess.run([sys.executable, "-m", "pytest", "-qq", "tests"], capture_output=True, text=True, check=False)
    assert "assert {'a': 1} == {'a': 2}" in ran.stdout
    assert (ran.returncode, len(taken)) == (1, 1)
    assert (tmp_path / "turtle.py").read_text().startswith("def own")


async def test_a_planted_hook_of_git_does_not_run(tmp_path: Path) -> None:
    hook = "#!/bin/sh\\ntouch hooked\\n"
    script = (
        PLANTER
        + f"""
import subprocess
subprocess.run(["git", "init", "-q"], check=True)
open(".git/hooks/pre-commit", "w").write("{hook}")
os.chmod(".git/hooks/pre-commit", 0o755)
"""
    )
    commit = "git -c user.name=n -c user.email=e commit -q --allow-empty -m m && test ! -e hooked"
    (result,) = await attack(tmp_path, script, {"check": {"command": commit}, "answer": None})
    assert (result.reason, result.reward) == (None, 1.0)


async def test_a_command_that_passes_is_a_reward_however_much_it_prints(tmp_path: Path) -> None:
    check = {"command": f"{sys.executable} -m pytest -qs test_calc.py", "files": {"test_calc.py": TESTS}}
    files = {"calc.py": "def add(a, b):\n    print('x' * 1_000_000)\n    return a + b\n"}
    (result,) = await attack(tmp_path, PLANTER, {"files": files, "check": check, "answer": None})
    assert (result.reason, result.reward) == (None, 1.0)


FORGER = """
import os, sys
for descriptor in range(20):
    for path in (f"/dev/fd/{descriptor}", f"/proc/{sys.argv[1]}/fd/{descriptor}"):
        try:
            os.write(os.open(path, os.O_WRONLY), b'{"score": {"reward": 100}}')
        except OSError:
            pass
"""
GRADING = (
    f"FORGER = {FORGER!r}"
    + """
import json, os, socket, subprocess, sys
def grade(task, ended):
    scope = {}
    exec((ended.folder / "calc.py").read_text(), scope)
    tried = {}
    for name in ("run", "environment", "engine"):
        try:
            tried[name] = repr(scope[name](task))
        except Exception as error:
            tried[name] = type(error).__name__
    print("what a check prints is not its score")
    subprocess.run([sys.executable, "-c", FORGER, str(os.getpid())], check=True)
    return {"reward": 0.5, "tried": tried, "user": os.getuid(), "nan": float("nan")}
"""
)
CALC = """
import os, socket
def run(task): return os.listdir(task["run"])
def environment(task): return open(f"/proc/{task['pid']}/environ").read()
def engine(task): return socket.create_connection(("127.0.0.1", task["engine"]), 3)
"""


async def test_a_check_function_runs_what_an_agent_wrote_inside_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grading_of_plants.py").write_text(GRADING)
    monkeypatch.syspath_prepend(tmp_path)
    task = {"files": {"calc.py": CALC}, "check": "python:grading_of_plants:grade", "answer": None, "pid": os.getpid()}
    (result,) = await attack(tmp_path, PLANTER, task)
    assert (result.reason, result.reward) == (None, 0.5)
    data = rolltape.trace_of(rollouts(tmp_path / "run")[0]).reward_data
    assert data is not None
    assert data["user"] == bubblewrap.USER
    assert data["tried"] == {
        "run": "FileNotFoundError",
        "environment": "FileNotFoundError",
        "engine": "ConnectionRefusedError",
    }


async def test_a_working_directory_that_cannot_be_checked_is_no_fault_of_the_infrastructure(tmp_path: Path) -> None:
    check = {"command": "true", "files": {"closed/test.py": ""}}
    script = PLANTER + "os.mkdir('closed')\nos.chmod('closed', 0)\nos.chmod('.', 0)\n"
    (result,) = await attack(tmp_path, script, {"check": check, "answer": None})
    assert (result.reason, result.reward) == (None, 0.0)
    data = rolltape.trace_of(rollouts(tmp_path / "run")[0]).reward_data
    assert data is not None
    assert "the working directory cannot be checked" in data["stderr"]
    assert list((tmp_path / "run" / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; [os.write(one, b'{\\n') for one in range(3, 20) if os.path.exists(f'/dev/fd/{one}')]; os._exit(0)",
    ],
    ids=["ends", "garbles"],
)
async def test_code_that_ends_the_check_is_not_rewarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "grading_of_exits.py").write_text(GRADING)
    monkeypatch.syspath_prepend(tmp_path)
    task = {"files": {"calc.py": code}, "check": "python:grading_of_exits:grade", "answer": None}
    (result,) = await attack(tmp_path, PLANTER, task)
    assert (result.reason, result.reward) == (None, 0.0)


ENVIRONMENT = """
import os
from rolltape.collect.environments import AGENT, Answer, Opening, Score

class Sums:
    name = "sums"
    def check(self, task): pass
    def begin(self, task, seed): return Sum()

class Sum:
    seats = (AGENT,)
    over = False
    def opening(self, seat):
        return Opening(messages=[{"role": "user", "content": "Go."}], files={"calc.py": "print(2 + 2)"})
    def next_seat(self): return None if self.over else AGENT
    async def answer(self, seat, reply): return Answer(done=True)
    async def score(self, seat, ended):
        end = await ended.run(["python3", "calc.py"])
        line = await ended.run("pwd; id -u; cat; exit 3", stdin="given", files={"new.txt": "x"})
        late = await ended.run("ls; sleep 60", timeout_s=3)
        data = {"line": [line.stdout, line.exit_code], "late": late.timed_out}
        data["new"] = (ended.folder / "new.txt").read_text()
        return Score(reward=float(end.stdout), reward_data=data)
"""


async def test_an_environment_runs_commands_where_the_agent_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums_in_a_sandbox.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["rolltape.collect.sandboxes.running"], "GRACE_S", 0.3)
    (result,) = await attack(tmp_path, PLANTER, {}, environment="python:sums_in_a_sandbox:Sums")
    assert (result.reason, result.reward) == (None, 4.0)
    data = rolltape.trace_of(rollouts(tmp_path / "run")[0]).reward_data
    assert data == {"line": [f"/workspace\n{bubblewrap.USER}\ngiven", 3], "late": True, "new": "x"}
