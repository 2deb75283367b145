"""What a trainer computes of recorded samples is what the engine gave: importance ratios are one, and stops train."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

import rolltape
from engine.gguf_file import write_gguf
from engine.test_agreement_llamacpp import serve
from engine.test_agreement_transformers import Reference
from gateways import CALCULATOR
from rolltape.capture.engines.embedded import EmbeddedEngine, Sampling
from rolltape.capture.engines.embedded.shipped import shipped_model
from rolltape.records.ledger import Fate
from rolltape.records.turn import Finish

TEMPERATURE = 0.7
QUESTIONS = ["What is 23 * 17?", "What is 48 + 77?", "What is 91 - 35?", "What is 12 * 12?"]


async def tool_session(gateway: rolltape.Gateway, question: str, **fields: Any) -> None:
    """One question, answered with the calculator's help; its answer is always wrong, so that the model may wonder."""
    session = await gateway.open_session(task_id=question, forced={"temperature": TEMPERATURE, "seed": 3}, **fields)
    client = AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key)
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(4):
        reply = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[CALCULATOR],  # type: ignore[list-item]
            max_tokens=96,
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or []
        messages.extend({"role": "tool", "tool_call_id": call.id, "content": "391"} for call in calls)
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Are you sure? Use the calculator."})
    await client.close()
    await session.finish(reward=1.0, samples=False)


async def test_importance_ratios_of_trained_tokens_are_one_and_stop_tokens_train(run: Path) -> None:
    async with rolltape.Gateway(engine="embedded", tape=run) as gateway:
        for question in QUESTIONS:
            await tool_session(gateway, question)
    reference = Reference(shipped_model())
    trained = stopped = tool_turns = 0
    for rollout in rolltape.read(run).rollouts():
        made = rolltape.linearize(rollout)
        assert made.ledger.totals() == {Fate.TRAINED: made.ledger.sampled}
        for sample in made.samples():
            scored = reference.logprobs(sample.ids.tolist(), TEMPERATURE)
            places = np.flatnonzero(sample.trained_mask)
            ratios = np.exp(scored[places - 1] - sample.logprobs[places])
            np.testing.assert_allclose(ratios, 1.0, rtol=0, atol=1e-3)
            trained += len(places)
        last_ids = {entry.turn: entry for entry in made.ledger.entries}
        for turn in rollout.turns:
            tool_turns += b"tool_calls" in (turn.reply.raw if turn.reply else b"")
            if turn.facts.finish is Finish.STOP:
                stopped += 1
                assert int(turn.sampled_ids[-1]) in (rollout.sessions[0].head.stop_ids or ())
                assert last_ids[turn.id].stop == len(turn.sampled_ids)
                assert last_ids[turn.id].fate is Fate.TRAINED
    assert trained > 200
    assert stopped > 8
    assert tool_turns >= 4


@pytest.fixture
def llamacpp(tmp_path: Path) -> Iterator[str]:
    server = serve(write_gguf(shipped_model(), tmp_path / "model.gguf"))
    yield server.listening_address
    del server


async def test_llamacpp_behind_the_gateway_gives_the_embedded_engines_logprobs(run: Path, llamacpp: str) -> None:
    engine = f"llamacpp:{llamacpp}"
    async with rolltape.Gateway(engine=engine, model=shipped_model(), tape=run) as gateway:
        for question in QUESTIONS[:2]:
            await tool_session(gateway, question)
    compared = 0
    async with EmbeddedEngine.load(shipped_model()) as embedded:
        for rollout in rolltape.read(run).rollouts():
            for turn in rollout.turns:
                prompt = turn.prompt_ids.tolist()
                scoring = Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
                scored = await embedded.generate([*prompt, *turn.sampled_ids.tolist()], scoring)
                assert turn.logprobs is not None
                for ours, theirs in zip(scored.prompt_logprobs, turn.logprobs.tolist(), strict=True):
                    if not math.isnan(theirs):
                        assert ours == pytest.approx(theirs, abs=1e-3)
                        compared += 1
    assert compared > 100
