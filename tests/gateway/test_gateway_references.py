"""Requests that name replies instead of sending them: `previous_response_id`, item references, threads."""

from pathlib import Path
from typing import Any

import pytest

import rolltape
from gateways import Answer, Api, Rig, body_of, rig, scripted, text_of, user
from rolltape.records.sample import Fate
from scripted_engine import Asked, Json, tool_call

RUN: Json = {"type": "function", "name": "run", "parameters": {"type": "object"}}
REPLIES = [
    f"<think>\nhm\n</think>\n\nI look.\n{tool_call('run', {'a': 1})}",
    "<think>\nok\n</think>\n\nDone.",
    "Again.",
]


def numbered(asked: Asked) -> str:
    return f"reply {asked.number}"


async def ask(it: Rig, opened: Json, given: str | list[Json], **fields: Any) -> Json:
    answer = await it.ask(opened, given, Api.RESPONSES, **fields)
    assert answer.status == 200, answer.raw
    return answer.json if not fields.get("stream") else answer.events[-1]["response"]


def output_of(reply: Json) -> Json:
    call = next(item for item in reply["output"] if item["type"] == "function_call")
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}


def assert_one_sample(run: Path) -> None:
    """Every prompt extends the one before, and all that was sampled trains."""
    (rollout,) = rolltape.read(run).rollouts()
    linearized = rolltape.linearize(rollout)
    assert linearized.forks == []
    assert [turn.facts.extra["prompt"] for turn in rollout.turns] == ["rendered", "bridged", "bridged"]
    assert linearized.ledger.totals() == {Fate.TRAINED: linearized.ledger.sampled}
    assert len(list(linearized.samples())) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_from_the_reply_that_it_names(run: Path, stream: bool) -> None:
    async with rig(run, scripted(REPLIES), thinking_retention="all") as it:
        opened = await it.open()
        fields = {"tools": [RUN], "instructions": "Be brief.", "stream": stream}
        first = await ask(it, opened, "go", **fields)
        second = await ask(it, opened, [output_of(first)], previous_response_id=first["id"], **fields)
        assert second["previous_response_id"] == first["id"]
        await ask(it, opened, "more", previous_response_id=second["id"], **fields)
        await it.finish(opened)
        assert it.engine.violations == []
    assert_one_sample(run)
    roles = [message["role"] for message in it.turns()[-1].prompt_messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


async def test_items_that_are_only_named_are_those_of_the_reply(run: Path) -> None:
    """As the AI SDK does it: reasoning and text by their ids, calls whole or by their ids."""
    async with rig(run, scripted(REPLIES), thinking_retention="all") as it:
        opened = await it.open()
        first = await ask(it, opened, "go", tools=[RUN])

        def named(reply: Json, *, calls: bool) -> list[Json]:
            return [
                {"type": "item_reference", "id": item["id"]}
                if calls or item["type"] != "function_call"
                else {key: item[key] for key in ("type", "call_id", "name", "arguments")}
                for item in reply["output"]
            ]

        said = [user("go"), *named(first, calls=False), output_of(first)]
        second = await ask(it, opened, said, tools=[RUN])
        said = [user("go"), *named(first, calls=True), output_of(first), *named(second, calls=True), user("more")]
        await ask(it, opened, said, tools=[RUN])
        await it.finish(opened)
        assert it.engine.violations == []
    assert_one_sample(run)


async def test_instructions_are_for_one_reply_alone(run: Path) -> None:
    """A request that goes on from it has its own, or none; a system message among the items stays."""
    async with rig(run, numbered) as it:
        opened = await it.open()
        system = {"role": "system", "content": "stays"}
        first = await ask(it, opened, [system, user("a")], instructions="one")
        second = await ask(it, opened, "b", previous_response_id=first["id"], instructions="two")
        await ask(it, opened, "c", previous_response_id=second["id"])
    said = [[message["content"] for message in turn.prompt_messages] for turn in it.turns()]
    assert said == [
        ["one", "stays", "a"],
        ["two", "stays", "a", "reply 0", "b"],
        ["stays", "a", "reply 0", "b", "reply 1", "c"],
    ]


async def test_a_reply_can_be_gone_on_from_twice(run: Path) -> None:
    async with rig(run, numbered) as it:
        opened = await it.open()
        first = await ask(it, opened, "a")
        for more in ("b", "c"):
            await ask(it, opened, more, previous_response_id=first["id"])
    assert [turn.facts.extra["prompt"] for turn in it.turns()] == ["rendered", "bridged", "bridged"]


async def test_a_retry_of_such_a_request_gets_the_same_reply(run: Path) -> None:
    async with rig(run, numbered) as it:
        opened = await it.open()
        first = await ask(it, opened, "a")
        replies = [await ask(it, opened, "b", previous_response_id=first["id"], retry=retry) for retry in (0, 1)]
        assert replies[0]["id"] == replies[1]["id"]
        assert it.engine.requests == 2


async def test_a_prompt_is_counted_with_the_replies_that_it_names(run: Path) -> None:
    async with rig(run, numbered) as it:
        opened = await it.open()
        first = await ask(it, opened, "a")
        asked: Json = {"model": "it", "input": "b", "previous_response_id": first["id"]}
        counted = await it.call("POST", f"/s/{opened['key']}/v1/responses/input_tokens", asked)
        second = await ask(it, opened, "b", previous_response_id=first["id"])
    assert counted.json == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}


