"""SGLang's `/generate` streamed: ids are told as they come, in either form of events, and nothing else differs."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from rolltape.doctor.engine.probing import SampledChunks, generation
from rolltape.errors import EngineDied, EngineFault
from rolltape.gateway.engines.protocol import Generated, ImplausibleReply
from rolltape.gateway.engines.sglang.engine import SglangEngine
from rolltape.gateway.turn.generate import check_generated
from rolltape.records.turn import Finish, LogprobKind, Segment
from rolltape.tiny import TinyEngine, shipped_model
from rolltape.tiny.server import EngineServer
from scripted_engine import IMPLAUSIBLE, Mishap, Script, ScriptedEngine, Step

TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
Json = dict[str, Any]

both_forms = pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])


@contextlib.asynccontextmanager
async def scripted(
    tokenizer: Tokenizer, script: Script, **settings: Any
) -> AsyncIterator[tuple[ScriptedEngine, SglangEngine]]:
    async with ScriptedEngine(tokenizer, script, **settings) as server:
        engine = SglangEngine(server.url)
        try:
            yield server, engine
        finally:
            server.thaw()
            await engine.close()


@contextlib.asynccontextmanager
async def sending(events: Sequence[Any], seen: list[Json] | None = None, **info: Any) -> AsyncIterator[SglangEngine]:
    """An engine that streams just these events, bytes as they are, and answers with the last one otherwise."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        if seen is not None:
            seen.append(body)
        coded = [event if isinstance(event, bytes) else msgspec.json.encode(event) for event in events]
        if not body.get("stream"):
            return web.Response(body=coded[-1], content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in [*coded, b"[DONE]"]:
            await response.write(b"data: " + data + b"\n\n")
        return response

    async def about(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "v0", **info})

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/generate", generate)
    for path in ("/health", "/get_model_info", "/get_server_info", "/v1/models"):
        app.router.add_get(path, about)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", routed_experts=True)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


def event(ids: list[int], total: int, finish: Json | None = None, **meta: Any) -> Json:
    """One of SGLang's events: ids and their logprobs, and how many there are by now."""
    fields = {
        "finish_reason": finish,
        "completion_tokens": total,
        "output_token_logprobs": [[-token / 10, token, None] for token in ids],
        "weight_version": "v0",
    }
    return {"text": "", "output_ids": ids, "meta_info": {**fields, **meta}}


def events(chunks: Sequence[list[int]], incremental: bool, finish: Json | None = None, **last: Any) -> list[Json]:
    """The events of a reply that comes in these chunks; `last` is for the meta info of the last."""
    every, so_far = [], list[int]()
    for at, chunk in enumerate(chunks):
        so_far = [*so_far, *chunk]
        ends = at == len(chunks) - 1
        end = finish or {"type": "length", "length": len(so_far)}
        extra = last if ends else {}
        every.append(event(chunk if incremental else so_far, len(so_far), end if ends else None, **extra))
    return every


def assert_same(streamed: Generated, plain: Generated) -> None:
    for name in Generated.__struct_fields__:
        one, other = getattr(streamed, name), getattr(plain, name)
        if name == "side_arrays":
            assert one.keys() == other.keys()
            for key in one:
                assert one[key]["start"] == other[key]["start"]
                np.testing.assert_array_equal(one[key]["values"], other[key]["values"])
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other, name


@both_forms
async def test_a_streamed_reply_is_the_unstreamed_one_and_is_told_in_chunks(
    incremental: bool, tokenizer: Tokenizer
) -> None:
    told = SampledChunks()
    replies = []
    for on_sampled in (None, told):
        async with scripted(tokenizer, [TEXT], incremental=incremental) as (server, engine):
            wanted = generation([1, 2], stop_ids=[server.end_id], on_sampled=on_sampled)
            replies.append(await engine.generate(wanted))
            assert server.said[0].ids == replies[-1].ids.tolist()
    plain, streamed = replies
    assert_same(streamed, plain)
    assert told.ids == streamed.ids.tolist()
    sizes = [len(chunk) for chunk in told.chunks]
    assert set(sizes[:-1]) == ({1} if incremental else {1, 16})
    assert sizes[0] == 1


