"""The most likely tokens beside sampled ones: as the engine gives them, on the tape and in replies alike."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rolltape
from engines.fake_vllm import FakeVllm, Reply, Token
from gateways import Answer, Rig, rig, scripted, slowly, tiny_gateway
from rolltape.cli import run as rolltape_command
from rolltape.gateway.engines.protocol import TOP_LOGPROBS
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Turn
from rolltape.tiny import shipped_model
from scripted_engine import Json
from told_tokens import LONG, encoded, post

Tops = list[list[tuple[int, float]]]


def on_tape(turn: Turn, count: int) -> Tops:
    """The most likely ids of each place of a reply."""
    ids, logprobs = turn.side[f"top_{count}_ids"], turn.side[f"top_{count}_logprobs"]
    assert ids.start == len(turn.prompt_tokens)
    assert len(ids.values) == len(turn.sampled_ids)
    rows = zip(ids.values.tolist(), logprobs.values.tolist(), strict=True)
    return [list(zip(row, values, strict=True)) for row, values in rows]


def told(answer: Answer) -> list[Json]:
    """What a reply of Chat Completions or `generate` says of each token."""
    assert answer.status == 200, answer.raw
    choices = [choice for event in answer.events for choice in event["choices"]]
    return [one for choice in choices for one in (choice["logprobs"] or {}).get("content", ())]


def tops(tokens: list[Json]) -> Tops:
    return [[(int(top["token"][len("token_id:") :]), top["logprob"]) for top in one["top_logprobs"]] for one in tokens]


async def chat(it: Rig, opened: Json, **fields: Any) -> Answer:
    return await it.ask(opened, "hello", logprobs=True, return_tokens_as_token_ids=True, **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
async def test_chat_tells_what_sglang_gives(run: Path, stream: bool, incremental: bool) -> None:
    async with rig(run, scripted([LONG], incremental=incremental)) as it:
        opened = await it.open()
        answer = await chat(it, opened, top_logprobs=3, stream=stream)
        await it.finish(opened)
    (turn,), (said,) = it.turns(), it.engine.said
    given = [
        [(token if not place else (token + place) % it.engine.end_id, value - place) for place in range(3)]
        for token, value in zip(said.ids, said.logprobs, strict=True)
    ]
    assert tops(told(answer)) == on_tape(turn, 3) == given
    assert rolltape_command(["check", str(run)]) == 0


async def test_the_tiny_engine_gives_them_and_the_likeliest_is_the_one_sampled_without_chance(run: Path) -> None:
    async with tiny_gateway(run) as it:
        opened = await it.open()
        answer = await chat(it, opened, top_logprobs=2, temperature=0, max_tokens=8)
        fewer = await chat(it, opened, top_logprobs=1, max_tokens=8)
        await it.finish(opened, reward=1.0)
    first, second = it.turns()
    assert tops(told(answer)) == on_tape(first, 2)
    assert tops(told(fewer)) == on_tape(second, 1)
    assert [top[0][0] for top in on_tape(first, 2)] == first.sampled_ids.tolist()
    (rollout,) = rolltape.read(run).rollouts()
    assert list(rolltape.linearize(rollout).samples())  # with rows of two lengths in one rollout


async def test_a_change_of_weights_in_the_middle_leaves_none_out(run: Path) -> None:
    async with rig(run, slowly(LONG, 0.04)) as it:
        opened = await it.open()
        asking = asyncio.ensure_future(chat(it, opened, top_logprobs=2))
        await it.requested(1)
        await it.gateway.pause()
        await it.gateway.resume("v1")
        answer = await asking
        await it.finish(opened)
    (turn,) = it.turns()
    assert tops(told(answer)) == on_tape(turn, 2)


async def test_those_of_vllm_are_the_likeliest_of_what_it_gives(run: Path) -> None:
    async with AsyncExitStack() as stack:
        end = 2  # of the shipped model: <|im_end|>
        server = await stack.enter_async_context(FakeVllm(Reply([Token(50, -0.8), Token(60, -0.4), Token(end)])))
        gateway = await stack.enter_async_context(Gateway(engine=f"vllm:{server.url}", model=shipped_model(), tape=run))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        it = Rig(gateway, scripted(()), run, http)
        answer = await chat(it, await it.open(), top_logprobs=2)
    got = tops(told(answer))
    assert [[one for one, _ in top] for top in got[:2]] == [[52, 51], [62, 61]]  # and not the sampled one
    assert [value for _, value in got[0]] == [-0.8 / 3, -0.4]


async def test_completions_and_generate_tell_them_with_the_sampled_one(run: Path) -> None:
    async with rig(run, ["It is it."] * 3) as it:
        opened, prompt = await it.open(), encoded(it, "Say it:")
        asked: Json = {"logprobs": 2, "return_tokens_as_token_ids": True}
        completed = await post(it, opened, "/v1/completions", model="it", prompt=prompt, **asked)
        path, params = "/inference/v1/generate", {"logprobs": 2}
        generated = await post(it, opened, path, token_ids=prompt, sampling_params=params)
        plain = await post(it, opened, path, token_ids=prompt, sampling_params={"logprobs": 1})
        await it.finish(opened)
    first, second, third = it.turns()
    listed = completed.json["choices"][0]["logprobs"]["top_logprobs"]
    assert listed == [{f"token_id:{token}": value for token, value in top} for top in on_tape(first, 2)]
    assert tops(told(generated)) == on_tape(second, 2)  # here the sampled one is the likeliest
    assert third.side == {}
    assert third.logprobs is not None
    sampled = zip(third.sampled_ids.tolist(), third.logprobs.tolist(), strict=True)
    assert tops(told(plain)) == [[one] for one in sampled]


async def test_an_engine_that_gives_none_has_the_parameter_listed(run: Path) -> None:
    async with tiny_gateway(run) as it:
        (engine,) = it.gateway.service.pool.engines
        engine.applies = engine.applies - {TOP_LOGPROBS}
        answer = await chat(it, await it.open(), top_logprobs=2, max_tokens=4)
    listed = answer.headers["x-rolltape-ignored-params"]
    assert listed == "top_logprobs: only the logprob of the sampled token is returned"
    assert {len(top) for top in tops(told(answer))} == {0}
    assert it.turns()[0].side == {}


async def test_more_than_the_api_has_is_refused(run: Path) -> None:
    async with rig(run) as it:
        answer = await chat(it, await it.open(), top_logprobs=21)
    assert answer.status == 400
    assert answer.error == "top_logprobs is 21; give a whole number of at least 0 and of at most 20"
