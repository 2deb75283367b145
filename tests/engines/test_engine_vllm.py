"""vLLM's completions from the gateway's side; the fake is held against real vLLM by check_real_backends.py."""

import asyncio
from typing import Any

import numpy as np
import pytest

from engines.fake_vllm import FakeVllm, Reply, Token
from rolltape.doctor.engine.probing import SampledChunks, generation
from rolltape.errors import EngineDied, EngineFault, EngineUnreachable
from rolltape.gateway.engines import http
from rolltape.gateway.engines.protocol import Engine, Generated, ImplausibleReply
from rolltape.gateway.engines.vllm import VllmEngine
from rolltape.gateway.turn.generate import check_generated
from rolltape.records.turn import Finish, LogprobKind

TOKENS = [Token(5, -0.1), Token(6, -0.2), Token(7, -0.3), Token(9, -0.4)]


async def once(server: FakeVllm, prompt: list[int], **settings: Any) -> Generated:
    engine: Engine = VllmEngine(server.url)
    try:
        return await engine.generate(generation(prompt, **settings))
    finally:
        await engine.close()


@pytest.mark.parametrize("per_event", [1, 3])
async def test_ids_and_raw_logprobs_come_however_they_are_cut_into_events(per_event: int) -> None:
    async with FakeVllm(Reply(TOKENS, per_event=per_event)) as server:
        given = await once(server, [1, 2], stop_ids=[9])
    assert given.ids.tolist() == [5, 6, 7, 9]
    assert given.logprobs is not None
    assert given.logprobs.tolist() == [-0.1, -0.2, -0.3, -0.4]
    assert (given.finish, given.logprob_kind) == (Finish.STOP, LogprobKind.RAW)
    assert (given.first_version, given.last_version, given.segments) == (None, None, ())


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("stop", None, (Finish.STOP, None)),
        ("stop", 9, (Finish.STOP, None)),
        ("stop", "END", (Finish.STOP_STRING, "END")),
        ("length", None, (Finish.LENGTH, None)),
        ("abort", None, (Finish.ABORT, None)),
    ],
)
async def test_how_it_ended(finish: str, stop_reason: int | str | None, expected: Any) -> None:
    async with FakeVllm(Reply(TOKENS, finish, stop_reason)) as server:
        given = await once(server, [1, 2], stop=("END",))
    assert (given.finish, given.stop_string) == expected