@both_forms
@pytest.mark.parametrize(
    "chunks", [[[5]], [[5], [5], [5]], [[5, 5], [5, 5], []], [[5], [], [6, 7], [5]], [[], [5, 6], [5, 6, 5, 6]], [[]]]
)
async def test_the_form_of_events_is_known_by_what_comes(chunks: list[list[int]], incremental: bool) -> None:
    told = SampledChunks()
    async with sending(events(chunks, incremental)) as engine:
        given = await engine.generate(generation([1], on_sampled=told))
    ids = [token for chunk in chunks for token in chunk]
    assert given.ids.tolist() == told.ids == ids
    assert given.logprobs is not None
    assert given.logprobs.tolist() == [-token / 10 for token in ids]
    assert told.chunks == [chunk for chunk in chunks if chunk]


@both_forms
@pytest.mark.parametrize(
    ("finish", "last"),
    [
        ({"type": "stop", "matched": "END"}, {}),
        ({"type": "stop", "matched": 7}, {"cached_tokens": 3}),
        ({"type": "length", "length": 3}, {"weight_version": "v1"}),
        ({"type": "abort", "message": "Aborted"}, {"weight_version": "v1"}),
        (
            {"type": "length", "length": 3},
            {
                "weight_version": "v1",
                "weight_versions": [
                    {"version": "v0", "start": 0, "end": 2},
                    {"version": "v1", "start": 2, "end": 3},
                ],
            },
        ),
        (
            {"type": "length", "length": 3},
            {"routed_experts": base64.b64encode(np.arange(16, dtype=np.int32).tobytes()).decode()},
        ),
    ],
    ids=["stop string", "stop id", "length", "abort", "segments", "experts"],
)
async def test_all_else_that_the_last_event_has_is_kept(finish: Json, last: Json, incremental: bool) -> None:
    ids = [5, 6, 7]
    given = []
    for every in ([event(ids, 3, finish, **last)], events([[5], [6], [7]], incremental, finish, **last)):
        async with sending(every) as engine:
            on_sampled = None if len(every) == 1 else SampledChunks()
            given.append(await engine.generate(generation([1, 2], stop=("END",), on_sampled=on_sampled)))
    assert_same(given[1], given[0])


async def test_events_are_asked_for_at_an_interval_that_bounds_what_is_repeated() -> None:
    params = []
    for limit, incremental in [(64, None), (32_768, None), (32_768, False), (32_768, True)]:
        seen: list[Json] = []
        async with sending(
            [event([5], 1, {"type": "length"})], seen, incremental_streaming_output=incremental
        ) as engine:
            await engine.generate(generation([1], max_tokens=limit, on_sampled=SampledChunks()))
            await engine.generate(generation([1], max_tokens=limit))
        streamed, plain = seen
        assert streamed.pop("stream") is True
        params.append(streamed["sampling_params"].pop("stream_interval", None))
        assert streamed == {**plain, "rid": "g-1"}
    assert params == [16, 256, 256, None]


@both_forms
async def test_an_event_that_contradicts_those_before_makes_all_of_it_a_fault(incremental: bool) -> None:
    told = SampledChunks()
    first = events([[5, 6], [7], [8]], incremental)[:2]
    async with sending([*first, event([5, 9, 7, 8], 4)]) as engine:
        with pytest.raises(ImplausibleReply, match="an event of 4 ids does not begin with the 3 before it") as caught:
            await engine.generate(generation([1], on_sampled=told))
    assert caught.value.given.ids.tolist() == told.ids == [5, 6, 7]


async def test_a_logprob_that_changes_after_it_was_sent_is_a_fault() -> None:
    changed = event([5, 6], 2, output_token_logprobs=[[-0.7, 5, None], [-0.6, 6, None]])
    async with sending([event([5], 1), changed]) as engine:
        with pytest.raises(ImplausibleReply, match="does not begin with the 1 before it"):
            await engine.generate(generation([1], on_sampled=SampledChunks()))


STOPPED: Json = {"type": "stop", "matched": "NaN happened"}
TRIPLE = [[-0.5, 8, None]]


