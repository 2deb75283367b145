"""What a trainer computes of recorded samples is what the engine gave: importance ratios are one, and stops train."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rolltape
from rolltape.records.sample import Fate
from rolltape.records.turn import Finish
from rolltape.tiny import TinyEngine, shipped_model
from tiny.gguf_file import write_gguf
from tiny.test_agreement_llamacpp import serve
from tiny.test_agreement_transformers import Reference
from tool_sessions import QUESTIONS, largest_difference, tool_session

TEMPERATURE = 0.7


async def test_importance_ratios_of_trained_tokens_are_one_and_stop_tokens_train(run: Path) -> None:
    async with rolltape.Gateway(engine="tiny", tape=run) as gateway:
        for question in QUESTIONS:
            await tool_session(gateway, question, TEMPERATURE)
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


async def test_llamacpp_behind_the_gateway_gives_the_tiny_engines_logprobs(run: Path, llamacpp: str) -> None:
    engine = f"llamacpp:{llamacpp}"
    async with rolltape.Gateway(engine=engine, model=shipped_model(), tape=run) as gateway:
        for question in QUESTIONS[:2]:
            await tool_session(gateway, question, TEMPERATURE)
    async with TinyEngine(shipped_model()) as tiny_engine:
        worst, compared = await largest_difference(run, tiny_engine, TEMPERATURE)
    assert worst < 1e-3
    assert compared > 100
