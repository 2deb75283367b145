"""Replies begin, grow, end and are cut as asked, whatever else goes on."""

import asyncio
import gc
import os
import random
import threading
import time
import weakref
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from rolltape.errors import CheckpointError, EngineError, EngineStopped, PromptError, SamplingError
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import EngineReply, InFlightPolicy, Sampling, TinyEngine
from tiny.checkpoints import IM_END, config_of, random_tensors, write_checkpoint, write_safetensors

ENDLESS = Sampling(seed=1, max_tokens=4000, stop_ids=())


async def some(count: int, engine: TinyEngine, *, prompt: list[int] | None = None) -> "asyncio.Task[EngineReply]":
    """A reply that has sampled at least so many ids and goes on."""
    started = asyncio.Event()

    async def follow() -> EngineReply:
        async for piece in engine.stream(prompt or [3, 4, 5], ENDLESS):
            if piece.start + len(piece.ids) >= count:
                started.set()
            if piece.reply is not None:
                return piece.reply
        raise AssertionError("a stream ends with a reply")

    task = asyncio.create_task(follow())
    await started.wait()
    return task


async def test_a_stream_adds_up_to_the_whole_reply(small: Path) -> None:
    async with TinyEngine(small, "v7") as engine:
        sampling = Sampling(seed=3, max_tokens=50, stop_ids=(), top_logprobs=2)
        whole = await engine.generate([1, 2, 3], sampling)
        pieces = [piece async for piece in engine.stream([1, 2, 3], sampling)]
    assert [piece.reply is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [token for piece in pieces for token in piece.ids] == whole.ids.tolist()
    assert [piece.start for piece in pieces] == np.cumsum([0, *(len(piece.ids) for piece in pieces)]).tolist()[:-1]
    assert [value for piece in pieces for value in piece.raw_logprobs] == whole.raw_logprobs.tolist()
    last = pieces[-1].reply
    assert last is not None
    assert last.ids.tolist() == whole.ids.tolist()
    assert last.top_logprobs == whole.top_logprobs
    assert {piece.version for piece in pieces} == {whole.version} == {"v7"}
    assert whole.logprobs(LogprobKind.RAW) is whole.raw_logprobs
    assert whole.logprobs(LogprobKind.AFTER_TEMPERATURE) is whole.tempered_logprobs
    with pytest.raises(ValueError, match="after_truncation"):
        whole.logprobs(LogprobKind.AFTER_TRUNCATION)


def test_old_names_warn(small: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"is now TinyEngine\(folder\)"):
        engine = TinyEngine.load(small, "v7")
    assert engine.version == "v7"
    assert engine.texts is not None
    with pytest.warns(DeprecationWarning, match=r"is now TokenTexts\.decode"):
        assert engine.texts.text_of([3, 4]) == engine.texts.decode([3, 4])


async def test_a_reply_ends_on_a_stop_id_which_is_its_last(small: Path) -> None:
    async with TinyEngine(small) as engine:
        free = await engine.generate([1], Sampling(seed=5, max_tokens=30, stop_ids=()))
        stop = int(free.ids[12])
        until = free.ids.tolist().index(stop) + 1
        reply = await engine.generate([1], Sampling(seed=5, max_tokens=30, stop_ids=(stop,)))
        assert (reply.finish, reply.stopped_by) == (Finish.STOP, stop)
        assert reply.ids.tolist() == free.ids[:until].tolist()
        assert (free.finish, free.stopped_by, len(free.ids)) == (Finish.LENGTH, None, 30)


async def test_the_checkpoint_says_what_ends_a_turn(small: Path, tmp_path: Path) -> None:
    async with TinyEngine(small) as engine:
        for seed in range(400):
            reply = await engine.generate([1], Sampling(seed=seed, temperature=3.0, max_tokens=40))
            if reply.finish is Finish.STOP:
                assert reply.ids[-1] in engine.config.eos_ids
                assert not np.isin(reply.ids[:-1], engine.config.eos_ids).any()
                return
    pytest.fail(f"no reply ended on {IM_END}")


async def test_a_stop_string_ends_the_reply_with_all_ids_that_spell_it(small: Path) -> None:
    async with TinyEngine(small) as engine:
        assert engine.texts is not None
        free = await engine.generate([1], Sampling(seed=5, max_tokens=60, stop_ids=()))
        text = engine.texts.decode(free.ids.tolist())
        stop = next(text[at : at + 4] for at in range(20, len(text)) if "\ufffd" not in text[at : at + 4])
        reply = await engine.generate([1], Sampling(seed=5, max_tokens=60, stop_ids=(), stop_strings=("never!", stop)))
        assert (reply.finish, reply.stopped_by) == (Finish.STOP_STRING, stop)
        count = len(reply.ids)
        assert reply.ids.tolist() == free.ids[:count].tolist()
        assert stop in engine.texts.decode(reply.ids.tolist())
        assert stop not in engine.texts.decode(reply.ids.tolist()[:-1])
        assert reply.stop_at is not None
        assert engine.texts.decode(reply.ids.tolist(), until=reply.stop_at) == text[: text.index(stop)]


async def test_no_tokens_asked_for_scores_the_prompt_alone(small: Path) -> None:
    async with TinyEngine(small) as engine:
        prompt = np.random.default_rng(0).integers(0, 320, 300).tolist()
        scored = await engine.generate(prompt, Sampling(max_tokens=0, prompt_logprobs_from=0, top_logprobs=1))
        assert (len(scored.ids), scored.finish) == (0, Finish.LENGTH)
        assert len(scored.prompt_logprobs) == len(scored.prompt_top_logprobs) == 300
        for first in (1, 127, 128, 129, 299):
            part = await engine.generate(prompt, Sampling(max_tokens=0, prompt_logprobs_from=first))
            assert part.prompt_logprobs == scored.prompt_logprobs[first:]


async def test_the_context_ends_a_reply_and_longer_prompts_are_refused(small: Path) -> None:
    async with TinyEngine(small, context=64) as engine:
        reply = await engine.generate([1] * 60, Sampling(seed=0, max_tokens=100, stop_ids=()))
        assert (len(reply.ids), reply.finish) == (4, Finish.LENGTH)
        with pytest.raises(PromptError, match="64 ids, the context 64; shorten"):
            await engine.generate([1] * 64)
        with pytest.raises(PromptError, match="empty"):
            await engine.generate([])
        with pytest.raises(PromptError, match="id 320 in the prompt, but the vocabulary has 320"):
            await engine.generate([1, 320])
        with pytest.raises(PromptError, match="id -1"):
            await engine.generate([-1])


async def test_an_id_in_flight_cannot_be_used_twice(small: Path) -> None:
    async with TinyEngine(small) as engine:
        task = asyncio.create_task(engine.generate([1], ENDLESS, request_id="mine"))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="mine is in flight"):
            await engine.generate([1], ENDLESS, request_id="mine")
        assert engine.abort("mine")
        assert (await task).finish is Finish.ABORT
        assert not engine.abort("mine")