@both_forms
@pytest.mark.parametrize(
    ("junk", "message"),
    [
        (b'{"output_ids": [5, 6', "JSON that cannot be read"),
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        (event([8], 9), "3 ids, then an event of 1, but completion_tokens 9"),
        (event([8], 4, output_token_logprobs=[]), "1 sampled ids but 0 logprobs"),
        (event([8], 4, output_token_logprobs=None), "1 sampled ids but 0 logprobs"),
        (event([9], 4, output_token_logprobs=TRIPLE), "output_ids and the ids of output_token_logprobs differ"),
        (event([-8], 4), "sampled id 0 is -8"),
        (event([8], 4, STOPPED), "it ended on 'NaN happened'"),
        (event([8], 4, {"type": "abort", "message": "no memory", "status_code": 503}), "no memory"),
        (event([8], 4, {"type": "boredom"}), "boredom"),
        (event([8], 4, {"type": "length"}, routed_experts="AAAA"), "routed_experts are not int32 values"),
        (event([8], 4, {"type": "length"}, weight_versions=[{"version": "v0", "start": 0, "end": 2}]), "cover 2 ids"),
    ],
)
async def test_what_was_told_is_kept_before_an_event_that_makes_no_sense(
    junk: Any, message: str, incremental: bool
) -> None:
    told = SampledChunks()
    async with sending([*events([[5], [6], [7], []], incremental)[:3], junk]) as engine:
        with pytest.raises(EngineDied, match=message) as caught:
            await engine.generate(generation([1], on_sampled=told))
    partial = caught.value.partial
    assert isinstance(partial, Generated)
    assert partial.ids.tolist() == told.ids
    assert told.ids[:3] == [5, 6, 7]
    assert (partial.finish, partial.side_arrays, partial.segments) == (Finish.ABORT, {}, ())
    assert (partial.first_version, partial.last_version) == ("v0", "v0")


@pytest.mark.parametrize(
    ("first", "message", "status"),
    [
        (b'{"output_ids": [5, 6', "JSON that cannot be read", None),
        ({"error": {"message": "the prompt is too long", "code": 400}}, "the prompt is too long", 400),
        (event([], 0, {"type": "abort", "message": "full", "status_code": 503}), "full", 503),
        (
            {"output_ids": [5], "meta_info": {"output_token_logprobs": [[-0.5, 5, None]]}},
            "completion_tokens None",
            None,
        ),
    ],
)
async def test_nonsense_before_the_first_id_is_a_fault(first: Any, message: str, status: int | None) -> None:
    told = SampledChunks()
    async with sending([first]) as engine:
        with pytest.raises(EngineFault, match=message) as caught:
            await engine.generate(generation([1], on_sampled=told))
    assert (caught.value.status, told.chunks) == (status, [])


@both_forms
async def test_an_abort_in_the_servers_queue_repeats_the_last_id_and_adds_nothing(incremental: bool) -> None:
    """SGLang ends a request so that was retracted; where an event waits to be sent, it joins the two."""
    begun = events([[5], [6], [7]], incremental)[:2]
    aborted = {"type": "abort", "message": "Abort in waiting queue"}
    known = {"output_token_logprobs": [[-0.5, 5, None], [-0.6, 6, None]]}
    joined = {"output_token_logprobs": [[-0.6, 6, None], [-0.5, 5, None], [-0.6, 6, None]]}
    for last in (
        event([6], 2, aborted, **known),
        event([6, 6], 2, aborted, **joined),
        {"meta_info": {"finish_reason": aborted}},
    ):
        told = SampledChunks()
        async with sending([*begun, last]) as engine:
            given = await engine.generate(generation([1], on_sampled=told))
        assert (given.finish, given.ids.tolist(), told.ids) == (Finish.ABORT, [5, 6], [5, 6])


async def test_an_abort_in_the_queue_brings_what_had_not_been_told() -> None:
    aborted = {"type": "abort", "message": "Abort in waiting queue"}
    last = event([7], 3, aborted, output_token_logprobs=[[-token / 10, token, None] for token in (5, 6, 7)])
    told = SampledChunks()
    async with sending([event([5], 1), last]) as engine:
        given = await engine.generate(generation([1], on_sampled=told))
    assert given.ids.tolist() == told.ids == [5, 6, 7]


async def test_events_that_bring_nothing_are_not_read_for_ever() -> None:
    told = SampledChunks()
    async with sending([event([5], 1), *[event([], 1)] * 1000]) as engine:
        with pytest.raises(EngineDied, match="events for 1 ids"):
            await engine.generate(generation([1], max_tokens=8, on_sampled=told))


