"""Conversations for tests of prompts, and a conversation that goes on by bridging."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.gateway.prompts import BridgeRefusal, ChatPrompts, PromptIds
from rolltape.records.turn import Ids, TokenChain

TINY = Path(__file__).parents[2] / "src/rolltape/tiny/models/tiny"

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Wetter für eine Stadt ☀",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How is it in Köln?"}
HEARD = {"role": "tool", "content": "cold", "tool_call_id": "c1"}
TOLD = {"role": "assistant", "content": "It is cold."}


def called(*arguments: dict[str, Any], content: str | None = None, thinking: str | None = None) -> dict[str, Any]:
    """An assistant's message with one call of `look` for each of these arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    message["tool_calls"] = [
        {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": text}}
        for n, text in enumerate(json.dumps(given, ensure_ascii=False) for given in arguments)
    ]
    return message


def ids_of(prompts: ChatPrompts, text: str, *, stopped: bool = True) -> Ids:
    """The ids of a reply's text, with a stop id unless it was cut off."""
    ids = prompts._tokenizer.encode(text) + ([prompts.stop_ids[0]] if stopped else [])
    return np.array(ids, dtype=np.int32)


def bridged(
    prompts: ChatPrompts, prompt: Ids, reply: Ids, new: Sequence[dict[str, Any]], thinking: bool | None = None
) -> PromptIds:
    given = prompts.bridge(TokenChain(prompt), reply, new, [LOOK], thinking)
    assert isinstance(given, PromptIds), given
    return given


def refusal(
    prompts: ChatPrompts, prompt: Ids, reply: Ids, new: Sequence[dict[str, Any]], thinking: bool | None = None
) -> str:
    given = prompts.bridge(TokenChain(prompt), reply, new, [LOOK], thinking)
    assert isinstance(given, BridgeRefusal), given
    return given
