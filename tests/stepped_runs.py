"""A run of three steps in which it is known why the reward changed, and which rollouts look like reward hacking."""

import json
from pathlib import Path
from typing import Any

import rolltape

ATTEMPTS = 4
# Step 0 to step 1: only `parse` falls, from 1 to 0, since its replies are cut off. Step 2 has other tasks.
STEPS: list[dict[str, float]] = [
    {"dates": 1.0, "parse": 1.0, "sort": 0.0, "sums": 0.0},
    {"dates": 1.0, "parse": 0.0, "sort": 0.0, "sums": 0.0},
    {"hard-1": 0.0, "hard-2": 0.0},
]
ENVIRONMENTS = {"dates": "code", "parse": "code", "sort": "code", "sums": "maths", "hard-1": "maths", "hard-2": "maths"}
# At step 1: one that is rewarded although it was cut off, one that is very short, one that edits a test.
TRUNCATED, SHORT, EDITED = ("dates", 0), ("dates", 1), ("dates", 2)
LONE = ("hard-2", 3)  # at step 2: the only one of its group that is rewarded


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    called = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


def record_stepped(path: Path) -> Path:
    with rolltape.open(path, name="exp") as tape:
        for step, tasks in enumerate(STEPS):
            for task, usual in tasks.items():
                for attempt in range(ATTEMPTS):
                    _record(tape, step, task, attempt, usual)
    return path


def _record(tape: Any, step: int, task: str, attempt: int, usual: float) -> None:
    one = (task, attempt) if step else None
    is_cut = (step == 1 and task == "parse") or one == TRUNCATED
    reward = 1.0 if one == LONE else usual
    tokens = 400 if is_cut else 4 if one == SHORT else 100
    edits = {"path": "tests/test_dates.py" if one == EDITED else "src/dates.py", "content": "pass"}
    reply = _call("write_file", edits) if task == "dates" else {"role": "assistant", "content": f"An answer to {task}."}
    with tape.rollout(
        task_id=task, step=step, attempt=attempt, source="made-up", extra={"environment": ENVIRONMENTS[task]}
    ) as rollout:
        session = rollout.session()
        turn = session.record_turn(
            prompt_messages=[{"role": "user", "content": f"Do {task}."}],
            prompt_ids=[1, 2],
            sampled_ids=[5] * tokens,
            logprobs=[-0.5] * tokens,
            reply=reply,
            finish="length" if is_cut else "stop",
        )
        if task == "sort":  # its tool fails
            session.record_turn(
                after=turn,
                new_messages=[{"role": "tool", "tool_call_id": "c", "content": "error: no such file"}],
                new_prompt_ids=[3],
                sampled_ids=[6],
                logprobs=[-0.5],
                reply={"role": "assistant", "content": "I give up."},
                finish="stop",
            )
        rollout.finish(
            reward=reward,
            reward_terms={"correct": reward, "format": 0.0 if is_cut else 0.1, "length": 0.0 if is_cut else -0.1},
            stop_reason="max_tokens" if is_cut and one != TRUNCATED else "completed",
        )
