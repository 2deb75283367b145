"""Google's SDK before a gateway: conversations with functions go on from the ids that are held."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

import rolltape
from gateways import Api, Rig, body_of, rig, scripted
from live_streams import Message, allow, allowing, said_streamed
from rolltape.records.sample import Fate
from scripted_engine import Json, Mishap, tool_call

CALL = tool_call("calculator", {"expression": "23 * 17"})
NAMELESS: Json = {"role": "model", "parts": [{"text": "Hm."}, {"functionCall": {"name": "calculator", "args": {}}}]}


def calculator(expression: str) -> int:
    """Evaluate an expression."""
    return 391


def client_of(it: Rig, opened: Json) -> Any:
    return genai.Client(api_key="any", http_options=types.HttpOptions(base_url=opened["google_base_url"]))


def prompts(it: Rig) -> list[tuple[str, str | None]]:
    return [(turn.facts.extra["prompt"], turn.prefix_miss) for turn in it.turns()]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_that_the_sdk_calls_by_itself_extend_the_held_ids(run: Path, stream: bool) -> None:
    engine = scripted([f"<think>\nhm\n</think>\n\nI see.\n{CALL}\n{CALL}", "It is 391.", f"Again.\n{CALL}", "391."])
    async with rig(run, engine, thinking_retention="all") as it:
        opened = await it.open()
        config = types.GenerateContentConfig(tools=[calculator], system_instruction="Be brief.")
        async with client_of(it, opened).aio as client:
            chat = client.chats.create(model="it", config=config)
            for wanted in ("It is 391.", "391."):
                if stream:
                    said = [chunk.text or "" async for chunk in await chat.send_message_stream("What is 23 * 17?")]
                else:
                    said = [(await chat.send_message("What is 23 * 17?")).text]
                assert "".join(said).endswith(wanted)
        done = await it.finish(opened, reward=1.0)
    assert prompts(it) == [("rendered", "first_turn")] + [("bridged", None)] * 3
    assert engine.violations == []
    assert done["ledger"].keys() == {Fate.TRAINED}
    results = [message.to_dict() for message in it.turns()[1].prompt.to_list()[-2:]]
    assert [result["content"] for result in results] == ['{"result":391}'] * 2
    reply = it.turns()[0].reply
    assert reply is not None
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in reply.to_dict()["tool_calls"]]


async def test_the_sync_client_does_too(run: Path) -> None:
    async with rig(run, [f"I see.\n{CALL}", "It is 391."]) as it:
        client = client_of(it, await it.open())
        config = types.GenerateContentConfig(tools=[calculator])
        chat = client.chats.create(model="it", config=config)
        assert (await asyncio.to_thread(chat.send_message, "What is 23 * 17?")).text == "It is 391."
    assert prompts(it) == [("rendered", "first_turn"), ("bridged", None)]


async def test_a_reply_that_comes_back_without_ids_and_signature_is_known_again(run: Path) -> None:
    first = {"role": "user", "parts": [{"text": "Go."}]}
    result = {"role": "user", "parts": [{"functionResponse": {"name": "calculator", "response": {"output": "2"}}}]}
    tools = [{"functionDeclarations": [{"name": "calculator", "parameters": {"type": "OBJECT"}}]}]
    async with rig(run, [f"Hm.\n{tool_call('calculator', {})}", "Two."]) as it:
        path = f"/s/{(await it.open())['key']}/v1beta/models/it:generateContent"
        assert (await it.call("POST", path, {"contents": [first], "tools": tools})).status == 200
        again = {"contents": [first, NAMELESS, result], "tools": tools}
        assert (await it.call("POST", path, again)).status == 200
    assert prompts(it) == [("rendered", "first_turn"), ("bridged", None)]


async def test_counting_tokens_agrees_with_the_request_that_follows(run: Path) -> None:
    async with rig(run, ["ok"]) as it:
        opened = await it.open()
        async with client_of(it, opened).aio as client:
            counted = await client.models.count_tokens(model="it", contents="What is it?")
            reply = await client.models.generate_content(model="it", contents="What is it?")
        assert counted.total_tokens == reply.usage_metadata.prompt_token_count
        assert (await it.finish(opened))["turns"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_several_candidates_are_turns_of_their_own_with_their_logprobs(run: Path, stream: bool) -> None:
    config = types.GenerateContentConfig(candidate_count=2, response_logprobs=True, logprobs=1)
    engine = scripted(["One.", f"Two. {CALL}"], conversation=lambda asked: asked.number)
    async with rig(run, engine) as it:
        async with client_of(it, await it.open()).aio as client:
            if stream:
                events = await client.models.generate_content_stream(model="it", contents="Go.", config=config)
                said = [event async for event in events]
            else:
                said = [await client.models.generate_content(model="it", contents="Go.", config=config)]
        first, second = said[-1].candidates
        assert "".join(event.text or "" for event in said) == "One."
        assert second.content.parts[0].text.startswith("Two.")
        turns = it.turns()
        for turn, candidate in zip(turns, (first, second), strict=True):
            chosen = candidate.logprobs_result.chosen_candidates
            assert [one.token_id for one in chosen] == turn.sampled_ids.tolist()
            assert turn.logprobs is not None
            assert [one.log_probability for one in chosen] == turn.logprobs.tolist()
            likely = [one.candidates for one in candidate.logprobs_result.top_candidates]
            assert [[one.token_id for one in top] for top in likely] == turn.side["top_1_ids"].values.tolist()
        assert said[-1].usage_metadata.candidates_token_count == sum(len(turn.sampled_ids) for turn in turns)


@pytest.mark.parametrize("query", ["", "?alt=json"])
async def test_a_stream_that_is_not_asked_for_as_events_is_an_array_that_grows(run: Path, query: str) -> None:
    engine = allowing([f"<think>\nhm\n</think>\n\nI see.\n{CALL}"])
    tools = [{"functionDeclarations": [{"name": "calculator"}]}]
    body = body_of(Api.GEMINI, "Go.", tools=tools, generationConfig={"thinkingConfig": {"thinkingBudget": -1}})
    async with rig(run, engine, keepalive_s=0.05) as it:
        url = f"{it.gateway.url}/s/{(await it.open())['key']}/v1beta/models/it:streamGenerateContent{query}"
        async with it.http.post(url, json=body) as response:
            assert response.content_type == "application/json"
            raw, early = b"", Message("", "", [])
            while not early.text.startswith("I see"):
                allow(engine, 1)
                raw += await response.content.readany()
                early = said_streamed(Api.GEMINI, json.loads(raw + b"]"))
            assert engine.said == []  # it has not ended
            allow(engine)
            raw += await response.content.read()
    replies = json.loads(raw)
    said = said_streamed(Api.GEMINI, replies)
    assert (said.reasoning, said.text, len(said.calls)) == ("hm", "I see.", 1)
    assert replies[-1]["candidates"][0]["finishReason"] == "STOP"


@pytest.mark.parametrize("first", [Mishap.ERROR_500, Mishap.DIES])
async def test_an_error_within_such_an_array_is_its_last_item(run: Path, first: Mishap) -> None:
    engine = scripted(lambda _: "one two three four five six", incremental=True)
    engine.mishaps |= {0: first} | dict.fromkeys(range(1, 99), Mishap.ERROR_500)
    async with rig(run, engine) as it:
        path = f"/s/{(await it.open())['key']}/v1beta/models/it:streamGenerateContent"
        answer = await it.call("POST", path, body_of(Api.GEMINI, "Go."))
    *replies, failed = json.loads(answer.raw)
    assert "".join(map(str, replies)).count("one") == (first is Mishap.DIES)
    assert failed["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
async def test_models_are_listed_as_each_client_reads_them(run: Path, version: str) -> None:
    async with rig(run) as it:
        opened = await it.open()
        options = types.HttpOptions(base_url=opened["google_base_url"], api_version=version)
        async with genai.Client(api_key="any", http_options=options).aio as client:
            assert [model.name async for model in await client.models.list()] == ["models/scripted"]
            assert (await client.models.get(model="org/name")).name == "models/org/name"
        openai = await it.call("GET", f"/s/{opened['key']}/v1/models")
        assert [model["id"] for model in openai.json["data"]] == ["scripted"]


async def test_the_key_is_in_the_header_the_query_or_the_path(run: Path) -> None:
    body = {"contents": [{"parts": [{"text": "hello"}]}]}
    async with rig(run, lambda _: "ok") as it:
        key = (await it.open())["key"]
        path = "/v1beta/models/org/it:generateContent"
        assert (await it.call("POST", path, body, x_goog_api_key=key)).json["modelVersion"] == "org/it"
        assert (await it.call("POST", f"{path}?key={key}", body)).status == 200
        assert (await it.call("POST", f"/s/{key}{path}", body, x_goog_api_key="any")).status == 200
        refused = await it.call("POST", path, body)
        assert (refused.status, refused.json["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_models_are_listed_for_a_key_in_the_query(run: Path) -> None:
    async with rig(run) as it:
        key = (await it.open())["key"]
        for path in ("/v1/models", "/v1beta/models"):
            listed = await it.call("GET", f"{path}?key={key}")
            assert [model["name"] for model in listed.json["models"]] == ["models/scripted"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1beta/models/it:embedContent"),
        ("DELETE", "/v1beta/models/it:generateContent"),
        ("POST", "/v1beta/files"),
    ],
)
async def test_what_the_api_has_and_the_gateway_has_not_is_refused_in_its_form(
    run: Path, method: str, path: str
) -> None:
    async with rig(run) as it:
        key = (await it.open())["key"]
        for prefix in ("", f"/s/{key}"):
            refused = await it.call(method, prefix + path, {})
            assert refused.status in (404, 405)
            assert refused.json["error"]["code"] == refused.status
        assert "type" in (await it.call(method, "/v1/nowhere", {})).json["error"]  # OpenAI's form
        assert (await it.call(method, "/v1/messages/batches", {})).json["type"] == "error"  # Anthropic's


async def test_an_ended_session_is_told_as_the_sdks_error(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        await it.finish(opened)
        async with client_of(it, opened).aio as client:
            with pytest.raises(errors.APIError) as raised:
                await client.models.generate_content(model="it", contents="hello")
        assert raised.value.message
    assert rolltape.read(run).rollout(opened["rollout"]).turns == []
