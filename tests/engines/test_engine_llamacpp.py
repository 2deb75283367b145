"""llama.cpp's own server, on a GGUF of the shipped model, behind the engine protocol."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineFault, EngineUnreachable
from rolltape.gateway.engines.llamacpp import LlamaCppEngine, placed
from rolltape.gateway.engines.protocol import Engine, Generated
from rolltape.gateway.turn.constraints import Constraint
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import Sampling, TinyEngine, shipped_model
from tiny.gguf_file import write_gguf
from tiny.test_agreement_llamacpp import serve

TOLERANCE = 1e-3
END = 4089


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = serve(write_gguf(shipped_model(), tmp_path_factory.mktemp("gguf") / "model.gguf"))
    yield server.listening_address
    del server


@pytest.fixture(scope="module")
def hello() -> list[int]:
    tokenizer = Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    ).ids
    return ids


async def once(url: str, prompt: list[int], **settings: Any) -> Generated:
    engine: Engine = LlamaCppEngine(url)
    try:
        return await engine.generate(generation(prompt, **settings))
    finally:
        await engine.close()


async def test_facts_are_the_servers(url: str) -> None:
    engine = LlamaCppEngine(url)
    facts = await engine.facts()
    await engine.close()
    assert facts.context == 2048
    assert facts.model is not None
    assert facts.model.endswith("model.gguf")
    assert facts.version is None


async def test_a_schema_is_enforced(url: str, hello: list[int]) -> None:
    wanted = generation(hello, stop_ids=[END], seed=3)
    constraint = Constraint(fields=("response_format",), schema={"enum": ["zebra", "quagga"]})
    engine = LlamaCppEngine(url)
    assert constraint.needs <= engine.abilities
    given = await engine.generate(msgspec.structs.replace(wanted, constraint=constraint))
    await engine.close()
    text = Tokenizer.from_file(str(shipped_model() / "tokenizer.json")).decode(given.ids.tolist())
    assert json.loads(text) in ("zebra", "quagga")
    assert given.constrained


async def test_the_stop_id_stays_and_has_a_logprob(url: str, hello: list[int]) -> None:
    given = await once(url, hello, stop_ids=[END], seed=3)
    assert given.finish is Finish.STOP
    assert given.ids[-1] == END
    assert given.logprobs is not None
    assert not np.isnan(given.logprobs).any()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_logprobs_are_raw_and_those_of_the_tiny_engine(url: str, temperature: float) -> None:
    rng = np.random.default_rng(2)
    compared = 0
    async with TinyEngine(shipped_model(), context=2048) as tiny_engine:
        for seed in range(6):
            prompt = rng.integers(10, 2000, 60).tolist()
            given = await once(url, prompt, temperature=temperature, seed=seed, max_tokens=60)
            assert given.logprob_kind is LogprobKind.RAW
            scored = await tiny_engine.generate(
                [*prompt, *given.ids.tolist()], Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
            )
            assert given.logprobs is not None
            has_one = ~np.isnan(given.logprobs)
            ours = np.array(scored.prompt_logprobs, dtype=np.float64)
            np.testing.assert_allclose(ours[has_one], given.logprobs[has_one], rtol=0, atol=TOLERANCE)
            compared += int(has_one.sum())
    assert compared > 60


async def test_nothing_but_what_was_asked_for_bends_the_distribution(url: str) -> None:
    """llama.cpp's own top-k 40 and min-p would never let such unlikely ids pass."""
    rng = np.random.default_rng(4)
    prompt = rng.integers(10, 2000, 60).tolist()
    hot = await once(url, prompt, temperature=2.0, seed=1, max_tokens=200)
    assert hot.logprobs is not None
    assert float(np.nanmin(hot.logprobs)) < -9
    cut = await once(url, prompt, temperature=2.0, top_k=1, seed=1, max_tokens=12)
    greedy = await once(url, prompt, temperature=0.0, max_tokens=12)
    assert cut.ids.tolist() == greedy.ids.tolist()


