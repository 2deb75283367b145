"""OpenEnv's client against its own server, on a real port in a process of its own."""

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from collecting import collected_at_once, rollouts, task_file
from rolltape.cli import run as rolltape_command
from rolltape.records.rollout import Status, StopReason
from scripted_engine import Asked

pytestmark = pytest.mark.slow  # its server takes several seconds to start

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    {field}


class Answered(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self.left = (seed or 0) % 10, 3
        return Answered(text="Guess a digit.", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        if str(action.guess) == "boom":
            raise RuntimeError("the dice fell off the table")
        self.left -= 1
        is_right = str(action.guess) == str(self.secret)
        text = "right" if is_right else "higher" if str(action.guess) < str(self.secret) else "lower"
        return Answered(text=text, done=is_right or not self.left, reward=1.0 if is_right else 0.0)

    @property
    def state(self):
        return State(step_count=3 - self.left)


app = create_fastapi_app(Guessing, Guess, Answered, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    servers: list[subprocess.Popen[bytes]] = []
    yield servers
    for server in servers:
        server.kill()
        server.wait()


def start(servers: list[subprocess.Popen[bytes]], folder: Path, field: str) -> str:
    """Start a server whose action has this field, and return its name as a source."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (folder / "server.py").write_text(SERVER.replace("{field}", field))
    servers.append(subprocess.Popen([sys.executable, str(folder / "server.py"), str(port)]))
    while True:
        assert servers[-1].poll() is None
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
        except urllib.error.URLError:
            continue
        return f"openenv:http://127.0.0.1:{port}"


def test_each_attempt_has_a_session_and_gets_its_rewards(tmp_path: Path, serve: list[subprocess.Popen[bytes]]) -> None:
    name = start(serve, tmp_path, "guess: str")

    def script(asked: Asked) -> str:
        return "2" if "higher" in asked.prompt else "1"

    results = collected_at_once(name, tmp_path / "run", script, limit=3, group_size=2)
    ended = {one.task: (one.reward, one.turns, one.stop_reason) for one in results}
    assert ended == {
        "seed-0": (0.0, 3, StopReason.COMPLETED),
        "seed-1": (1.0, 1, StopReason.COMPLETED),
        "seed-2": (1.0, 2, StopReason.COMPLETED),
    }
    first = next(one for one in rollouts(tmp_path / "run") if one.head.task_id == "seed-2")
    assert [message["content"] for message in first.turns[-1].prompt_messages] == ["Guess a digit.", "1", "higher"]


def test_the_command_of_the_page_collects_from_a_running_server(
    tmp_path: Path, serve: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    name = start(serve, tmp_path, "guess: str")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "collect" / "other-environments.md").read_text()
    line = re.search(r"^rolltape (collect openenv:http.*)$", page, re.MULTILINE)
    assert line is not None
    words = re.sub(r"openenv:\S+", name, line[1]).replace("--limit 100 -g 8", "--limit 2 -g 1").split()
    how = ("--run", str(tmp_path / "run"), "--max-reply-tokens", "4", "--force-no-thinking")
    assert rolltape_command([*words, *how]) == 0  # by the shipped model
    assert "2 rollouts" in capsys.readouterr().out


def test_an_action_of_several_fields_is_json_and_what_the_server_refuses_is_told(
    tmp_path: Path, serve: list[subprocess.Popen[bytes]]
) -> None:
    name = start(serve, tmp_path, "guess: int\n    reason: str = ''")
    replies = ["seven?", '{"guess": "seven"}', 'So: {"guess": 7, "reason": "luck"}']
    source = task_file(tmp_path, [{"id": "a", "seed": 7}])
    (result,) = collected_at_once(
        source,
        tmp_path / "run",
        lambda asked: replies[asked.number],
        group_size=1,
        environment=name,
    )
    assert (result.status, result.reward, result.turns) == (Status.FINISHED, 1.0, 3)
    (rollout,) = rollouts(tmp_path / "run")
    told = [message["content"] for message in rollout.turns[-1].prompt_messages if message["role"] == "user"]
    assert '"guess": {"title": "Guess", "type": "integer"}' in told[0]
    assert told[1] == "There is no JSON object in your answer."
    assert told[2].startswith("Your action was refused:")


def test_a_server_that_fails_or_is_not_there_has_broken_the_attempt(
    tmp_path: Path, serve: list[subprocess.Popen[bytes]]
) -> None:
    name = start(serve, tmp_path, "guess: str")
    (result,) = collected_at_once(name, tmp_path / "run", lambda _: "boom", limit=1, group_size=1)
    assert (result.status, result.reward) == (Status.FAILED, None)
    assert "the dice fell off the table" in str(result.reason)
    serve[0].kill()
    serve[0].wait()
    (result,) = collected_at_once(name, tmp_path / "gone", lambda _: "1", limit=1, group_size=1)
    assert result.status is Status.FAILED
    assert f"{name} could not begin: ClientConnectorError" in str(result.reason)