async def test_replies_of_other_sessions_are_unknown(run: Path) -> None:
    async with rig(run, numbered) as it:
        opened, other = await it.open(), await it.open(task_id="u")
        first = await ask(it, opened, "a")
        for given in ({"previous_response_id": first["id"]}, {"previous_response_id": "x"}):
            refused = await it.ask(other, "b", Api.RESPONSES, **given)
            assert refused.status == 400
            assert refused.error.startswith("there is no reply"), refused.error
            assert refused.json["error"]["code"] == "previous_response_not_found"
        items = [user("a"), {"type": "item_reference", "id": first["output"][0]["id"]}, user("b")]
        assert (await it.ask(other, items, Api.RESPONSES)).error.startswith("there is no reply")
        assert it.engine.requests == 1


async def test_a_conversation_that_becomes_too_long_is_refused(run: Path) -> None:
    async with rig(run, numbered, max_messages=2) as it:
        opened = await it.open()
        first = await ask(it, opened, "a")
        refused = await it.ask(opened, "b", Api.RESPONSES, previous_response_id=first["id"])
        assert (refused.status, refused.error) == (400, "messages: there are 3, and 2 are allowed; send fewer")


async def test_an_open_gateway_finds_the_session_by_the_reply(run: Path) -> None:
    async def post(it: Rig, given: str, **fields: Any) -> Answer:
        return await it.call("POST", "/v1/responses", {"model": "it", "input": given, **fields}, x_api_key="all")

    async with rig(run, numbered, open=True) as it:
        firsts = [(await post(it, "a")).json for _ in range(3)]
        for first in reversed(firsts):
            answer = await post(it, "b", previous_response_id=first["id"])
            assert text_of(Api.RESPONSES, answer).startswith("reply")
        refused = await post(it, "b", previous_response_id="resp_unknown")
        assert refused.status == 400
        assert refused.error.startswith("there is no open session with a reply unknown")
        assert len(it.gateway.service.sessions) == 3
        asked: Json = {"input": "b", "previous_response_id": firsts[0]["id"]}
        counted = await it.call("POST", "/v1/responses/input_tokens", asked, x_api_key="all")
        assert counted.error.startswith("the request names replies and no session")
    assert sorted(len(one.turns) for one in rolltape.read(run).rollouts()) == [2, 2, 2]


CREATE: Json = {"type": "create"}
LOOK: Json = {"name": "run", "input_schema": {"type": "object"}}


def goes_on(reply: Json) -> Json:
    return {"type": "continue", "previous_message_id": reply["id"]}


def result_of(reply: Json) -> list[Json]:
    called = next(block for block in reply["content"] if block["type"] == "tool_use")
    return [user([{"type": "tool_result", "tool_use_id": called["id"], "content": "4"}])]  # type: ignore[arg-type]


async def test_a_thread_goes_on_with_its_system_prompt_and_its_tools(run: Path) -> None:
    async with rig(run, scripted(REPLIES), thinking_retention="all", constrain="none") as it:
        opened = await it.open()
        given: Json = {"tools": [LOOK], "system": "Be brief.", "thread": CREATE}
        first = (await it.ask(opened, "go", Api.MESSAGES, **given)).json
        asked: Json = {"thread": goes_on(first), "tool_choice": {"type": "tool", "name": "run"}}
        forced = (await it.ask(opened, result_of(first), Api.MESSAGES, **asked)).json
        last = await it.ask(opened, "more", Api.MESSAGES, thread=goes_on(forced))
        assert last.status == 200, last.raw
        await it.finish(opened)
        assert it.engine.violations == []
    assert_one_sample(run)
    assert [turn.root.tools for turn in it.turns()] == [it.turns()[0].root.tools] * 3
    roles = [message["role"] for message in it.turns()[-1].prompt_messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_thread_that_is_not_known_is_to_be_sent_whole(run: Path, is_open: bool) -> None:
    """By this code Anthropic's SDKs (2.10) know that they are to begin another thread with all messages."""
    async with rig(run, numbered, open=is_open) as it:
        opened = await it.open()
        path = "/v1/messages" if is_open else f"/s/{opened['key']}/v1/messages"
        refused = await it.call("POST", path, body_of(Api.MESSAGES, "b", thread=goes_on({"id": "msg_gone"})))
        assert refused.status == 400
        assert refused.json["error"]["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize("option", ["strict", "defer_loading"])
async def test_tools_with_options_that_the_tape_does_not_keep_are_not_for_threads(run: Path, option: str) -> None:
    async with rig(run, numbered) as it:
        opened = await it.open()
        refused = await it.ask(opened, "a", Api.MESSAGES, tools=[LOOK | {option: True}], thread=CREATE)
        assert refused.status == 400
        assert refused.json["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_a_thread_does_not_change_what_it_was_created_with(run: Path) -> None:
    async with rig(run, numbered) as it:
        opened = await it.open()
        first = (await it.ask(opened, "a", Api.MESSAGES, thread=CREATE)).json
        refused = await it.ask(opened, "b", Api.MESSAGES, thread=goes_on(first), tools=[LOOK])
        assert refused.status == 400
        assert refused.error.endswith("leave it out: a thread goes on with what it was created with")
