"""Two made-up runs whose comparison is known: `base`, and `tuned`, which does better at most tasks and worse at one."""

from pathlib import Path
from typing import Any

import rolltape
from taped import assistant, user

# By task: the rewards in `base` and in `tuned`. None: the attempt failed; no list: the run lacks the task.
REWARDS: dict[str, tuple[list[float | None] | None, list[float | None] | None]] = {
    "always": ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
    "learned": ([0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
    "lost": ([1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]),
    **{f"better-{number:02d}": ([0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]) for number in range(9)},
    "broken": ([1.0, 0.0], [None, None]),
    "only-base": ([1.0, 0.0], None),
    "only-tuned": (None, [0.0]),
}
_SYSTEM = {"role": "system", "content": "You are a careful engineer.\nAnswer in one line."}


def record_compared(folder: Path) -> tuple[Path, Path]:
    """Record both runs; each attempt asks a tool, and says in its last line what it found."""
    for side, name in enumerate(("base", "tuned")):
        with rolltape.open(folder / name, name=name) as tape:
            for task, sides in REWARDS.items():
                for attempt, reward in enumerate(sides[side] or ()):
                    _record(tape, task, attempt, reward, version=f"v{side}")
    return folder / "base", folder / "tuned"


def _record(tape: Any, task: str, attempt: int, reward: float | None, *, version: str) -> None:
    fields = {"task_id": task, "attempt": attempt, "step": 3 + attempt // 2, "source": "sums", "model": "m"}
    with tape.rollout(**fields) as rollout:
        if reward is None:
            rollout.fail("it broke")
            return
        session = rollout.session()
        call = {"role": "assistant", "content": "", "tool_calls": [_call(task)]}
        first = session.record_turn(
            prompt_messages=[_SYSTEM, user(f"Solve {task}.")],
            prompt_ids=[1, 2, 3],
            sampled_ids=[4, 5],
            logprobs=[-0.5, -0.25],
            reply=call,
            finish="stop",
            weight_version=version,
        )
        found = "12" if reward else "11"
        log = "\n".join(f"step {number} is done" for number in range(30))
        session.record_turn(
            after=first,
            new_messages=[{"role": "tool", "tool_call_id": "1", "content": f"{log}\nthe sum is {found}\nthe end"}],
            new_prompt_ids=[6],
            sampled_ids=[7] * (3 if version == "v0" else 5),
            logprobs=[-0.5] * (3 if version == "v0" else 5),
            reply=assistant(f"I looked at it twice.\nThe answer is {found}.\nI am done."),
            finish="stop",
            weight_version=version,
        )
        rollout.finish(reward=reward, reward_terms={"correct": reward, "brief": 0.5})


def _call(task: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": f'{{"task": "{task}"}}'}}