@both_forms
@pytest.mark.parametrize(
    "mishap", [Mishap.DIES, Mishap.GOES, Mishap.TRUNCATED_LATE, Mishap.WRONG_LENGTHS_LATE], ids=lambda one: one.name
)
async def test_a_reply_goes_on_from_what_was_told_before_its_stream_broke(
    mishap: Mishap, incremental: bool, tokenizer: Tokenizer
) -> None:
    told = SampledChunks()
    async with scripted(tokenizer, [TEXT, "the next"], incremental=incremental) as (server, engine):
        server.mishaps[0] = mishap
        with pytest.raises(EngineDied) as caught:
            await engine.generate(generation([1, 2], stop_ids=[server.end_id], on_sampled=told))
        partial = caught.value.partial
        assert isinstance(partial, Generated)
        assert partial.ids.tolist() == told.ids
        assert partial.logprobs is not None
        assert 0 < len(partial.ids) == len(partial.logprobs)
        if server.said:
            assert partial.logprobs.tolist() == server.said[0].logprobs[: len(partial.ids)]
        await server.refuse()
        await server.listen()
        head = [1, 2, *told.ids]
        rest = await engine.generate(generation(head, name="g-2", stop_ids=[server.end_id], on_sampled=told))
        assert (tokenizer.decode(told.ids[:-1]), rest.finish) == (TEXT, Finish.STOP)
        after = [*head, *rest.ids]
        await engine.generate(generation(after, name="g-3", stop_ids=[server.end_id], on_sampled=told))
        assert tokenizer.decode(told.ids[:-1]).endswith("the next")
    assert server.violations == []


@both_forms
@pytest.mark.parametrize(
    "mishap",
    [Mishap.ABORTED, Mishap.ABORTED_AT_ONCE, Mishap.ABORTED_AT_STOP, Mishap.NO_STOP_ID],
    ids=lambda one: one.name,
)
async def test_a_reply_that_ends_otherwise_ends_so_streamed(
    mishap: Mishap, incremental: bool, tokenizer: Tokenizer
) -> None:
    told = SampledChunks()
    replies = []
    for on_sampled in (None, told):
        async with scripted(tokenizer, [TEXT], incremental=incremental) as (server, engine):
            server.mishaps[0] = mishap
            wanted = generation([1, 2], stop_ids=[server.end_id], on_sampled=on_sampled)
            replies.append(await engine.generate(wanted))
    assert_same(replies[1], replies[0])
    assert told.ids == replies[1].ids.tolist()


@both_forms
@pytest.mark.parametrize(
    "mishap",
    [Mishap.ERROR_500, Mishap.REFUSED, Mishap.BUSY, Mishap.TRUNCATED, Mishap.WRONG_LENGTHS],
    ids=lambda one: one.name,
)
async def test_an_engine_that_gives_nothing_fails_the_same_way_streamed(
    mishap: Mishap, incremental: bool, tokenizer: Tokenizer
) -> None:
    told = SampledChunks()
    faults = []
    async with scripted(tokenizer, ["fine"], incremental=incremental) as (server, engine):
        server.mishaps = {0: mishap, 1: mishap}
        for name, on_sampled in {"a": None, "b": told}.items():
            with pytest.raises(EngineFault) as caught:
                await engine.generate(generation([1], name=name, stop_ids=[server.end_id], on_sampled=on_sampled))
            faults.append((caught.value.status, caught.value.retry_after_s))
        given = await engine.generate(generation([1], name="c", stop_ids=[server.end_id], on_sampled=told))
    assert faults[0] == faults[1]
    assert tokenizer.decode(told.ids[:-1]) == "fine"
    assert given.ids.tolist() == told.ids


@both_forms
@pytest.mark.parametrize("mishap", IMPLAUSIBLE, ids=lambda one: one.name)
async def test_ids_that_cannot_have_been_sampled_are_never_told(
    mishap: Mishap, incremental: bool, tokenizer: Tokenizer
) -> None:
    told = SampledChunks()
    async with scripted(tokenizer, [TEXT, TEXT], incremental=incremental) as (server, engine):
        server.mishaps = {0: mishap}
        vocabulary = tokenizer.get_vocab_size()
        wanted = generation([1], stop_ids=[server.end_id], vocabulary=vocabulary, on_sampled=told)
        given = await engine.generate(wanted)
        with pytest.raises(ImplausibleReply):
            check_generated(engine, wanted, given)
        assert told.ids == given.ids[: len(told.ids)].tolist()
        assert len(told.ids) <= 64
        assert max(told.ids, default=0) < vocabulary
        assert server.end_id not in told.ids[:-1]
        again = await engine.generate(generation([1], name="b", stop_ids=[server.end_id], on_sampled=SampledChunks()))
        assert tokenizer.decode(again.ids[:-1].tolist()) == TEXT


