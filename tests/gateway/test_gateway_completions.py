"""Completions: prompts as text or ids, recorded as they are, chained by ids; `/tokenize` and `/detokenize`."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import rolltape
from gateways import CALCULATOR, Answer, Api, Rig, eventually, rig, slowly, tiny_gateway, user
from live_streams import Live, allow, allowing, used_up
from rolltape.cli import run as rolltape_command
from rolltape.records.sample import Fate
from rolltape.records.turn import Finish
from scripted_engine import Json, Step, tool_call
from told_tokens import LONG, encoded, on_tape, post, told

DETAILS: Json = {"return_token_ids": True, "logprobs": 0, "max_tokens": 100}


def text_of(answer: Answer | Live, index: int = 0) -> str:
    choices = [choice for event in answer.events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


async def complete(it: Rig, opened: Json, prompt: object, **fields: Any) -> Answer:
    return await post(it, opened, "/v1/completions", model="it", prompt=prompt, **(DETAILS | fields))


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_that_extend_each_other_are_one_sample(run: Path, stream: bool) -> None:
    texts = ["It is é.", tool_call("calculator", {"expression": "1"}), LONG]
    async with rig(run, texts) as it:
        opened, prompt, answers = await it.open(), encoded(it, "Question: what is it?\nAnswer:"), []
        for limit in (100, 100, 5):
            answers.append(await complete(it, opened, prompt, stream=stream, max_tokens=limit))
            prompt = prompt + told(answers[-1]).ids + encoded(it, "\nAnd then?")
        assert it.engine.violations == []
        await it.finish(opened, reward=1.0)
    turns = it.turns()
    assert [told(answer) for answer in answers] == [on_tape(turn) for turn in turns]
    assert [text_of(answer) for answer in answers[:2]] == texts[:2]
    assert [turn.facts.finish for turn in turns] == ["stop", "stop", "length"]
    assert [turn.prompt_messages for turn in turns] == [[], [], []]
    assert [turn.reply for turn in turns] == [None] * 3
    assert [turn.facts.extra["prompt"] for turn in turns] == ["given"] * 3
    (rollout,) = rolltape.read(run).rollouts()
    (sample,) = rolltape.linearize(rollout, "exact").samples()
    assert sample.ids.tolist() == turns[-1].tokens.to_numpy().tolist()
    assert int(sample.trained_mask.sum()) == sum(len(turn.sampled_ids) for turn in turns)
    assert rolltape_command(["check", str(run)]) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_id_that_the_client_names_ends_a_reply_and_is_no_part_of_its_text(
    run: Path, path: str, stream: bool
) -> None:
    """As in vLLM: `token_ids` has it, the text does not. The conversation goes on from it."""
    said = [user("What is 12 + 7?")]
    prompt = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    given: Json = {"prompt": prompt} if path == "/v1/completions" else {"messages": said}
    fields: Json = {"model": "it", "return_token_ids": True, "max_tokens": 60, "stream": stream, **given}

    def text_in(answer: Answer) -> str:
        choices = [choice for event in answer.events for choice in event["choices"]]
        messages = [choice.get("delta", choice.get("message", {"content": choice.get("text")})) for choice in choices]
        return "".join(message.get("content") or "" for message in messages)

    async with tiny_gateway(run, forced={"seed": 7}, thinking=False, thinking_retention="all") as it:
        opened = await it.open()
        whole = await post(it, opened, path, **fields)
        ids = told(whole).ids
        ending = ids[-2]  # of the answer's text, before the end of the turn
        cut = await post(it, opened, path, **fields, stop_token_ids=[ending])
        assert told(cut).ids == ids[: ids.index(ending) + 1]
        assert text_in(whole).startswith(text_in(cut) + it.engine.text_of([ending]).rstrip())
        assert "x-rolltape-ignored-params" not in cut.headers
        if path == "/v1/chat/completions":
            said += [{"role": "assistant", "content": text_in(cut)}, user("Go on.")]
            await post(it, opened, path, model="it", messages=said)
            assert it.turns()[-1].prompt_ids.tolist()[: len(told(cut).prompt_ids + told(cut).ids)] == (
                told(cut).prompt_ids + told(cut).ids
            )
        await it.finish(opened)
    assert (it.turns()[1].facts.finish, it.turns()[1].facts.extra["stop_ids"]) == (Finish.STOP, [ending])
    assert rolltape_command(["check", str(run)]) == 0


async def test_a_turn_is_stored_as_what_it_adds_to_the_longest_turn_that_it_begins_with(run: Path) -> None:
    async with rig(run, lambda asked: f"reply {asked.number}") as it:
        opened, start = await it.open(), encoded(it, "a long beginning")
        first = told(await complete(it, opened, start))
        after_first = first.prompt_ids + first.ids
        second = told(await complete(it, opened, after_first + encoded(it, " and")))
        other = await complete(it, opened, encoded(it, "something else"))
        beside = await complete(it, opened, after_first + encoded(it, " or"))
        third = await complete(it, opened, second.prompt_ids + second.ids)
        assert it.gateway.service.sessions.of_id(opened["session"]).history.longest_held(np.array(start)) is None
        await it.finish(opened)
    turns = it.turns()
    new = {turn.sequence: turn.prompt_tokens.own.tolist() for turn in turns}
    assert new[1] == encoded(it, " and")
    assert new[2] == told(other).prompt_ids
    assert new[3] == encoded(it, " or")
    assert new[4] == []
    assert [told(one) for one in (beside, third)] == [on_tape(turn) for turn in turns[3:]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_over_a_change_of_weights_tells_all_its_ids(run: Path, stream: bool) -> None:
    async with rig(run, slowly(LONG, 0.04)) as it:
        opened = await it.open()
        asking = asyncio.ensure_future(complete(it, opened, "hello", stream=stream))
        await it.requested(1)
        await it.gateway.pause()
        await it.gateway.resume("v1")
        answer = await asking
        await it.finish(opened)
    (turn,) = it.turns()
    assert told(answer) == on_tape(turn)
    assert text_of(answer) == LONG


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_goes_on_with_what_was_sampled(run: Path, stream: bool) -> None:
    async with rig(run, allowing(lambda _: LONG, 4)) as it:
        opened = await it.open()
        first = asyncio.ensure_future(complete(it, opened, "hello", stream=stream))
        await used_up(it.engine)
        first.cancel()
        await eventually(lambda: len(it.engine.said) == 1)
        allow(it.engine)
        answer = await complete(it, opened, "hello", stream=stream)
        await it.finish(opened)
    interrupted, resumed = map(on_tape, it.turns())
    assert told(answer).prompt_ids == interrupted.prompt_ids
    assert told(answer).ids == interrupted.ids + resumed.ids
    assert told(answer).logprobs == interrupted.logprobs + resumed.logprobs
    assert text_of(answer) == LONG


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_ids(run: Path, stream: bool) -> None:
    prompt = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    async with tiny_gateway(run, forced={"seed": 7}) as it:
        opened = await it.open()
        whole = text_of(await complete(it, opened, prompt))
        stop = whole[3:5]
        answer = await complete(it, opened, prompt, stop=stop, stream=stream)
        await it.finish(opened)
    turn = it.turns()[-1]
    assert turn.facts.finish == "stop_string"
    assert told(answer) == on_tape(turn)
    assert text_of(answer) == whole[: whole.index(stop)]


async def test_a_streamed_text_comes_as_it_is_sampled_up_to_a_possible_stop_string(run: Path) -> None:
    text = "  It is é ☃, and <|im_start|> too. ST but no more STOP"
    engine = allowing([Step(text, "STOP")], unusual=False)
    async with rig(run, engine) as it:
        opened, live = await it.open(), Live(Api.CHAT)
        ids = encoded(it, text)
        most = next(count for count in range(len(ids)) if engine.text_of(ids[:count]).endswith("more S"))
        url = f"{it.gateway.url}/s/{opened['key']}/v1/completions"
        body = {"model": "it", "prompt": "Say it:", "stream": True, "stop": ["STOP"], **DETAILS}
        async with it.http.post(url, json=body) as response:
            reading = asyncio.ensure_future(live.read(response))
            allow(engine, most)
            await eventually(lambda: text_of(live) == text[: text.index("STOP")])
            assert engine.said == []  # it goes on
            allow(engine)
            await reading
        await it.finish(opened)
    (turn,) = it.turns()
    assert text_of(live) == text[: text.index("STOP")]
    assert told(Answer(200, {}, live.raw)) == on_tape(turn)


async def test_the_sdk_completes_text_and_ids(run: Path) -> None:
    async with rig(run, ["It is é.", "It is è.", "It is ê."]) as it:
        opened = await it.open()
        async with openai.AsyncOpenAI(base_url=opened["openai_base_url"], api_key="any") as sdk:
            asking: Any = {"model": "it", "logprobs": 2, "extra_body": {"return_token_ids": True}}
            whole: Any = await sdk.completions.create(prompt=["Say it:"], n=2, **asking)
            stream: Any = await sdk.completions.create(prompt=encoded(it, "Say it:"), stream=True, **asking)
            chunks = [chunk async for chunk in stream]
        await it.finish(opened)
    first, second, third = map(on_tape, it.turns())
    assert sorted(choice.text for choice in whole.choices) == ["It is è.", "It is é."]
    assert whole.usage.completion_tokens == len(first.ids) + len(second.ids)
    by_ids = {tuple(choice.token_ids): choice for choice in whole.choices}
    for turn in (first, second):
        choice = by_ids[tuple(turn.ids)]
        assert choice.prompt_token_ids == turn.prompt_ids
        assert choice.logprobs.token_logprobs == turn.logprobs
        assert choice.logprobs.text_offset[0] == 0
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == len(turn.ids)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "It is ê."
    assert choices[0].prompt_token_ids == third.prompt_ids == encoded(it, "Say it:")
    assert [one for choice in choices for one in getattr(choice, "token_ids", None) or ()] == third.ids


async def test_sixteen_tokens_are_sampled_where_nothing_is_said(run: Path) -> None:
    async with rig(run, [LONG * 3]) as it:
        answer = await post(it, await it.open(), "/v1/completions", model="it", prompt="hello")
    choice = answer.json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert answer.json["usage"]["completion_tokens"] == 16
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt is missing; give a text or a list of token ids"),
        ({"prompt": ""}, "prompt is ''; give"),
        ({"prompt": []}, "prompt is []; give"),
        ({"prompt": ["a", "b"]}, "prompt has 2 prompts; send one request for each"),
        ({"prompt": [1, True]}, "prompt[1] is True; give token ids"),
        ({"prompt": [[1, "x"]]}, "prompt[1] is 'x'; give token ids"),
        ({"prompt": [1, -1]}, "the prompt's id 1 is -1, which the model does not have; give ids from 0 to"),
        ({"prompt": [10**30]}, f"the prompt's id 0 is {10**30}, which the model does not have"),
        ({"prompt": "a", "echo": True}, "echo is True; put the prompt before the reply yourself"),
        ({"prompt": "a", "suffix": "b"}, "suffix is 'b'; a prompt is continued only at its end"),
        ({"prompt": "a", "best_of": 3}, "best_of is 3; ask for n replies"),
        ({"prompt": "a", "logprobs": "x"}, "logprobs is 'x'; give a number"),
    ],
)
async def test_what_cannot_be_completed_is_refused(run: Path, body: Json, said: str) -> None:
    async with rig(run) as it:
        answer = await post(it, await it.open(), "/v1/completions", model="it", **body)
    assert (answer.status, answer.error[: len(said)]) == (400, said)


async def test_completions_beside_a_chat_leave_its_turns_as_they_are(run: Path) -> None:
    async with rig(run, lambda asked: f"reply {asked.number}") as it:
        opened = await it.open()
        chat = await it.ask(opened, "hello", return_token_ids=True)
        held = chat.json["prompt_token_ids"] + chat.json["choices"][0]["token_ids"]
        for word in (" so", " then"):
            await complete(it, opened, held + encoded(it, word))
        reply = chat.json["choices"][0]["message"]["content"]
        await it.ask(opened, [user("hello"), {"role": "assistant", "content": reply}, user("more")])
        await it.finish(opened, reward=1.0)
    first, *given, last = it.turns()
    assert [turn.prompt_messages for turn in given] == [[], []]
    assert [turn.prompt_ids.tolist()[: len(held)] for turn in (*given, last)] == [held] * 3
    (rollout,) = rolltape.read(run).rollouts()
    fates = rolltape.linearize(rollout, "exact").ledger.by_turn()
    assert [list(fates[turn.id]) for turn in (first, *given, last)] == [[Fate.TRAINED]] * 4


async def test_an_open_gateway_finds_the_session_of_a_prompt_by_its_ids(run: Path) -> None:
    async with rig(run, lambda asked: f"reply {asked.number}", open=True) as it:
        ask = {"model": "it", **DETAILS}
        first, other = [
            told(await it.call("POST", "/v1/completions", {**ask, "prompt": prompt})) for prompt in ("one", "two")
        ]
        await it.call("POST", "/v1/completions", {**ask, "prompt": first.prompt_ids + first.ids + [5]})
        await it.call("POST", "/v1/completions", {**ask, "prompt": other.prompt_ids + other.ids + [6]})
    rollouts = [[turn.prompt_ids.tolist()[0] for turn in rollout.turns] for rollout in rolltape.read(run).rollouts()]
    assert sorted(rollouts) == sorted([[first.prompt_ids[0]] * 2, [other.prompt_ids[0]] * 2])


# Tokenizing.


async def test_tokenize_gives_the_ids_that_the_next_turn_uses(run: Path) -> None:
    async with rig(run, ["<think>\nhm\n</think>\n\n" + tool_call("calculator", {"expression": "1"}), "done"]) as it:
        opened, tools = await it.open(), [CALCULATOR]
        messages: list[Json] = [user("What is 1?")]
        for _ in range(2):
            tokenized = (await post(it, opened, "/tokenize", model="it", messages=messages, tools=tools)).json
            answer = await it.ask(opened, messages, tools=tools, return_token_ids=True)
            assert tokenized["tokens"] == answer.json["prompt_token_ids"]
            assert tokenized["count"] == len(tokenized["tokens"])
            assert tokenized["max_model_len"] == 131_072
            reply = answer.json["choices"][0]["message"]
            for call in reply.get("tool_calls", ()):
                messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "1"}]
        assert len(messages) == 3
        await it.finish(opened)
    assert len(it.turns()) == 2


async def test_texts_become_ids_and_ids_texts(run: Path) -> None:
    text = "naïve <|im_end|> ☃"
    async with rig(run) as it:
        opened = await it.open()
        tokenized = (await post(it, opened, "/tokenize", prompt=text, return_token_strs=True)).json
        assert tokenized["tokens"] == encoded(it, text)
        assert tokenized["token_strs"][0] in text
        assert (await post(it, opened, "/detokenize", tokens=tokenized["tokens"])).json == {"prompt": text}
        without = await post(it, opened, "/tokenize", messages=[user("hi")], add_generation_prompt=False)
        whole = await post(it, opened, "/tokenize", messages=[user("hi")])
        shorter, longer = without.json["tokens"], whole.json["tokens"]
        assert longer[: len(shorter)] == shorter
        assert it.engine.text_of(longer[len(shorter) :]).startswith("<|im_start|>assistant")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": [user("hi")], "continue_final_message": True}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
        ("/detokenize", {}, 400),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(run: Path, path: str, body: Json, status: int) -> None:
    async with rig(run) as it:
        assert (await post(it, await it.open(), path, **body)).status == status
        assert (await it.call("POST", path, body)).status == 401  # without a session's key
