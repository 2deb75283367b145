"""Tools of Responses that clients run: shell, local shell, patches. The openai package calls them through a gateway."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from gateways import Rig, rig
from rolltape.records.turn import TurnFlag
from scripted_engine import tool_call

Json = dict[str, Any]
Tool = tuple[str, Json, Json]

LOCAL_SHELL: Tool = ("local_shell", {"command": ["ls", "-l  'a b'"], "timeout_ms": 5000}, {"type": "local_shell"})
SHELL: Tool = ("shell", {"commands": ["cd x", "ls  -l\n"], "max_output_length": 100}, {"type": "shell"})
PATCH: Tool = ("apply_patch", {"type": "update_file", "path": "é.txt", "diff": "@@\n-a\n+b\n"}, {"type": "apply_patch"})
DELETE: Tool = ("apply_patch", {"type": "delete_file", "path": "é.txt"}, {"type": "apply_patch"})
OUTPUT = [{"stdout": "a\nb\n", "stderr": "oh\n", "outcome": {"type": "exit", "exit_code": 1}}]


async def asked(client: Any, stream: bool, **request: Any) -> list[Any]:
    """The items of a reply, as the package gives them."""
    if not stream:
        return list((await client.responses.create(model="it", **request)).output)
    async with client.responses.stream(model="it", **request) as events:
        return list((await events.get_final_response()).output)


def output_of(call: Any) -> tuple[Json, str]:
    """What a client sends back for a call, and what the model shall read of it."""
    match call.type:
        case "local_shell_call":
            assert (call.action.type, call.action.env, call.action.command[0]) == ("exec", {}, "ls")
            return {"type": "local_shell_call_output", "id": call.call_id, "output": "a b"}, "a b"
        case "shell_call":
            assert call.action.commands == SHELL[1]["commands"]
            return {"type": "shell_call_output", "call_id": call.call_id, "output": OUTPUT}, "a\nb\noh\nexit code 1"
        case _:
            assert (call.type, call.operation.path) == ("apply_patch_call", "é.txt")
            sent = {"type": "apply_patch_call_output", "call_id": call.call_id, "status": "failed", "output": "no hunk"}
            return sent, "failed\nno hunk"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "arguments", "tool"), [LOCAL_SHELL, SHELL, PATCH, DELETE])
async def test_a_client_runs_the_tool_and_the_session_is_one_branch_that_trains(
    run: Path, name: str, arguments: Json, tool: Json, stream: bool
) -> None:
    said = f"<think>\nSo.\n</think>\n\nI try.\n{tool_call(name, arguments)}"
    async with rig(run, (said, said, "Done.")) as it:
        opened = await it.open()
        url = f"{it.gateway.url}/s/{opened['key']}/v1"
        history: list[Any] = [{"role": "user", "content": "Go."}]
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            for _ in range(2):
                items = await asked(client, stream, input=history, tools=[tool])
                assert [item.type for item in items] == ["reasoning", "message", f"{name}_call"]
                output, read = output_of(items[-1])
                history += [*items, output]
            (last,) = await asked(client, stream, input=history, tools=[tool])
        done = await it.finish(opened, reward=1.0)
    assert last.content[0].text == "Done."
    assert it.engine.violations == []
    assert it.engine.said[1].asked.prompt.endswith(
        f"<tool_response>\n{read}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    turns = it.turns()
    assert [turn.facts.extra["prompt"] for turn in turns] == ["rendered", "bridged", "bridged"]
    assert done["ledger"] == {"trained": sum(len(turn.sampled_ids) for turn in turns)}
    assert len(done["samples"]) == 1
    assert all("ignored_params" not in turn.facts.extra for turn in turns)


async def test_arguments_that_fit_no_item_go_back_as_those_of_a_function(run: Path) -> None:
    replies = [tool_call("shell", {"cmd": "ls"}), tool_call("shell", {"commands": None}), tool_call("shell", {})]
    async with rig(run, replies) as it:
        opened = await it.open(thinking=False)
        async with openai.AsyncOpenAI(base_url=f"{it.gateway.url}/s/{opened['key']}/v1", api_key="none") as client:
            for at in range(3):
                (item,) = await asked(client, stream=bool(at % 2), input=f"Go {at}.", tools=[{"type": "shell"}])
                assert (item.type, item.name) == ("function_call", "shell")


@pytest.mark.parametrize("name", ["shell", "apply_patch"])
async def test_such_a_tool_can_be_required(run: Path, name: str) -> None:
    arguments = {"shell": SHELL[1], "apply_patch": PATCH[1]}[name]
    async with rig(run, (tool_call(name, arguments),)) as it:
        opened = await it.open(thinking=False)
        tools = [{"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}]
        answer = await _posted(it, opened, tools=tools, tool_choice={"type": name})
    assert [item["type"] for item in answer["output"]] == [f"{name}_call"]
    (turn,) = it.turns()
    assert turn.facts.flags == (TurnFlag.CONSTRAINED,)
    (tag,) = json.loads(it.engine.said[0].asked.body["sampling_params"]["structural_tag"])["format"]["tags"]
    assert name in tag["begin"]


async def test_a_shell_in_a_container_is_not_the_clients(run: Path) -> None:
    async with rig(run, ("ok",)) as it:
        opened = await it.open()
        tools = [{"type": "shell", "environment": {"type": "container_auto"}}]
        await _posted(it, opened, tools=tools)
    (turn,) = it.turns()
    assert turn.ignored_params == ["tools: 'shell' is not offered here"]


async def _posted(it: Rig, opened: Json, **fields: Any) -> Json:
    answer = await it.call("POST", f"/s/{opened['key']}/v1/responses", {"model": "it", "input": "Go.", **fields})
    assert answer.status == 200, answer.raw
    return answer.json


async def test_an_output_names_its_call_by_the_item_too(run: Path) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {"A": "b"}}
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": action, "status": "completed"}
    output = {"type": "local_shell_call_output", "id": "lsh_1", "output": "x"}
    async with rig(run, ("ok",)) as it:
        await _posted(it, await it.open(), input=[{"role": "user", "content": "Go."}, call, output])
    called, answered = it.turns()[0].prompt_messages[-2:]
    (made,) = called["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"command": ["ls"], "env": {"A": "b"}}
    assert (made["id"], answered["tool_call_id"]) == ("c", "c")
