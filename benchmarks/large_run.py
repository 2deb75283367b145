"""Made-up runs that the web page and the commands are measured on, recorded through the public API."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import rolltape
from rolltape.records.rollout import EventKind
from rolltape.samples.summary import summarize
from rolltape.tape.journal.entries import NewEvent

TURNS = 10  # a rollout
GROUP = 8
LONG_TURNS, LONG_FORKS = 2000, 300
LONG_TOKENS = 200_000
_GROUPS_A_STEP = 100
_WORDS = 5000
_AT_A_TIME = 64
_SUMMARIES_AT_ONCE = 1_000


def record_large(path: Path, rollouts: int) -> None:
    """Record rollouts of an agent that looks around: ten turns each, every tenth one with a fork; many at a time."""
    words = [f"w{number:04d}" for number in range(_WORDS)]
    system = {"role": "system", "content": "instructions " + " ".join(words[:100])}
    first_ids, new_ids = np.arange(30, dtype=np.int32), np.arange(10, dtype=np.int32)
    logprobs = np.full(20, -0.5, np.float32)
    numbers = iter(range(rollouts))

    async def record(tape: Any, number: int) -> None:
        random = np.random.default_rng(number)
        group = number // GROUP
        step = group // _GROUPS_A_STEP
        task = {"environment": f"env-{group % 3}", "question": f"task {group}"}
        fields: dict[str, Any] = {"task_id": f"task-{group}", "step": step, "attempt": number % GROUP}
        with tape.rollout(task=task, agent="chat", model="m", **fields) as rollout:
            session = rollout.session()
            turn = None
            for index, (left, right) in enumerate(random.integers(0, _WORDS, (TURNS, 2)).tolist()):
                given: dict[str, Any] = {
                    "sampled_ids": random.integers(0, 1000, 20, dtype=np.int32),
                    "logprobs": logprobs,
                    "reply": {"role": "assistant", "content": f"look at {words[left]} and {words[right]}"},
                    "finish": "stop",
                    "weight_version": str(step),
                }
                if turn is None or (index == TURNS // 2 and number % 10 == 0):
                    given["prompt_messages"] = [system, {"role": "user", "content": f"task {group} {index}"}]
                    given["prompt_ids"] = first_ids
                else:
                    given["new_messages"] = [{"role": "user", "content": f"result {words[right]}"}]
                    given |= {"after": turn, "new_prompt_ids": new_ids}
                turn = await session.record_turn_async(**given)
            rollout.finish(reward=float(random.random() < 0.3 + group / rollouts))

    async def take_turns(tape: Any) -> None:
        for number in numbers:
            await record(tape, number)

    async def record_all() -> None:
        with rolltape.open(path, name="large") as tape:
            await asyncio.gather(*(take_turns(tape) for _ in range(_AT_A_TIME)))

    asyncio.run(record_all())


def append_summaries(path: Path) -> None:
    """Append the summaries that were left out because the run was recorded as fast as possible."""
    run = rolltape.read(path)
    run.index()
    lacking = "SELECT id, try_index, changed FROM rollouts WHERE number NOT IN (SELECT rollout FROM summaries)"
    keys = run.tape_index.ask(lambda connection: connection.execute(lacking).fetchall())
    with rolltape.open(path) as tape:
        for first in range(0, len(keys), _SUMMARIES_AT_ONCE):
            tape.append_events(
                NewEvent(
                    EventKind.SUMMARY,
                    id_,
                    {**msgspec.to_builtins(summarize(run.tape_index.load((id_, try_index)))), "covers": changed},
                    try_index=try_index,
                )
                for id_, try_index, changed in keys[first : first + _SUMMARIES_AT_ONCE]
            )


def record_special(path: Path) -> None:
    """Record one session of very many turns and forks, and one rollout whose only sample is very long."""
    random = np.random.default_rng(1)
    with rolltape.open(path, name="special") as tape:
        with tape.rollout(task_id="session") as rollout:
            session = rollout.session()
            turns: list[Any] = []
            for index in range(LONG_TURNS):
                base = turns[-1] if turns else None
                if turns and index % (LONG_TURNS // LONG_FORKS) == 0:
                    base = turns[int(random.integers(max(len(turns) - 40, 0), len(turns)))]
                given: dict[str, Any] = {
                    "sampled_ids": random.integers(0, 1000, 60, dtype=np.int32),
                    "logprobs": np.full(60, -0.5, np.float32),
                    "reply": {"role": "assistant", "content": f"reply {index} " + "words " * 40},
                    "finish": "stop",
                }
                new = [{"role": "user", "content": f"result {index} " + "more words " * 40}]
                ids = random.integers(0, 1000, 100, dtype=np.int32)
                if base is None:
                    turns.append(session.record_turn(prompt_messages=new, prompt_ids=ids, **given))
                else:
                    turns.append(session.record_turn(after=base, new_messages=new, new_prompt_ids=ids, **given))
            rollout.finish(reward=1.0)
        with tape.rollout(task_id="sample") as rollout:
            sampled = LONG_TOKENS // 2
            rollout.session().record_turn(
                prompt_messages=[{"role": "user", "content": "a long one"}],
                prompt_ids=random.integers(0, 100_000, LONG_TOKENS - sampled, dtype=np.int32),
                sampled_ids=random.integers(0, 100_000, sampled, dtype=np.int32),
                logprobs=-random.exponential(0.5, sampled).astype(np.float32),
                reply={"role": "assistant", "content": "long"},
                finish="stop",
            )
            rollout.finish(reward=1.0)
