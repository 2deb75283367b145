"""The tiny engine behind the engine protocol."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.doctor.engine.probing import SampledChunks, generation
from rolltape.errors import EngineDied, EngineError, EngineFault, EngineUnreachable
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.engines.opening import open_engine
from rolltape.gateway.engines.protocol import Engine, Generated
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import Sampling, TinyEngine, batch, shipped_model
from rolltape.tiny.sampling import choose

PROMPT = list(range(30, 50))


def loaded(folder: Path | None = None) -> InProcessEngine:
    return InProcessEngine(TinyEngine(folder or shipped_model(), "w1"))


async def test_it_starts_at_its_first_use_and_gives_what_the_engine_gives() -> None:
    engine = loaded()
    behind_protocol: Engine = engine
    facts = await behind_protocol.facts()
    assert (facts.context, facts.version) == (engine.engine.context, "w1")
    given = await behind_protocol.generate(generation(PROMPT, temperature=0.7, seed=5, max_tokens=20))
    own = await engine.engine.generate(PROMPT, Sampling(temperature=0.7, seed=5, max_tokens=20, stop_ids=()))
    await behind_protocol.close()
    assert given.ids.tolist() == own.ids.tolist()
    assert given.logprobs is not None
    np.testing.assert_array_equal(given.logprobs, own.logprobs(LogprobKind.AFTER_TEMPERATURE))
    assert given.logprob_kind is LogprobKind.AFTER_TEMPERATURE
    assert given.finish is Finish.LENGTH
    assert (given.first_version, given.last_version) == ("w1", "w1")


async def test_all_ids_and_a_negative_seed_are_taken_as_other_engines_take_them() -> None:
    engine = loaded()
    given = await engine.generate(generation(PROMPT, temperature=1.0, top_k=-1, seed=-1, max_tokens=4))
    own = await engine.engine.generate(PROMPT, Sampling(seed=2**64 - 1, max_tokens=4, stop_ids=()))
    await engine.close()
    assert given.ids.tolist() == own.ids.tolist()


async def test_a_stop_id_stays_and_a_stop_string_is_named() -> None:
    engine = loaded()
    greedy = await engine.generate(generation(PROMPT, temperature=0.0, max_tokens=12))
    by_id = await engine.generate(generation(PROMPT, name="b", temperature=0.0, stop_ids=[int(greedy.ids[4])]))
    assert by_id.finish is Finish.STOP
    assert by_id.ids[-1] == greedy.ids[4]
    texts = engine.engine.texts
    assert texts is not None
    text = next(one for one in (texts.decode([token]) for token in greedy.ids.tolist()) if one.strip())
    by_text = await engine.generate(generation(PROMPT, name="c", temperature=0.0, stop=(text,)))
    assert (by_text.finish, by_text.stop_string) == (Finish.STOP_STRING, text)
    await engine.close()


async def test_abort_and_cancel_end_it() -> None:
    engine = loaded()
    await engine.facts()
    task = asyncio.create_task(engine.generate(generation(PROMPT, max_tokens=3000)))
    await asyncio.sleep(0.1)
    await engine.abort("g-1")
    assert (await task).finish is Finish.ABORT
    task = asyncio.create_task(engine.generate(generation(PROMPT, name="g-2", max_tokens=3000)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.engine.in_flight == 0
    await engine.close()


async def test_what_it_cannot_do_is_a_fault_and_a_closed_one_is_unreachable() -> None:
    engine = loaded()
    with pytest.raises(EngineFault, match="the prompt is empty"):
        await engine.generate(generation([]))
    with pytest.raises(EngineFault, match="vocabulary"):
        await engine.generate(generation([10**6]))
    with pytest.raises(EngineFault, match="top_p"):
        await engine.generate(generation(PROMPT, top_p=3.0))
    await engine.close()
    with pytest.raises(EngineUnreachable):
        await engine.generate(generation(PROMPT))


def test_logprobs_after_truncation_are_refused_before_anything_is_sampled() -> None:
    with pytest.raises(EngineError, match="no logprobs after truncation; take raw or after_temperature"):
        open_engine("tiny", logprob_kind=LogprobKind.AFTER_TRUNCATION)


async def test_ids_are_told_as_they_are_sampled_and_the_reply_is_the_same() -> None:
    engine = loaded()
    told = SampledChunks()
    plain = await engine.generate(generation(PROMPT, seed=5, max_tokens=300))
    streamed = await engine.generate(generation(PROMPT, name="b", seed=5, max_tokens=300, on_sampled=told))
    await engine.close()
    assert len(told.chunks) > 1
    assert told.ids == streamed.ids.tolist() == plain.ids.tolist()
    np.testing.assert_array_equal(streamed.logprobs, plain.logprobs)
    assert (streamed.finish, streamed.last_version) == (plain.finish, plain.last_version)


async def test_what_was_sampled_while_the_loop_was_busy_is_told_at_once() -> None:
    engine = loaded()
    await engine.facts()

    def wait_for_the_engine() -> None:
        (request,) = engine.engine._known.values()
        while len(request.sampled) < 10:
            time.sleep(0.001)

    told = SampledChunks(wait_for_the_engine)
    await engine.generate(generation(PROMPT, seed=5, max_tokens=30, on_sampled=told))
    await engine.close()
    assert len(told.chunks[0]) + len(told.chunks[1]) >= 10


async def test_an_abort_gives_what_was_told() -> None:
    engine = loaded()
    first = asyncio.Event()
    told = SampledChunks(first.set)
    task = asyncio.create_task(engine.generate(generation(PROMPT, max_tokens=3000, on_sampled=told)))
    await first.wait()
    await engine.abort("g-1")
    given = await task
    await engine.close()
    assert given.finish is Finish.ABORT
    assert given.ids.tolist() == told.ids


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [LogprobKind.AFTER_TEMPERATURE, LogprobKind.RAW])
@pytest.mark.parametrize("breaks", ["its thread", "its logits"])
async def test_what_was_told_is_kept_when_the_engine_fails(
    breaks: str, kind: LogprobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InProcessEngine(TinyEngine(shipped_model(), "w1"), logprob_kind=kind)
    settings: dict[str, Any] = {"seed": 5, "temperature": 0.5, "max_tokens": 3000}

    def broken(logits: Any, samplings: Any, draws: Any) -> Any:
        if not told.chunks:
            return choose(logits, samplings, draws)
        if breaks == "its thread":
            raise MemoryError("no more")
        return [None]

    monkeypatch.setattr(batch, "choose", broken)
    told = SampledChunks()
    with pytest.raises(EngineDied) as caught:
        await engine.generate(generation(PROMPT, on_sampled=told, **settings))
    await engine.close()
    partial = caught.value.partial
    assert isinstance(partial, Generated)
    assert partial.ids.tolist() == told.ids
    assert partial.finish is Finish.ABORT
    monkeypatch.undo()
    again = InProcessEngine(TinyEngine(shipped_model(), "w1"), logprob_kind=kind)
    whole = await again.generate(generation(PROMPT, **{**settings, "max_tokens": len(told.ids)}))
    await again.close()
    assert whole.ids.tolist() == told.ids
    np.testing.assert_array_equal(partial.logprobs, whole.logprobs)
    assert (partial.first_version, partial.logprob_kind) == ("w1", kind)
