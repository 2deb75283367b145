"""Agents written with the openai and anthropic packages: the loops that their documentation shows."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agent_runs import Stage, assert_one_branch, echoes, stage, thinks
from scripted_engine import Json, Step

NAMES = ("write", "read")
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path", "text"],
    "additionalProperties": False,
}
DONE = thinks("All is well.\n\n  Indeed.", "out.txt  has two lines.\n\n")
WRITE = ("write", {"path": "out.txt", "text": "a\n5000\n"})
READ = ("read", {"path": "out.txt"})
SCRIPT = [
    thinks("I write it first.", "I will write the file.\n\n", WRITE, READ),
    thinks("Numbers are numbers.", "", ("read", {"path": "out.txt", "limit": 5000.0, "from": 1e20})),
    thinks("Badly.", 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": \n</tool_call>'),
    thinks("", "", READ, READ),
    DONE,
]
Agent = Callable[[Stage, bool], Awaitable[str]]


def use_tool(it: Stage, name: str, given: Json) -> str:
    file = it.work / str(given["path"])
    if name == "write":
        file.write_text(given["text"])
    return file.read_text()


def is_last(text: str) -> bool:
    return "two lines" in text


async def chat_agent(it: Stage, stream: bool) -> str:
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in NAMES
    ]
    messages: list[Any] = [{"role": "user", "content": "Write a and 5000 into out.txt."}]
    async with openai.AsyncOpenAI(base_url=it.session.openai_base_url, api_key="none") as client:
        while True:
            request: Any = {"model": "scripted", "messages": messages, "tools": tools}
            if stream:
                async with client.chat.completions.stream(**request) as events:
                    reply: Any = (await events.get_final_completion()).choices[0].message
            else:
                reply = (await client.chat.completions.create(**request)).choices[0].message
            messages.append(reply)
            for call in reply.tool_calls or ():
                result = use_tool(it, call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not reply.tool_calls:
                if is_last(reply.content):
                    return str(reply.content)
                messages.append({"role": "user", "content": "Go on, please."})


async def responses_agent(it: Stage, stream: bool) -> str:
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in NAMES]
    items: list[Any] = [{"role": "user", "content": "Write a and 5000 into out.txt."}]
    async with openai.AsyncOpenAI(base_url=it.session.openai_base_url, api_key="none") as client:
        while True:
            request: Any = {"model": "scripted", "input": items, "tools": tools, "store": False}
            if stream:
                async with client.responses.stream(**request) as events:
                    reply: Any = await events.get_final_response()
            else:
                reply = await client.responses.create(**request)
            items += reply.output
            calls = [item for item in reply.output if item.type == "function_call"]
            for call in calls:
                result = use_tool(it, call.name, json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                if is_last(reply.output_text):
                    return str(reply.output_text)
                items.append({"role": "user", "content": "Go on, please."})


async def messages_agent(it: Stage, stream: bool) -> str:
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    messages: list[Any] = [{"role": "user", "content": "Write a and 5000 into out.txt."}]
    async with anthropic.AsyncAnthropic(base_url=it.session.anthropic_base_url, api_key="none") as client:
        while True:
            request: Any = {"model": "scripted", "messages": messages, "tools": tools, "max_tokens": 4096}
            if stream:
                async with client.messages.stream(**request) as events:
                    reply: Any = await events.get_final_message()
            else:
                reply = await client.messages.create(**request)
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                (text,) = (block.text for block in reply.content if block.type == "text")
                if is_last(text):
                    return str(text)
                messages.append({"role": "user", "content": "Go on, please."})
            else:
                results = [(call.id, use_tool(it, call.name, call.input)) for call in calls]
                content = [{"type": "tool_result", "tool_use_id": id_, "content": text} for id_, text in results]
                messages.append({"role": "user", "content": content})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent])
async def test_a_task_with_several_tool_calls_is_one_branch_that_trains_whole(
    tmp_path: Path, agent: Agent, stream: bool
) -> None:
    # Qwen3's own template drops earlier thinking where a new user message comes.
    async with stage(tmp_path, SCRIPT, thinking_retention="all") as it:
        assert await agent(it, stream) == "out.txt  has two lines."
        await it.session.finish(reward=1.0)
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    assert echoes(assert_one_branch(it, turns=len(SCRIPT))) == set()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_tool_runner_of_anthropics_package_is_one_branch_that_trains_whole(
    tmp_path: Path, stream: bool
) -> None:
    """It goes on in a thread (since 2.9): after the first request it sends new messages alone."""
    script = [SCRIPT[0], SCRIPT[3], DONE]
    async with stage(tmp_path, script, thinking_retention="all") as it:

        @anthropic.beta_async_tool
        async def write(path: str, text: str) -> str:
            return use_tool(it, "write", {"path": path, "text": text})

        @anthropic.beta_async_tool
        async def read(path: str) -> str:
            return use_tool(it, "read", {"path": path})

        async with anthropic.AsyncAnthropic(base_url=it.session.anthropic_base_url, api_key="none") as client:
            runner: Any = client.beta.messages.tool_runner(
                model="scripted",
                max_tokens=4096,
                system="You write files.",
                messages=[{"role": "user", "content": "Write a and 5000 into out.txt."}],
                tools=[write, read],
                stream=stream,
            )
            replies = [await one.get_final_message() if stream else one async for one in runner]
        assert is_last(replies[-1].content[-1].text)
        await it.session.finish(reward=1.0)
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    assert echoes(assert_one_branch(it, turns=len(script))) == set()


@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent])
async def test_a_refusal_is_not_retried(tmp_path: Path, agent: Agent) -> None:
    async with stage(tmp_path, SCRIPT, spec={"max_turns": 2}) as it:
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError), match="has reached its maximum of turns"):
            await agent(it, False)
        assert it.refused() == 1
        await it.session.finish()
        with pytest.raises((openai.InternalServerError, anthropic.APIStatusError), match="takes no more turns"):
            await agent(it, False)
        assert it.refused() == 2
    assert_one_branch(it, turns=2)


async def test_a_time_out_is_retried_and_gets_the_same_turn(tmp_path: Path) -> None:
    async with stage(tmp_path, [Step(DONE, token_delay_s=0.02)]) as it:
        client = openai.AsyncOpenAI(base_url=it.session.openai_base_url, api_key="none", timeout=0.4, max_retries=9)
        async with client:
            reply = await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "?"}])
        assert reply.choices[0].message.content == "out.txt  has two lines."
        assert it.gateway.status()["counts"]["retries"] > 0
        await it.session.finish()
    assert_one_branch(it, turns=len(it.engine.said))
    sampled = [token for said in it.engine.said for token in said.ids]
    assert it.engine.text_of(sampled) == DONE + "<|im_end|>"  # no token was sampled twice
