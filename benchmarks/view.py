"""The web page's server over made-up runs: how soon a large one is there, and what each question costs."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

import rolltape
from benchmarks.figures import Figure, seconds, shortest_s

_ROLLOUTS = int(os.environ.get("ROLLTAPE_VIEW_ROLLOUTS", "100000"))
_TURNS = 10  # a rollout
_GROUP = 8
_WORDS = 5000
_AT_A_TIME = 64
_LONG_TURNS, _LONG_FORKS = 2000, 300
_LONG_TOKENS = 200_000


def figures() -> Iterator[Figure]:
    """A run of many rollouts, one long session, and one long sample."""
    with tempfile.TemporaryDirectory(prefix="rolltape-bench-") as folder:
        large = Path(os.environ.get("ROLLTAPE_VIEW_RUN", f"{folder}/large"))
        if not large.exists():
            yield Figure("recording the run", seconds(lambda: record_large(large, _ROLLOUTS)), "s")
        yield from _large(large)
        special = Path(folder) / "special"
        record_special(special)
        yield from _special(special)


def _large(run: Path) -> Iterator[Figure]:
    note = f"{_ROLLOUTS:,} rollouts, {_ROLLOUTS * _TURNS:,} turns"
    if not any((run / "cache").glob("view-*.kept")) or "ROLLTAPE_VIEW_RUN" not in os.environ:
        shutil.rmtree(run / "cache", ignore_errors=True)
        with served(run) as (ask, _, started):
            listed = _until(lambda: ask("/api/runs")["runs"][0]["rollouts"] >= _ROLLOUTS) - started
            yield Figure(
                "first time: all rollouts listed", listed, "s", note="no cache; the page shows them as they come"
            )
            done = _until(lambda: _is_derived(ask("/api/large/overview"))) - started
            yield Figure("first time: forks, ledgers and search there", done, "s", note="in the background, then kept")
    with served(run) as (ask, memory_mb, started):
        ask("/api/large/overview")
        page = ask("/api/large/rollouts?sort=-started")
        yield Figure(
            "overview and first page, from the start of the command", time.time() - started, "s", 1.5, note=note
        )
        assert page["total"] >= _ROLLOUTS
        yield Figure("overview and first page again", shortest_s(lambda: _opened(ask), 3), "s", 1.5)
        for sort in ("reward", "-tokens", "task", "-forks"):
            one = shortest_s(lambda sort=sort: ask(f"/api/large/rollouts?sort={sort}"), 3)  # type: ignore[misc]
            yield Figure(f"sorted by {sort}", one * 1000, "ms", 300)
        asked = "status=finished&min_reward=0.5&min_forks=1&environment=env-1&sort=-reward"
        yield Figure("filtered", shortest_s(lambda: ask(f"/api/large/rollouts?{asked}"), 3) * 1000, "ms", 300)
        for what in ("rare word", "in every rollout", "phrase"):
            word = {"rare word": "w4999", "in every rollout": "instructions", "phrase": '"look at w0001"'}[what]
            one = shortest_s(lambda word=word: ask(f"/api/large/rollouts?q={quote(word)}"), 2)  # type: ignore[misc]
            yield Figure(f"searched: {what}", one, "s", 2.0)
        rollout = page["rows"][50]["id"]
        yield Figure("one rollout", shortest_s(lambda: ask(f"/api/large/rollouts/{rollout}"), 1) * 1000, "ms")
        yield Figure("memory of server and worker", memory_mb(), "MB", 1000)


def _opened(ask: Any) -> None:
    ask("/api/large/overview")
    ask("/api/large/rollouts")


def _special(run: Path) -> Iterator[Figure]:
    with served(run) as (ask, _, _started):
        _until(lambda: _is_derived(ask("/api/special/overview")))
        rows = {row["task"]: row["id"] for row in ask("/api/special/rollouts")["rows"]}
        size = len(ask(f"/api/special/rollouts/{rows['session']}", raw=True))
        one = shortest_s(lambda: ask(f"/api/special/rollouts/{rows['session']}", raw=True), 2)
        note = f"{_LONG_TURNS:,} turns, {_LONG_FORKS} forks, {size / 1e6:.1f} MB of JSON"
        yield Figure("a long session with its forks", one, "s", 1.0, note=note)
        path = f"/api/special/rollouts/{rows['sample']}/samples/0/tokens"
        size = len(ask(path, raw=True))
        one = shortest_s(lambda: ask(path, raw=True), 2)
        yield Figure("a long sample's tokens", one, "s", 1.0, note=f"{_LONG_TOKENS:,} tokens, {size / 1e6:.1f} MB")


def _is_derived(overview: dict[str, Any]) -> bool:
    return bool(overview["read_through"]) and overview["rollouts"] > 0 and overview["pending"] == 0


@contextmanager
def served(run: Path) -> Iterator[tuple[Any, Any, float]]:
    """`rolltape view` in a process of its own: how to ask it, what memory it takes, and when it was started."""
    started = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "rolltape.cli", "view", str(run), "--port", "0", "--no-open"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip().rstrip("/")

    def ask(path: str, raw: bool = False) -> Any:
        with urllib.request.urlopen(address + path) as answer:
            body = answer.read()
        return body if raw else json.loads(body)

    try:
        yield ask, lambda: _memory_mb(process.pid), started
    finally:
        process.terminate()
        process.wait()


def _memory_mb(pid: int) -> float:
    """Of a process and its children, what is theirs alone."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    rss = (re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text()) for one in (pid, *children))
    return sum(int(found[1]) for found in rss if found) / 1024


