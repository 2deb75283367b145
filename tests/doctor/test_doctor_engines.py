"""Stacks with an engine: a sound one is silent, and each that is broken on purpose is named by what is broken."""

import asyncio
import json
import os
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from doctor.broken_engines import Json, other_weights, sglang, vllm, without_stop_id
from rolltape.doctor import ENGINE_CHECKS, CheckResult, EngineProbe, Severity, Stack, check_engine, diagnose
from rolltape.doctor.engine.pairing_checks import check_tokenizer, check_weights
from rolltape.gateway.engines.opening import open_engine
from rolltape.gateway.prompts import ChatPrompts
from rolltape.records.turn import LogprobKind
from rolltape.tiny import TinyEngine, shipped_model

BAD = (Severity.WARNING, Severity.FAULT)
Served = AbstractAsyncContextManager[str]


async def diagnosed(served: Served, **fields: Any) -> dict[str, CheckResult]:
    """The results of a stack, by their checks."""
    async with served as engine:
        stack = Stack(**{"engine": engine, "model": shipped_model(), **fields})
        return {one.check: one async for one in diagnose(stack)}


def bad(results: dict[str, CheckResult]) -> dict[str, str]:
    return {one.check: one.verdict.value for one in results.values() if one.verdict in BAD}


@pytest.mark.parametrize("served", [sglang, vllm], ids=["sglang", "vllm"])
async def test_a_sound_stack_is_silent(served: Any) -> None:
    results = await diagnosed(served())
    assert bad(results) == {}
    measured = {"logprob kind", "stop id", "prefix cache", "ids", "tokenizer", "weights", "streaming", "recording"}
    assert {results[check].verdict for check in measured} == {Severity.OK}
    assert results["weights"].figures["largest"] < 1e-3
    assert results["recording"].figures["samples"] == 1


async def test_raw_logprobs_declared_as_tempered_are_named() -> None:
    results = await diagnosed(sglang(kind=LogprobKind.RAW))
    assert bad(results) == {"logprob kind": "fault"}
    assert "declared after temperature, measured raw" in results["logprob kind"].measured
    assert "--logprobs raw" in (results["logprob kind"].advice or "")


@pytest.mark.slow
async def test_the_declared_kind_is_the_one_that_the_flag_names_and_the_last_probe_can_be_left_out() -> None:
    results = await diagnosed(sglang(kind=LogprobKind.RAW), logprobs=LogprobKind.RAW, gentle=True)
    assert bad(results) == {}
    assert "out of range" not in results


@pytest.mark.slow
async def test_tempered_logprobs_of_vllm_are_named() -> None:
    results = await diagnosed(vllm(LogprobKind.AFTER_TEMPERATURE))
    assert bad(results) == {"logprob kind": "fault"}
    assert "declared raw, measured after temperature" in results["logprob kind"].measured


async def test_a_trimmed_stop_id_is_named() -> None:
    results = await diagnosed(sglang(answer=without_stop_id))
    assert bad(results) == {"stop id": "fault"}


async def test_an_engine_without_a_prefix_cache_is_named() -> None:
    results = await diagnosed(sglang(prefix_cache_mb=0))
    assert bad(results) == {"prefix cache": "warning"}
    assert results["prefix cache"].figures["cached_tokens"] == 0


async def test_a_folder_with_other_weights_is_named(tmp_path: Path) -> None:
    results = await diagnosed(sglang(), model=other_weights(tmp_path / "other"))
    assert bad(results) == {"weights": "fault"}


