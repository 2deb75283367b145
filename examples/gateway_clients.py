"""Three clients that know nothing of Rolltape, through the gateway to the model that ships with it.

The OpenAI SDK asks for products, the Anthropic SDK plays guess-the-number over a stream, and a small loop of its own
calls a calculator. Needs `pip install 'rolltape[clients]'`.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

import rolltape
from rolltape.collect.environments.calculator import calculator
from rolltape.gateway.gateway import Gateway

ATTEMPTS = 4
PRODUCT, PRODUCT_ANSWER = "What is 38 * 4?", 152
SECRET, HIGHEST, GUESSES = 13, 20, 8
HARD_PRODUCT, HARD_ANSWER = "What is 23 * 17? Use the calculator.", 391
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def number_in(text: str) -> int | None:
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


async def multiply(gateway: Gateway, attempt: int) -> None:
    """The OpenAI SDK: one question, one answer."""
    session = await gateway.open_session(task_id="product", attempt=attempt, agent="openai-sdk", thinking=False)
    client = AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key)
    asked: list[Any] = [{"role": "user", "content": PRODUCT}]
    reply = await client.chat.completions.create(model="tiny", messages=asked, max_tokens=64)
    right = number_in(reply.choices[0].message.content or "") == PRODUCT_ANSWER
    await session.finish(reward=float(right))


async def guess_the_number(gateway: Gateway, attempt: int) -> None:
    """The Anthropic SDK, streaming: several turns of guesses and hints."""
    session = await gateway.open_session(task_id="guess", attempt=attempt, agent="anthropic-sdk", thinking=False)
    client = AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.key)
    rules = f"I am thinking of a number between 1 and {HIGHEST}. Guess it. I will say higher or lower."
    messages: list[Any] = [{"role": "user", "content": rules}]
    reward = 0.0
    for _ in range(GUESSES):
        async with client.messages.stream(model="tiny", max_tokens=64, messages=messages) as stream:
            reply = await stream.get_final_message()
        guess = number_in("".join(block.text for block in reply.content if block.type == "text"))
        if guess == SECRET or guess is None:
            reward = float(guess == SECRET)
            break
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": "higher" if guess < SECRET else "lower"})
    await session.finish(reward=reward)


async def use_the_calculator(gateway: Gateway, attempt: int) -> None:
    """A loop of our own over plain HTTP: call, run the tool, send its result."""
    session = await gateway.open_session(task_id="calculator", attempt=attempt, agent="tool-loop")
    messages: list[Any] = [{"role": "user", "content": HARD_PRODUCT}]
    reward = 0.0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for _ in range(4):
            body = {"model": "tiny", "messages": messages, "tools": [CALCULATOR], "max_tokens": 128}
            async with http.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                reward = float(number_in(message["content"]) == HARD_ANSWER)
                break
            for call in message["tool_calls"]:
                result = calculated(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    await session.finish(reward=reward)


def calculated(arguments: str) -> str:
    """The tool's answer, whatever the model made of the arguments."""
    try:
        return calculator(str(json.loads(arguments).get("expression", "")))
    except (ValueError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"


async def record(path: Path) -> None:
    """Every task several times, all at once, through one gateway."""
    with rolltape.open(path) as tape:
        async with Gateway(engine="tiny", tape=tape) as gateway:
            print(f"gateway at {gateway.url}, {gateway.service.prompts.describe()}")
            works = (multiply, guess_the_number, use_the_calculator)
            await asyncio.gather(*(work(gateway, attempt) for attempt in range(ATTEMPTS) for work in works))
            counts = gateway.status()["counts"]
    turns, tokens, bridged = (counts[name] for name in ("turns", "sampled_tokens", "bridged"))
    print(f"{turns} turns, {tokens} sampled tokens, {bridged} prompts built on the ids of an earlier turn")
    print(f"look at them: rolltape ls {path}")


def main() -> None:
    arguments = argparse.ArgumentParser(description="Record three clients through the gateway.")
    arguments.add_argument("run", type=Path, help="where to, a run that is not there yet")
    path = arguments.parse_args().run
    if path.exists():
        arguments.error(f"{path} is there already; give another place")
    asyncio.run(record(path))


if __name__ == "__main__":
    main()
