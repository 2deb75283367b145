"""The server speaks SGLang's protocol over a real socket."""

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from rolltape.tiny import Sampling, TinyEngine
from rolltape.tiny.server import EngineServer

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
ENDLESS = {"sampling_seed": 1, "max_new_tokens": 4000, "ignore_eos": True}


class Client:
    """A server on a free port, and a session that talks to it."""

    def __init__(self, session: aiohttp.ClientSession, engine: TinyEngine, folder: Path) -> None:
        self.session, self.engine, self.folder = session, engine, folder

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        async with self.session.post(path, data=data) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text) if response.content_type == "application/json" else text

    async def get(self, path: str, *, status: int = 200) -> Any:
        async with self.session.get(path) as response:
            assert response.status == status
            return await response.json() if response.content_type == "application/json" else await response.text()

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The events of a stream, the [DONE] at its end included."""
        async with self.session.post("/generate", json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                if line.startswith(b"data: "):
                    text = line[6:].strip()
                    yield text.decode() if text == b"[DONE]" else json.loads(text)

    async def idle(self) -> None:
        """Until nothing is in flight."""
        async with asyncio.timeout(10):
            while self.engine.in_flight or self.engine._batch.busy:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    async with TinyEngine(folder, "default") as engine:
        runner = web.AppRunner(
            EngineServer(engine, folder, **settings).app(), handler_cancellation=True, shutdown_timeout=1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield Client(session, engine, folder)
        await runner.cleanup()


async def test_ids_in_and_ids_logprobs_version_and_reason_out(small: Path) -> None:
    async with served(small) as client:
        answer = await client.post(
            "/generate",
            {
                "input_ids": [1, 2, 3],
                "rid": "mine",
                "return_logprob": True,
                "sampling_params": {"temperature": 0.7, "max_new_tokens": 5, "sampling_seed": 4, "ignore_eos": True},
            },
        )
        sampling = Sampling(temperature=0.7, max_tokens=5, seed=4, stop_ids=())
        reply = await client.engine.generate([1, 2, 3], sampling)
    assert answer["output_ids"] == reply.ids.tolist()
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 5, 0)
    assert meta["weight_version"] == "default"
    assert meta["input_token_logprobs"] == [[None, 3, None]]
    values, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
    assert list(ids) == answer["output_ids"]
    assert list(values) == [pytest.approx(value, abs=1e-6) for value in reply.tempered_logprobs.tolist()]
    assert set(texts) == {None}
    assert meta["output_token_logprobs_length"] == 5


def int32s(encoded: str) -> list[int]:
    values: list[int] = np.frombuffer(base64.b64decode(encoded), np.int32).tolist()
    return values


async def test_the_ids_that_top_p_kept_come_with_the_end_and_logprobs_are_among_them(small: Path) -> None:
    params = {"max_new_tokens": 6, "sampling_seed": 4, "ignore_eos": True, "top_p": 0.4, "temperature": 0.8}
    asked = {**params, "custom_params": {"return_top_p_token_ids": True}}
    async with served(small) as client:
        body = {"input_ids": [1, 2, 3], "return_logprob": True, "top_logprobs_num": client.engine.config.vocab_size}
        plain = await client.post("/generate", {**body, "sampling_params": params})
        answer = await client.post("/generate", {**body, "sampling_params": asked})
        events = [event async for event in client.events({**body, "sampling_params": asked}) if event != "[DONE]"]
        whole = {**asked, "top_p": 1.0}
        uncut = await client.post("/generate", {**body, "sampling_params": whole})
        greedy = await client.post("/generate", {**body, "sampling_params": {**asked, "temperature": 0}})
    assert answer["output_ids"] == plain["output_ids"]
    meta = answer["meta_info"]
    ids, ends = int32s(meta["top_p_token_ids"]), int32s(meta["top_p_token_offsets"])
    assert len(ends) == 7
    for at, ((value, token, _), top) in enumerate(
        zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    ):
        row = ids[ends[at] : ends[at + 1]]
        probabilities = {one: math.exp(logprob) for logprob, one, _ in top}
        share = sum(probabilities[one] for one in row)
        assert token in row
        assert share >= 0.4 > share - min(probabilities[one] for one in row)
        assert value == pytest.approx(math.log(probabilities[token] / share), abs=1e-5)
    assert ["top_p_token_ids" in event["meta_info"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["meta_info"]["top_p_token_ids"] == meta["top_p_token_ids"]
    assert "top_p_token_ids" not in uncut["meta_info"]
    assert int32s(greedy["meta_info"]["top_p_token_ids"]) == greedy["output_ids"]


async def test_text_in_and_text_out_and_raw_logprobs_on_request(small: Path) -> None:
    from rolltape.records.turn import LogprobKind

    async with served(small, kind=LogprobKind.RAW) as client:
        body = {
            "text": "one two",
            "sampling_params": {"temperature": 0.7, "sampling_seed": 1, "max_new_tokens": 6, "ignore_eos": True},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        }
        answer = await client.post("/generate", body)
        texts = client.engine.texts
        assert texts is not None
        prompt = texts.encode("one two")
        sampling = Sampling(temperature=0.7, seed=1, max_tokens=6, stop_ids=(), prompt_logprobs_from=0, top_logprobs=2)
        reply = await client.engine.generate(prompt, sampling)
    meta = answer["meta_info"]
    assert answer["text"] == texts.decode(reply.ids.tolist(), skip_special=True)
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
        [pytest.approx(value, abs=1e-6), token]
        for value, token in zip(reply.raw_logprobs.tolist(), reply.ids.tolist(), strict=True)
    ]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt
    assert [entry[2] for entry in meta["input_token_logprobs"]] == [texts.decode([token]) for token in prompt]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_token_logprobs"][1][0] == pytest.approx(reply.prompt_logprobs[1], abs=1e-6)
    assert [[entry[1] for entry in top] for top in meta["output_top_logprobs"]] == [
        [entry.id for entry in top] for top in reply.top_logprobs
    ]
    assert meta["input_top_logprobs"][0] is None


async def test_a_list_of_prompts_gets_a_list_of_answers_in_its_order(small: Path) -> None:
    async with served(small) as client:
        prompts = [[1, 2], [3], [4, 5, 6]]
        answers = await client.post("/generate", {"input_ids": prompts, "rid": "r", "sampling_params": GREEDY})
        alone = [await client.post("/generate", {"input_ids": ids, "sampling_params": GREEDY}) for ids in prompts]
        assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]
        assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1", "r_2"]
        texts = await client.post(
            "/generate",
            {"text": ["one", "two"], "sampling_params": [GREEDY, {**GREEDY, "max_new_tokens": 3}]},
        )
        assert [len(answer["output_ids"]) for answer in texts] == [12, 3]


async def test_stop_ids_and_stop_strings_are_matched_and_trimmed_from_the_text(small: Path) -> None:
    async with served(small) as client:
        params = {"sampling_seed": 5, "max_new_tokens": 60}
        free = await client.post("/generate", {"input_ids": [1], "sampling_params": {**params, "ignore_eos": True}})
        texts = client.engine.texts
        assert texts is not None
        ids, text = free["output_ids"], free["text"]
        place = next(at for at in range(10, 60) if ids[at] not in ids[:at] and texts.decode([ids[at]]).isalnum())
        by_id = {**params, "stop_token_ids": [ids[place]]}
        answer = await client.post("/generate", {"input_ids": [1], "sampling_params": by_id})
        assert answer["output_ids"] == ids[: place + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
        assert answer["text"] == texts.decode(ids[:place], skip_special=True)
        whole = await client.post("/generate", {"input_ids": [1], "sampling_params": {**by_id, "no_stop_trim": True}})
        assert whole["text"] == texts.decode(ids[: place + 1], skip_special=True)

        stop = next(text[at : at + 3] for at in range(8, len(text) - 3) if text[at : at + 3].isascii())
        by_text = {**params, "ignore_eos": True, "stop": stop}
        answer = await client.post("/generate", {"input_ids": [1], "sampling_params": by_text})
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_equals_the_whole_answer(small: Path, incremental: bool) -> None:
    async with served(small, incremental=incremental) as client:
        body = {
            "input_ids": [1, 2],
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 2, "stop": ["zzz", "e"]},
        }
        whole = await client.post("/generate", body)
        events = [event async for event in client.events(body)]
    assert events.pop() == "[DONE]"
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [whole["meta_info"]["finish_reason"]]
    assert [event["meta_info"]["completion_tokens"] for event in events] == sorted(
        event["meta_info"]["completion_tokens"] for event in events
    )
    if incremental:
        assert "".join(event["text"] for event in events) == whole["text"]
        assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
        logprobs = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
        assert logprobs == whole["meta_info"]["output_token_logprobs"]
        return
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    for earlier, later in pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]


@pytest.mark.parametrize("incremental", [False, True])
async def test_an_event_after_the_first_brings_as_many_ids_as_the_interval(small: Path, incremental: bool) -> None:
    async with served(small, incremental=incremental) as client:
        params = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 2}
        whole = await client.post("/generate", {"input_ids": [1], "sampling_params": params})
        body = {"input_ids": [1], "sampling_params": {**params, "stream_interval": 15}}
        events = [event async for event in client.events(body)][:-1]
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert all(later - earlier >= 15 for earlier, later in pairwise(counts[:-1]))
        assert counts[-1] == 200
        ids = [token for event in events for token in event["output_ids"]] if incremental else events[-1]["output_ids"]
        assert ids == whole["output_ids"]
        none = {"input_ids": [1], "sampling_params": {"stream_interval": 0}}
        assert "at least 1" in (await client.post("/generate", none, status=400))["error"]["message"]


async def test_a_streamed_list_says_which_prompt_each_event_is_for(small: Path) -> None:
    async with served(small) as client:
        prompts = [[1], [2], [3]]
        events = [event async for event in client.events({"input_ids": prompts, "sampling_params": GREEDY})]
        last = {event["index"]: event["output_ids"] for event in events if event != "[DONE]"}
        whole = await client.post("/generate", {"input_ids": prompts, "sampling_params": GREEDY})
        assert [last[index] for index in range(3)] == [answer["output_ids"] for answer in whole]


async def test_an_abort_ends_a_stream_with_what_it_has(small: Path) -> None:
    async with served(small) as client:
        events = []
        async for event in client.events({"input_ids": [1], "rid": "long", "sampling_params": ENDLESS}):
            events.append(event)
            if len(events) == 3:
                await client.post("/abort_request", {"rid": "long"})
        assert events.pop() == "[DONE]"
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert 3 <= len(events[-1]["output_ids"]) < 4000
        await client.idle()


async def test_abort_all_ends_unstreamed_requests_too(small: Path) -> None:
    async with served(small) as client:
        task = asyncio.create_task(client.post("/generate", {"input_ids": [[1], [2]], "sampling_params": ENDLESS}))
        while client.engine.in_flight < 2:
            await asyncio.sleep(0.01)
        await client.post("/abort_request", {"abort_all": True})
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in await task] == ["abort", "abort"]
        await client.post("/abort_request", {"rid": "unknown"})
        await client.post("/abort_request", {}, status=400)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_the_engine(small: Path, stream: bool) -> None:
    async with served(small) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.session._base_url.port)  # type: ignore[union-attr]
        body = json.dumps({"input_ids": [[1], [2]], "sampling_params": ENDLESS, "stream": stream}).encode()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        while client.engine.in_flight < 2:
            await asyncio.sleep(0.01)
        if stream:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        await client.idle()


async def test_weights_are_updated_from_disk_and_replies_say_which(small: Path, small_next: Path) -> None:
    async with served(small) as client:
        before = await client.post("/generate", {"input_ids": [1], "sampling_params": GREEDY})
        running = asyncio.create_task(client.post("/generate", {"input_ids": [1], "sampling_params": ENDLESS}))
        while not client.engine.in_flight:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        update = {"model_path": str(small_next), "weight_version": "step-1"}
        done = await client.post("/update_weights_from_disk", update)
        assert (done["success"], done["num_paused_requests"]) == (True, 1)
        after = await client.post("/generate", {"input_ids": [1], "sampling_params": GREEDY})
        assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("default", "step-1")
        assert before["output_ids"] != after["output_ids"]
        assert not running.done()
        await client.post(
            "/update_weights_from_disk", {**update, "weight_version": "step-2", "abort_all_requests": True}
        )
        # Only replies under way when the weights change are of the kind that ends; the older one goes with them.
        aborted = await running
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        assert aborted["meta_info"]["weight_version"] == "default"
        assert (await client.get("/get_weight_version")) == {"weight_version": "step-2"}
        failed = await client.post("/update_weights_from_disk", {"model_path": "/nowhere"}, status=400)
        assert failed["success"] is False
        assert "/nowhere" in failed["message"]
        await client.post("/update_weight_version", {"new_version": "step-3"})
        assert (await client.get("/model_info"))["weight_version"] == "step-3"


async def test_cached_tokens_are_those_of_earlier_prompts_until_the_cache_is_flushed(small: Path) -> None:
    async with served(small) as client:
        body = {"input_ids": list(range(300)), "return_logprob": True, "sampling_params": GREEDY}

        async def cached() -> int:
            count: int = (await client.post("/generate", body))["meta_info"]["cached_tokens"]
            return count

        assert [await cached(), await cached()] == [0, 256]
        await client.post("/flush_cache")
        assert [await cached(), await cached()] == [0, 256]


async def test_pausing_holds_new_requests_until_told_to_continue(small: Path) -> None:
    async with served(small) as client:
        running = asyncio.create_task(client.post("/generate", {"input_ids": [1], "sampling_params": ENDLESS}))
        while not client.engine.in_flight:
            await asyncio.sleep(0.01)
        await client.post("/flush_cache", status=400)
        await client.post("/pause_generation", {})
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        await client.post("/flush_cache")
        waiting = asyncio.create_task(client.post("/generate", {"input_ids": [1], "sampling_params": GREEDY}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.get("/health_generate")
        await client.post("/continue_generation", {})
        assert len((await waiting)["output_ids"]) == 12
        await client.post("/pause_generation", {"mode": "sideways"}, status=400)


async def test_it_says_what_it_serves(small: Path) -> None:
    async with served(small, model_name="tiny") as client:
        await client.get("/health")
        await client.get("/health_generate")
        info = await client.get("/get_model_info")
        assert (info["model_path"], info["is_generation"]) == (str(small), True)
        models = await client.get("/v1/models")
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 4096)
        assert (await client.get("/server_info"))["logprob_kind"] == "after_temperature"
        assert "error" in await client.get("/nothing", status=404)
        assert "error" in await client.get("/generate", status=405)


MALFORMED: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b"null",
    b"[]",
    b"1",
    b'"text"',
    {},
    {"input_ids": None},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [[1], []]},
    {"input_ids": [1, [2]]},
    {"input_ids": "1"},
    {"input_ids": [1.5]},
    {"input_ids": [10**30]},
    {"input_ids": [-1]},
    {"input_ids": [320]},
    {"input_ids": [1] * 5000},
    {"input_ids": {"a": 1}},
    {"input_ids": [1], "text": "both"},
    {"text": ""},
    {"text": []},
    {"text": ["", "a"]},
    {"text": 3},
    {"input_ids": [1], "rid": 3},
    {"input_ids": [1], "rid": ["a", "b"]},
    {"input_ids": [[1], [2]], "rid": ["same", "same"]},
    {"input_ids": [[1], [2]], "sampling_params": [{}]},
    {"input_ids": [1], "stream": "yes"},
    {"input_ids": [1], "sampling_params": "hot"},
    {"input_ids": [1], "image_data": "a.png"},
    {"input_ids": [1], "return_logprob": True, "logprob_start_len": 7},
    {"input_ids": [1], "return_logprob": True, "top_logprobs_num": -1},
    *(
        {"input_ids": [1], "sampling_params": params}
        for params in (
            {"temperature": -1},
            {"temperature": "warm"},
            {"temperature": 1e400},
            {"top_p": 0},
            {"top_p": 2},
            {"top_k": 0},
            {"top_k": -2},
            {"max_new_tokens": -1},
            {"max_new_tokens": 1.5},
            {"sampling_seed": -1},
            {"stop": 3},
            {"stop_token_ids": ["a"]},
            {"n": 2},
            {"regex": "a+"},
            {"min_p": 0.1},
            {"frequency_penalty": 1},
            {"temprature": 1},
        )
    ),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_bodies_are_refused_with_a_reason(small: Path, stream: bool) -> None:
    async with served(small) as client:
        for body in MALFORMED:
            sent = {**body, "stream": True} if stream and isinstance(body, dict) and "stream" not in body else body
            answer = await client.post("/generate", sent, status=400)
            assert len(answer["error"]["message"]) > 5, body
        for path in ("/abort_request", "/update_weights_from_disk", "/pause_generation", "/update_weight_version"):
            for wrong in (b"{", b"[]", b'{"mode": 3, "rid": 3, "model_path": 3, "new_version": 3}'):
                assert (await client.post(path, wrong, status=400))["error"]["message"]
        await client.idle()
        assert len((await client.post("/generate", {"input_ids": [1], "sampling_params": GREEDY}))["output_ids"]) == 12


async def test_a_body_beyond_the_limit_is_refused(small: Path) -> None:
    async with served(small) as client:
        assert "error" in await client.post("/generate", b" " * (65 * 2**20), status=413)


async def test_with_a_key_set_only_health_is_open(small: Path) -> None:
    async with served(small, api_key="secret") as client:
        await client.get("/health")
        for header in (None, "Bearer wrong", "secret", "Bearer sécret"):
            headers = {} if header is None else {"Authorization": header}
            async with client.session.post("/generate", json={"input_ids": [1]}, headers=headers) as response:
                assert response.status == 401
        async with client.session.get("/v1/models", headers={"Authorization": "Bearer secret"}) as response:
            assert response.status == 200


async def test_nulls_are_as_good_as_absent(small: Path) -> None:
    async with served(small) as client:
        params = dict.fromkeys(("temperature", "top_p", "top_k", "stop", "stop_token_ids", "n", "sampling_seed"))
        body = {"input_ids": [1], "text": None, "rid": None, "return_logprob": None, "sampling_params": params}
        answer = await client.post("/generate", body)
        assert len(answer["output_ids"]) <= 128
