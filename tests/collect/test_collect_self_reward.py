"""An agent that goes for the gateway's own routes: it gets nothing, and every rollout has the honest reward."""

import json
import sys
from pathlib import Path

import pytest

from collecting import collected, instant, rollouts, task_file
from rolltape.records.rollout import Status

AGENT = """
import json, os, sys, urllib.error, urllib.request
from pathlib import Path

told = json.load(sys.stdin)
base, key = told["openai_base_url"], told["openai_base_url"].split("/s/")[1].split("/")[0]
root = base.split("/s/")[0]


def ask(method, url, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


_, headers, _ = ask("POST", base + "/chat/completions", {"model": told["model"], "messages": told["messages"]})
session = headers["x-rolltape-session"]
tries = [
    ("GET", "/sessions", None),
    ("GET", f"/sessions/{session}", None),
    ("POST", "/sessions", {"task_id": "mine"}),
    ("POST", f"/sessions/{session}/finish", {"reward": 100}),
    ("DELETE", f"/sessions/{session}", {"reason": "mine"}),
    ("POST", "/weights", {"version": "mine"}),
    ("POST", "/weights/pause", {}),
    ("POST", "/weights/resume", {"version": "mine"}),
    ("GET", "/status", None),
    ("GET", "/metrics", None),
]
given = [{}, {"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"Authorization": "Bearer "}, {"Host": "[::1]"}]
answers = [ask(method, at + path, body, **extra) for method, path, body in tries for extra in given
           for at in (root, base, base.removesuffix("/v1"))]
seen = [" ".join(sys.argv), repr(dict(os.environ)), *(text for _, _, text in answers)]
for entry in Path("/proc").glob("[0-9]*"):
    for name in ("environ", "cmdline"):
        try:
            seen.append((entry / name).read_bytes().decode("utf-8", "replace"))
        except OSError:
            pass
statuses = sorted({status for status, _, _ in answers})
print(json.dumps({"statuses": statuses, "secret": any("rta-" in text for text in seen)}), file=sys.stderr)
print("4")
"""


@pytest.mark.slow
async def test_an_agent_cannot_reward_itself_end_others_or_change_weights(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [{"id": f"sum-{n}", "prompt": f"What is {n} + 1?", "answer": n + 1} for n in (3, 5)]
    source, run = task_file(tmp_path, tasks), tmp_path / "run"
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    async with instant() as engine:
        await collected(source, run, engine, agent=agent, group_size=4)
    held = rollouts(run)
    honest = {"sum-3": 1.0, "sum-5": 0.0}
    assert len(held) == 8
    assert [(one.status, one.reward) for one in held] == [
        (Status.FINISHED, honest[str(one.head.task_id)]) for one in held
    ]
    assert {part.last_version for one in held for turn in one.turns for part in turn.facts.segments} == {"v0"}
    for one in held:
        told = json.loads((run / "logs" / one.id / "stderr.txt").read_text())
        assert told == {"statuses": [401, 404], "secret": False}
