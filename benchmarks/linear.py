"""Record, tree and samples of a 400-turn session that ends at 260,000 tokens, against the straightforward way."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator

from benchmarks import baseline
from benchmarks.figures import Figure, main, seconds, shortest_s
from benchmarks.growth import rollout_of
from benchmarks.workload import Workload, agent_session
from rolltape.records.rollout import SessionHead
from rolltape.records.sample import Sample
from rolltape.records.turn import Turn
from rolltape.samples import linearize
from rolltape.tape.recording.intake import SessionIntake


def figures() -> Iterator[Figure]:
    """Time and memory of the straightforward way over ours."""
    work = long_session()
    straightforward_s = seconds(lambda: WAYS["straightforward"](work))
    straightforward_mib = _peak_mib_apart("straightforward")
    for way in ("as_new", "as_whole"):
        own_s = shortest_s(lambda way=way: WAYS[way](work), times=3)  # type: ignore[misc]
        own_mib = _peak_mib_apart(way)
        given = f"given {way.replace('_', ' ')}"
        note = f"{straightforward_s:.2f} s against {own_s:.3f} s"
        yield Figure(f"{given}: time", straightforward_s / own_s, "× less", 10, at_most=False, note=note)
        note = f"{straightforward_mib:.0f} MiB against {own_mib:.1f} MiB at their peaks"
        yield Figure(f"{given}: memory", straightforward_mib / own_mib, "× less", 30, at_most=False, note=note)


def long_session() -> Workload:
    """640 new tokens a turn, 160 of them sampled."""
    return agent_session(400, new_tokens=640, sampled=160, first_prompt=4_000)


def as_new(work: Workload) -> tuple[list[Turn], list[Sample]]:
    """Ours, each turn given as what is new."""
    intake = SessionIntake(SessionHead(id="r.0.0", ordinal=0))
    for given in work.as_new():
        if intake.turns:
            given["after"] = intake.turns[-1]
        else:
            given["prompt_messages"], given["prompt_ids"] = given.pop("new_messages"), given.pop("new_prompt_ids")
        intake.accept(intake.code(**given))
    return intake.turns, list(linearize(rollout_of(intake.turns)).samples())


def as_whole(work: Workload) -> tuple[list[Turn], list[Sample]]:
    """Ours, each turn given with its whole prompt."""
    intake = SessionIntake(SessionHead(id="r.0.0", ordinal=0))
    for given in work.as_whole():
        intake.accept(intake.code(**given))
    return intake.turns, list(linearize(rollout_of(intake.turns)).samples())


def straightforward(work: Workload) -> object:
    """The baseline, everything that it keeps included."""
    rows = baseline.record(work)
    return rows, baseline.samples_of(baseline.tree_of(rows))


WAYS: dict[str, Callable[[Workload], object]] = {
    "as_new": as_new,
    "as_whole": as_whole,
    "straightforward": straightforward,
}


def _peak_mib_apart(way: str) -> float:
    """The peak of what one way allocates, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.linear", "--peak", way]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _print_peak(way: str) -> None:
    work = long_session()
    tracemalloc.start()
    kept = WAYS[way](work)
    print(tracemalloc.get_traced_memory()[1] / 2**20)
    del kept


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        _print_peak(sys.argv[2])
    else:
        main({"linear": figures})