async def test_equal_seeds_give_equal_replies(url: str) -> None:
    prompt = list(range(100, 140))
    one = await once(url, prompt, seed=2**40 + 5, max_tokens=20, temperature=1.5)
    two = await once(url, prompt, seed=2**40 + 5, max_tokens=20, temperature=1.5)
    other = await once(url, prompt, seed=6, max_tokens=20, temperature=1.5)
    assert one.ids.tolist() == two.ids.tolist() != other.ids.tolist()


async def test_a_second_turn_finds_its_prefix_cached(url: str, hello: list[int]) -> None:
    given = await once(url, hello, stop_ids=[END], seed=3)
    after = await once(url, [*hello, *given.ids.tolist(), 198, 4088], stop_ids=[END], seed=3)
    assert after.cached_tokens is not None
    assert after.cached_tokens >= len(hello)


async def test_a_stop_string_is_named_and_its_ids_stay(url: str, hello: list[int]) -> None:
    given = await once(url, hello, stop=("greeting",), seed=3)
    assert (given.finish, given.stop_string) == (Finish.STOP_STRING, "greeting")
    tokenizer = Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))
    assert tokenizer.decode(given.ids.tolist()).endswith("greeting")


async def test_a_stop_id_that_llamacpp_does_not_know_ends_the_reply_here(url: str, hello: list[int]) -> None:
    whole = await once(url, hello, stop_ids=[END], temperature=0.0)
    cut = await once(url, hello, stop_ids=[int(whole.ids[3])], temperature=0.0)
    assert cut.finish is Finish.STOP
    assert cut.ids.tolist() == whole.ids.tolist()[:4]


async def test_length_abort_and_cancel(url: str) -> None:
    prompt = np.random.default_rng(4).integers(10, 2000, 60).tolist()
    short = await once(url, prompt, max_tokens=3, temperature=5.0, seed=1)
    assert (short.finish, len(short.ids)) == (Finish.LENGTH, 3)
    engine = LlamaCppEngine(url)
    task = asyncio.create_task(engine.generate(generation(prompt, max_tokens=1500, temperature=5.0, seed=1)))
    await asyncio.sleep(0.2)
    await engine.abort("g-1")
    given = await task
    assert (given.finish, len(given.ids), given.logprobs) == (Finish.ABORT, 0, None)
    task = asyncio.create_task(engine.generate(generation(prompt, name="g-2", max_tokens=1500, temperature=5.0)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The only slot is free again at once: this would take many seconds otherwise.
    async with asyncio.timeout(3):
        await engine.generate(generation(prompt, name="g-3", max_tokens=1))
    await engine.close()


async def test_a_prompt_that_it_cannot_take_is_a_fault_in_its_own_words(url: str) -> None:
    with pytest.raises(EngineFault, match="exceeds the available context size"):
        await once(url, [5] * 3000)
    with pytest.raises(EngineFault, match="invalid tokens"):
        await once(url, [10**6])
    with pytest.raises(EngineUnreachable):
        await once("http://127.0.0.1:9", [5])


def entries(*pairs: tuple[int, float]) -> list[Any]:
    from rolltape.gateway.engines.llamacpp import _CompletionProbability

    return [_CompletionProbability(token, value) for token, value in pairs]


def test_a_logprob_whose_place_is_not_certain_is_not_given() -> None:
    # One of two equal ids has none, and nothing says which.
    assert placed([7, 5, 5, 8], entries((7, -1.0), (5, -2.0), (8, -3.0)), "x") == [-1.0, None, None, -3.0]
    # Here the gap can only be at one place.
    assert placed([7, 5, 6, 8], entries((7, -1.0), (6, -2.0), (8, -3.0)), "x") == [-1.0, None, -2.0, -3.0]
    assert placed([7, 5], [], "x") == [None, None]
    with pytest.raises(EngineFault, match="1 logprobs that are not those of its 2 sampled ids"):
        placed([7, 5], entries((9, -1.0)), "x")
