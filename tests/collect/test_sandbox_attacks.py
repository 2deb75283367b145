"""An agent that attacks: what it reaches from inside a sandbox, and what it leaves behind for the collector."""

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rolltape
from bwrap import needs_bwrap
from collecting import ROOT, rollouts
from rolltape.collect.grading.grades import keep_folder, unpack_folder
from rolltape.collect.sandboxes import ContainerSettings, SandboxKind, SandboxNetwork, bubblewrap
from rolltape.collect.sandboxes.visible import install_mounts, with_parents
from rolltape.collect.sandboxes.workspace import remove
from rolltape.errors import CollectError
from sandbox_runs import KINDS, attack, printed

SECRET = "hush-hush"
ORDINARY = 4242  # a user whom nobody knows
# Each attack returns what it got, or raises. Where one succeeds, it does no harm: files are opened and not written, and
# processes are seized and not stopped.
ATTACKER = """
import ctypes, glob, json, os, signal, socket, subprocess, sys, urllib.request
told = json.load(sys.stdin)
task = told["task"]
libc = ctypes.CDLL(None, use_errno=True)

def ask():
    body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
    url = told["openai_base_url"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})))

def system_call(done):
    if done == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return done

def environments():
    read = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            read.append(open(path).read())
        except OSError:
            pass
    return [one for one in read if task["secret"] in one] or refuse()

def refuse():
    raise OSError(1, "nothing was found")

def connect(kind, address):
    with socket.socket(kind) as one:
        one.settimeout(3)
        one.connect(address)
        return "connected"

def capabilities():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    held = [lines[name].strip() for name in ("CapPrm", "CapEff", "CapAmb")]
    return held if any(int(one, 16) for one in held) or lines["NoNewPrivs"].strip() != "1" else refuse()

def admin(method, path):
    url = told["openai_base_url"].partition("/s/")[0] + path
    headers = {"Authorization": "Bearer " + told["key"], "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, b"{}", headers, method=method)).read()

def fill(path):
    with open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(2**20))
        return file.tell()

def write(path):
    os.close(os.open(path, os.O_WRONLY))
    return path

def create(folder):
    path = f"{folder}/rolltape-test-{os.getpid()}"
    open(path, "x").close()
    os.unlink(path)
    return path

UNSHARE = "import ctypes, sys; sys.exit(-ctypes.CDLL(None).unshare(0x10000000))"
os.mkdir("folder")
attacks = {
    "list the run": lambda: os.listdir(task["run"]),
    "read the run": lambda: open(task["run"] + "/run.json").read(),
    "read other workspaces": lambda: glob.glob(task["run"] + "/scratch/*/*") or refuse(),
    "read tasks": lambda: open(task["run"] + "/../tasks.jsonl").read(),
    "environment of another process": lambda: open(f"/proc/{task['pid']}/environ").read(),
    "any environment": environments,
    "kill another process": lambda: os.kill(task["pid"], 0),
    "kill everybody": lambda: len(glob.glob("/proc/[0-9]*")) > 4 or refuse(),
    "trace another process": lambda: system_call(libc.ptrace(0x4206, task["pid"], 0, 0)),
    "trace the first process": lambda: system_call(libc.ptrace(0x4206, 1, 0, 0)),
    "memory of the first process": lambda: open("/proc/1/mem", "rb").read(1),
    "descriptors of the first process": lambda: os.listdir("/proc/1/fd"),
    "reach the engine": lambda: connect(socket.AF_INET, ("127.0.0.1", task["engine"])),
    "reach another port": lambda: connect(socket.AF_INET, ("127.0.0.1", task["port"])),
    "reach the machine's own address": lambda: connect(socket.AF_INET, (task["address"], task["port"])),
    "reach an abstract socket": lambda: connect(socket.AF_UNIX, "\\0" + task["abstract"]),
    "reach a socket in a folder": lambda: connect(socket.AF_UNIX, task["socket"]),
    "write to the system": lambda: create("/usr/lib"),
    "write to the root": lambda: create("/"),
    "write to /etc": lambda: write("/etc/passwd"),
    "write to the kernel": lambda: write("/proc/sys/kernel/core_pattern"),
    "write beside the workspace": lambda: create("/home"),
    "be root": lambda: os.setuid(0),
    "be root outside": lambda: 0 if os.getuid() == 0 or os.geteuid() == 0 else refuse(),
    "hold capabilities": capabilities,
    "gain capabilities": lambda: subprocess.run([sys.executable, "-c", UNSHARE], check=True),
    "gain capabilities by a program": lambda: subprocess.run(["unshare", "-Ur", "true"], check=True, stderr=-3),
    "mount": lambda: system_call(libc.mount(b"none", b"folder", b"tmpfs", 0, 0)) or libc.umount(b"folder"),
    "change the mounts": lambda: system_call(libc.mount(b"none", b"/usr", None, 32 | 4096, 0)),
    "read the keyring": lambda: system_call(libc.syscall(250, 0, -3, 0)),
    "read the disk": lambda: [open(path, "rb").read(1) for path in glob.glob("/dev/[svxm][de]*")][0],
    "fill the disk by /tmp": lambda: fill("/tmp/full"),
    "fill the memory by /dev/shm": lambda: fill("/dev/shm/full"),
    "reach a port of another container": lambda: connect(socket.AF_INET, ("127.0.0.1", task["port_of_other"])),
    "reach a socket of another container": lambda: connect(socket.AF_UNIX, "\\0other-container"),
    "open a session": lambda: admin("POST", "/sessions"),
    "list sessions": lambda: admin("GET", "/sessions"),
    "finish a session": lambda: admin("POST", f"/sessions/{told['rollout']}/finish"),
    "announce weights": lambda: admin("POST", "/weights"),
}
ask()
got = {}
for name, attack in attacks.items():
    if name not in task.get("only", attacks):
        continue
    try:
        got[name] = repr(attack())
    except Exception as error:
        got[name] = None
    for path in ("/tmp/full", "/dev/shm/full"):
        if os.path.exists(path):
            os.unlink(path)
print(json.dumps({name: value for name, value in got.items() if value is not None}))
"""


