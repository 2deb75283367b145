"""Trackio's own page in a browser: a multi-turn rollout of a tape, and one of a batch, as a person sees them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest

import rolltape
from browser import browser_page
from rolltape.tracking import show_batch, show_step, trackio_sink
from tracked import record_conversation

PROJECT = "page"
BATCH = {
    "input_ids": np.array([[1, 2, 3, 4, 5]]),
    "loss_mask": np.array([[0, 1, 0, 1, 0]]),
    "versions": np.array([[-1, 3, -1, 4, -1]]),
    "rewards": np.array([0.25]),
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where `trackio show` serves a project with what two sinks have put into it."""
    run = tmp_path_factory.mktemp("runs") / "exp"
    with rolltape.open(run, name="exp") as tape:
        for attempt in range(3):
            record_conversation(tape, step=2, attempt=attempt, reward=attempt / 2)
    with trackio_sink(project=PROJECT, name="exp", max_traces_per_step=1, choice="rewards") as sink:
        show_step(sink, rolltape.read(run), step=2)
    with trackio_sink(project=PROJECT, name="trainer") as sink:
        show_batch(sink, BATCH, lambda ids: " ".join(f"word{token}" for token in ids), split="eval", step=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port), "GRADIO_NUM_PORTS": "1", "BROWSER": "true"}
    command = [str(Path(sys.executable).with_name("trackio")), "show", "--project", PROJECT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}/version", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urlopen(url, timeout=5).read()
        except (URLError, OSError):
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"trackio show ended with {server.returncode}")


def test_multi_turn_rollout_is_on_the_page(address: str, tmp_path: Path) -> None:
    with browser_page() as page:
        page.goto(f"{address}/traces?project={PROJECT}")
        page.locator("tr.trace-row", has_text="How many lines has parser.py?").click()
        page.locator("details.conversation-section summary").click()
        page.screenshot(path=os.environ.get("ROLLTAPE_SCREENSHOT", tmp_path / "page.png"), full_page=True)
        messages = page.locator(".conversation .message")
        roles = [messages.nth(place).get_attribute("data-role") for place in range(messages.count())]
        assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        said = messages.locator(".message-content").all_inner_texts()
        assert said == [
            "How many lines has parser.py?",
            "I will count them.",
            "212 parser.py",
            "It has 212 lines.",
            "And without the comments?",
            "About 180.",
        ]
        assert page.locator(".span-name").all_inner_texts() == ["step 0", "bash", "step 1", "step 2"]
        assert page.locator(".span-duration").all_inner_texts() == ["1.50s", "—", "250ms", "1.00s"]
        about = page.locator(".detail-meta").inner_text()
        for shown in ("Logged as: train/traces", "reward: 0.5", "first_version: 7", "last_version: 8", "turns: 3"):
            assert shown in about


def test_batch_is_on_the_page_turn_by_turn(address: str) -> None:
    with browser_page() as page:
        page.goto(f"{address}/traces?project={PROJECT}")
        page.locator("tr.trace-row", has_text="word1").click()
        page.locator("details.conversation-section summary").click()
        messages = page.locator(".conversation .message .message-content")
        assert messages.all_inner_texts() == ["word1", "word2", "word3", "word4", "word5"]
        assert "Logged as: eval/traces" in page.locator(".detail-meta").inner_text()


def test_figures_are_plotted_under_their_splits(address: str) -> None:
    with browser_page() as page:
        page.goto(f"{address}/metrics?project={PROJECT}")
        page.get_by_text("train (", exact=False).first.wait_for()
        shown = page.locator("body").inner_text()
        for group in ("train (", "eval (", "reward (", "ledger (", "staleness ("):
            assert group in shown
