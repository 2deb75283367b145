"""What showing a step of many rollouts on a tracker costs the thread that trains."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import rolltape
from benchmarks.figures import Figure, main, seconds
from rolltape.tracking import Outbox, ShownStep, show_batch, show_step


class _Counting:
    """A tracker that takes everything at once, so that only our own work is measured."""

    def __init__(self) -> None:
        self.rollouts = 0

    def holds(self, split: str, step: int) -> bool:
        return False

    def put(self, shown: ShownStep) -> None:
        self.rollouts += shown.summary.rollouts if shown.summary is not None else 0

    def close(self) -> None:
        pass


def figures(rollouts: int = 1000, tokens: int = 2048) -> Iterator[Figure]:
    """Milliseconds that the training thread waits, and that the sink's own thread works."""
    with tempfile.TemporaryDirectory() as folder, rolltape.open(Path(folder) / "run") as tape:
        for attempt in range(rollouts):
            _record(tape, attempt)
        run = tape.run()
        yield from _cost("show_step", rollouts, lambda sink: show_step(sink, run, step=0))
    batch = {
        "input_ids": np.ones((rollouts, tokens), dtype=np.int64),
        "loss_mask": np.tile(np.arange(tokens) % 2 == 0, (rollouts, 1)),
        "rewards": np.linspace(0, 1, rollouts),
    }
    note = f"{rollouts} x {tokens} tokens are copied"
    yield from _cost("show_batch", rollouts, lambda sink: show_batch(sink, batch, str, split="train", step=0), note)


def _cost(name: str, rollouts: int, show: Callable[[Outbox], bool], note: str = "") -> Iterator[Figure]:
    held_s, worked_s = min(_measured(rollouts, show) for _ in range(5))
    yield Figure(f"{name}, {rollouts} rollouts: the training thread", held_s * 1000, "ms", 50, note=note)
    yield Figure(f"{name}, {rollouts} rollouts: the sink's thread", worked_s * 1000, "ms")


def _measured(rollouts: int, show: Callable[[Outbox], bool]) -> tuple[float, float]:
    """The seconds until the step is handed over, and until it is delivered."""
    tracker = _Counting()
    sink = Outbox(tracker)
    held_s = seconds(lambda: show(sink))
    worked_s = seconds(lambda: sink.close(600))
    assert tracker.rollouts == rollouts
    return held_s, worked_s


def _record(tape: rolltape.Tape, attempt: int) -> None:
    with tape.rollout(task_id="count", step=0, attempt=attempt) as rollout:
        session = rollout.session()
        for turn in range(3):
            session.record_turn(
                prompt_messages=[{"role": "user", "content": f"question {turn}"}],
                prompt_ids=[1, 2, turn],
                sampled_ids=[10, 11, 12],
                logprobs=[-0.1, -0.2, -0.3],
                reply={"role": "assistant", "content": f"answer {turn}"},
                finish="stop",
            )
        rollout.finish(reward=float(attempt % 2))


if __name__ == "__main__":
    main({"tracking": figures})
