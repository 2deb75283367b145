"""Tool sessions through a gateway, and what the tiny engine says of the ids that were sampled in them."""

import math
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import rolltape
from gateways import CALCULATOR
from rolltape.records.turn import LogprobKind
from rolltape.tiny import Sampling, TinyEngine

QUESTIONS = ["What is 23 * 17?", "What is 48 + 77?", "What is 91 - 35?", "What is 12 * 12?"]


async def tool_session(gateway: rolltape.Gateway, question: str, temperature: float) -> None:
    """One question, answered with the calculator's help; its answer is always the same, so the model may wonder."""
    session = await gateway.open_session(task_id=question, forced={"temperature": temperature, "seed": 3})
    client = AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key)
    messages: list[Any] = [{"role": "user", "content": question}]
    tools: list[Any] = [CALCULATOR]
    for _ in range(4):
        reply = await client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=96)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or []
        messages.extend({"role": "tool", "tool_call_id": call.id, "content": "391"} for call in calls)
        if not calls:
            messages.append({"role": "user", "content": "Are you sure? Use the calculator."})
    await client.close()
    await session.finish(reward=1.0, samples=False)


async def largest_difference(run: Path, tiny_engine: TinyEngine, temperature: float) -> tuple[float, int]:
    """Between the recorded logprobs of a run and the tiny engine's on the same ids, and over how many ids."""
    worst, compared = 0.0, 0
    for rollout in rolltape.read(run).rollouts():
        for turn in rollout.turns:
            assert turn.logprobs is not None
            prompt = turn.prompt_ids.tolist()
            scoring = Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
            if turn.facts.logprob_kind is not LogprobKind.RAW and temperature != 1.0:
                raise AssertionError(f"logprobs are {turn.facts.logprob_kind}; compare at temperature 1")
            scored = await tiny_engine.generate([*prompt, *turn.sampled_ids.tolist()], scoring)
            for ours, theirs in zip(scored.prompt_logprobs, turn.logprobs.tolist(), strict=True):
                if not math.isnan(theirs):
                    assert ours is not None
                    worst, compared = max(worst, abs(ours - theirs)), compared + 1
    return worst, compared
