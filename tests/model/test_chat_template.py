"""The chat template gives the very ids that the Qwen3 renderer of `renderers` gives, and those trained on."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from training.dialogue import Dialogue, Message, as_chat, prompt_text
from training.manner import FALLIBLE
from training.mixture import any_dialogue
from training.packing import encode

pytest.importorskip("httpx")
renderers = pytest.importorskip("renderers")
configs = pytest.importorskip("renderers.configs")
transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "src/rolltape/tiny/models/tiny"
Chat = list[dict[str, Any]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt ☀",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
AS_TEXT = {"id": "c2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bonn"}'}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How is it in Köln?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
THOUGHT = {"role": "assistant", "content": "I look.", "reasoning_content": "I call it.", "tool_calls": [CALL, AS_TEXT]}
HEARD = {"role": "tool", "content": "cold"}
TOLD = {"role": "assistant", "content": "It is cold."}

CHATS: dict[str, Chat] = {
    "one question": [ASKED],
    "system prompt": [SYSTEM, ASKED],
    "several queries": [SYSTEM, ASKED, TOLD, ASKED],
    "ends with a reply": [ASKED, TOLD],
    "call and response": [SYSTEM, ASKED, CALLED, HEARD],
    "call without content": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, HEARD],
    "call without envelope": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}, HEARD],
    "two calls with thinking, two responses": [ASKED, THOUGHT, HEARD, HEARD],
    "thinking before the last query": [ASKED, THOUGHT, HEARD, TOLD, ASKED],
    "thinking inside the content": [ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nCold."}],
    "such a reply in the past": [ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nCold."}, ASKED],
    "empty thinking": [ASKED, {"role": "assistant", "content": "Cold.", "reasoning_content": ""}],
    "system in the middle": [ASKED, TOLD, SYSTEM, ASKED],
    "content in parts": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
    "response as a user message": [
        ASKED,
        THOUGHT,
        {"role": "user", "content": "<tool_response>\ncold\n</tool_response>"},
    ],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def by_template(tokenizer: Any, chat: Chat, tools: list[Any] | None, *, thinking: bool, ask: bool) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=ask, enable_thinking=thinking, tokenize=True, return_dict=False
    )
    return ids


def by_renderer(tokenizer: Any, chat: Chat, tools: list[Any] | None, *, thinking: bool, ask: bool) -> list[int]:
    renderer = renderers.create_renderer(tokenizer, configs.Qwen3RendererConfig(enable_thinking=thinking))
    ids: list[int] = renderer.render_ids(chat, tools=tools, add_generation_prompt=ask)
    return ids


@pytest.mark.parametrize("ask", [True, False], ids=["asking", "as it stands"])
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER["function"]]], ids=["no tools", "tool", "bare tool"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_template_renders_as_renderers_does(
    tokenizer: Any, chat: Chat, tools: list[Any] | None, thinking: bool, ask: bool
) -> None:
    expected = by_renderer(tokenizer, chat, tools, thinking=thinking, ask=ask)
    assert by_template(tokenizer, chat, tools, thinking=thinking, ask=ask) == expected


@pytest.mark.parametrize("seed", range(40))
def test_training_dialogues_have_the_ids_of_both(tokenizer: Any, seed: int) -> None:
    dialogue = any_dialogue(Random(seed), FALLIBLE)
    chat, tools, thinking = as_chat(dialogue), list(dialogue.tools) or None, dialogue.thinking_on
    rendered = by_renderer(tokenizer, chat, tools, thinking=thinking, ask=False)
    assert by_template(tokenizer, chat, tools, thinking=thinking, ask=False) == rendered
    if not (thinking and dialogue.keep_thinking):  # kept thinking is what bridging gives, not a fresh render
        assert encode(tokenizer.backend_tokenizer, dialogue)[0] == rendered


def test_thinking_off_is_an_empty_thought_before_the_reply(tokenizer: Any) -> None:
    dialogue = Dialogue((Message("user", "Hi"),))
    assert prompt_text(dialogue) == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    asked = by_template(tokenizer, as_chat(dialogue), None, thinking=False, ask=True)
    assert tokenizer.decode(asked) == prompt_text(dialogue)
