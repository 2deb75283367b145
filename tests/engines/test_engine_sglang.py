"""SGLang's protocol from the gateway's side: against the scripted engine and against `rolltape engine`."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineDied, EngineFault, EngineUnreachable
from rolltape.gateway.engines.protocol import Engine, Generated
from rolltape.gateway.engines.sglang.engine import SglangEngine
from rolltape.records.turn import Finish, LogprobKind, Segment
from rolltape.tiny import Sampling, TinyEngine, shipped_model
from rolltape.tiny.server import EngineServer
from scripted_engine import Mishap, Script, ScriptedEngine, Step
from tiny.checkpoints import write_checkpoint


@contextlib.asynccontextmanager
async def scripted(tokenizer: Tokenizer, script: Script, **settings: Any) -> AsyncIterator[tuple[ScriptedEngine, Any]]:
    async with ScriptedEngine(tokenizer, script, **settings) as server:
        engine: Engine = SglangEngine(server.url)
        try:
            yield server, engine
        finally:
            await engine.close()


@contextlib.asynccontextmanager
async def answering(answer: Any, seen: list[Any] | None = None, **options: Any) -> AsyncIterator[SglangEngine]:
    """An engine whose `/generate` answers just that: bytes as they are, else as JSON; a callable gets the body."""

    async def generate(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        if seen is not None:
            seen.append(body)
        given = answer(body) if callable(answer) else answer
        data = given if isinstance(given, bytes) else msgspec.json.encode(given)
        return web.Response(body=data, content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "v0"})

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/generate", generate)
    for path in ("/health", "/get_model_info", "/get_server_info", "/v1/models"):
        app.router.add_get(path, info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    options = options or {"routed_experts": True}
    engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", **options)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


def answer(ids: list[int], **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(ids)},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "v0",
            **meta,
        },
    }


async def test_ids_logprobs_and_all_else_come_as_the_server_gave_them(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, ["hello there", "and again"]) as (server, engine):
        prompt = tokenizer.encode("say hello").ids
        given: Generated = await engine.generate(generation(prompt, stop_ids=[server.end_id]))
        again = await engine.generate(generation([*prompt, *given.ids], name="g-2", stop_ids=[server.end_id]))
    said = server.said[0]
    assert given.ids.tolist() == said.ids
    assert given.ids[-1] == server.end_id
    assert given.logprobs is not None
    assert given.logprobs.tolist() == said.logprobs
    assert given.finish is Finish.STOP
    assert (given.first_version, given.last_version) == ("v0", "v0")
    assert given.logprob_kind is LogprobKind.AFTER_TEMPERATURE
    assert again.cached_tokens == len(prompt) + len(given.ids)
    assert server.violations == []


async def test_the_scripted_engine_splits_unusually_and_tells_of_prompts_that_depart(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox"
    async with scripted(tokenizer, [text, "more"]) as (server, engine):
        given = await engine.generate(generation([5, 6], stop_ids=[server.end_id]))
        assert given.ids[:-1].tolist() != tokenizer.encode(text).ids
        assert tokenizer.decode(given.ids[:-1].tolist()) == text
        retokenized = [5, 6, *tokenizer.encode(text).ids, server.end_id]
        await engine.generate(generation(retokenized, name="g-2", stop_ids=[server.end_id]))
    assert len(server.violations) == 1
    assert server.violations[0].startswith("request 1 departs at id ")


async def test_facts_are_the_servers(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, [], version="v7", context=4096) as (_, engine):
        facts = await engine.facts()
    assert (facts.model, facts.context, facts.version) == ("scripted", 4096, "v7")


async def test_every_parameter_is_sent_and_what_nobody_decided_is_neutral() -> None:
    seen: list[Any] = []
    async with answering(answer([1]), seen) as engine:
        await engine.generate(generation([1, 2], stop_ids=[7, 8]))
        await engine.generate(generation([1, 2], temperature=0.5, top_k=3, min_p=0.1, seed=9, stop=("END",)))
    plain, full = (body["sampling_params"] for body in seen)
    assert plain == {
        "max_new_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [7, 8],
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    assert (full["temperature"], full["top_k"], full["min_p"]) == (0.5, 3, 0.1)
    assert (full["sampling_seed"], full["stop"]) == (9, ["END"])
    assert (seen[0]["return_logprob"], seen[0]["logprob_start_len"]) == (True, -1)


async def test_abort_returns_what_there_is_and_the_rest_can_be_asked_for(tokenizer: Tokenizer) -> None:
    script = [Step("one two three four five six seven eight", token_delay_s=0.02)]
    async with scripted(tokenizer, script) as (server, engine):
        task = asyncio.create_task(engine.generate(generation([1, 2], stop_ids=[server.end_id])))
        await asyncio.sleep(0.15)
        await engine.abort("g-1")
        given = await task
        assert given.finish is Finish.ABORT
        assert 0 < len(given.ids) == len(given.logprobs)
        rest = await engine.generate(generation([1, 2, *given.ids], name="g-2", stop_ids=[server.end_id]))
    assert rest.finish is Finish.STOP
    assert tokenizer.decode([*given.ids, *rest.ids[:-1]]) == script[0].text
    assert server.violations == []


async def test_cancelling_the_caller_aborts_in_the_engine(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, ["never"]) as (server, engine):
        server.mishaps[0] = Mishap.HANG
        task = asyncio.create_task(engine.generate(generation([1, 2], stop_ids=[server.end_id])))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.close()
        assert server.aborted == ["g-1"]


async def test_weights_that_change_under_a_reply_leave_two_versions(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, [Step("a b c d", token_delay_s=0.05), "e"]) as (server, engine):
        task = asyncio.create_task(engine.generate(generation([1, 2], stop_ids=[server.end_id])))
        await asyncio.sleep(0.1)
        server.version = "v1"
        given = await task
        assert (given.first_version, given.last_version) == ("v0", "v1")
        after = await engine.generate(generation([1, 2, *given.ids], name="g-2", stop_ids=[server.end_id]))
        assert (after.first_version, after.last_version) == ("v1", "v1")


async def test_a_version_that_was_not_known_at_the_start_is_asked_for_and_an_update_is_seen_by_facts(
    tokenizer: Tokenizer,
) -> None:
    async with scripted(tokenizer, ["a", "b"], version="v3") as (server, engine):
        given = await engine.generate(generation([1], stop_ids=[server.end_id]))
        assert (given.first_version, given.last_version) == ("v3", "v3")
        server.version = "v4"
        await engine.facts()
        given = await engine.generate(generation([1, *given.ids], name="g-2", stop_ids=[server.end_id]))
        assert (given.first_version, given.last_version) == ("v4", "v4")


async def test_spans_of_weight_versions_become_segments() -> None:
    spans = [{"version": "v0", "start": 0, "end": 2}, {"version": "v1", "start": 2, "end": 3}]
    async with answering(answer([1, 2, 3], weight_versions=spans, weight_version="v1")) as engine:
        given = await engine.generate(generation([1]))
    assert given.segments == (Segment(0, 2, "v0", "v0"), Segment(2, 3, "v1", "v1"))
    assert (given.first_version, given.last_version) == ("v0", "v1")
    async with answering(answer([1, 2, 3, 4], weight_versions=spans)) as engine:
        with pytest.raises(EngineFault, match="cover 3 ids, not the 4"):
            await engine.generate(generation([1]))


async def test_routed_experts_come_whole_first_and_then_only_for_new_tokens() -> None:
    seen: list[Any] = []

    def routed(body: dict[str, Any]) -> Any:
        tokens = len(body["input_ids"]) + 2 - 1
        rows = np.arange(tokens * 4, dtype=np.int32).reshape(tokens, 4)[body["routed_experts_start_len"] :]
        return answer([1, 2], routed_experts=base64.b64encode(rows.tobytes()).decode())

    async with answering(routed, seen) as engine:
        first = await engine.generate(generation([1, 2, 3]))
        later = await engine.generate(generation([1, 2, 3, 1, 2, 9], held_tokens=4))
    experts = first.side_arrays["routed_experts"]
    assert (experts["start"], experts["values"].shape) == (0, (4, 4))
    assert seen[1]["routed_experts_start_len"] == 4
    experts = later.side_arrays["routed_experts"]
    assert (experts["start"], experts["values"].tolist()) == (4, [[16, 17, 18, 19], [20, 21, 22, 23], [24, 25, 26, 27]])


async def test_a_server_that_always_gives_all_routed_experts_is_noticed() -> None:
    def routed(body: dict[str, Any]) -> Any:
        tokens = len(body["input_ids"]) + 1
        return answer([1, 2], routed_experts=base64.b64encode(np.arange(tokens * 4, dtype=np.int32).tobytes()).decode())

    async with answering(routed) as engine:
        await engine.generate(generation([1, 2, 3]))
        later = await engine.generate(generation([1, 2, 3, 1, 2, 9], held_tokens=4))
    experts = later.side_arrays["routed_experts"]
    assert (experts["start"], experts["values"][0].tolist()) == (4, [16, 17, 18, 19])


def kept(*rows: list[int]) -> dict[str, str]:
    ends = np.cumsum([0, *map(len, rows)])
    values = [token for row in rows for token in row]
    return {
        "top_p_token_ids": base64.b64encode(np.array(values, np.int32).tobytes()).decode(),
        "top_p_token_offsets": base64.b64encode(ends.astype(np.int32).tobytes()).decode(),
    }


async def test_kept_ids_are_asked_for_where_sampling_is_cut_and_logprobs_are_then_after_truncation() -> None:
    seen: list[Any] = []

    def cut(body: dict[str, Any]) -> Any:
        asked = "custom_params" in body["sampling_params"]
        return answer([1, 2], **(kept([1, 5], [2]) if asked else {}))

    async with answering(cut, seen, kept_ids=True) as engine:
        given = await engine.generate(generation([7, 8, 9], top_p=0.9))
        whole = await engine.generate(generation([7, 8, 9]))
    assert seen[0]["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True}
    side = given.side_arrays["kept_ids"]
    assert (side["start"], side["values"].tolist(), side["counts"].tolist()) == (3, [1, 5, 2], [2, 1])
    assert given.logprob_kind is LogprobKind.AFTER_TRUNCATION
    assert (dict(whole.side_arrays), whole.logprob_kind) == ({}, LogprobKind.AFTER_TEMPERATURE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (answer([1, 2]), "no top_p_token_ids, though kept ids were asked for; use SGLang with slime's patch"),
        (answer([1, 2], **kept([1])), "top_p_token_offsets are of 1 ids, but 2 were sampled"),
        (answer([1, 2], **{**kept([1], [2]), "top_p_token_ids": "AAAA"}), "top_p_token_ids are not int32 values"),
        (
            answer([1], **{**kept([1]), "top_p_token_ids": kept([1, 2])["top_p_token_ids"]}),
            "top_p_token_offsets do not divide the 2 top_p_token_ids",
        ),
    ],
)
async def test_kept_ids_that_cannot_be_those_of_the_reply_are_a_fault(given: Any, message: str) -> None:
    async with answering(given, kept_ids=True) as engine:
        with pytest.raises(EngineFault, match=message):
            await engine.generate(generation([1], top_k=4))


async def test_a_reply_that_broke_off_comes_without_kept_ids() -> None:
    async with answering(answer([1, 2], finish_reason={"type": "abort"}), kept_ids=True) as engine:
        given = await engine.generate(generation([1], top_p=0.5))
    assert (given.finish, dict(given.side_arrays)) == (Finish.ABORT, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (answer([1, -2]), "sampled id 1 is -2"),
        (answer([1, 2], output_token_logprobs=[[-0.5, 1, None]]), "2 sampled ids but 1 logprobs"),
        (answer([1], output_token_logprobs=[[-0.5, 2, None]]), "differ"),
        (answer([1], output_token_logprobs=None), "1 sampled ids but no output_token_logprobs"),
        (answer([1], finish_reason={"type": "stop", "matched": "NaN happened"}), "it ended on 'NaN happened'"),
        (answer([1], finish_reason={"type": "abort", "message": "no memory", "status_code": 503}), "no memory"),
        (answer([1], finish_reason={"type": "boredom"}), "boredom"),
        (answer([1], routed_experts="AAAA"), "routed_experts are not int32 values"),
        (b'{"output_ids": [1, 2', "JSON that cannot be read"),
        (b'{"meta_info": 5}', "JSON that cannot be read"),
        (b"", "JSON that cannot be read"),
        (b'{"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON that cannot be read"),
    ],
)
async def test_an_answer_that_cannot_be_one_is_a_fault(given: Any, message: str) -> None:
    async with answering(given) as engine:
        with pytest.raises(EngineFault, match=message):
            await engine.generate(generation([1]))


@pytest.mark.parametrize("likely", [-7, 2**31, 2**40])
async def test_a_likely_id_that_no_vocabulary_has_is_a_fault(likely: int) -> None:
    given = answer([1], output_top_logprobs=[[[-0.1, likely, None]]])
    async with answering(given) as engine:
        with pytest.raises(EngineFault, match=f"{likely} is listed as likely at sampled id 0, but is not an id"):
            await engine.generate(generation([1], top_logprobs=1))


async def test_a_missing_logprob_is_nan_and_not_made_up() -> None:
    triples = [[-0.5, 1, None], [None, 2, None]]
    async with answering(answer([1, 2], output_token_logprobs=triples)) as engine:
        given = await engine.generate(generation([1]))
    assert given.logprobs is not None
    np.testing.assert_array_equal(given.logprobs, [-0.5, np.nan])


async def test_an_abort_before_the_first_token_is_empty() -> None:
    empty = {"meta_info": {"finish_reason": {"type": "abort", "message": "Abort before prefill"}}}
    async with answering(empty) as engine:
        given = await engine.generate(generation([1]))
    assert (given.finish, len(given.ids), given.last_version) == (Finish.ABORT, 0, None)


@pytest.mark.parametrize(
    ("mishap", "error"),
    [
        (Mishap.ERROR_500, EngineFault),
        (Mishap.TRUNCATED, EngineFault),
        (Mishap.WRONG_LENGTHS, EngineFault),
        (Mishap.DIES, EngineDied),
    ],
)
async def test_mishaps_are_told_apart_and_the_next_request_works(
    mishap: Mishap, error: type[Exception], tokenizer: Tokenizer
) -> None:
    async with scripted(tokenizer, ["fine"]) as (server, engine):
        server.mishaps[0] = mishap
        with pytest.raises(error):
            await engine.generate(generation([1], stop_ids=[server.end_id]))
        given = await engine.generate(generation([1], name="g-2", stop_ids=[server.end_id]))
        assert tokenizer.decode(given.ids.tolist()[:-1]) == "fine"
    assert server.violations == []


async def test_an_errors_own_message_is_passed_on(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, ["fine"]) as (server, engine):
        server.mishaps[0] = Mishap.ERROR_500
        with pytest.raises(EngineFault, match="/generate answered 500: the script says so"):
            await engine.generate(generation([1], stop_ids=[server.end_id]))


async def test_a_refused_connection_means_that_nothing_was_begun(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, ["fine"]) as (server, engine):
        await engine.facts()
        await server.refuse()
        await asyncio.sleep(0.05)  # until this side, too, knows that the connection is closed
        with pytest.raises(EngineUnreachable):
            await engine.generate(generation([1], stop_ids=[server.end_id]))
        with pytest.raises(EngineUnreachable):
            await engine.facts()
        await server.listen()
        assert (await engine.generate(generation([1], stop_ids=[server.end_id]))).finish is Finish.STOP


async def test_an_engine_that_goes_away_in_mid_reply_has_died(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, ["never"]) as (server, engine):
        server.mishaps[0] = Mishap.HANG
        task = asyncio.create_task(engine.generate(generation([1], stop_ids=[server.end_id])))
        while not server.requests:
            await asyncio.sleep(0.01)
        await server.refuse()
        with pytest.raises(EngineDied):
            await task


@pytest.mark.parametrize("kind", [LogprobKind.AFTER_TEMPERATURE, LogprobKind.RAW])
async def test_rolltapes_own_server_gives_what_the_engine_behind_it_gives(kind: LogprobKind) -> None:
    async with TinyEngine(shipped_model(), "w1") as tiny_engine:
        runner = web.AppRunner(EngineServer(tiny_engine, shipped_model(), kind=kind).app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
        facts = await engine.facts()
        prompt = list(range(20, 60))
        stop_ids = tiny_engine.config.eos_ids
        given = await engine.generate(generation(prompt, temperature=0.8, seed=3, stop_ids=stop_ids, max_tokens=30))
        own = await tiny_engine.generate(prompt, Sampling(temperature=0.8, seed=3, max_tokens=30, stop_ids=stop_ids))
        await engine.close()
        await runner.cleanup()
    assert (facts.version, facts.context) == ("w1", tiny_engine.context)
    assert given.ids.tolist() == own.ids.tolist()
    assert given.logprobs is not None
    np.testing.assert_allclose(given.logprobs, own.logprobs(kind), atol=1e-4)
    assert (given.logprob_kind, given.first_version, given.last_version) == (kind, "w1", "w1")
    assert "seed" in engine.applies


async def test_it_loads_weights_of_the_same_shape_and_replies_have_their_version(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=1)
    async with TinyEngine(first, "w0") as tiny_engine:
        runner = web.AppRunner(EngineServer(tiny_engine, first).app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await engine.load_weights(str(second), "w1")
        with pytest.raises(EngineFault, match=r"other: .*does not fit"):
            await engine.load_weights(str(other), "w2")
        given = await engine.generate(generation([5, 6, 7], seed=3, max_tokens=20))
        await engine.close()
        await runner.cleanup()
    async with TinyEngine(second) as own:
        expected = await own.generate([5, 6, 7], Sampling(seed=3, max_tokens=20, stop_ids=()))
    assert given.ids.tolist() == expected.ids.tolist()
    assert (given.first_version, given.last_version) == ("w1", "w1")


async def test_cancelling_ends_the_request_in_rolltapes_own_server() -> None:
    async with TinyEngine(shipped_model(), "w1") as tiny_engine:
        runner = web.AppRunner(EngineServer(tiny_engine, shipped_model()).app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
        task = asyncio.create_task(engine.generate(generation([5, 6], max_tokens=2000)))
        while not tiny_engine.in_flight:
            await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(5):
            while tiny_engine.in_flight:
                await asyncio.sleep(0.01)
        await engine.close()
        await runner.cleanup()


def test_a_key_is_not_in_any_text_about_the_engine() -> None:
    engine = SglangEngine("http://127.0.0.1:1", api_key="secret-key")
    assert "secret" not in repr(engine) + engine.name


async def test_a_wrong_key_is_told(tokenizer: Tokenizer) -> None:
    async with TinyEngine(shipped_model()) as tiny_engine:
        runner = web.AppRunner(EngineServer(tiny_engine, shipped_model(), api_key="right").app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        wrong, right = SglangEngine(url, api_key="wrong"), SglangEngine(url, api_key="right")
        with pytest.raises(EngineFault, match="answered 401"):
            await wrong.facts()
        assert (await right.facts()).version == "0"
        await wrong.close()
        await right.close()
        await runner.cleanup()
