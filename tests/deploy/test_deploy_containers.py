"""The image of deploy/Dockerfile, and the services of deploy/compose.yaml in it, run by podman and podman-compose."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from distributions import ROOT, build
from podman import needs_podman, podman
from served_gateways import free_port

pytest.importorskip("hatchling")

KEYS = {"ROLLTAPE_ADMIN_KEY": "admin-1", "ROLLTAPE_ENGINE_KEY": "engine-1", "ROLLTAPE_VIEW_KEY": "view-1"}
# No package index is reachable: the packages that Rolltape needs, and the libraries that those need, are mounted.
PACKAGES = Path(aiohttp.__file__).parents[1]
FOLDERS = [f"{PACKAGES}:/packages:ro", "/usr/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu:ro"]
MOUNTS = [f"--volume={one}" for one in FOLDERS]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image, with the wheel of this source in it."""
    base, name = needs_podman(), f"localhost/rolltape-deploy:{uuid.uuid4().hex[:12]}"
    context = tmp_path_factory.mktemp("context")
    build(context / "dist")
    done = podman(
        *("build", "--file", str(ROOT / "deploy" / "Dockerfile"), "--tag", name, "--network=none", "--no-cache"),
        *(
            f"--build-arg=BASE={base}",
            "--build-arg=PIP_OPTIONS=--no-deps --no-index --ignore-installed",
            "--env=PYTHONPATH=/packages",
        ),
        *(*MOUNTS, str(context)),
    )
    assert done.returncode == 0, done.stderr
    yield name
    podman("rmi", "--force", name)


