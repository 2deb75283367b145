"""A large run in the web page and in the commands that list it, sample it and resume it."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from benchmarks.collect import resume_figures
from benchmarks.figures import Figure, main, seconds, shortest_s
from benchmarks.large_run import (
    LONG_FORKS,
    LONG_TOKENS,
    LONG_TURNS,
    TURNS,
    append_summaries,
    record_large,
    record_special,
)

_SAMPLED_ROLLOUTS = 10_000  # at most, of the run that `rolltape samples` reads
_LOOK_EVERY_S = 0.1


def figures(rollouts: int = 100_000, run: Path | None = None) -> Iterator[Figure]:
    """Record a run of so many rollouts, or take one that is there, and measure everything that looks at it."""
    with tempfile.TemporaryDirectory(prefix="rolltape-bench-") as scratch:
        folder = Path(scratch)
        large = run or folder / "large"
        if not large.exists():
            yield Figure("recording the run", seconds(lambda: record_large(large, rollouts)), "s")
            append_summaries(large)
        yield from opening_figures(large)
        yield from page_figures(large)
        yield from listing_figures(large)
        yield from sampling_figures(folder / "sampled", min(rollouts, _SAMPLED_ROLLOUTS))
        yield from resume_figures(folder, rollouts)
        yield from special_figures(folder / "special")


def opening_figures(run: Path) -> Iterator[Figure]:
    """The page's first answer without and with an index, and how soon the whole index and the search are there."""
    started_s = shortest_s(lambda: _rolltape("--help"), 3)
    shutil.rmtree(run / "cache", ignore_errors=True)
    with served(run) as server:
        first = server.progress()
        first_s = server.age_s()
        note = f"indexed {first.indexed:,} of {first.total:,}; {first_s / started_s:.1f} × `rolltape --help`"
        yield Figure("first answer, no index", first_s, "s", 1.5, note=note)
        indexed_s = server.wait_until(lambda progress: progress.is_indexed)
        yield Figure("the whole index from scratch", indexed_s, "s", 30, note=_read_note(run, indexed_s))
        both_s = server.wait_until(lambda progress: progress.is_indexed and progress.is_searchable)
        yield Figure("search ready after that", both_s - indexed_s, "s", 60)
        summarized_s = server.wait_until(lambda progress: progress.is_summarized)
        yield Figure("all rollouts summarized", summarized_s, "s", note="from the start of the command")
    with served(run) as server:
        again = server.progress()
        note = f"indexed {again.indexed:,} of {again.total:,}"
        yield Figure("first answer, with an index", server.age_s(), "s", 1.5, note=note)


def page_figures(run: Path) -> Iterator[Figure]:
    """What each question costs once everything is indexed, and the server's memory."""
    with served(run) as server:
        server.wait_until(lambda progress: progress.is_indexed and progress.is_searchable)
        page = server.ask("rollouts?sort=-started")
        note = f"{page['total']:,} rollouts"
        yield Figure("overview and first page", shortest_s(server.open_page, 3), "s", 1.5, note=note)
        for sort in ("reward", "-tokens", "task", "-forks"):
            yield Figure(f"sorted by {sort}", server.shortest_ms(f"rollouts?sort={sort}"), "ms", 300)
        asked = "rollouts?status=finished&min_reward=0.5&min_forks=1&environment=env-1&sort=-reward"
        yield Figure("filtered", server.shortest_ms(asked), "ms", 300)
        for what, asked in {
            "tasks": "tasks",
            "tasks by name": "tasks?sort=task&name=7",
            "tasks of a step": "tasks?step=1",
        }.items():
            yield Figure(what, server.shortest_ms(asked), "ms", 1000)
        limits = iter(range(1, 100))  # another limit is another comparison: none is answered from memory
        compared_s = shortest_s(lambda: server.compare(f"solved_at=0.{next(limits):02d}"), 3)
        yield Figure("compared with itself", compared_s * 1000, "ms", 1000, note="all tasks, every measure tested")
        yield Figure("the same, sorted", shortest_s(lambda: server.compare("sort=task"), 3) * 1000, "ms", 1000)
        searches = {"rare word": "w4999", "in every rollout": "instructions", "phrase": '"look at w0001"'}
        for what, words in searches.items():
            yield Figure(f"searched: {what}", server.shortest_ms(f"rollouts?q={quote(words)}") / 1000, "s", 2.0)
        yield Figure("one rollout", server.shortest_ms(f"rollouts/{page['rows'][50]['id']}"), "ms")
        yield Figure("memory of server and worker", server.memory_mb(), "MB", 1000)


def listing_figures(run: Path) -> Iterator[Figure]:
    """`rolltape ls` once the run is indexed."""
    _rolltape("ls", run)
    started_s = shortest_s(lambda: _rolltape("--help"), 3)
    for what, options in (("rolltape ls", ()), ("rolltape ls --json", ("--json",)), ("rolltape ls --limit 20", _FEW)):
        taken_s = shortest_s(lambda options=options: _rolltape("ls", run, *options), 2)  # type: ignore[misc]
        note = f"{taken_s / started_s:.1f} × `rolltape --help`"
        yield Figure(what, taken_s, "s", 2.0, note=note)


