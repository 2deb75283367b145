"""Pushing to trackers that keep their data here reaches nothing but this machine, also for a user who is logged in."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
code = run(["push", sys.argv[1], "--to", sys.argv[2]])
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


# W&B sends from a program of its own, which no patch in Python reaches: it takes the proxy that it is told.
ONLINE = """
import wandb
wandb.init(project="p", settings=wandb.Settings(silent=True))
"""


class Proxy:
    """Counts those who want to reach other machines, and turns them away."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @contextmanager
    def listening(self) -> Iterator["Proxy"]:
        thread = threading.Thread(target=self._listen, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._socket.shutdown(socket.SHUT_RDWR)
            thread.join()
            self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.asked.set()
            connection.close()


def environment(tmp_path: Path, proxy: str) -> dict[str, str]:
    ours = ("HF_", "TRACKIO_", "WANDB_", "MLFLOW_", "CI")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "HOME": str(tmp_path),
        "HF_TOKEN": "hf_notarealtokennotarealtoken",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
    }


def said(code: str, tmp_path: Path, *arguments: str, **more: str) -> str:
    """The last line of a program, which names whom it asked; the proxy must not have been asked."""
    run = tmp_path / "exp"
    if not run.exists():
        record_steps(run)
    printed = tmp_path / "printed"
    # Into a file: a pipe would stay open for as long as a process that a tracker has started.
    with Proxy().listening() as proxy, printed.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", GUARDED + code, str(run), *arguments],
            stdout=file,
            env={**environment(tmp_path, proxy.url), **more},
            cwd=tmp_path,
        )
        assert done.returncode == 0
        assert not proxy.asked.is_set()
    return printed.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("to", "kept"),
    [
        ("trackio:sums", "trackio/*.db"),
        ("tensorboard:logs", "logs/exp/*tfevents*"),
        pytest.param("wandb:sums", "wandb/offline-run-*/*.wandb", marks=pytest.mark.slow),
        pytest.param("mlflow:sums", "mlflow.db", marks=pytest.mark.slow),
    ],
)
def test_nothing_outside_is_looked_up_or_connected_to_by_a_push(to: str, kept: str, tmp_path: Path) -> None:
    assert said(PUSH, tmp_path, to, WANDB_MODE="offline") == "0 []"
    assert list(tmp_path.glob(kept))


def test_nothing_outside_is_looked_up_or_connected_to_by_a_sink(tmp_path: Path) -> None:
    assert said(SINK, tmp_path) == "0 []"
    assert list((tmp_path / "trackio").glob("*.db"))


def test_the_guard_sees_what_trackio_itself_asks_the_hub(tmp_path: Path) -> None:
    environ = environment(tmp_path, "")
    done = subprocess.run([sys.executable, "-c", GUARDED + INIT], capture_output=True, text=True, env=environ)
    assert done.stdout.splitlines()[-1] == "0 True"


@pytest.mark.slow
def test_the_proxy_sees_what_wandb_sends_when_it_is_online(tmp_path: Path) -> None:
    with Proxy().listening() as proxy:
        environ = environment(tmp_path, proxy.url)
        quiet = subprocess.DEVNULL
        with subprocess.Popen([sys.executable, "-c", ONLINE], env=environ, stdout=quiet, stderr=quiet) as online:
            try:
                assert proxy.asked.wait(60)
            finally:
                online.kill()
