"""Requests to engines, as the gateway makes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.request import Api, ChatRequest, SamplingParams


def generation(
    prompt_ids: Sequence[int],
    *,
    name: str = "g-1",
    session: str = "s",
    stop_ids: Sequence[int] = (),
    held_tokens: int = 0,
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
    **sampling: Any,
) -> Generation:
    """A generation of at most 64 tokens, unless said otherwise."""
    params = SamplingParams(**{"max_tokens": 64, **sampling})
    return Generation(
        id=name,
        session=session,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        sampling=params,
        stop_ids=tuple(stop_ids),
        held_tokens=held_tokens,
        request=ChatRequest(api=Api.CHAT, model="it", messages=messages or [], tools=tools, sampling=params),
    )