_FEW = ("--limit", "20")


def sampling_figures(run: Path, rollouts: int) -> Iterator[Figure]:
    """`rolltape samples` over a run of the same rollouts."""
    record_large(run, rollouts)
    taken_s = seconds(lambda: _rolltape("samples", run))
    floor_s = shortest_s(lambda: _read_journals(run), 2)
    note = f"{rollouts:,} rollouts in {taken_s:.1f} s; {taken_s / floor_s:.0f} × reading all rows of its journals"
    yield Figure("rolltape samples", rollouts / taken_s, "rollouts/s", 1000, at_most=False, note=note)


def special_figures(run: Path) -> Iterator[Figure]:
    """One long session and one long sample."""
    record_special(run)
    with served(run) as server:
        server.wait_until(lambda progress: progress.is_indexed)
        rows = {row["task"]: row["id"] for row in server.ask("rollouts")["rows"]}
        size = len(server.ask_bytes(f"rollouts/{rows['session']}"))
        note = f"{LONG_TURNS:,} turns, {LONG_FORKS} forks, {size / 1e6:.1f} MB of JSON"
        taken_s = server.shortest_ms(f"rollouts/{rows['session']}") / 1000
        yield Figure("a long session with its forks", taken_s, "s", 1.0, note=note)
        path = f"rollouts/{rows['sample']}/samples/0/tokens"
        size = len(server.ask_bytes(path))
        note = f"{LONG_TOKENS:,} tokens, {size / 1e6:.1f} MB"
        yield Figure("a long sample's tokens", server.shortest_ms(path) / 1000, "s", 1.0, note=note)


class Progress(NamedTuple):
    """How far a server's index is, in rollouts."""

    indexed: int
    total: int
    summarized: int
    searchable: int

    @property
    def is_indexed(self) -> bool:
        return 0 < self.total <= self.indexed

    @property
    def is_summarized(self) -> bool:
        return 0 < self.total <= self.summarized

    @property
    def is_searchable(self) -> bool:
        return 0 < self.total <= self.searchable


class ServedRun:
    """`rolltape view` over one run, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], started: float) -> None:
        assert process.stdout is not None
        printed = urlsplit(process.stdout.readline().strip())
        self._address = f"{printed.scheme}://{printed.netloc}"
        self._name = json.loads(self._get("/api/runs"))["runs"][0]["r"]
        self._process = process
        self._started = started

    def ask(self, path: str) -> Any:
        return json.loads(self.ask_bytes(path))

    def ask_bytes(self, path: str) -> bytes:
        return self._get(f"/api/{self._name}/{path}")

    def compare(self, query: str) -> None:
        """Compare the run with itself: every rollout is on both sides."""
        self._get(f"/api/compare?a={self._name}&b={self._name}&{query}")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._address + path) as answer:
            content: bytes = answer.read()
            return content

    def age_s(self) -> float:
        """Seconds since the command was started."""
        return time.time() - self._started

    def progress(self) -> Progress:
        """The progress that the overview states; of a server without one, what its other fields amount to."""
        overview = self.ask("overview")
        if "progress" in overview:
            return Progress(**{name: overview["progress"][name] for name in Progress._fields})
        rollouts = overview["rollouts"]
        search = self.ask("rollouts?q=instructions&limit=1")["search"]
        total = rollouts if overview["read_through"] else rollouts + 1  # not all are known so far
        return Progress(rollouts, total, total - overview["pending"], total - (search["ended"] - search["indexed"]))

    def wait_until(self, reached: Callable[[Progress], bool]) -> float:
        """Seconds from the start of the command to the first look at which the index has got there."""
        while not reached(self.progress()):
            time.sleep(_LOOK_EVERY_S)
        return self.age_s()

    def open_page(self) -> None:
        self.ask("overview")
        self.ask("rollouts")

    def shortest_ms(self, path: str) -> float:
        return shortest_s(lambda: self.ask_bytes(path), 3) * 1000

    def memory_mb(self) -> float:
        """Resident memory of the process and its children."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rss = (re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text()) for one in (pid, *children))
        return sum(int(found[1]) for found in rss if found) / 1024


@contextmanager
def served(run: Path) -> Iterator[ServedRun]:
    """Serve a run within the block."""
    started = time.time()
    command = [sys.executable, "-m", "rolltape.cli", "view", str(run), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield ServedRun(process, started)
    finally:
        process.terminate()
        process.wait()


def _rolltape(*arguments: object) -> None:
    command = [sys.executable, "-m", "rolltape.cli", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "120"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def _read_note(run: Path, taken_s: float) -> str:
    floor_s = seconds(lambda: _read_journals(run))
    return f"{TURNS} turns a rollout; {taken_s / floor_s:.1f} × reading all rows of its journals"


def _read_journals(run: Path) -> None:
    """Read every row of every table: the floor of whatever reads a run as a whole."""
    for path in run.glob("journals/*.sqlite"):
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as journal:
            tables = [name for (name,) in journal.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                for _ in journal.execute(f'SELECT * FROM "{table}"'):
                    pass


if __name__ == "__main__":
    main({"view": figures})