@pytest.mark.slow
async def test_a_folder_with_another_tokenizer_is_named(tmp_path: Path) -> None:
    """As of a model of the same family with another vocabulary: the ids of all words are in another order."""
    folder = other_weights(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    moved = dict(zip(words, [*list(words.values())[256:], *list(words.values())[:256]], strict=True))
    tokenizer["model"]["vocab"] = moved
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    results = await diagnosed(sglang(), model=folder)
    assert bad(results)["tokenizer"] == "fault"


async def test_an_engine_that_tokenizes_prompts_anew_is_named() -> None:
    texts = TinyEngine(shipped_model()).texts
    assert texts is not None

    def anew(body: Json) -> Json:
        if max(body["input_ids"]) >= 4096:
            return body
        return {**body, "input_ids": texts.encode(texts.decode(body["input_ids"]))}

    assert (await kit(sglang(body=anew), "ids"))["ids"].verdict is Severity.FAULT


async def test_an_engine_that_cuts_prompts_is_named() -> None:
    def cut(body: Json) -> Json:
        return {**body, "input_ids": body["input_ids"][-512:]}

    assert (await kit(sglang(body=cut, context=600), "too long"))["too long"].verdict is Severity.FAULT


async def test_an_engine_that_takes_any_id_is_named() -> None:
    def taken(body: Json) -> Json:
        return {**body, "input_ids": [token % 4096 for token in body["input_ids"]]}

    assert (await kit(sglang(body=taken), "out of range"))["out of range"].verdict is Severity.WARNING


async def test_missing_logprobs_are_named() -> None:
    def some(answer: Json) -> Json:
        meta = answer["meta_info"]
        triples = [[None if at % 2 else value, token, None] for at, (value, token, _) in enumerate(_triples(meta))]
        return {**answer, "meta_info": {**meta, "output_token_logprobs": triples}}

    assert (await kit(sglang(answer=some), "logprobs"))["logprobs"].verdict is Severity.WARNING


async def test_an_engine_that_ignores_the_temperature_is_named() -> None:
    def at_one(body: Json) -> Json:
        return {**body, "sampling_params": {**body["sampling_params"], "temperature": 1.0, "top_k": -1}}

    result = (await kit(sglang(body=at_one), "logprob kind"))["logprob kind"]
    assert (result.verdict, result.figures["measured"]) == (Severity.FAULT, LogprobKind.RAW)


async def test_an_engine_without_a_tokenizer_gets_by_without_texts() -> None:
    """As SGLang with --skip-tokenizer-init, which some trainers start."""

    def without(answer: Json) -> Json:
        return {name: value for name, value in answer.items() if name != "text"}

    async with sglang(body=_refuse_stop_strings, answer=without) as spec:
        engine = open_engine(spec)
        prompts = ChatPrompts(shipped_model())
        probe = EngineProbe(engine, prompts)
        kind, _, url = spec.partition(":")
        result = await check_tokenizer(probe, prompts=prompts, kind=kind, url=url, api_key=None)
        string = [one async for one in check_engine(probe, {"stop string": ENGINE_CHECKS["stop string"]})]
        await engine.close()
    assert result is not None
    assert result.verdict is Severity.NOTE
    assert [one.verdict for one in string] == [Severity.WARNING]


async def test_a_stop_id_that_only_the_text_has_is_no_other_tokenizer() -> None:
    prompts = ChatPrompts(shipped_model())
    stop = prompts.decode(np.array(prompts.stop_ids[:1], dtype=np.int32))

    def ended_at_once(answer: Json) -> Json:
        text = prompts.decode(np.array([400], dtype=np.int32)) + stop
        return {
            **answer,
            "text": text,
            "meta_info": {**answer["meta_info"], "output_token_logprobs": [[-1.0, 400, None]]},
        }

    async with sglang(answer=ended_at_once) as spec:
        engine = open_engine(spec)
        kind, _, url = spec.partition(":")
        probe = EngineProbe(engine, prompts)
        result = await check_tokenizer(probe, prompts=prompts, kind=kind, url=url, api_key=None)
        await engine.close()
    assert result is not None
    assert result.verdict is Severity.OK


def _refuse_stop_strings(body: Json) -> Json:
    if body["sampling_params"].get("stop"):
        raise web.HTTPBadRequest(reason="no tokenizer")
    return body


async def test_nothing_more_is_asked_of_an_engine_that_does_not_answer() -> None:
    results = [one async for one in diagnose(Stack(engine="sglang:http://127.0.0.1:9", model=shipped_model()))]
    assert [(one.check, one.verdict) for one in results if one.part != "model"] == [("reachable", Severity.FAULT)]


async def test_an_engine_that_gives_text_alone_cannot_be_trained() -> None:
    async with vllm() as engine:
        stack = Stack(engine=engine.replace("vllm:", "openai:"), model=shipped_model())
        results = [one async for one in diagnose(stack)]
    assert [(one.check, one.verdict) for one in results if one.part != "model"] == [("reachable", Severity.FAULT)]


@pytest.mark.slow
async def test_the_kit_works_without_a_model_folder() -> None:
    results = await kit(sglang(), *ENGINE_CHECKS, folder=False)
    assert bad(results) == {}
    assert "stop id" in results


def _triples(meta: Json) -> list[list[Any]]:
    triples: list[list[Any]] = meta["output_token_logprobs"]
    return triples


async def kit(served: Served, *checks: str, folder: bool = True, **fields: Any) -> dict[str, CheckResult]:
    """Some checks of the kit, on an engine behind its own protocol."""
    async with served as spec:
        engine = open_engine(spec)
        probe = EngineProbe(engine, ChatPrompts(shipped_model()) if folder else None, **fields)
        chosen = {name: ENGINE_CHECKS[name] for name in checks}
        try:
            return {one.check: one async for one in check_engine(probe, chosen)}
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("check", "replies"), [("ids", 0), ("logprobs", 5)], ids=["from the start", "after some replies"]
)
async def test_an_engine_that_takes_requests_and_never_answers_is_asked_nothing_more(check: str, replies: int) -> None:
    asked = count()

    async def hang(_: Json) -> None:
        if next(asked) >= replies:
            await asyncio.Event().wait()

    results = await kit(sglang(before=hang), *ENGINE_CHECKS, reply_timeout_s=2.0)
    assert (list(results)[-1], next(asked)) == (check, replies + 1)
    assert results[check].measured == "no answer in 2 s"
    assert results[check].verdict is Severity.FAULT


