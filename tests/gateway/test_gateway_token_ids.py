"""Token ids and logprobs in replies: what a client is told is what the tape has, bit for bit."""

import asyncio
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

import rolltape
from gateways import CALCULATOR, Answer, Api, Rig, eventually, rig, slowly, tiny_gateway, user
from live_streams import allow, allowing, used_up
from rolltape.records.fork import ForkCause
from rolltape.records.sample import Fate
from scripted_engine import Json, Step, tool_call
from told_tokens import LONG, Told, on_tape, told

DETAILS: Json = {"return_token_ids": True, "logprobs": True}


async def ask(it: Rig, opened: Json, messages: str | list[Json], **fields: Any) -> Answer:
    return await it.ask(opened, messages, **DETAILS, **fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_turn_of_a_conversation_tells_the_ids_of_the_tape(run: Path, stream: bool) -> None:
    script: list[str | Step] = [
        "<think>\nhm\n</think>\n\n" + tool_call("calculator", {"expression": "1"}),
        "It is é.",
        Step(LONG),
    ]
    async with rig(run, script) as it:
        opened, messages, answers = await it.open(), [user("What is 1?")], []
        for limit in (100, 100, 5):
            answers.append(await ask(it, opened, messages, stream=stream, tools=[CALCULATOR], max_tokens=limit))
            if limit > 5:
                reply = _message(answers[-1])
                messages += [reply, _next(reply)]
        await it.finish(opened)
    turns = it.turns()
    assert [told(answer) for answer in answers] == [on_tape(turn) for turn in turns]
    assert [turn.facts.finish for turn in turns] == ["stop", "stop", "length"]
    assert [turn.sampled_ids[-1] for turn in turns[:2]] == [it.engine.end_id] * 2


def _message(answer: Answer) -> Json:
    """The message of a chat reply, streamed or not."""
    if answer.events[0]["object"] == "chat.completion":
        message: Json = answer.json["choices"][0]["message"]
        return message
    state = ChatCompletionStreamState()
    for chunk in answer.events:
        state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(chunk))
    completed: Any = state.get_final_completion()
    message = completed.choices[0].message.to_dict(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return message


def _next(message: Json) -> Json:
    calls = message.get("tool_calls")
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": "1"} if calls else user("And then?")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_over_a_change_of_weights_tells_all_its_ids(run: Path, stream: bool) -> None:
    async with rig(run, slowly(LONG, 0.04)) as it:
        opened = await it.open()
        asking = asyncio.ensure_future(ask(it, opened, "hello", stream=stream))
        await it.requested(1)
        await it.gateway.pause()
        await it.gateway.resume("v1")
        answer = await asking
        await it.finish(opened)
    (turn,) = it.turns()
    assert told(answer) == on_tape(turn)
    assert turn.sampled_ids.tolist() == [token for said in it.engine.said for token in said.ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_a_stop_string_ends_tells_the_ids_that_make_it_up(run: Path, stream: bool) -> None:
    async with tiny_gateway(run, forced={"seed": 7, "max_tokens": 24}) as it:
        opened = await it.open()
        answer = await ask(it, opened, "What is 12 + 7?", stop=["= 1"], stream=stream)  # it thinks "12 + 7 = 19."
        await it.finish(opened)
    (turn,) = it.turns()
    assert turn.facts.finish == "stop_string"
    assert told(answer) == on_tape(turn)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_a_retry_goes_on_with_tells_what_was_sampled_before_it(run: Path, stream: bool) -> None:
    async with rig(run, allowing(lambda _: LONG, 4)) as it:
        opened = await it.open()
        first = asyncio.ensure_future(ask(it, opened, "hello", stream=stream))
        await used_up(it.engine)
        first.cancel()
        await eventually(lambda: len(it.engine.said) == 1)
        allow(it.engine)
        answer = await ask(it, opened, "hello", stream=stream)
        await it.finish(opened)
    interrupted, resumed = map(on_tape, it.turns())
    assert len(interrupted.ids) > 0
    assert resumed.prompt_ids == interrupted.prompt_ids + interrupted.ids
    whole = Told(interrupted.prompt_ids, interrupted.ids + resumed.ids, interrupted.logprobs + resumed.logprobs)
    assert told(answer) == whole


async def test_tokens_are_spelled_as_text_and_bytes_or_by_their_ids(run: Path) -> None:
    async with rig(run, ["naïve ☃"] * 2) as it:
        opened = await it.open()
        by_text = await ask(it, opened, "say it")
        by_id = await ask(it, await it.open(task_id="u"), "say it", return_tokens_as_token_ids=True)
    content = by_text.json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "naïve ☃<|im_end|>"
    assert content[-1]["token"] == "<|im_end|>"
    assert all(one["token"] == bytes(one["bytes"]).decode("utf-8", "replace") for one in content)
    choice = by_id.json["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert all(one["top_logprobs"] == [] for one in choice["logprobs"]["content"])
    assert "x-rolltape-ignored-params" not in by_text.headers


async def test_nobody_is_told_of_ids_who_did_not_ask(run: Path) -> None:
    async with rig(run, ["ok"] * 2) as it:
        opened = await it.open()
        whole, streamed = await it.ask(opened, "hello"), await it.ask(opened, "hello", stream=True)
    for raw in (whole.raw, streamed.raw):
        assert b"token_ids" not in raw
        assert b'"logprobs":{' not in raw


async def test_a_logprob_that_the_engine_did_not_give_is_null(run: Path) -> None:
    async with rig(run, ["ok"]) as it:
        it.engine.unknown_logprobs = frozenset({0})
        opened = await it.open()
        answer = await ask(it, opened, "hello")
        await it.finish(opened)
    (turn,) = it.turns()
    assert told(answer) == on_tape(turn)
    assert told(answer).logprobs[0] is None


async def test_the_sdk_reads_ids_and_logprobs(run: Path) -> None:
    async with rig(run, ["It is é."] * 2) as it:
        opened = await it.open()
        async with openai.AsyncOpenAI(base_url=opened["openai_base_url"], api_key="any") as sdk:
            asking: Any = {"model": "it", "logprobs": True, "extra_body": {"return_token_ids": True}}
            whole: Any = await sdk.chat.completions.create(**asking, messages=cast("Any", [user("a")]))
            async with sdk.chat.completions.stream(**asking, messages=cast("Any", [user("b")])) as stream:
                chunks = [event.chunk async for event in stream if event.type == "chunk"]
                streamed: Any = await stream.get_final_completion()
        await it.finish(opened)
    first, second = map(on_tape, it.turns())
    content = whole.choices[0].logprobs.content
    assert Told(whole.prompt_token_ids, whole.choices[0].token_ids, [one.logprob for one in content]) == first
    assert [one.logprob for one in streamed.choices[0].logprobs.content] == second.logprobs
    assert streamed.prompt_token_ids == second.prompt_ids
    given: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
    assert [one for choice in given for one in getattr(choice, "token_ids", None) or ()] == second.ids


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tells_logprobs_with_the_text(run: Path, stream: bool) -> None:
    """Those of all sampled tokens, as in vLLM."""
    wanted = "message.output_text.logprobs"
    async with rig(run, ["It is é."] * 2) as it:
        opened = await it.open()
        asked: Json = {"include": [wanted], "top_logprobs": 2, "stream": stream}
        answer = await it.ask(opened, "hello", Api.RESPONSES, **asked)
        reply = answer.events[-1]["response"] if stream else answer.json
        said = [user("hello"), *reply["output"], user("And then?")]
        alone = await it.ask(opened, said, Api.RESPONSES, top_logprobs=2)
        await it.finish(opened)
    given = reply["output"][0]["content"][0]["logprobs"]
    done = [event["logprobs"] for event in answer.events if event.get("type") == "response.output_text.done"]
    assert done == [given] * stream
    assert [one["logprob"] for one in given] == on_tape(it.turns()[0]).logprobs
    assert b"".join(bytes(one["bytes"]) for one in given).decode() == "It is é.<|im_end|>"
    assert [len(one["top_logprobs"]) for one in given] == [2] * len(given)
    assert it.turns()[1].facts.extra["prompt"] == "bridged"  # what comes back with the text is no part of it
    assert alone.json["output"][0]["content"][0]["logprobs"] == []
    assert alone.headers["x-rolltape-ignored-params"] == f"top_logprobs: ignored without '{wanted}' in include"


# Several replies to one request.


@pytest.mark.parametrize("stream", [False, True])
async def test_n_replies_are_n_turns_side_by_side(run: Path, stream: bool) -> None:
    texts = ["one", tool_call("calculator", {"expression": "1"}), "<think>\nhm\n</think>\n\nthree"]
    async with rig(run, [*texts, "after"]) as it:
        opened = await it.open()
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await ask(it, opened, "hello", stream=stream, n=3, tools=[CALCULATOR], **usage)
        choices = [told(answer, index) for index in range(3)]
        await it.ask(opened, [user("hello"), {"role": "assistant", "content": "one"}, user("go on")])
        await it.finish(opened, reward=1.0)
    *siblings, last = it.turns()
    by_ids = {tuple(turn.sampled_ids.tolist()): turn for turn in siblings}
    assert len(by_ids) == 3
    assert [one._replace(prompt_ids=choices[0].prompt_ids) for one in choices] == [
        on_tape(by_ids[tuple(one.ids)]) for one in choices
    ]
    assert {turn.facts.delivery for turn in siblings} == {"delivered"}
    spent = (answer.events[-1] if stream else answer.json)["usage"]
    assert spent["completion_tokens"] == sum(len(turn.sampled_ids) for turn in siblings)
    assert spent["prompt_tokens"] == len(siblings[0].prompt_ids)
    assert max(turn.facts.started_at or 0 for turn in siblings) < min(turn.facts.ended_at or 0 for turn in siblings)
    assert last.facts.finish == "stop"


@pytest.mark.parametrize("goes_on", [False, True])
async def test_of_several_replies_those_that_an_agent_left_do_not_train(run: Path, goes_on: bool) -> None:
    async with rig(run, lambda asked: f"reply {asked.number}") as it:
        opened = await it.open()
        first, *_ = _texts(await it.ask(opened, "hello", n=3))
        if goes_on:
            await it.ask(opened, [user("hello"), {"role": "assistant", "content": first}, user("go on")])
        await it.finish(opened, reward=1.0)
    (rollout,) = rolltape.read(run).rollouts()
    made = rolltape.linearize(rollout, "exact")
    assert [fork.cause for fork in made.forks] == [ForkCause.SIBLING] * 2
    fates = [fate for turn in made.ledger.by_turn().values() for fate in turn]
    assert fates.count(Fate.TRAINED) == (2 if goes_on else 3)
    assert fates.count(Fate.MASKED_ABANDONED) == (2 if goes_on else 0)


async def test_a_streamed_choice_has_its_index_and_its_own_end(run: Path) -> None:
    async with rig(run, ["one", "two", "three"]) as it:
        opened = await it.open()
        whole = it.asking(opened, "hello", n=3, stream=True)
        events = (await whole).events
    assert len({event["id"] for event in events}) == 1
    said = dict.fromkeys(range(3), "")
    for choice in (choice for event in events for choice in event["choices"]):
        said[choice["index"]] += choice["delta"].get("content") or ""
    assert sorted(said.values()) == ["one", "three", "two"]
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert [(end["index"], end["finish_reason"]) for end in ends] == [(0, "stop"), (1, "stop"), (2, "stop")]


async def test_a_retry_of_a_request_for_several_replies_gets_the_same_ones(run: Path) -> None:
    async with rig(run, lambda asked: f"reply {asked.number}") as it:
        opened = await it.open()
        first = await it.ask(opened, "hello", n=20)
        again = await it.ask(opened, "hello", n=20, retry=1)
        assert _texts(first) == _texts(again)
        assert len(set(_texts(first))) == 20
        fresh = await it.ask(opened, "hello", n=20)
        assert set(_texts(fresh)).isdisjoint(_texts(first))
        await it.finish(opened)
    assert len(it.turns()) == 40


def _texts(answer: Answer) -> list[str]:
    return [choice["message"]["content"] for choice in answer.json["choices"]]


async def test_replies_under_one_seed_differ_as_their_seeds_do(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        await it.ask(await it.open(), "hello", n=3, seed=5)
    assert sorted(said.asked.body["sampling_params"]["sampling_seed"] for said in it.engine.said) == [5, 6, 7]


async def test_more_replies_than_the_cap_allows_are_refused_and_none_goes_on(run: Path) -> None:
    async with rig(run, slowly(LONG, 0.05)) as it:
        opened = await it.open(max_turns=2)
        assert (await it.ask(opened, "hello", n=3)).status == 429
        await it.finish(opened)
    assert [turn.facts.finish for turn in it.turns()] == ["abort", "abort"]


@pytest.mark.parametrize("n", [0, 33, "2"])
async def test_a_number_of_replies_has_its_limits(run: Path, n: object) -> None:
    async with rig(run) as it:
        answer = await it.ask(await it.open(), "hello", n=n)
    assert answer.status == 400
    assert answer.error.startswith(f"n is {n!r}; give a")