async def test_an_aborted_reply_keeps_what_it_has(small: Path) -> None:
    async with TinyEngine(small) as engine:
        whole = await engine.generate([3, 4, 5], Sampling(seed=1, max_tokens=300, stop_ids=()))
        task = await some(5, engine)
        assert engine.abort_all() == 1
        reply = await task
        assert reply.finish is Finish.ABORT
        assert len(reply.ids) == len(reply.raw_logprobs) == len(reply.tempered_logprobs) >= 5
        count = min(len(reply.ids), 300)
        assert reply.ids[:count].tolist() == whole.ids[:count].tolist()
        assert engine.in_flight == 0


async def test_leaving_a_stream_or_cancelling_a_caller_aborts(small: Path) -> None:
    async with TinyEngine(small) as engine:
        async with aclosing(engine.stream([1], ENDLESS)) as pieces:
            async for _ in pieces:
                break
        task = asyncio.create_task(engine.generate([1], ENDLESS))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.in_flight == 0
        await engine.pause()  # answers between two steps, after the aborts
        assert not engine._batch.busy


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
async def test_64_at_once_with_random_cancellations_neither_leak_nor_mix(small: Path) -> None:
    async with TinyEngine(small, max_running=48) as engine:
        expected = {
            seed: (await engine.generate([seed], Sampling(seed=seed, max_tokens=60, stop_ids=()))).ids.tolist()
            for seed in range(64)
        }
        dice = random.Random(0)

        async def one(seed: int) -> bool:
            sampling = Sampling(seed=seed, max_tokens=60, stop_ids=())
            fate = dice.random()
            if fate < 0.4:
                task = asyncio.create_task(engine.generate([seed], sampling))
                await asyncio.sleep(dice.random() * 0.3)
                task.cancel()
                done = await asyncio.gather(task, return_exceptions=True)
                return isinstance(done[0], EngineReply) and done[0].ids.tolist() == expected[seed]
            if fate < 0.6:
                ids: list[int] = []
                async with aclosing(engine.stream([seed], sampling)) as pieces:
                    async for piece in pieces:
                        ids += piece.ids
                        if dice.random() < 0.05:
                            break
                assert ids == expected[seed][: len(ids)]
                return False
            reply = await engine.generate([seed], sampling)
            assert reply.ids.tolist() == expected[seed]
            return True

        async def round_of_64() -> int:
            return sum(await asyncio.gather(*(one(seed) for seed in range(64))))

        assert await round_of_64() > 10
        before, caches = resident_mb(), live_caches()
        for _ in range(4):
            await round_of_64()
        await engine.pause()
        assert engine.in_flight == 0
        assert not engine._batch.busy
        assert live_caches() == caches == 0
        assert resident_mb() - before < 20