async def test_an_engine_whose_every_reply_is_broken_is_named_once_and_has_no_session() -> None:
    results = await diagnosed(sglang(answer=lambda answer: {**answer, "meta_info": []}))
    assert [one.check for one in results.values() if one.part == "engine"] == ["reachable", "ids"]
    assert "recording" not in results
    assert results["ids"].verdict is Severity.FAULT


@pytest.mark.parametrize("spoiled", ["pairs", "text", "ids", "hangs"])
async def test_texts_that_an_engine_does_not_give_as_its_api_has_them_are_a_fault(spoiled: str) -> None:
    async def hang(_: Json) -> None:
        if spoiled == "hangs":
            await asyncio.Event().wait()

    def spoil(answer: Json) -> Json:
        if spoiled == "text":
            return {**answer, "text": 5}
        meta = answer["meta_info"]
        if spoiled == "ids":
            return {**answer, "meta_info": {**meta, "output_token_logprobs": [[-1.0, 10**12, None]]}}
        return {**answer, "meta_info": {**meta, "output_token_logprobs": [one[:2] for one in _triples(meta)]}}

    async with sglang(answer=spoil, before=hang) as spec:
        engine = open_engine(spec)
        prompts = ChatPrompts(shipped_model())
        kind, _, url = spec.partition(":")
        check = partial(check_tokenizer, prompts=prompts, kind=kind, url=url, api_key=None)
        limit_s = 0.5 if spoiled == "hangs" else 60.0  # a busy machine takes its time
        probe = EngineProbe(engine, prompts, reply_timeout_s=limit_s)
        (result,) = [one async for one in check_engine(probe, {"tokenizer": check})]
        await engine.close()
    assert result.verdict is Severity.FAULT
    assert ("no answer in 0.5 s" if spoiled == "hangs" else "unknown form") in result.measured


async def test_damaged_weights_of_the_folder_are_not_blamed_on_the_engine(tmp_path: Path) -> None:
    folder = other_weights(tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    os.truncate(weights, 10_000)
    async with sglang() as spec:
        engine = open_engine(spec)
        check = partial(check_weights, folder=folder)
        (result,) = [one async for one in check_engine(EngineProbe(engine), {"weights": check})]
        await engine.close()
    assert result.verdict is Severity.WARNING
    assert "the folder's weights cannot be loaded" in result.measured