async def test_everything_is_asked_for_and_nothing_is_left_to_the_models_own_defaults() -> None:
    async with FakeVllm(Reply(TOKENS)) as server:
        await once(server, [1, 2], stop_ids=[9])
        await once(server, [1, 2], temperature=0.5, top_k=7, seed=3, stop=("END",))
    plain, full = server.bodies
    assert plain == {
        "model": "it",
        "request_id": "g-1",
        "prompt": [1, 2],
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (full["temperature"], full["top_k"], full["seed"], full["stop"]) == (0.5, 7, 3, ["END"])


async def test_a_logprob_of_minus_9999_is_none_at_all() -> None:
    async with FakeVllm(Reply([Token(5, -9999.0), Token(9, -0.25)])) as server:
        given = await once(server, [1, 2])
    assert given.logprobs is not None
    np.testing.assert_array_equal(given.logprobs, [np.nan, -0.25])


async def test_abort_closes_the_stream_and_keeps_what_came() -> None:
    async with FakeVllm(Reply(TOKENS * 50, token_delay_s=0.02)) as server:
        engine = VllmEngine(server.url)
        task = asyncio.create_task(engine.generate(generation([1, 2])))
        await asyncio.sleep(0.2)
        await engine.abort("g-1")
        given = await task
        assert given.finish is Finish.ABORT
        assert 0 < len(given.ids) < 200
        assert given.logprobs is not None
        assert len(given.logprobs) == len(given.ids)
        await asyncio.sleep(0.1)
        assert server.disconnected == 1
        await engine.abort("g-1")  # long over
        await engine.close()


async def test_cancelling_closes_the_stream() -> None:
    async with FakeVllm(Reply(TOKENS * 50, token_delay_s=0.02)) as server:
        engine = VllmEngine(server.url)
        task = asyncio.create_task(engine.generate(generation([1, 2])))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert server.disconnected == 1
        await engine.close()


async def test_a_death_in_mid_reply_keeps_what_came() -> None:
    async with FakeVllm(Reply(TOKENS[:3], dies=True, token_delay_s=0.01)) as server:
        with pytest.raises(EngineDied) as caught:
            await once(server, [1, 2])
    partial = caught.value.partial
    assert isinstance(partial, Generated)
    assert (partial.ids.tolist(), partial.finish) == ([5, 6, 7], Finish.ABORT)


async def test_an_error_event_is_a_death_after_the_first_token_and_a_fault_before() -> None:
    async with FakeVllm(Reply(TOKENS[:2], error="EngineCore died")) as server:
        with pytest.raises(EngineDied, match="EngineCore died") as caught:
            await once(server, [1, 2])
    assert isinstance(caught.value.partial, Generated)
    async with FakeVllm(Reply([], error="Token id 1000000 is out of vocabulary")) as server:
        with pytest.raises(EngineFault, match="out of vocabulary"):
            await once(server, [1, 2])


async def test_events_that_end_too_early_are_a_death_with_nothing() -> None:
    async with FakeVllm(Reply([])) as server:
        with pytest.raises(EngineDied, match="ended before the reply did") as caught:
            await once(server, [1, 2])
    assert caught.value.partial is None


@pytest.mark.parametrize("per_event", [1, 3])
async def test_ids_are_told_as_events_bring_them_and_the_reply_is_the_same(per_event: int) -> None:
    told = SampledChunks()
    async with FakeVllm(Reply(TOKENS, per_event=per_event)) as server:
        plain = await once(server, [1, 2], stop_ids=[9])
        streamed = await once(server, [1, 2], stop_ids=[9], on_sampled=told)
    assert told.chunks == ([[5], [6], [7], [9]] if per_event == 1 else [[5, 6, 7], [9]])
    assert streamed.ids.tolist() == plain.ids.tolist() == told.ids
    assert plain.logprobs is not None
    np.testing.assert_array_equal(streamed.logprobs, plain.logprobs)
    assert (streamed.finish, streamed.cached_tokens) == (plain.finish, plain.cached_tokens)


@pytest.mark.parametrize("per_event", [1, 2, 8])
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 6, 900, 7, 9], [5, 6]),
        ([5, 9, 6, 7], [5, 9]),
        ([5, 9, 900], [5, 9]),
        ([5, 900, 9], [5]),
        ([5, 6, 7, 8, 4, 3, 2], [5, 6, 7, 8, 4]),
    ],
)
async def test_what_cannot_have_been_sampled_is_never_told_and_the_reply_is_a_fault(
    ids: list[int], expected: list[int], per_event: int
) -> None:
    told = SampledChunks()
    wanted = generation([1, 2], stop_ids=[9], vocabulary=100, max_tokens=5, on_sampled=told)
    async with FakeVllm(Reply([Token(token) for token in ids], "length", per_event=per_event)) as server:
        engine = VllmEngine(server.url)
        given = await engine.generate(wanted)
        with pytest.raises(ImplausibleReply) as caught:
            check_generated(engine, wanted, given)
        await engine.close()
    assert told.ids == expected
    assert caught.value.given.ids[: len(expected)].tolist() == expected


async def test_a_stream_of_too_many_ids_is_not_read_to_its_end() -> None:
    async with FakeVllm(Reply([Token(5)] * 100_000, "length")) as server:
        given = await once(server, [1, 2], max_tokens=5)
    assert 5 < len(given.ids) < 100_000


@pytest.mark.parametrize(
    "reply",
    [
        Reply(TOKENS[:3], dies=True),
        Reply(TOKENS[:3], error="EngineCore died"),
        Reply(TOKENS[:3], junk=b'{"choices": [{"token_ids": [4'),
        Reply(TOKENS[:3], junk=b'{"choices": [{"token_ids": [4, 5], "logprobs": {"token_logprobs": [-0.5]}}]}'),
        Reply(TOKENS[:3], junk=b'{"choices": [{"token_ids": [-4], "logprobs": {"token_logprobs": [-0.5]}}]}'),
        Reply(TOKENS, "error"),
    ],
    ids=["dies", "error", "truncated", "wrong lengths", "no id", "finish"],
)
async def test_what_was_told_is_kept_however_the_stream_breaks(reply: Reply) -> None:
    told = SampledChunks()
    async with FakeVllm(reply) as server:
        with pytest.raises(EngineDied) as caught:
            await once(server, [1, 2], on_sampled=told)
    partial = caught.value.partial
    assert isinstance(partial, Generated)
    assert partial.ids.tolist() == told.ids == [5, 6, 7]
    assert partial.logprobs is not None
    assert partial.logprobs.tolist() == [-0.1, -0.2, -0.3]
    assert partial.finish is Finish.ABORT


