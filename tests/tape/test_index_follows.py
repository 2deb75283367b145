"""The index under interleaving: the follower is stopped between any two of its reads while others write."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rolltape
from rolltape.records.rollout import Status, outcome_of, pruned_of
from rolltape.tape.contents import open_contents
from rolltape.tape.index import follower
from rolltape.tape.index.database import IndexFile
from rolltape.tape.index.index import Index
from rolltape.tape.index.sources import RunSources
from rolltape.tape.rundir import Place, RunDirectory
from taped import check_summaries, first_turn, record_run

# A process that does to a run what it reads from its input, and says "ok" after each.
WRITER = """
import os, sys, rolltape
from rolltape.tape.recording import summaries
summaries._CLOSE_S = 600.0  # however busy the machine is
tape = rolltape.open(sys.argv[1])
held = {}
for line in sys.stdin:
    what, *rest = line.split()
    try:
        if what == "start":
            held[rest[0]] = rollout = tape.rollout(task_id=rest[0], source="s", attempt=int(rest[1]), new_try=True)
            held[rest[0], "session"] = rollout.session()
        elif what == "resume":
            held[rest[0]] = rollout = tape.rollout(task_id=rest[0], source="s", attempt=int(rest[1]), resume=True)
            held[rest[0], "session"] = rollout.session()
        elif what == "turn":
            ids = [1, 2, int(rest[1])]
            held[rest[0], "turn"] = held[rest[0], "session"].record_turn(
                prompt_messages=[{"role": "user", "content": rest[0]}], prompt_ids=ids, sampled_ids=[7, 8],
                logprobs=[-0.5, -0.25], reply={"role": "assistant", "content": "a"}, finish="stop", weight_version="v1")
        elif what == "finish":
            held.pop(rest[0]).finish(reward=float(rest[1]))
        elif what == "fail":
            held.pop(rest[0]).fail("broken")
        elif what == "deliver" and (rest[0], "turn") in held:
            tape.mark_delivered(held[rest[0], "turn"].id, rest[1])
        elif what == "score":
            tape.score(rest[0], reward=float(rest[1]))
        elif what == "filter":
            tape.filter(rest[0], rest[1] if rest[1] != "-" else None)
        elif what == "tag":
            tape.tag(rest[0], rest[1])
        elif what == "version":
            tape.announce_version(rest[0])
        elif what == "close":
            tape.close()
            print("ok", flush=True)
            os._exit(0)
        print("ok", flush=True)
    except rolltape.RolltapeError as error:
        print("refused", error, flush=True)