@pytest.fixture(scope="module")
def services(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The containers of the compose file by service, in one network of their own."""
    described = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    mark = uuid.uuid4().hex[:12]
    volume = f"rolltape-deploy-{mark}"
    made: dict[str, str] = {}
    names = tmp_path_factory.mktemp("names")  # in the place of compose's name server
    (names / "hosts").write_text("127.0.0.1 localhost engine gateway view\n")
    (names / "nsswitch.conf").write_text("hosts: files\n")
    resolve = [f"--volume={names / file}:/etc/{file}:ro" for file in ("hosts", "nsswitch.conf")]
    try:
        for name, service in described["services"].items():
            network = [f"--network=container:{made['engine']}" if made else "--network=none"]
            environment = [f"--env={key}={KEYS[key]}" for key in service["environment"]]
            volumes = [f"--volume={one.replace('runs:', f'{volume}:')}" for one in service.get("volumes", [])]
            if service.get("depends_on") and not isinstance(service["depends_on"], list):
                wait_until_ready(made["gateway"])
            done = podman(
                *("run", "--detach", *network, *resolve, *environment, *volumes, *MOUNTS, image),
                *map(str, service["command"]),
            )
            assert done.returncode == 0, done.stderr
            made[name] = done.stdout.strip()
        yield made
    finally:
        for container in reversed(made.values()):
            podman("rm", "--force", "--time=5", container)
        podman("volume", "rm", "--force", volume)


def ask(container: str, url: str, key: str | None = None, body: Any = None) -> tuple[int, str]:
    """A request from within a container; the status, and the text."""
    program = f"""
import json, urllib.error, urllib.request
request = urllib.request.Request({url!r}, data={None if body is None else json.dumps(body).encode()!r})
request.add_header("Content-Type", "application/json")
if {key!r}: request.add_header("Authorization", "Bearer " + {key!r})
try:
    answer = urllib.request.urlopen(request)
    print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except urllib.error.URLError as error:
    print(json.dumps([0, str(error)]))
"""
    done = podman("exec", container, "python3", "-c", program)
    assert done.returncode == 0, done.stderr
    status, text = json.loads(done.stdout)
    return status, text


def wait_until_ready(container: str, url: str = "http://127.0.0.1:8400/readyz", key: str | None = None) -> str:
    """Waits until an address answers from within a container; the text."""
    return wait_for(lambda: ask(container, url, key), container)


def wait_for(answers: Callable[[], tuple[int, str]], container: str) -> str:
    began, within_s = time.monotonic(), 240.0
    while (answer := answers())[0] != 200:
        assert time.monotonic() < began + within_s, (answer, podman("logs", container).stderr)
        time.sleep(0.5)
    return answer[1]


def test_services_of_the_compose_file_record_and_show_a_turn(services: dict[str, str]) -> None:
    gateway, admin = services["gateway"], KEYS["ROLLTAPE_ADMIN_KEY"]
    assert ask(gateway, "http://127.0.0.1:8400/livez")[0] == 200
    assert ask(gateway, "http://127.0.0.1:8400/metrics")[0] == 401
    status, text = ask(gateway, "http://127.0.0.1:8400/sessions", admin, {"task_id": "t1"})
    assert status in (200, 201), text
    opened = json.loads(text)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 64}
    status, text = ask(gateway, "http://127.0.0.1:8400/v1/chat/completions", opened["key"], body)
    assert status == 200, text
    reply = json.loads(text)["choices"][0]["message"]["content"]
    status, text = ask(gateway, f"http://127.0.0.1:8400/sessions/{opened['session']}/finish", admin, {"reward": 1.0})
    assert status == 200, text
    listed = podman("exec", gateway, "python3", "-m", "rolltape.cli", "ls", "/runs/exp1", "--json")
    assert [json.loads(line)["reward"] for line in listed.stdout.splitlines()] == [1.0], listed.stderr
    shown = podman("exec", gateway, "python3", "-m", "rolltape.cli", "show", "/runs/exp1", "--part", "transcript")
    assert reply.strip() in shown.stdout
    view = services["view"]
    wait_until_ready(view, "http://127.0.0.1:8500/api/runs", KEYS["ROLLTAPE_VIEW_KEY"])
    assert ask(view, "http://127.0.0.1:8500/api/runs")[0] == 401
    assert "exp1" in ask(view, "http://127.0.0.1:8500/api/runs", KEYS["ROLLTAPE_VIEW_KEY"])[1]


def test_nothing_in_the_image_runs_as_root_and_it_stops_in_order(services: dict[str, str]) -> None:
    for container in services.values():
        assert podman("exec", container, "python3", "-c", "import os; print(os.getuid())").stdout == "10001\n"
    stopped = podman("stop", "--time=40", services["gateway"])
    assert stopped.returncode == 0, stopped.stderr
    state = podman("inspect", "--format={{.State.ExitCode}}", services["gateway"])
    assert state.stdout.strip() == "0", podman("logs", services["gateway"]).stderr


def podman_compose() -> str:
    """The program podman-compose; the test is skipped where it, or what its networks need, is not installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/lib/podman", "/usr/sbin"])
    for program in ("podman-compose", "aardvark-dns", "iptables"):
        if shutil.which(program, path=path) is None:
            pytest.skip(f"{program} is not installed")
    found = shutil.which("podman-compose", path=path)
    assert found is not None
    return found


def get(url: str, key: str | None = None) -> tuple[int, str]:
    """A request from this machine; the status, or 0 without an answer, and the text."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_compose_brings_the_services_up_and_takes_them_down(image: str, tmp_path: Path) -> None:
    program, project = podman_compose(), f"rolltape-{uuid.uuid4().hex[:12]}"
    one = {"environment": {"PYTHONPATH": "/packages"}, "volumes": FOLDERS}
    (tmp_path / "mounts.yaml").write_text(json.dumps({"services": dict.fromkeys(("engine", "gateway", "view"), one)}))
    files = ("--file", str(ROOT / "deploy" / "compose.yaml"), "--file", str(tmp_path / "mounts.yaml"))
    ports = {"ROLLTAPE_GATEWAY_PORT": str(free_port()), "ROLLTAPE_VIEW_PORT": str(free_port())}
    gateway, view = (f"http://127.0.0.1:{port}" for port in ports.values())
    environment = {**os.environ, **KEYS, **ports, "ROLLTAPE_IMAGE": image}

    def compose(*arguments: str) -> None:
        command = [program, "--project-name", project, *files, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr

    def left() -> list[str]:
        listed = [podman(kind, "ls", "--noheading").stdout for kind in ("volume", "network")]
        listed.append(podman("ps", "--all", "--noheading").stdout)
        return [line for text in listed for line in text.splitlines() if project in line]

    try:
        compose("up", "--detach")
        # The gateway is ready once it has found the engine by its name.
        wait_for(lambda: get(f"{gateway}/readyz"), f"{project}_gateway_1")
        assert get(f"{gateway}/sessions")[0] == 401
        assert get(f"{gateway}/sessions", KEYS["ROLLTAPE_ADMIN_KEY"])[0] == 200
        runs = wait_for(lambda: get(f"{view}/api/runs", KEYS["ROLLTAPE_VIEW_KEY"]), f"{project}_view_1")
        assert "exp1" in runs
        assert get(f"{view}/api/runs")[0] == 401
        assert left() != []
    finally:
        compose("down", "--volumes")
    assert left() == []
