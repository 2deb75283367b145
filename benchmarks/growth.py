"""Whether a turn costs more the longer its session is: turn 5,000 against turn 500, given as what is new."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import rolltape
from benchmarks.figures import Figure, main, seconds, shortest_s
from benchmarks.workload import Workload, agent_session
from rolltape.records.rollout import Rollout, RolloutHead, Session, SessionHead
from rolltape.records.turn import Turn
from rolltape.samples import linearize
from rolltape.tape.recording.intake import SessionIntake
from rolltape.tree import Tree

EARLY, LATE, WINDOW = 500, 5_000, 200
TARGET = 1.5


def figures() -> Iterator[Figure]:
    """Per-turn cost late in a session over the cost early in it."""
    work = agent_session(LATE, new_tokens=64, sampled=16)
    intake = SessionIntake(SessionHead(id="r.0.0", ordinal=0))
    yield _growth("record in memory", _timed(work, lambda given: intake.accept(intake.code(**given))))
    yield _ratio("begin another conversation", *(_another_conversation_us(work, count) for count in (EARLY, LATE)))
    tree = Tree()
    yield _growth("add to the tree", [_microseconds(tree.add, turn) for turn in intake.turns])
    with tempfile.TemporaryDirectory() as folder, rolltape.open(Path(folder) / "run") as tape:
        rollout = tape.rollout(task_id="growth")
        session = rollout.session()
        yield _growth("record on a tape", _timed(work, lambda given: session.record_turn(**given)))
        rollout.finish(reward=1.0)
    early, late = (_linearizing_us(intake.turns[:count]) for count in (EARLY, LATE))
    yield _ratio("tree and samples", early, late)


def rollout_of(turns: list[Turn]) -> Rollout:
    """A running rollout of one session."""
    head = RolloutHead(id="r", try_index=0, group="g", run="run", step=0, attempt=0, task_id="t", started_at_ns=0)
    return Rollout(head, [Session(SessionHead(id="r.0.0", ordinal=0), turns)], [], writer_alive=True)


def _another_conversation_us(work: Workload, turns: int) -> float:
    """Microseconds for the first prompt of a sub-agent, given whole, after so many turns given as what is new."""
    intake = SessionIntake(SessionHead(id="r.0.0", ordinal=0))
    first = Workload(work.ids, work.turns[:turns])
    _timed(first, lambda given: intake.accept(intake.code(**given)))
    message, reply = {"role": "user", "content": "look"}, {"role": "assistant", "content": "found"}

    def begin() -> object:
        return intake.code(prompt_messages=[message], prompt_ids=[1, 2], sampled_ids=[3], reply=reply, finish="stop")

    return seconds(begin) * 1e6


def _linearizing_us(turns: list[Turn]) -> float:
    rollout = rollout_of(turns)
    return shortest_s(lambda: list(linearize(rollout).samples()), times=5) / len(turns) * 1e6


def _timed(work: Workload, record: Callable[[dict[str, Any]], Turn]) -> list[float]:
    """Microseconds for each turn."""
    taken: list[float] = []
    turn: Turn | None = None
    for given in work.as_new():
        if turn is None:
            given["prompt_messages"], given["prompt_ids"] = given.pop("new_messages"), given.pop("new_prompt_ids")
        else:
            given["after"] = turn
        start = time.perf_counter()
        turn = record(given)
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def _microseconds(work: Callable[[Turn], object], turn: Turn) -> float:
    start = time.perf_counter()
    work(turn)
    return (time.perf_counter() - start) * 1e6


def _growth(what: str, taken_us: list[float]) -> Figure:
    return _ratio(what, *(median(taken_us[end - WINDOW : end]) for end in (EARLY, LATE)))


def _ratio(what: str, early_us: float, late_us: float) -> Figure:
    note = f"{early_us:.1f} µs a turn near {EARLY}, {late_us:.1f} near {LATE:,}"
    return Figure(f"{what}: turn {LATE:,} / turn {EARLY}", late_us / early_us, "×", TARGET, note=note)


if __name__ == "__main__":
    main({"growth": figures})
