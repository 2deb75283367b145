"""Refuse a request that is too large before it costs anything: its tokens are estimated, the rest of it is limited."""

import random
from collections.abc import Callable, Iterator

import msgspec

from rolltape.errors import BadRequest, PromptTooLong
from rolltape.gateway.request import Api, ChatRequest
from rolltape.records.messages import content_text

_CHEAP = 100_000  # characters, which are tokenized in some hundredths of a second
_CHARACTERS_A_TOKEN = 4  # of a text that is not looked at closely: at most four times the context is tokenized
_FAR = 2  # times the context: a prompt between the two ends its reply with `length`, as any that leaves no room
_MOST_BESIDES = 256 * 1024  # bytes of a field that is no part of the prompt: engine and tape are given it each turn
_WINDOWS, _WINDOW = 32, 256  # stretches of the text that are tokenized, and their characters


def check_request_size(ask: ChatRequest, max_messages: int, context: int | None, count: Callable[[str], int]) -> None:
    """Raise BadRequest for too many messages or too much besides, PromptTooLong for a prompt far beyond the context.

    `count` counts the tokens of a text; it is given samples of the request's.
    """
    if len(ask.messages) > max_messages:
        raise BadRequest(f"messages: there are {len(ask.messages):,}, and {max_messages:,} are allowed; send fewer")
    _check_besides(ask)
    if context is None:
        return
    texts = [text for text in _texts(ask) if text]
    characters = sum(map(len, texts))
    if characters <= max(context * _CHARACTERS_A_TOKEN, _CHEAP):
        return
    tokens = _estimate(texts, characters, count)
    if tokens > _FAR * context:
        raise PromptTooLong(
            f"prompt is too long: about {tokens:,} tokens, and the maximum context length is {context:,}; send less"
        )


def _check_besides(ask: ChatRequest) -> None:
    schema, stop = ask.output_schema, "stop_sequences" if ask.api is Api.MESSAGES else "stop"
    besides = {"metadata": ask.metadata, stop: ask.sampling.stop, schema.field if schema else "": schema}
    for field, value in besides.items():
        size = len(msgspec.json.encode(value)) if value else 0
        if size > _MOST_BESIDES:
            raise BadRequest(f"{field} has {size:,} bytes, and {_MOST_BESIDES:,} are allowed; send less")


def _texts(ask: ChatRequest) -> Iterator[str]:
    """What of a request becomes part of the prompt."""
    for message in ask.messages:
        yield content_text(message.get("content"))
        if message["role"] == "assistant":
            yield content_text(message.get("reasoning_content"))
            for call in message.get("tool_calls") or ():
                yield content_text(call["function"].get("arguments"))
    if ask.tools:
        yield msgspec.json.encode(ask.tools).decode()


def _estimate(texts: list[str], characters: int, count: Callable[[str], int]) -> int:
    """Tokens by the rate of windows at random places, so that no text can be written to look short."""
    sampled, tokens = 0, 0
    for text in random.choices(texts, [len(text) for text in texts], k=_WINDOWS):
        start = random.randrange(max(len(text) - _WINDOW, 0) + 1)
        window = text[start : start + _WINDOW]
        sampled += len(window)
        tokens += count(window)
    return round(characters * tokens / sampled)