def live_caches() -> int:
    from rolltape.tiny.attention import Cache

    gc.collect()
    return sum(type(thing) is Cache for thing in gc.get_objects())


async def test_a_long_prompt_does_not_stall_the_others(small: Path) -> None:
    async with TinyEngine(small) as engine:
        running = await some(3, engine)
        long = asyncio.create_task(engine.generate([7] * 4000, Sampling(seed=1, max_tokens=1, stop_ids=())))
        short = await engine.generate([9, 9], Sampling(seed=2, max_tokens=5, stop_ids=()))
        assert not long.done()
        assert len(short.ids) == 5
        assert len((await long).ids) == 1
        engine.abort_all()
        await running


async def test_more_than_may_run_wait_their_turn(small: Path) -> None:
    async with TinyEngine(small, max_running=2, max_cached_tokens=50) as engine:
        sampling = Sampling(seed=4, max_tokens=20, stop_ids=())
        replies = await asyncio.gather(*(engine.generate([index] * 30, sampling) for index in range(8)))
        assert all(len(reply.ids) == 20 for reply in replies)


async def test_new_weights_abort_replies_in_flight_if_asked(small: Path, small_next: Path) -> None:
    async with TinyEngine(small, "1") as engine:
        task = await some(5, engine)
        assert await engine.load_weights(small_next, "2", in_flight=InFlightPolicy.ABORT) == 1
        reply = await task
        assert (reply.finish, reply.version) == (Finish.ABORT, "1")
        assert len(reply.ids) >= 5
        assert engine.version == "2"
        after = await engine.generate([1, 2], Sampling(seed=9, max_tokens=20, stop_ids=()))
        assert after.version == "2"
    async with TinyEngine(small_next) as fresh:
        same = await fresh.generate([1, 2], Sampling(seed=9, max_tokens=20, stop_ids=()))
        assert after.ids.tolist() == same.ids.tolist()


