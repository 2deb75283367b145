"""What the tape's tests share: small recordings, and a comparison of rollouts bit for bit."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rolltape
from rolltape.records.rollout import Rollout
from rolltape.records.turn import Turn
from rolltape.samples.summary import summarize
from rolltape.tape.index.database import pack_summary
from rolltape.tape.index.index import Index
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.recording.tape import open_tape


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def first_fields() -> dict[str, Any]:
    return {
        "prompt_messages": [user("hello")],
        "prompt_ids": [1, 2, 3],
        "sampled_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "reply": assistant("hi"),
        "finish": "stop",
        "weight_version": "7",
    }


def next_fields(index: int = 0) -> dict[str, Any]:
    return {
        "new_messages": [user(f"go on {index}")],
        "new_prompt_ids": [10 + index, 11],
        "sampled_ids": [20 + index, 21, 22],
        "logprobs": [-0.1, -0.2, None],
        "reply": assistant(f"reply {index}"),
        "finish": "length",
        "weight_version": "8",
    }


def first_turn(session: SessionRecorder, **fields: Any) -> Turn:
    return session.record_turn(**{**first_fields(), **fields})


def next_turn(session: SessionRecorder, after: Turn, index: int = 0, **fields: Any) -> Turn:
    return session.record_turn(after=after, **{**next_fields(index), **fields})


def record_session(rollout: RolloutRecorder, turns: int, **fields: Any) -> list[Turn]:
    session = rollout.session()
    done = [first_turn(session, **fields)]
    for index in range(1, turns):
        done.append(next_turn(session, done[-1], index))
    return done


def record_side_arrays(rollout: RolloutRecorder, name: str, widths: Sequence[int]) -> None:
    """A conversation with a turn for each width, in which a side array has so many columns."""
    session = rollout.session()
    for number, width in enumerate(widths):
        session.record_turn(
            prompt_messages=[user("go")] * (number + 1),
            prompt_ids=[1, 2, 5, 6, 9][: 2 + 3 * number],
            sampled_ids=[5, 6],
            logprobs=[-0.1, -0.2],
            finish="length",
            side_arrays={name: np.zeros((2, width), np.int16)},
        )


def record_run(path: Path, rollouts: int = 3, turns: int = 4, *, summaries: bool = True) -> list[str]:
    """A finished run by one writer that is closed; its rollouts' ids."""
    ids = []
    with (rolltape.open if summaries else open_tape)(path, name="exp") as tape:
        for index in range(rollouts):
            with tape.rollout(task_id=f"task-{index}", step=index) as rollout:
                record_session(rollout, turns)
                rollout.finish(reward=float(index))
                ids.append(rollout.id)
    return ids


def spelled(rollout: Rollout) -> dict[str, Any]:
    """Everything in a rollout, as values that compare exactly; arrays as dtype, shape and bytes."""
    return {
        "head": rollout.head,
        "outcome": rollout.outcome,
        "events": rollout.events,
        "sessions": [(session.head, [spelled_turn(turn) for turn in session.turns]) for session in rollout.sessions],
    }


def spelled_turn(turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.id,
        "root": turn.root.raw,
        "prompt": [message.raw for message in turn.prompt.to_list()],
        "prompt_ids": array(turn.prompt_ids),
        "reply": turn.reply and turn.reply.raw,
        "sampled_ids": array(turn.sampled_ids),
        "logprobs": array(turn.logprobs),
        "facts": turn.facts,
        "side": {name: (side.start, array(side.values), array(side.counts)) for name, side in turn.side.items()},
    }


def array(value: Any) -> Any:
    return None if value is None else (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())


def check_summaries(index: Index) -> int:
    """Every summary in the index is that of the rollout as it is now; how many there are."""
    index.advance()
    columns = "id, try_index, branches, forks, samples, ledgers, behavior"
    question = f"SELECT {columns} FROM summaries JOIN rollouts ON number = rollout"
    found = index.ask(lambda connection: connection.execute(question).fetchall())
    for id_, try_index, branches, *arrays in found:
        now = summarize(index.load((id_, try_index)))
        assert (branches, tuple(arrays)) == (now.branches, pack_summary(now))
    return len(found)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another Python process that runs `code`, with its output on a pipe."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finished(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output
