"""Requests to engines, as the gateway makes them."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.request import ChatRequest, SamplingParams
from rolltape.gateway.turn.generate import PlausibleIds


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
    on_sampled: Callable[[Sequence[int]], None] | None = None,
    **sampling: Any,
) -> Generation:
    """A generation of at most 64 tokens, unless said otherwise."""
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
        request=ChatRequest(api="chat", model="it", messages=messages or [], tools=tools, sampling=params),
    )
    if on_sampled is None:
        return wanted
    return msgspec.structs.replace(wanted, on_sampled=PlausibleIds(wanted, on_sampled).add)


class Told:
    """An `on_sampled` that keeps what it is called with; `then` is called after the first time."""

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
