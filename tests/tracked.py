"""What the tests of sinks share: runs with some steps, and what trackio has stored of them."""

from pathlib import Path
from typing import Any

import rolltape
from rolltape.tape.recording.tape import Tape

Message = dict[str, Any]


def call(place: int, name: str, arguments: str) -> Message:
    return {"id": f"call-{place}", "type": "function", "function": {"name": name, "arguments": arguments}}


QUESTION = {"role": "user", "content": "How many lines has parser.py?"}
COUNT = {"role": "assistant", "content": "I will count them.", "tool_calls": [call(0, "bash", '{"command": "wc -l"}')]}
COUNTED = {"role": "tool", "tool_call_id": "call-0", "content": "212 parser.py"}
ANSWER = {"role": "assistant", "content": "It has 212 lines."}
THANKS = {"role": "user", "content": "And without the comments?"}
GUESS = {"role": "assistant", "content": "About 180."}


def record_conversation(
    tape: Tape, *, task: str = "count", step: int = 0, attempt: int = 0, source: str | None = None, reward: float = 1.0
) -> str:
    """A rollout of three turns with a tool call and a weight update in between; its id."""
    with tape.rollout(task_id=task, step=step, attempt=attempt, source=source, model="tiny", agent="chat") as rollout:
        session = rollout.session()
        first = session.record_turn(
            prompt_messages=[QUESTION],
            prompt_ids=[1, 2, 3],
            sampled_ids=[10, 11, 12],
            logprobs=[-0.1, -0.2, -0.3],
            reply=COUNT,
            finish="stop",
            weight_version="7",
            started_at=1_700_000_000.0,
            ended_at=1_700_000_001.5,
        )
        second = session.record_turn(
            after=first,
            new_messages=[COUNTED],
            new_prompt_ids=[4, 5],
            sampled_ids=[13, 14],
            logprobs=[-0.1, -0.2],
            reply=ANSWER,
            finish="stop",
            weight_version="7",
            started_at=1_700_000_002.0,
            ended_at=1_700_000_002.25,
        )
        session.record_turn(
            after=second,
            new_messages=[THANKS],
            new_prompt_ids=[6],
            sampled_ids=[15, 16, 17, 18],
            logprobs=[-0.1, -0.2, -0.3, -0.4],
            reply=GUESS,
            finish="length",
            weight_version="8",
            started_at=1_700_000_003.0,
            ended_at=1_700_000_004.0,
        )
        rollout.finish(reward=reward, reward_terms={"right": reward}, stop_reason="max_turns")
        return rollout.id


def record_steps(path: Path, steps: int = 2, attempts: int = 2) -> Path:
    """A run with steps of a train split, and an evaluation at every step."""
    with rolltape.open(path, name="exp") as tape:
        for step in range(steps):
            for attempt in range(attempts):
                record_conversation(tape, step=step, attempt=attempt, source="sums#train", reward=float(attempt))
            record_conversation(tape, step=step, source="sums#test", reward=0.5)
    return path


def stored_traces(project: str, run: str = "exp", step: int | None = None) -> list[dict[str, Any]]:
    """The traces that trackio holds of a run, in the order in which they were logged."""
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_traces(project, run, sort="step_asc", step=step)


def stored_metrics(project: str, run: str = "exp") -> list[dict[str, Any]]:
    """The metrics that trackio holds of a run, entry by entry."""
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(project, run)