@both_forms
async def test_an_abort_gives_what_was_sampled_and_told(incremental: bool, tokenizer: Tokenizer) -> None:
    first = asyncio.Event()
    told = SampledChunks(first.set)
    script = [Step(TEXT, token_delay_s=0.02)]
    async with scripted(tokenizer, script, incremental=incremental) as (server, engine):
        task = asyncio.create_task(engine.generate(generation([1, 2], stop_ids=[server.end_id], on_sampled=told)))
        await first.wait()
        await engine.abort("g-1")
        given = await task
        assert given.finish is Finish.ABORT
        assert given.ids.tolist() == told.ids == server.said[0].ids
        rest = await engine.generate(
            generation([1, 2, *told.ids], name="g-2", stop_ids=[server.end_id], on_sampled=told)
        )
    assert (rest.finish, tokenizer.decode(told.ids[:-1])) == (Finish.STOP, TEXT)
    assert server.violations == []


@both_forms
async def test_an_abort_that_a_frozen_engine_does_not_take_gives_what_was_told(
    incremental: bool, tokenizer: Tokenizer
) -> None:
    first = asyncio.Event()
    told = SampledChunks(first.set)
    async with scripted(tokenizer, [TEXT], incremental=incremental) as (server, engine):
        server.mishaps[0] = Mishap.FREEZES
        task = asyncio.create_task(engine.generate(generation([1, 2], stop_ids=[server.end_id], on_sampled=told)))
        await first.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.abort("g-1")
        given = await task
    assert given.finish is Finish.ABORT
    assert given.ids.tolist() == told.ids
    assert TEXT.startswith(tokenizer.decode(told.ids))


async def test_an_abort_before_the_first_token_is_empty(tokenizer: Tokenizer) -> None:
    told = SampledChunks()
    async with scripted(tokenizer, [TEXT]) as (server, engine):
        server.mishaps[0] = Mishap.HANG
        task = asyncio.create_task(engine.generate(generation([1], stop_ids=[server.end_id], on_sampled=told)))
        while not server.requests:
            await asyncio.sleep(0.01)
        await engine.abort("g-1")
        given = await task
    assert (given.finish, len(given.ids), told.chunks) == (Finish.ABORT, 0, [])


async def test_cancelling_the_caller_of_a_stream_aborts_in_the_engine(tokenizer: Tokenizer) -> None:
    first = asyncio.Event()
    async with scripted(tokenizer, [Step(TEXT, token_delay_s=0.02)]) as (server, engine):
        task = asyncio.create_task(
            engine.generate(generation([1], stop_ids=[server.end_id], on_sampled=SampledChunks(first.set)))
        )
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.close()
        assert server.aborted == ["g-1"]


async def test_weights_that_change_under_a_stream_leave_two_versions(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, [Step("a b c d", token_delay_s=0.01)]) as (server, engine):

        def change() -> None:
            server.version = "v1"

        given = await engine.generate(generation([1], stop_ids=[server.end_id], on_sampled=SampledChunks(change)))
    assert (given.first_version, given.last_version) == ("v0", "v1")


async def test_what_broke_off_has_the_segments_that_cover_it() -> None:
    spans = [{"version": "v0", "start": 0, "end": 1}, {"version": "v1", "start": 1, "end": 2}]
    async with sending([event([5], 1), event([5, 6], 2, weight_version="v1", weight_versions=spans)]) as engine:
        with pytest.raises(EngineDied, match="ended before the reply did") as caught:
            await engine.generate(generation([1], on_sampled=SampledChunks()))
    partial = caught.value.partial
    assert isinstance(partial, Generated)
    assert partial.segments == (Segment(0, 1, "v0", "v0"), Segment(1, 2, "v1", "v1"))


@both_forms
@pytest.mark.parametrize("kind", [LogprobKind.AFTER_TEMPERATURE, LogprobKind.RAW])
async def test_rolltapes_own_server_streams_what_it_gives_unstreamed(kind: LogprobKind, incremental: bool) -> None:
    told = SampledChunks()
    async with TinyEngine(shipped_model(), "w1") as tiny_engine:
        server = EngineServer(tiny_engine, shipped_model(), kind=kind, incremental=incremental)
        runner = web.AppRunner(server.app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
        settings: Json = {"temperature": 1.0, "seed": 5, "max_tokens": 50}
        prompt = list(range(20, 60))
        plain = await engine.generate(generation(prompt, **settings))
        streamed = await engine.generate(generation(prompt, name="b", on_sampled=told, **settings))
        await engine.close()
        await runner.cleanup()
    assert_same(streamed, plain)
    assert told.ids == plain.ids.tolist()
    assert len(told.ids) == 50
    assert incremental or all(len(chunk) >= 16 for chunk in told.chunks[1:-1])