def _until(condition: Any) -> float:
    while not condition():
        time.sleep(0.25)
    return time.time()


def record_large(path: Path, rollouts: int) -> None:
    """Rollouts of an agent that looks around: ten turns each, every tenth one with a fork; many at a time."""
    words = [f"w{number:04d}" for number in range(_WORDS)]
    system = {"role": "system", "content": "instructions " + " ".join(words[:100])}
    first_ids, new_ids = np.arange(30, dtype=np.int32), np.arange(10, dtype=np.int32)
    logprobs = np.full(20, -0.5, np.float32)
    numbers = iter(range(rollouts))

    async def record(tape: Any, number: int) -> None:
        random = np.random.default_rng(number)
        group = number // _GROUP
        task = {"environment": f"env-{group % 3}", "question": f"task {group}"}
        fields: dict[str, Any] = {"task_id": f"task-{group}", "step": group // 100, "attempt": number % _GROUP}
        with tape.rollout(task=task, agent="chat", model="m", **fields) as rollout:
            session = rollout.session()
            turn = None
            for index, (left, right) in enumerate(random.integers(0, _WORDS, (_TURNS, 2)).tolist()):
                given: dict[str, Any] = {
                    "sampled_ids": random.integers(0, 1000, 20, dtype=np.int32),
                    "logprobs": logprobs,
                    "reply": {"role": "assistant", "content": f"look at {words[left]} and {words[right]}"},
                    "finish": "stop",
                    "weight_version": str(group // 100),
                }
                if turn is None or (index == _TURNS // 2 and number % 10 == 0):
                    given["prompt_messages"] = [system, {"role": "user", "content": f"task {group} {index}"}]
                    given["prompt_ids"] = first_ids
                else:
                    given["new_messages"] = [{"role": "user", "content": f"result {words[right]}"}]
                    given |= {"after": turn, "new_prompt_ids": new_ids}
                turn = await session.record_turn_async(**given)
            rollout.finish(reward=float(random.random() < 0.3 + group / rollouts))

    async def take_turns(tape: Any) -> None:
        for number in numbers:
            await record(tape, number)

    async def record_all() -> None:
        with rolltape.open(path, name="large") as tape:
            await asyncio.gather(*(take_turns(tape) for _ in range(_AT_A_TIME)))

    asyncio.run(record_all())


def record_special(path: Path) -> None:
    """One session of very many turns and forks, and one rollout whose only sample is very long."""
    random = np.random.default_rng(1)
    with rolltape.open(path, name="special") as tape:
        with tape.rollout(task_id="session") as rollout:
            session = rollout.session()
            turns: list[Any] = []
            for index in range(_LONG_TURNS):
                base = turns[-1] if turns else None
                if turns and index % (_LONG_TURNS // _LONG_FORKS) == 0:
                    base = turns[int(random.integers(max(len(turns) - 40, 0), len(turns)))]
                given: dict[str, Any] = {
                    "sampled_ids": random.integers(0, 1000, 60, dtype=np.int32),
                    "logprobs": np.full(60, -0.5, np.float32),
                    "reply": {"role": "assistant", "content": f"reply {index} " + "words " * 40},
                    "finish": "stop",
                }
                new = [{"role": "user", "content": f"result {index} " + "more words " * 40}]
                ids = random.integers(0, 1000, 100, dtype=np.int32)
                if base is None:
                    turns.append(session.record_turn(prompt_messages=new, prompt_ids=ids, **given))
                else:
                    turns.append(session.record_turn(after=base, new_messages=new, new_prompt_ids=ids, **given))
            rollout.finish(reward=1.0)
        with tape.rollout(task_id="sample") as rollout:
            sampled = _LONG_TOKENS // 2
            rollout.session().record_turn(
                prompt_messages=[{"role": "user", "content": "a long one"}],
                prompt_ids=random.integers(0, 100_000, _LONG_TOKENS - sampled, dtype=np.int32),
                sampled_ids=random.integers(0, 100_000, sampled, dtype=np.int32),
                logprobs=-random.exponential(0.5, sampled).astype(np.float32),
                reply={"role": "assistant", "content": "long"},
                finish="stop",
            )
            rollout.finish(reward=1.0)