@contextmanager
def listeners(place: Path) -> Iterator[dict[str, Any]]:
    """What a program has that runs beside: a variable with a key, ports, an abstract socket, and one in a folder."""
    abstract, path = f"rolltape-test-{os.getpid()}", str(place / "any.sock")
    with (
        socket.create_server(("0.0.0.0", 0)) as port,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as hidden,
        subprocess.Popen(["sleep", "600"], env={"SOME_API_KEY": SECRET, "PATH": os.environ["PATH"]}) as process,
    ):
        named.bind(path)
        hidden.bind(f"\0{abstract}")
        named.listen()
        hidden.listen()
        task = {
            "port": port.getsockname()[1],
            "address": own_address(),
            "abstract": abstract,
            "socket": path,
            "port_of_other": 1,
            "pid": process.pid,
            "secret": SECRET,
        }
        try:
            yield task
        finally:
            process.kill()


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


async def test_an_agent_in_a_sandbox_gets_nothing_but_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "_IN_MEMORY", {"/tmp": 2**23, "/dev/shm": 2**23})
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    with listeners(tmp_path) as task:
        (result,) = await attack(tmp_path, ATTACKER, task)
    assert (result.reason, result.turns) == (None, 1)
    assert json.loads(printed(tmp_path)) == {}


# No attacks, since they end at the container's own files and processes.
OF_USERS = {
    *("fill the disk by /tmp", "fill the memory by /dev/shm", "trace the first process"),
    *("memory of the first process", "descriptors of the first process"),
}
OF_ROOT = {
    *("write to the system", "write to the root", "write to /etc", "write beside the workspace", "be root"),
    *("be root outside", "hold capabilities"),
}
LISTENING = """
import socket
port, hidden = socket.create_server(("0.0.0.0", 5555)), socket.socket(socket.AF_UNIX)
hidden.bind("\\0other-container")
hidden.listen()
print("listening", flush=True)
port.accept()
"""


@pytest.mark.parametrize("user", [None, "1000:1000"])
async def test_an_agent_in_a_container_gets_nothing_but_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str | None
) -> None:
    from podman import needs_podman

    image = needs_podman()
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    attacks = re.findall(r'^    "([^"]+)": ', ATTACKER, re.MULTILINE)
    only = [name for name in attacks if name not in (OF_USERS if user else OF_USERS | OF_ROOT)]
    other = ["podman", "run", "--rm", "--init", "--network=none", image, "python3", "-c", LISTENING]
    with (
        listeners(tmp_path) as task,
        subprocess.Popen(other, stdout=subprocess.PIPE, text=True) as running,
    ):
        assert running.stdout is not None
        assert running.stdout.readline() == "listening\n"
        task |= {"port_of_other": 5555, "only": only}
        settings = ContainerSettings(image=image, user=user)
        (result,) = await attack(tmp_path, ATTACKER, task, sandbox=SandboxKind.PODMAN, container=settings)
        running.terminate()
    assert (result.reason, result.turns) == (None, 1)
    assert json.loads(printed(tmp_path)) == {}


