"""Pushing to trackio reaches nothing but this machine, also for a user who is logged in to the hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracked import record_steps

# Run in a process of its own: every look-up and every connection is written down, and refused off loopback.
GUARDED = """
import socket, sys
asked = []
real_connect, real_lookup = socket.socket.connect, socket.getaddrinfo
def is_here(host):
    return str(host) in ("localhost", "127.0.0.1", "::1", "0.0.0.0")
def connect(self, address):
    if self.family != socket.AF_UNIX and not is_here(address[0]):
        asked.append(address)
        raise OSError("no network in this test")
    return real_connect(self, address)
def lookup(host, *more, **named):
    if host is not None and not is_here(host):
        asked.append(host)
        raise OSError("no network in this test")
    return real_lookup(host, *more, **named)
socket.socket.connect, socket.getaddrinfo = connect, lookup
"""

PUSH = """
from rolltape.cli import run
code = run(["push", sys.argv[1], "--to", "trackio"])
print(code, asked)
"""

SINK = """
import numpy as np
from rolltape.tracking import show_batch
from rolltape.tracking import trackio_sink
batch = {"input_ids": np.array([[1, 2]]), "loss_mask": np.array([[0, 1]])}
with trackio_sink(project="p", name="n") as sink:
    show_batch(sink, batch, str, split="train", step=0)
print(0 if sink.close().complete else 1, asked)
"""

INIT = """
import trackio
trackio.init(project="p", embed=False, auto_log_cpu=False, auto_log_gpu=False)
trackio.finish()
print(0, bool(asked))
"""


def said(code: str, tmp_path: Path) -> str:
    run = tmp_path / "exp"
    if not run.exists():
        record_steps(run)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRACKIO_"))},
        "HOME": str(tmp_path),
        "HF_TOKEN": "hf_notarealtokennotarealtoken",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GUARDED + code, str(run)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("code", [PUSH, SINK], ids=["command", "sink"])
def test_nothing_outside_is_looked_up_or_connected_to(code: str, tmp_path: Path) -> None:
    assert said(code, tmp_path) == "0 []"
    assert list((tmp_path / "trackio").glob("*.db"))


def test_the_guard_sees_what_trackio_itself_asks_the_hub(tmp_path: Path) -> None:
    assert said(INIT, tmp_path) == "0 True"