async def test_an_abort_gives_what_was_told() -> None:
    async with FakeVllm(Reply(TOKENS * 50, token_delay_s=0.01)) as server:
        engine = VllmEngine(server.url)
        first = asyncio.Event()
        told = SampledChunks(first.set)
        task = asyncio.create_task(engine.generate(generation([1, 2], on_sampled=told, max_tokens=200)))
        await first.wait()
        await engine.abort("g-1")
        given = await task
        await engine.close()
    assert given.finish is Finish.ABORT
    assert given.ids.tolist() == told.ids


async def test_a_reply_that_has_ended_is_whole_though_the_connection_breaks_then() -> None:
    async with FakeVllm(Reply(TOKENS, dies_after_finish=True)) as server:
        given = await once(server, [1, 2], stop_ids=[9])
    assert (given.ids.tolist(), given.finish) == ([5, 6, 7, 9], Finish.STOP)


async def test_a_stream_that_was_read_leaves_its_connection_to_the_next_request() -> None:
    async with FakeVllm(Reply(TOKENS)) as server:
        engine = VllmEngine(server.url, model="it")
        for _ in range(3):
            await engine.generate(generation([1, 2]))
        await engine.close()
    assert len(set(server.peers)) == 1


async def test_an_event_without_end_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_EVENT_BYTES", 10_000)
    async with FakeVllm(Reply([], junk=b"x" * 100_000)) as server:
        with pytest.raises(EngineFault, match="longer than 10000 bytes"):
            await once(server, [1, 2])


async def test_what_cannot_be_used_is_a_fault() -> None:
    async with FakeVllm(Reply(TOKENS), token_ids=False) as server:
        with pytest.raises(EngineFault, match=r"vLLM gives them from 0\.10\.2 on"):
            await once(server, [1, 2])
    async with FakeVllm(Reply(TOKENS)) as server:
        with pytest.raises(EngineFault, match="answered 400: This model's maximum context"):
            await once(server, [1] * 3000)


async def test_likely_ids_that_are_no_numbers_are_left_out() -> None:
    likely = b'{"token_id:x": -0.1, "token_id:-4": -0.2, "token_id:9": -0.5}'
    logprobs = b'{"token_logprobs": [-0.5], "top_logprobs": [%s]}' % likely
    last = b'{"choices": [{"token_ids": [9], "logprobs": %s, "finish_reason": "stop"}]}' % logprobs
    async with FakeVllm(Reply(TOKENS, junk=last)) as server:
        given = await once(server, [1, 2], top_logprobs=1)
    assert given.side_arrays["top_1_ids"]["values"][-1].tolist() == [9]


async def test_facts_and_a_model_that_is_not_served() -> None:
    async with FakeVllm(Reply(TOKENS)) as server:
        engine, other = VllmEngine(server.url), VllmEngine(server.url, model="another")
        facts = await engine.facts()
        assert (facts.model, facts.context, facts.version) == ("it", 2048, None)
        with pytest.raises(EngineFault, match="it serves it, not another"):
            await other.facts()
        await engine.close()
        await other.close()
    with pytest.raises(EngineUnreachable):
        await VllmEngine("http://127.0.0.1:9").facts()


async def test_it_loads_weights_while_it_is_paused_and_has_their_version() -> None:
    async with FakeVllm(Reply(TOKENS)) as server:
        engine = VllmEngine(server.url)
        assert (await engine.facts()).version is None  # nobody has given one
        await engine.load_weights("/checkpoints/1", "v1")
        assert (await engine.facts()).version == "v1"
        await engine.close()
    assert server.weight_calls == [
        ("/pause", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/checkpoints/1"}}),
        ("/update_weight_version", {"new_version": "v1"}),
        ("/resume", {}),
    ]


async def test_weights_that_it_cannot_load_keep_their_name_and_leave_it_running() -> None:
    async with FakeVllm(Reply(TOKENS)) as server:
        server.loads = False
        engine = VllmEngine(server.url)
        with pytest.raises(EngineFault, match="/collective_rpc answered 500"):
            await engine.load_weights("/checkpoints/1", "v1")
        await engine.close()
    assert [path for path, _ in server.weight_calls] == ["/pause", "/collective_rpc", "/resume"]


async def test_a_server_without_the_routes_for_weights_says_how_to_start_it() -> None:
    async with FakeVllm(Reply(TOKENS), development=False) as server:
        engine = VllmEngine(server.url)
        assert (await engine.facts()).version is None
        with pytest.raises(EngineFault, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.load_weights("/checkpoints/1", "v1")
        await engine.close()
