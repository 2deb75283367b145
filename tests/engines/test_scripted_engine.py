"""The scripted engine itself: its splits, its odd JSON, and its life in a thread."""

import asyncio
import json
import random

import pytest
from tokenizers import Tokenizer

from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import Generated
from rolltape.gateway.engines.sglang.engine import SglangEngine
from rolltape.records.turn import Finish
from scripted_engine import Mishap, ScriptedEngine, Splits, odd_json, tool_call

TEXTS = ["plain words here", "naïve café – 漢字 🎈", "<think>\nhm\n</think>\n\nHello", "", '\n\n  {"a": 1}\t']


def test_splits_spell_the_same_text_in_other_ids_and_keep_special_tokens_whole(tokenizer: Tokenizer) -> None:
    splits = Splits(tokenizer, random.Random(0))
    for text in TEXTS:
        ids = splits.of(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert splits.of(TEXTS[0]) != tokenizer.encode(TEXTS[0]).ids
    assert splits.of(TEXTS[0]) != splits.of(TEXTS[0])
    assert tokenizer.token_to_id("<think>") in splits.of(TEXTS[2])


def test_odd_json_is_odd_and_still_the_same_value() -> None:
    value = {"path": "a b", "lines": [1, 2.5, None, True], "deep": {"é": []}}
    texts = {odd_json(value, random.Random(seed)) for seed in range(5)}
    assert len(texts) == 5
    assert all(json.loads(text) == value for text in texts)
    call = tool_call("run", {"command": "ls -l"})
    assert call.startswith("<tool_call>\n{")
    inner = call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(inner) == {"name": "run", "arguments": {"command": "ls -l"}}


def test_it_can_serve_from_a_thread_of_its_own(tokenizer: Tokenizer) -> None:
    async def ask(url: str, end_id: int) -> Generated:
        engine = SglangEngine(url)
        try:
            return await engine.generate(generation([1, 2], stop_ids=[end_id]))
        finally:
            await engine.close()

    with ScriptedEngine(tokenizer, lambda asked: f"request {asked.number}").in_thread() as server:
        given = asyncio.run(ask(server.url, server.end_id))
    assert given.ids.tolist() == server.said[0].ids
    assert server.text_of(given.ids[:-1].tolist()) == "request 0"


async def test_an_interrupted_reply_goes_on_where_it_was_cut(tokenizer: Tokenizer) -> None:
    async with ScriptedEngine(tokenizer, ["a rather long reply to cut", "the next"]) as server:
        engine = SglangEngine(server.url)
        server.mishaps = {0: Mishap.ABORTED, 1: Mishap.TRUNCATED}
        head = await engine.generate(generation([1, 2], stop_ids=[server.end_id]))
        assert head.finish is Finish.ABORT
        prompt = [1, 2, *head.ids.tolist()]
        with pytest.raises(EngineFault):
            await engine.generate(generation(prompt, name="b", stop_ids=[server.end_id]))
        rest = await engine.generate(generation(prompt, name="c", stop_ids=[server.end_id]))
        assert server.text_of([*head.ids, *rest.ids[:-1]]) == "a rather long reply to cut"
        after = await engine.generate(generation([*prompt, *rest.ids], name="d", stop_ids=[server.end_id]))
        assert server.text_of(after.ids[:-1].tolist()) == "the next"
        await engine.close()
    assert server.violations == []


async def test_conversations_are_held_apart(tokenizer: Tokenizer) -> None:
    async with ScriptedEngine(tokenizer, lambda asked: "x", conversation=lambda asked: asked.prompt_ids[0]) as server:
        engine = SglangEngine(server.url)
        for name, prompt in {"a": [1, 2], "b": [3, 4]}.items():
            await engine.generate(generation(prompt, name=name, stop_ids=[server.end_id]))
        assert server.violations == []
        await engine.generate(generation([1, 9], name="c", stop_ids=[server.end_id]))
        assert len(server.violations) == 1
        await engine.close()