"""


class Writer:
    """A writing process under control."""

    def __init__(self, run: Path) -> None:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.pid = self._process.pid
        self.open: dict[str, int] = {}  # by task, the attempt
        self.alive = True

    def do(self, *words: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self._process.stdin.flush()
        answer = self._process.stdout.readline().decode()
        assert answer, "the writer ended by itself"
        return answer

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.alive = False

    def close(self) -> None:
        self.do("close")
        self._process.wait()
        self.alive = False

    def end(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.communicate()


Seen = dict[tuple[str, int], Any]


def from_scratch(run: Path) -> Seen:
    """What a run holds, worked out from all of its sources at once."""
    seen: Seen = {}
    with open_contents(RunDirectory.opened(run)) as contents:
        for key, entry in contents.entries.items():
            events = contents.deciding(key)
            counts = entry.held.counts
            how_much = (len(counts.turns), sum(counts.turns), counts.sampled_tokens, counts.versions)
            seen[key] = (outcome_of(events, entry.alive), *how_much, pruned_of(events))
    return seen


def indexed(index: Index) -> Seen:
    return {
        row.key: (row.outcome, row.sessions, row.turns, row.sampled_tokens, row.versions, row.pruned)
        for row in index.rows()
    }


def opened_index(run: Path, stop: Callable[[str], None] | None = None) -> Index:
    directory = RunDirectory.opened(run)
    file = IndexFile(directory.path, str(run), directory.about.get("created"))
    return Index(RunSources(directory, Place(run)), file, str(run), stop)


class World:
    """Processes that write one run, and all the states that it has had."""

    def __init__(self, run: Path, choice: random.Random) -> None:
        self.run = run
        self._choice = choice
        self._count = 0
        self._left: list[tuple[str, int]] = []  # tasks and attempts of writers that died
        rolltape.open(run, name="run").close()
        self.writers = [Writer(run), Writer(run)]
        self.states: list[Seen] = [from_scratch(run)]

    def step(self) -> None:
        """One change by somebody."""
        writer = self._choice.choice(self.writers)
        kinds = [
            "start",
            "resume",
            "turn",
            "turn",
            "finish",
            "score",
            "filter",
            "tag",
            "deliver",
            "version",
            "seal",
            "prune",
            "die",
            "close",
        ]
        kind = self._choice.choices(kinds, [5, 6, 5, 5, 6, 4, 2, 2, 4, 1, 1.5, 0.5, 2, 0.5])[0]
        self._change(writer, kind)
        self.states.append(from_scratch(self.run))

    def _change(self, writer: Writer, kind: str) -> None:
        known = sorted({key[0] for key in self.states[-1]})
        match kind:
            case "start":
                self._count += 1
                name = f"t{self._choice.randrange(6)}"
                if name not in writer.open and writer.do("start", name, self._count).startswith("ok"):
                    writer.open[name] = self._count
            case "resume" if self._left:
                name, attempt = self._left.pop(self._choice.randrange(len(self._left)))
                if name not in writer.open and writer.do("resume", name, attempt).startswith("ok"):
                    writer.open[name] = attempt
            case "turn" if writer.open:
                writer.do("turn", self._choice.choice(list(writer.open)), self._choice.randrange(9))
            case "finish" if writer.open:
                name = self._choice.choice(list(writer.open))
                del writer.open[name]
                writer.do(*(("finish", name, self._choice.random()) if self._choice.random() < 0.8 else ("fail", name)))
            case "score" if known:
                writer.do("score", self._choice.choice(known), self._choice.random())
            case "filter" if known:
                writer.do("filter", self._choice.choice(known), self._choice.choice(["bad", "-"]))
            case "tag" if known:
                writer.do("tag", self._choice.choice(known), f"tag{self._choice.randrange(3)}")
            case "deliver":
                name = f"t{self._choice.randrange(6)}"
                writer.do("deliver", name, self._choice.choice(["delivered", "undelivered"]))
            case "version":
                writer.do("version", f"v{self._choice.randrange(4)}")
            case "seal":
                rolltape.seal(self.run)
            case "prune":
                rolltape.prune(self.run, before_step=1)
            case "die":
                writer.kill()
                self._left += writer.open.items()
            case "close":
                writer.close()
        self.writers = [one if one.alive else Writer(self.run) for one in self.writers]

    def finish_one(self) -> None:
        """A writer finishes a rollout and closes the run, so that its summary is written."""
        writer = self.writers[0]
        for words in (("start", "last", 0), ("turn", "last", 1), ("finish", "last", 0.5)):
            assert writer.do(*words) == "ok\n"
        writer.close()
        self.states.append(from_scratch(self.run))

    def end(self) -> None:
        for writer in self.writers:
            writer.end()


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[[int], World]]:
    made: list[World] = []

    def make(seed: int) -> World:
        made.append(World(tmp_path / f"run-{seed}", random.Random(seed)))
        return made[-1]

    yield make
    for world in made:
        world.end()


def spelled(state: Seen) -> str:
    """A state as text, in which NaN equals itself."""
    return repr(sorted((key, msgspec.json.encode(value[0]), *value[1:]) for key, value in state.items()))


@pytest.mark.parametrize("seed", range(int(os.environ.get("ROLLTAPE_SEEDS", "4"))))
def test_at_each_stop_the_index_is_a_state_that_the_run_had(seed: int, worlds: Callable[[int], World]) -> None:
    """Between any two reads of the follower others write; what it commits is the run at some moment, whole."""
    world, choice = worlds(seed), random.Random(1000 + seed)
    stops, left = 0, 0
    other = opened_index(world.run)

    def compare() -> None:
        got = spelled(indexed(other))
        had = [spelled(state) for state in world.states]
        assert got in had, _nearest(indexed(other), world.states)

    def stop(what: str) -> None:
        nonlocal stops, left
        stops += 1
        compare()  # what another process reads at this stop
        for _ in range(min(choice.choice((0, 1, 1, 2)), left)):
            left -= 1
            world.step()

    index = opened_index(world.run, stop)
    for _ in range(25):
        world.step()
        left = choice.randrange(6)  # then they let it read
        index.advance()
        compare()
    index.close()
    world.finish_one()
    calm = opened_index(world.run)
    calm.advance()
    assert spelled(indexed(calm)) == spelled(from_scratch(world.run))
    check_summaries(calm)
    shutil.rmtree(world.run / "cache")
    anew = opened_index(world.run)
    anew.advance()
    assert spelled(indexed(anew)) == spelled(from_scratch(world.run)), "an index made anew says the same"
    assert check_summaries(anew) > 0
    assert stops > 50


def _nearest(got: Seen, states: list[Seen]) -> str:
    best = min(states, key=lambda state: sum(got.get(key) != state.get(key) for key in got.keys() | state.keys()))
    wrong = {key: (got.get(key), best.get(key)) for key in got.keys() | best.keys() if got.get(key) != best.get(key)}
    return f"{len(wrong)} rollouts differ from the nearest state: {wrong}"


def test_what_was_written_after_a_death_is_not_seen_before_it(worlds: Callable[[int], World]) -> None:
    world = worlds(78)
    by_pid = {str(writer.pid): writer for writer in world.writers}
    for task, writer in enumerate(world.writers):
        writer.do("start", f"t{task}", task)
    pinned: list[Writer] = []

    def stop(what: str) -> None:
        kind, _, journal = what.partition(" ")
        writer = by_pid.get(journal.split("-")[-2]) if kind == "pin" else None
        if writer is not None and len(pinned) < 2:
            pinned.append(writer)
            if len(pinned) == 2:  # the first one is pinned already, and was alive
                pinned[0].kill()
                writer.do("start", "later", 2)

    index = opened_index(world.run, stop)
    index.advance()
    found = {row.task_id: row.outcome.status for row in index.rows()}
    assert len(pinned) == 2
    dead = f"t{world.writers.index(pinned[0])}"
    assert found == {"t0": Status.RUNNING, "t1": Status.RUNNING, "later": Status.RUNNING, dead: Status.LOST}


def test_a_follower_that_another_one_overtakes_with_an_earlier_state_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_STUCK_S", 0.0)  # neither waits for the other's lock
    has_read, may_write = threading.Event(), threading.Event()

    def wait(what: str) -> None:
        if what == "write":
            has_read.set()
            may_write.wait()

    def let_the_slow_one_write(what: str) -> None:
        if what == "write":
            may_write.set()
            thread.join()

    with rolltape.open(tmp_path / "run") as tape:
        tape.rollout(task_id="first")
        slow = opened_index(tmp_path / "run", wait)
        thread = threading.Thread(target=slow.advance)
        thread.start()
        has_read.wait()
        tape.rollout(task_id="later")
        fast = opened_index(tmp_path / "run", let_the_slow_one_write)
        fast.advance()
        assert [row.task_id for row in fast.rows()] == ["first", "later"]


def test_a_follower_that_another_one_overtakes_between_two_pieces_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_STUCK_S", 0.0)
    monkeypatch.setattr(follower, "_PIECE", 2)
    with rolltape.open(tmp_path / "run") as tape:
        begun = [tape.rollout(task_id=str(number)) for number in range(5)]
        fast = opened_index(tmp_path / "run")

        def overtake(what: str) -> None:
            if what == "piece" and begun:
                while begun:
                    begun.pop().finish(reward=1.0, reason="done")
                fast.advance()

        slow = opened_index(tmp_path / "run", overtake)
        slow.advance()
        assert spelled(indexed(fast)) == spelled(from_scratch(tmp_path / "run"))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_first_index_that_was_interrupted_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    monkeypatch.setattr(follower, "_PIECE", 2)
    run = tmp_path / "run"
    record_run(run, rollouts=9)
    if sealed:
        rolltape.seal(run)
    with rolltape.open(run, name="exp") as tape:
        begun = [tape.rollout(task_id=f"running {number}") for number in range(9)]
        for interrupted_at in itertools.count():
            shutil.rmtree(run / "cache", ignore_errors=True)
            stops = itertools.count()

            def interrupt(what: str, stops: Iterator[int] = stops, at: int = interrupted_at) -> None:
                if what == "piece" and next(stops) == at:
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                opened_index(run, interrupt).advance()
                break
            first_turn(begun[0].session())
            begun.pop().finish(reward=1.0, reason="done")
            index = opened_index(run)
            index.advance()
            assert spelled(indexed(index)) == spelled(from_scratch(run))
        assert interrupted_at > 3


def test_nothing_alive_is_called_lost(worlds: Callable[[int], World]) -> None:
    world = worlds(77)
    (writer, _) = world.writers
    writer.do("start", "a", 0)

    killed: list[bool] = []

    def stop(what: str) -> None:
        if what.startswith("read") and writer.alive:
            writer.do("turn", "a", 1)

    index = opened_index(world.run, stop)
    for _ in range(5):
        index.advance()
        assert [row.outcome.status for row in index.rows()] == [Status.RUNNING]
    killed.append(True)
    writer.kill()
    index.advance()
    assert [row.outcome.status for row in index.rows()] == [Status.LOST]
