"""Training jobs for tests: an engine that is a function, tasks, and a source of groups on a run of its own."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rolltape.collect.settings import CollectSettings
from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.request import SamplingParams
from rolltape.integrations import FunctionEngine, LiveGroups
from rolltape.records.policy import Credit
from rolltape.tiny import shipped_model

Say = Callable[[str, Generation], str]  # prompt → reply

SUMS = [{"id": f"sum-{n}", "prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(1, 5)]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))


def reply_ids(text: str, wanted: Generation) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return [*ids, wanted.stop_ids[0]]


def function_engine(say: Say, **options: Any) -> FunctionEngine:
    """An engine that says what it is told, with a logprob of -0.5 for each token."""

    async def sample(prompt_ids: list[int], wanted: Generation) -> tuple[Sequence[int], Sequence[float], str]:
        ids = reply_ids(say(tokenizer().decode(prompt_ids), wanted), wanted)
        return ids, [-0.5] * len(ids), "stop"

    return FunctionEngine(sample, model="said", logprob_kind="raw", **options)


def job(run: Path, engine: FunctionEngine, *, credit: Credit | None = None, **settings: Any) -> LiveGroups:
    """A job that collects groups of two."""
    given: dict[str, Any] = {
        "source": "sums",
        "group_size": 2,
        "model": str(shipped_model()),
        "thinking": False,
        "sampling": SamplingParams(temperature=1.0, max_tokens=32),
        **settings,
    }
    return LiveGroups(run, collect=CollectSettings(**given), engine=engine, version="0", credit=credit)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what a thread does in the background."""
    while not holds():
        time.sleep(0.01)
