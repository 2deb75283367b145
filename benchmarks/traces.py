"""What tracing costs an environment: nothing when it is off, and with the step, not with its history, when it is on."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rolltape
from benchmarks.figures import Figure, main, shortest_s
from rolltape.traces import TraceWriter

_TEXT = "what is said at a step " * 40  # about a thousand characters


def figures() -> Iterator[Figure]:
    """Microseconds a step of a game of 400, each with a prompt of all that was said before."""
    prompts = [_conversation(2 * step + 1) for step in range(400)]
    loop_us = _step_us(prompts, lambda _: None)
    off_us = _step_us(prompts, lambda tape: TraceWriter(tape.rollout(task_id="a"), "off"))
    yield Figure("off: a step", off_us - loop_us, "µs", 5)
    first_us = _step_us(prompts[:20], _traced)
    last_us = _step_us(prompts[-20:], _traced, before=prompts[-21:-20])
    yield Figure("all: a step, at the start", first_us, "µs", note="written to disk")
    yield Figure(
        "all: a step, after 380", last_us, "µs", note="a prompt of 760 messages, 700,000 characters, looked through"
    )
    sizes = {steps: _bytes_of(prompts[:steps]) for steps in (200, 400)}
    yield Figure(
        "disk: 400 steps over 200", sizes[400] / sizes[200], "×", 2.2, note=f"{sizes[400] / 400:.0f} bytes a step"
    )


def _conversation(messages: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": f"{place} {_TEXT}"} for place in range(messages)]


def _traced(tape: rolltape.Tape) -> TraceWriter:
    return TraceWriter(tape.rollout(task_id="a"))


def _step_us(
    prompts: list[list[dict[str, Any]]],
    opened: Callable[[rolltape.Tape], TraceWriter | None],
    before: list[list[dict[str, Any]]] | None = None,
) -> float:
    def play(writer: TraceWriter | None, prompts: list[list[dict[str, Any]]]) -> None:
        for step, prompt in enumerate(prompts):
            if writer is not None:
                writer.step(prompt=prompt, reward=0.0, env_state={"step": step, "board": [0] * 9})

    def timed() -> float:
        with tempfile.TemporaryDirectory() as folder, rolltape.open(Path(folder) / "run") as tape:
            writer = opened(tape)
            play(writer, before or [])
            return shortest_s(lambda: play(writer, prompts), times=1)

    return min(timed() for _ in range(5)) / len(prompts) * 1e6


def _bytes_of(prompts: list[list[dict[str, Any]]]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        with rolltape.open(Path(folder) / "run") as tape:
            writer = _traced(tape)
            for step, prompt in enumerate(prompts):
                writer.step(prompt=prompt, reward=0.0, env_state={"step": step, "board": [0] * 9})
        return sum(path.stat().st_size for path in (Path(folder) / "run" / "journals").iterdir())


if __name__ == "__main__":
    main({"traces": figures})
