"""What replies tell of token ids and logprobs, in the forms of the APIs that do, to be held against the tape."""

import math
from typing import Any, NamedTuple

from gateways import Answer, Rig
from rolltape.records.turn import Turn
from scripted_engine import Json

LONG = "one two three four five six seven eight nine ten eleven twelve"


class Told(NamedTuple):
    """What a client was told of tokens."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float | None]


def told(answer: Answer, index: int = 0) -> Told:
    """What a reply says of one of its choices, streamed or not: of Chat Completions, Completions, or `generate`."""
    assert answer.status == 200, answer.raw
    events = answer.events
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return Told(
        prompt_ids=[one for part in (*events, *choices) for one in part.get("prompt_token_ids") or ()],
        ids=[one for choice in choices for one in choice.get("token_ids") or ()],
        logprobs=[one for choice in choices for one in _logprobs(choice["logprobs"] or {})],
    )


def _logprobs(given: Json) -> list[float | None]:
    if "token_logprobs" in given:
        listed: list[float | None] = given["token_logprobs"]
        return listed
    return [one["logprob"] for one in given.get("content", ())]


def on_tape(turn: Turn) -> Told:
    assert turn.logprobs is not None
    logprobs = [None if math.isnan(one) else one for one in turn.logprobs.tolist()]
    return Told(turn.prompt_ids.tolist(), turn.sampled_ids.tolist(), logprobs)


async def post(it: Rig, opened: Json, path: str, **body: Any) -> Answer:
    """A request within a session."""
    return await it.call("POST", f"/s/{opened['key']}{path}", body)


def encoded(it: Rig, text: str) -> list[int]:
    ids: list[int] = it.engine.tokenizer.encode(text, add_special_tokens=False).ids
    return ids
