"""Unruly programs under the collector: each is ended, its end is on the record, and no process of it is left."""

import sys
from pathlib import Path

import pytest

import rolltape
from bwrap import needs_bwrap
from collecting import collected, instant, rollouts, task_file
from rolltape.collect.sandboxes import SandboxKind, running
from rolltape.collect.sandboxes.running import attempt_processes
from rolltape.records.rollout import Status, StopReason

AGENT = """
import json, os, signal, subprocess, sys, time, urllib.request

told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]


def hangs():
    time.sleep(300)


def forks():
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(300)


def floods():
    while True:
        os.write(1, b"y" * 65536)
        os.write(2, b"n" * 65536)


def exits():
    sys.exit(1)


def is_deaf():
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    subprocess.Popen(sleeper)
    time.sleep(300)


print("4", flush=True)
globals()[told["task"]["id"]]()
"""
# By what it does: how it ends, and what the record says of the program itself.
ENDS = {
    "hangs": (StopReason.TIMEOUT, {"signal": 15, "timed_out": True}),
    "forks": (StopReason.COMPLETED, {"exit_code": 0}),
    "floods": (StopReason.TIMEOUT, {"signal": 15, "timed_out": True}),
    "exits": (StopReason.COMPLETED, {"exit_code": 1}),
    "is_deaf": (StopReason.TIMEOUT, {"signal": 9, "timed_out": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ["none", "bwrap"])
async def test_unruly_programs_are_ended_recorded_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str
) -> None:
    if sandbox == "bwrap":
        needs_bwrap()
    monkeypatch.setattr(running, "GRACE_S", 0.5)
    monkeypatch.setattr(running, "MAX_LOG_BYTES", 100_000)
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [{"id": name, "prompt": "What is 3 + 1?", "answer": 4, "unfinished": -1.0} for name in ENDS]
    source, run = task_file(tmp_path, tasks), tmp_path / "run"
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    async with instant() as engine:
        results = await collected(
            source, run, engine, agent=agent, group_size=2, timeout_s=6.0, sandbox=SandboxKind(sandbox)
        )
    assert {result.status for result in results} == {Status.FINISHED}
    held = rollouts(run)
    assert len(held) == 2 * len(ENDS)
    for one in held:
        stop_reason, end = ENDS[str(one.head.task_id)]
        extra = dict(rolltape.trace_of(one).extra or {})
        assert str(extra.pop("text", "4")).startswith("4")
        assert (one.outcome.stop_reason, extra) == (stop_reason, end)
        assert one.reward == (1.0 if stop_reason is StopReason.COMPLETED else -1.0)
        assert attempt_processes(one.id) == []
        assert {path.stat().st_size < 200_000 for path in (run / "logs" / one.id).iterdir()} == {True}
    assert list((run / "scratch").iterdir()) == []