async def test_or_they_finish_under_the_weights_that_they_began_with(small: Path, small_next: Path) -> None:
    sampling = Sampling(seed=1, max_tokens=400, stop_ids=())
    async with TinyEngine(small, "1") as engine:
        undisturbed = await engine.generate([3, 4, 5], sampling)
        first = weakref.ref(engine._batch.weights.model)
        pieces = engine.stream([3, 4, 5], sampling)
        await anext(pieces)
        assert await engine.load_weights(small_next, "2", in_flight=InFlightPolicy.FINISH) == 1
        newer = await engine.generate([3, 4, 5], Sampling(seed=1, max_tokens=20, stop_ids=()))
        rest = [piece async for piece in pieces]
        older = rest[-1].reply
        assert older is not None
        assert (older.version, newer.version) == ("1", "2")
        assert older.raw_logprobs.tobytes() == undisturbed.raw_logprobs.tobytes()
        assert newer.ids.tolist() != older.ids[:20].tolist()
        del pieces, rest, older, undisturbed
        await engine.pause()
        await asyncio.sleep(0.01)
        gc.collect()
        assert first() is None  # the old weights go when the last reply under them has ended


async def test_weights_of_another_shape_or_none_change_nothing(small: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=3)
    async with TinyEngine(small, "1") as engine:
        for folder in (other, tmp_path / "nothing"):
            with pytest.raises(CheckpointError):
                await engine.load_weights(folder, "2")
        assert engine.version == "1"
        assert (await engine.generate([1], Sampling(max_tokens=2))).version == "1"
        await engine.announce("1b")
        assert (await engine.generate([1], Sampling(max_tokens=2))).version == "1b"


async def test_while_paused_requests_wait_and_those_in_flight_end_or_are_held(small: Path) -> None:
    async with TinyEngine(small) as engine:
        held = await some(3, engine)
        assert await engine.pause(in_flight=InFlightPolicy.FINISH) == 1
        waiting = asyncio.create_task(engine.generate([1], Sampling(max_tokens=2, stop_ids=())))
        await asyncio.sleep(0.1)
        assert not held.done()
        assert not waiting.done()
        await engine.resume()
        assert len((await waiting).ids) == 2
        assert await engine.pause(in_flight=InFlightPolicy.ABORT) == 1
        assert (await held).finish is Finish.ABORT
        await engine.resume()


async def test_a_stopped_engine_says_so(small: Path) -> None:
    engine = TinyEngine(small)
    with pytest.raises(EngineStopped, match="async with"):
        await engine.generate([1])
    async with engine:
        task = await some(2, engine)
    assert (await task).finish is Finish.ABORT
    with pytest.raises(EngineStopped, match="closed"):
        await engine.generate([1])
    assert not any(thread.name == "rolltape-engine" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_failing_thread_fails_its_requests_and_does_not_hang(small: Path) -> None:
    engine = TinyEngine(small)
    async with engine:
        task = await some(2, engine)

        def broken() -> list[object]:
            raise MemoryError("no room")

        engine._batch.step = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineStopped, match="MemoryError: no room"):
            await task
        with pytest.raises(EngineStopped, match="no room"):
            await engine.pause()


async def test_weights_that_are_no_numbers_end_the_reply_as_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = random_tensors(config_of())
    tensors["model.norm.weight"][3] = np.nan
    write_safetensors(folder / "model.safetensors", tensors)
    async with TinyEngine(folder) as engine:
        reply = await engine.generate([1, 2])
        assert reply.finish is Finish.ERROR
        assert reply.error == "logits at position 2 are not finite; are the weights?"


async def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    async with TinyEngine(folder) as engine:
        with pytest.raises(SamplingError, match=r"tokenizer\.json"):
            await engine.generate([1], Sampling(stop_strings=("a",)))
        assert len((await engine.generate([1], Sampling(max_tokens=3, stop_ids=()))).ids) == 3


async def test_the_event_loop_goes_on_while_the_model_runs(shaped: Path) -> None:
    async with TinyEngine(shaped) as engine:
        tasks = [asyncio.create_task(engine.generate([index], ENDLESS)) for index in range(16)]
        ticks, end = 0, time.monotonic() + 0.5
        while time.monotonic() < end:
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 20
        engine.abort_all()
        await asyncio.gather(*tasks)
