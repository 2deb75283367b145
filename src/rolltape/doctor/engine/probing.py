"""Requests to an engine like the gateway's, for checks of its replies."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.request import ChatRequest, SamplingParams
from rolltape.gateway.turn.generate import PlausibleIds, check_generated

REPLY_TIMEOUT_S = 120.0
_HIGHEST_ORDINARY = 2000  # without a tokenizer: every vocabulary has the ids below


def generation(
    prompt_ids: Sequence[int],
    *,
    name: str = "g-1",
    session: str = "s",
    stop_ids: Sequence[int] = (),
    held_tokens: int = 0,
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
    vocabulary: int | None = None,
    top_logprobs: int = 0,
    on_sampled: Callable[[Sequence[int]], None] | None = None,
    **sampling: Any,
) -> Generation:
    """A generation of at most 64 tokens by default."""
    params = SamplingParams(**{"max_tokens": 64, **sampling})
    wanted = Generation(
        id=name,
        session=session,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        sampling=params,
        decided=SamplingParams(**sampling),
        stop_ids=tuple(stop_ids),
        vocabulary=vocabulary,
        held_tokens=held_tokens,
        top_logprobs=top_logprobs,
        request=ChatRequest(api="chat", model="it", messages=messages or [], tools=tools, sampling=params),
    )
    if on_sampled is None:
        return wanted
    return msgspec.structs.replace(wanted, on_sampled=PlausibleIds(wanted, on_sampled).add)


class SampledChunks:
    """An `on_sampled` that keeps its arguments; `then` is called after the first call."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.chunks: list[list[int]] = []
        self._then = then

    def __call__(self, ids: Sequence[int]) -> None:
        self.chunks.append(list(ids))
        if len(self.chunks) == 1:
            self._then()

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


class EngineProbe:
    """An engine to check, with the prompts of its model if a folder is given."""

    def __init__(
        self,
        engine: Engine,
        prompts: ChatPrompts | None = None,
        *,
        seed: int = 0,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.reply_timeout_s = reply_timeout_s
        self.answers = True  # False if it returned no replies, and is not asked again
        self.vocabulary = None if prompts is None else prompts.vocabulary
        self.stop_ids: tuple[int, ...] = () if prompts is None else prompts.stop_ids
        self._rng = np.random.default_rng(seed)
        self._sent = 0

    def noise(self, count: int, *, unseen: bool = False) -> list[int]:
        """Random ordinary ids: a prompt after which a model is hardly ever sure of the next id.

        They are the same for every probe with a seed, unless they must be `unseen` by the engine's cache.
        """
        rng = np.random.default_rng() if unseen else self._rng
        highest = min(self.vocabulary or _HIGHEST_ORDINARY, _HIGHEST_ORDINARY)
        ids: list[int] = rng.integers(min(300, highest // 2), highest, count).tolist()
        return ids

    def wanted(self, prompt_ids: Sequence[int], **fields: Any) -> Generation:
        """A request with a new name, and with a seed, so that repeated checks get the same verdict."""
        self._sent += 1
        if "seed" in self.engine.applies:
            fields = {"seed": self._sent, **fields}
        name = f"doctor-{id(self):x}-{self._sent}"
        return generation(prompt_ids, name=name, session=name, vocabulary=self.vocabulary, **fields)

    async def sample(self, prompt_ids: Sequence[int], **fields: Any) -> Generated:
        """Sample a reply; raises EngineError for an implausible reply, and TimeoutError."""
        return await self.generate(self.wanted(prompt_ids, **fields))

    async def generate(self, wanted: Generation) -> Generated:
        async with asyncio.timeout(self.reply_timeout_s):
            given = await self.engine.generate(wanted)
        check_generated(self.engine, wanted, given)
        return given