@pytest.mark.slow
def test_the_same_holds_where_the_collector_is_an_ordinary_user(tmp_path: Path) -> None:
    needs_bwrap()
    if os.geteuid() != 0:
        return  # the test above was run by one
    (tmp_path / "own").mkdir()
    os.chown(tmp_path / "own", ORDINARY, ORDINARY)
    test = f"{__file__}::{test_an_agent_in_a_sandbox_gets_nothing_but_its_session.__name__}"
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "/mnt/t", test]
    mounts = [*install_mounts((sys.executable,), ""), ("--ro-bind", str(ROOT), str(ROOT))]
    closed = {one for mount in mounts for one in Path(mount[-1]).parents if not one.stat().st_mode & 0o001}
    command = [
        *("bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc"),
        *(word for one in sorted(closed) for word in ("--perms", "0755", "--tmpfs", str(one))),
        *with_parents(mount for mount in mounts if closed & set(Path(mount[-1]).parents)),
        *("--bind", str(tmp_path / "own"), "/mnt", "--chdir", str(ROOT), "--cap-drop", "ALL"),
        *(
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--setenv",
            "HOME",
            "/mnt",
            "--setenv",
            "TMPDIR",
            "/mnt",
        ),
        *("setpriv", "--reuid", str(ORDINARY), "--regid", str(ORDINARY), "--clear-groups", *pytest_command),
    ]
    env = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/usr/bin:/bin",
        "CI": "true",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_without_a_sandbox_it_gets_at_all_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = [
        "read the run",
        "environment of another process",
        "any environment",
        "kill another process",
        "reach the engine",
    ]
    only += ["reach another port", "reach an abstract socket", "reach a socket in a folder"]
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    with listeners(tmp_path) as task:
        await attack(tmp_path, ATTACKER, task | {"only": only}, sandbox=SandboxKind.NONE)
    assert list(json.loads(printed(tmp_path))) == only


async def test_the_host_network_and_variables_are_passed_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    monkeypatch.setenv("OTHER_API_KEY", SECRET)
    script = ATTACKER.replace("got = {}", 'print([name for name in os.environ if task["secret"] in os.environ[name]])')
    script = script.partition("for name, attack")[0] + 'print(attacks["reach another port"]())\n'
    with listeners(tmp_path) as task:
        (result,) = await attack(
            tmp_path, script, task, sandbox_network=SandboxNetwork.HOST, pass_env=("SOME_API_KEY",)
        )
    assert result.reason is None
    assert printed(tmp_path) == "['SOME_API_KEY']\nconnected\n"


async def test_its_environment_holds_what_was_listed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SOME_API_KEY", "PYTHONPATH", "SSH_AUTH_SOCK", "HTTPS_PROXY", "OPENAI_ORG_ID"):
        monkeypatch.setenv(name, SECRET)
    await attack(tmp_path, ATTACKER.partition("UNSHARE =")[0] + "ask()\nprint(*os.environ)\n", {})
    listed = "PATH LANG LANGUAGE LC_ALL LC_CTYPE TERM TZ SHELL USER LOGNAME HOME PWD TMPDIR"
    listed += " OPENAI_BASE_URL OPENAI_API_KEY OPENAI_MODEL ANTHROPIC_BASE_URL ANTHROPIC_API_KEY ANTHROPIC_MODEL"
    listed += " GOOGLE_GEMINI_BASE_URL GEMINI_API_KEY GEMINI_MODEL"
    listed += " ROLLTAPE_MODEL ROLLTAPE_SEED ROLLTAPE_ATTEMPT"
    assert set(printed(tmp_path).split()) - set(listed.split()) == set()


@pytest.mark.parametrize("sandbox", KINDS[:2])
async def test_what_the_user_shows_can_be_read_and_a_run_below_it_cannot(tmp_path: Path, sandbox: SandboxKind) -> None:
    (tmp_path / "shown.txt").write_text("shown")
    tmp_path.chmod(0o755)
    script = ATTACKER.partition("UNSHARE =")[0] + (
        "ask()\nprint(open(task['run'] + '/../shown.txt').read(), os.listdir(task['run']))\n"
    )
    await attack(tmp_path, script, {}, sandbox=sandbox, sandbox_read=(str(tmp_path),))
    assert printed(tmp_path) == "shown []\n"


async def test_many_streams_at_once_reach_the_gateway(tmp_path: Path) -> None:
    script = """
import json, sys, threading, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"], "stream": True}).encode()
url = told["openai_base_url"] + "/chat/completions"
ends = []
def ask():
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    lines = [line for line in urllib.request.urlopen(request) if line.strip()]
    ends.append(lines[-1].strip() == b"data: [DONE]" and len(lines) > 3)
threads = [threading.Thread(target=ask) for _ in range(100)]
[one.start() for one in threads]
[one.join() for one in threads]
print(len(ends), all(ends))
"""
    (result,) = await attack(tmp_path, script, {}, max_turns=1000)
    assert printed(tmp_path) == "100 True\n"
    assert result.turns == 100


