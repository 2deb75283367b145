"""Structural tags as xgrammar reads them, the grammar of SGLang and vLLM: right replies pass, others do not."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as lets_through

from prompts.family_folders import prompts_of
from rolltape.gateway.engines.structural_tags import structural_tag
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.reply_form import Thinking
from rolltape.gateway.request import ChatRequest, OutputSchema, ToolChoice
from rolltape.gateway.turn.constraints import Ability, Constraint, build_constraint
from rolltape.records.turn import TokenChain

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"q": {"type": "string"}},
    "required": ["q"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "seek")]
REQUIRED, NAMED = ToolChoice("required"), ToolChoice("required", "look")
JSON_FAMILIES = ["qwen3", "qwen3-vl", "deepseek-v3"]
XML_FAMILIES = ["prime-qwen3", "qwen3.5", "qwen3.6", "nemotron-3"]


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with TemporaryDirectory() as made:
        yield Path(made)


def constraint(prompts: ChatPrompts, thinking: Thinking = Thinking.OFF, **fields: Any) -> Constraint:
    ask = ChatRequest(api="chat", model="it", messages=[], **fields)
    found, ignored = build_constraint(ask, prompts.reply_form, thinking, "all", frozenset(Ability))
    assert found is not None, ignored
    return found


def grammar(prompts: ChatPrompts, thinking: Thinking = Thinking.OFF, **fields: Any) -> Any:
    return xgrammar.Grammar.from_structural_tag(structural_tag(constraint(prompts, thinking, **fields)))


def calls(prompts: ChatPrompts, *made: tuple[str, Any]) -> str:
    """Calls as the family itself renders them, without what ends the reply."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    asked = prompts.render(chat, TOOLS, False).ids
    written = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(made)
    ]
    after = {"role": "tool", "tool_call_id": "call_0", "content": "x"}
    whole = prompts.render(
        [*chat, {"role": "assistant", "content": "", "tool_calls": written}, after], TOOLS, False
    ).ids
    reply = whole[len(asked) :].tolist()
    end = next(at for at, token in enumerate(reply) if token in prompts.stop_ids)
    return prompts.decode(np.array(reply[:end])).strip()


@pytest.mark.parametrize("family", JSON_FAMILIES + XML_FAMILIES)
def test_what_a_family_renders_is_let_through_and_read_back(family: str, scratch: Path) -> None:
    prompts = prompts_of(family, scratch)
    right = calls(prompts, ("look", {"q": "Köln"}))
    both = calls(prompts, ("look", {"q": "a"}), ("seek", {"q": "b"}))
    required = grammar(prompts, tools=TOOLS, tool_choice=REQUIRED)
    assert lets_through(required, right)
    assert lets_through(required, both)
    asked = prompts.render([{"role": "user", "content": "hi"}], TOOLS, False).ids
    reply = np.array([*prompts._tokenizer.encode(both), prompts.stop_ids[0]], np.int32)
    parsed = prompts.parse(TokenChain(asked), reply, TOOLS, False)
    assert [call.name for call in parsed.calls] == ["look", "seek"]
    for wrong in ("", "Well.", f"Well. {right}", right.replace("look", "took"), right.replace("q", "p"), right + "x"):
        assert not lets_through(required, wrong)
    one = grammar(prompts, tools=TOOLS, tool_choice=REQUIRED, parallel_tool_calls=False)
    assert (lets_through(one, right), lets_through(one, both)) == (True, False)
    named = grammar(prompts, tools=TOOLS, tool_choice=NAMED)
    assert (lets_through(named, right), lets_through(named, both)) == (True, False)


def test_a_family_with_one_call_a_reply_gets_one(scratch: Path) -> None:
    prompts = prompts_of("llama-3", scratch)
    right = '{"name": "look", "parameters": {"q": "a"}}'
    required = grammar(prompts, tools=TOOLS, tool_choice=REQUIRED)
    assert (lets_through(required, right), lets_through(required, right + right)) == (True, False)


@pytest.mark.parametrize("family", ["kimi-k2", "glm-4.5", "gemma4", "minimax-m2"])
def test_a_family_whose_calls_are_written_otherwise_is_not_constrained(family: str, scratch: Path) -> None:
    ask = ChatRequest(api="chat", model="it", messages=[], tools=TOOLS, tool_choice=REQUIRED)
    form = prompts_of(family, scratch).reply_form
    found, ignored = build_constraint(ask, form, Thinking.OFF, "forced", frozenset(Ability))
    assert found is None
    assert ignored == ["tool_choice: the exact form of this model's calls is not known; the model is free"]


def test_thinking_comes_first_where_it_may_and_always_where_the_prompt_began_it(scratch: Path) -> None:
    prompts = prompts_of("qwen3", scratch)
    call = calls(prompts, ("look", {"q": "a"}))
    thought = "<think>\nI might say <tool_call>.\n</think>\n\n"
    possible = grammar(prompts, Thinking.POSSIBLE, tools=TOOLS, tool_choice=REQUIRED)
    assert lets_through(possible, call)
    assert lets_through(possible, thought + call)
    assert lets_through(possible, "\n\n" + call)  # what is left to a server that holds back until thinking has ended
    assert not lets_through(possible, thought + "Well.")
    begun = grammar(prompts, Thinking.BEGUN, tools=TOOLS, tool_choice=REQUIRED)
    assert lets_through(begun, thought.removeprefix("<think>") + call)
    assert not lets_through(begun, call)


def test_a_schema_is_for_the_text_and_calls_may_come_instead(scratch: Path) -> None:
    prompts = prompts_of("qwen3", scratch)
    asked = OutputSchema("response_format", SCHEMA)
    alone = grammar(prompts, Thinking.POSSIBLE, output_schema=asked)
    beside = grammar(prompts, tools=TOOLS, output_schema=asked)
    call = calls(prompts, ("look", {"q": "a"}))
    assert lets_through(alone, '<think>so</think>\n\n{"q": "a"}')
    assert [lets_through(alone, text) for text in ('{"q": 1}', call, "Well.")] == [False] * 3
    assert [lets_through(beside, text) for text in ('{"q": "a"}', call, "Well.")] == [True, True, False]


def test_strict_tools_leave_text_free_and_hold_their_calls(scratch: Path) -> None:
    prompts = prompts_of("qwen3", scratch)
    held = grammar(prompts, Thinking.POSSIBLE, tools=TOOLS, strict_tools=frozenset({"look"}))
    right, loose = calls(prompts, ("look", {"q": "a"})), calls(prompts, ("seek", {"p": 1}))
    for text in ("Well.", f"Well.\n{right}", f"<think>a</think>\n\n{right}\n{loose}"):
        assert lets_through(held, text)
    assert not lets_through(held, right.replace('"a"', "1"))