LEFTOVERS = (
    ATTACKER.partition("UNSHARE =")[0]
    + """
import time
ask()
os.symlink("/etc/hostname", "out.txt")
os.symlink(task["outside"], "folder")
os.symlink(task["outside"] + "/precious.txt", "file")
os.makedirs("closed/inner")
open("closed/inner/file", "w").close()
os.chmod("closed/inner", 0)
os.chmod("closed", 0)
os.mkfifo("pipe")
here = os.getcwd()
for _ in range(1200):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
os.chdir(here)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("daemon.sock")
        listener.listen()
        os.environ.clear()
        os.close(0), os.close(1), os.close(2)
        while True:
            listener.accept()
    os._exit(0)
os.wait()
while True:
    try:
        connect(socket.AF_UNIX, "daemon.sock")
        break
    except OSError:
        time.sleep(0.01)
print(4)
"""
)
LOOKS = """
import os, socket
def looks(task, ended):
    folder = os.open(ended.folder, os.O_RDONLY)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(f"/proc/self/fd/{folder}/daemon.sock")
        except ConnectionRefusedError:
            return {"reward": 1.0, "daemon": "has ended"}
    return {"reward": 0.0, "daemon": "still runs"}
"""


@pytest.mark.parametrize("sandbox", KINDS)
async def test_what_an_agent_leaves_neither_runs_on_nor_leads_the_collector_astray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: SandboxKind
) -> None:
    (tmp_path / "outside").mkdir()
    precious = tmp_path / "outside" / "precious.txt"
    precious.write_text("keep me")
    precious.chmod(0o600)
    (tmp_path / "looks_at_daemons.py").write_text(LOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    checks = [
        {"exact": Path("/etc/hostname").read_text(), "file": "out.txt"},
        {"function": "python:looks_at_daemons:looks", "sandbox": False},
    ]
    task = {"outside": str(tmp_path / "outside"), "check": checks, "answer": None}
    monkeypatch.setattr(sys.modules["rolltape.collect.sandboxes.running"], "GRACE_S", 0.3)
    (result,) = await attack(tmp_path, LEFTOVERS, task, sandbox=sandbox)
    assert (result.reason, result.reward) == (None, 0.0)
    data = rolltape.trace_of(rollouts(tmp_path / "run")[0]).reward_data
    assert data is not None
    (linked, daemon) = data["checks"]
    assert linked["why"] == "out.txt leads out of the working directory"
    assert daemon["daemon"] == "has ended"
    assert list((tmp_path / "run" / "scratch").iterdir()) == []
    assert (precious.read_text(), precious.stat().st_mode & 0o777) == ("keep me", 0o600)


def test_whatever_an_agent_left_is_kept_for_grading_as_far_as_it_can_be(tmp_path: Path) -> None:
    left = tmp_path / "left"
    (left / "a/b").mkdir(parents=True)
    (left / "a/b/file").write_text("text")
    (left / "inside").symlink_to("a/b/file")
    (left / "outside").symlink_to("/etc/passwd")
    os.mkfifo(left / "pipe")
    folder = os.open(left, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d" * 100, dir_fd=folder)
        deeper = os.open("d" * 100, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    os.close(folder)
    keep_folder(left, tmp_path / "kept.tar")
    workspace = unpack_folder(tmp_path / "kept.tar", tmp_path / "scratch")
    assert sorted(one.name for one in workspace.work.iterdir()) == ["a", "d" * 100, "inside"]
    assert (workspace.work / "inside").read_text() == "text"
    with (left / "huge").open("wb") as file:
        file.truncate(2**41)
    with pytest.raises(CollectError, match="more than"):
        keep_folder(left, tmp_path / "kept.tar")
    remove(left)
    assert not left.exists()


def test_what_an_agent_made_unreadable_is_left_out_of_what_is_kept_for_grading() -> None:
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:  # a folder of pytest's is closed to others
        left = Path(folder, "left")
        (left / "listed").mkdir(parents=True)
        for name in ("closed", "listed/inside", "open"):
            (left / name).write_text("text")
        (left / "closed").chmod(0)
        (left / "listed").chmod(0o444)
        for one in (Path(folder), left, *left.rglob("*")):
            os.chown(one, ORDINARY, ORDINARY) if is_root else None
        os.seteuid(ORDINARY if is_root else os.geteuid())
        try:
            keep_folder(left, Path(folder, "kept.tar"))
        finally:
            os.seteuid(0 if is_root else os.geteuid())
        with tarfile.open(Path(folder, "kept.tar")) as kept:
            assert kept.getnames() == ["listed", "open"]
        (left / "listed").chmod(0o700)
