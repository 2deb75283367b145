"""Forced calls, JSON schemas and single calls over every API: what reaches the engine, and what becomes of the turn."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rolltape
from engines.fake_vllm import FakeVllm, Reply, Token
from gateways import CALCULATOR, PATHS, QUICK, Answer, Api, Rig, body_of, rig, scripted, text_of
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import TurnFlag
from rolltape.tiny import shipped_model
from scripted_engine import Mishap, Step, load_tokenizer

Json = dict[str, Any]

SCHEMA: Json = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
SEARCH: Json = {"type": "function", "function": {"name": "search", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
OTHER_CALL = CALL.replace("1+1", "2+2")


def tools(api: Api, *, strict: bool = False) -> list[Json]:
    functions = [CALCULATOR["function"] | ({"strict": True} if strict else {}), SEARCH["function"]]
    match api:
        case Api.CHAT:
            return [{"type": "function", "function": function} for function in functions]
        case Api.RESPONSES:
            return [{"type": "function", **function} for function in functions]
        case Api.MESSAGES:
            renamed = [{**function, "input_schema": function["parameters"]} for function in functions]
            return [{key: one[key] for key in one if key != "parameters"} for one in renamed]
        case Api.GEMINI:
            declared = [{"name": one["name"], "parametersJsonSchema": one["parameters"]} for one in functions]
            return [{"functionDeclarations": declared}]


REQUIRED: dict[Api, Json] = {
    Api.CHAT: {"tool_choice": "required"},
    Api.RESPONSES: {"tool_choice": "required"},
    Api.MESSAGES: {"tool_choice": {"type": "any"}},
    Api.GEMINI: {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
}
NAMED: dict[Api, Json] = {
    Api.CHAT: {"tool_choice": {"type": "function", "function": {"name": "calculator"}}},
    Api.RESPONSES: {"tool_choice": {"type": "function", "name": "calculator"}},
    Api.MESSAGES: {"tool_choice": {"type": "tool", "name": "calculator"}},
    Api.GEMINI: {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["calculator"]}}},
}
# The Gemini API has no word for a single call, nor for tools that alone are strict.
ONE_CALL: dict[Api, Json] = {
    Api.CHAT: {"parallel_tool_calls": False},
    Api.RESPONSES: {"parallel_tool_calls": False},
    Api.MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
REQUIRED_ONE: dict[Api, Json] = {
    Api.CHAT: REQUIRED[Api.CHAT] | ONE_CALL[Api.CHAT],
    Api.RESPONSES: REQUIRED[Api.RESPONSES] | ONE_CALL[Api.RESPONSES],
    Api.MESSAGES: {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}
FORMATS: list[tuple[Api, Json]] = [
    (Api.CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}),
    (Api.RESPONSES, {"text": {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}}),
    (Api.MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (Api.GEMINI, {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}}),
    (Api.MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
]


def sent(it: Rig, number: int = -1) -> Json:
    """The constraint that reached the engine, under the name that it has there."""
    params: Json = it.engine.said[number].asked.body["sampling_params"]
    return {name: json.loads(params[name]) for name in ("json_schema", "structural_tag") if name in params}


@pytest.mark.parametrize(
    ("api", "fields", "names", "one_call"),
    [(api, fields, 2, False) for api, fields in REQUIRED.items()]
    + [(api, fields, 1, False) for api, fields in NAMED.items()]
    + [(api, fields, 2, True) for api, fields in REQUIRED_ONE.items()],
)
async def test_a_required_call_is_enforced_by_sglang_and_does_not_train(
    run: Path, api: Api, fields: Json, names: int, one_call: bool
) -> None:
    async with rig(run, (CALL,)) as it:
        opened = await it.open(thinking=False)
        answer = await it.ask(opened, "Compute.", api, tools=tools(api), **fields)
        done = await it.finish(opened, reward=1.0)
    assert "x-rolltape-ignored-params" not in answer.headers
    tag = sent(it)["structural_tag"]["format"]
    assert (tag["type"], len(tag["tags"]), tag["stop_after_first"]) == ("tags_with_separator", names, one_call)
    assert tag["tags"][0]["begin"] == '<tool_call>\n{"name": "calculator", "arguments": '
    assert tag["tags"][0]["content"]["json_schema"] == CALCULATOR["function"]["parameters"]
    assert tag["tags"][0]["end"] == "}\n</tool_call>"
    (turn,) = it.turns()
    assert turn.facts.flags == (TurnFlag.CONSTRAINED,)
    assert done["ledger"] == {"masked:constrained": len(turn.sampled_ids)}


@pytest.mark.parametrize(("api", "fields"), FORMATS)
async def test_a_schema_reaches_sglang_and_thinking_comes_before_it(run: Path, api: Api, fields: Json) -> None:
    async with rig(run, lambda _: '{"answer": 2}') as it:
        plain = await it.open(thinking=False)
        answer = await it.ask(plain, "Compute.", api, **fields)
        assert text_of(api, answer) == '{"answer": 2}'
        assert "x-rolltape-ignored-params" not in answer.headers
        assert sent(it) == {"json_schema": SCHEMA}
        await it.ask(await it.open(task_id="other", thinking=True), "Compute.", api, **fields)
        with_thought, without = sent(it)["structural_tag"]["format"]["elements"]
        thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
        assert with_thought == {"type": "sequence", "elements": [thought, without]}
        assert without["elements"][-1] == {"type": "json_schema", "json_schema": SCHEMA}
        await it.ask(plain, "Compute.", api, tools=tools(api), **fields)
        calls, text = sent(it)["structural_tag"]["format"]["elements"]
        assert (calls["type"], text["json_schema"]) == ("tags_with_separator", SCHEMA)
    assert [turn.facts.flags for turn in it.turns()] == [(TurnFlag.CONSTRAINED,)] * 3


@pytest.mark.parametrize("api", list(ONE_CALL))
async def test_strict_tools_are_enforced_where_that_is_asked_for(run: Path, api: Api) -> None:
    async with rig(run, lambda _: CALL) as it:
        answer = await it.ask(await it.open(thinking=False), "Compute.", api, tools=tools(api, strict=True))
        assert "tools: strict" in answer.headers["x-rolltape-ignored-params"]
        assert sent(it) == {}
    assert it.turns()[0].facts.flags == ()
    async with rig(run.with_name("all"), lambda _: "Well. " + CALL, constrain="all") as it:
        answer = await it.ask(await it.open(thinking=False), "Compute.", api, tools=tools(api, strict=True))
        assert "x-rolltape-ignored-params" not in answer.headers
        tag = sent(it)["structural_tag"]["format"]
        assert (tag["type"], tag["triggers"]) == ("triggered_tags", ["<tool_call>"])
        held = [one["content"]["json_schema"] for one in tag["tags"]]
        assert held == [CALCULATOR["function"]["parameters"], {"type": "object"}]
    assert it.turns()[0].facts.flags == (TurnFlag.CONSTRAINED,)


@pytest.mark.parametrize("api", list(ONE_CALL))
async def test_a_second_call_is_cut_off_where_one_was_asked_for_and_the_rest_trains(run: Path, api: Api) -> None:
    async with rig(run, (f"Well.\n{CALL}\n{OTHER_CALL}", "2")) as it:
        opened = await it.open(thinking=False)
        answer = await it.ask(opened, "Compute.", api, tools=tools(api), **ONE_CALL[api])
        assert "x-rolltape-ignored-params" not in answer.headers
        assert sent(it) == {}
        first = it.turns()[0]
        assert it.engine.text_of(first.sampled_ids.tolist()) == f"Well.\n{CALL}"
        call, finish = _only_call(api, answer)
        assert finish in ("tool_calls", "tool_use", "completed")
        again = [{"role": "user", "content": "Compute."}, *_echo(api, answer, call)]
        await it.ask(opened, again, api, tools=tools(api), **ONE_CALL[api])
        done = await it.finish(opened, reward=1.0)
    both = it.turns()
    assert both[1].prompt_ids[: len(first.tokens)].tolist() == first.tokens.to_numpy().tolist()
    assert both[0].facts.extra["cut_after_call"] is True
    assert done["ledger"] == {"trained": sum(len(turn.sampled_ids) for turn in both)}
    assert len(done["samples"]) == 1


def _only_call(api: Api, answer: Answer) -> tuple[str, str]:
    """The id of a reply's only call, and how the reply ended."""
    body = answer.json
    match api:
        case Api.CHAT:
            (choice,) = body["choices"]
            (call,) = choice["message"]["tool_calls"]
            return call["id"], choice["finish_reason"]
        case Api.MESSAGES:
            (use,) = [block for block in body["content"] if block["type"] == "tool_use"]
            return use["id"], body["stop_reason"]
        case _:
            (item,) = [item for item in body["output"] if item["type"] == "function_call"]
            return item["call_id"], body["status"]


def _echo(api: Api, answer: Answer, call: str) -> list[Json]:
    """A reply as its client sends it back, and what the tool said."""
    body = answer.json
    match api:
        case Api.CHAT:
            return [body["choices"][0]["message"], {"role": "tool", "tool_call_id": call, "content": "2"}]
        case Api.MESSAGES:
            result = {"type": "tool_result", "tool_use_id": call, "content": "2"}
            return [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
        case _:
            return [*body["output"], {"type": "function_call_output", "call_id": call, "output": "2"}]


async def test_a_reply_that_is_not_what_was_demanded_is_flagged_whoever_is_to_blame(run: Path) -> None:
    replies = ("No.", '{"answer": "two"}', CALL, '{"answer": 2}')
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
    other = {"type": "function", "function": {"name": "search"}}
    async with rig(run, replies) as it:
        opened = await it.open(thinking=False)
        asked: list[Json] = [
            {"tools": [CALCULATOR], "tool_choice": "required"},
            schema,
            {"tools": [CALCULATOR, SEARCH], "tool_choice": other},
            schema,
        ]
        flags = [
            (await it.ask(opened, str(at), **fields)).headers["x-rolltape-flags"] for at, fields in enumerate(asked)
        ]
    assert flags == ["constrained,unmet_demand"] * 3 + ["constrained"]


async def test_a_grammar_that_the_engine_refuses_is_named_and_the_model_is_free(run: Path) -> None:
    engine = scripted((CALL,))
    engine.mishaps = {0: Mishap.REFUSED}
    async with rig(run, engine) as it:
        opened = await it.open(thinking=False)
        answer = await it.ask(opened, "Compute.", tools=[CALCULATOR], tool_choice="required")
        assert answer.status == 200
        done = await it.finish(opened)
    assert sent(it) == {}
    (turn,) = it.turns()
    assert turn.ignored_params == ["tool_choice: the engine refused the grammar; the model is free"]
    assert answer.headers["x-rolltape-ignored-params"] == turn.ignored_params[0]
    assert done["ledger"] == {"trained": len(turn.sampled_ids)}


async def test_an_interrupted_reply_goes_on_unconstrained_unless_it_was_still_thinking(run: Path) -> None:
    thought = "<think>\n" + "hm " * 40 + "\n</think>\n\n"
    for text, held, field in ((thought + CALL, True, "tools"), ('{"answer": 2}', False, "response_format")):
        engine = scripted((text,))
        engine.mishaps = {0: Mishap.ABORTED}
        fields: Json = {"tools": [CALCULATOR], "tool_choice": "required"}
        async with rig(run.with_name(field), engine) as it:
            opened = await it.open(thinking=held)
            await it.ask(opened, "Compute.", **(fields if held else {"response_format": {"type": "json_object"}}))
        assert sent(it, 0) != {}
        (turn,) = it.turns()
        assert turn.facts.flags == (TurnFlag.CONSTRAINED,)
        if held:
            thinking, answer = sent(it, 1)["structural_tag"]["format"]["elements"]
            assert (thinking["begin"], thinking["end"]) == ("", "</think>")
            assert answer["elements"][-1]["type"] == "tags_with_separator"
            assert turn.ignored_params == []
        else:
            assert sent(it, 1) == {}
            (named,) = turn.ignored_params
            assert named.startswith("response_format: not enforced after an interruption")


async def test_a_reply_cut_by_its_length_is_not_blamed(run: Path) -> None:
    async with rig(run, (Step('{"answer"', finish="length"),)) as it:
        answer = await it.ask(await it.open(thinking=False), "Compute.", response_format={"type": "json_object"})
    assert answer.headers["x-rolltape-flags"] == "constrained"


@pytest.mark.parametrize("api", list(Api))
async def test_vllm_gets_structured_outputs(run: Path, api: Api) -> None:
    tokenizer = load_tokenizer(shipped_model())
    end = tokenizer.token_to_id("<|im_end|>") or 0
    ids = [*tokenizer.encode('{"answer": 2}', add_special_tokens=False).ids, end]
    fields = dict(FORMATS[:4])[api]
    async with (
        FakeVllm(Reply([Token(one) for one in ids], stop_reason=end)) as server,
        Gateway(engine=f"vllm:{server.url}", model=shipped_model(), tape=run, patience=QUICK) as gateway,
        aiohttp.ClientSession() as http,
    ):
        session = await gateway.open_session(task_id="t", thinking=False)
        bodies = [body_of(api, "Compute.", **fields), body_of(api, "Compute.", tools=tools(api), **REQUIRED[api])]
        for body in bodies:
            url = f"{gateway.url}/s/{session.key}{PATHS[api]}"
            async with http.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                assert "x-rolltape-ignored-params" not in response.headers
        await session.finish()
    by_schema, by_tag = (body["structured_outputs"] for body in server.bodies)
    assert by_schema == {"json": SCHEMA}
    assert json.loads(by_tag["structural_tag"])["format"]["type"] == "tags_with_separator"
    first, second = next(iter(rolltape.read(run).rollouts())).turns
    assert first.facts.flags == (TurnFlag.CONSTRAINED,)
    assert second.facts.flags == (TurnFlag.CONSTRAINED, TurnFlag.UNMET_DEMAND)


@pytest.mark.parametrize("api", list(Api))
async def test_an_engine_that_cannot_constrain_has_it_named(run: Path, api: Api) -> None:
    async with Gateway(engine="tiny", tape=run, forced={"max_tokens": 8}) as gateway, aiohttp.ClientSession() as http:
        session = await gateway.open_session(task_id="t", thinking=False)
        body = body_of(api, "Compute.", tools=tools(api), **REQUIRED[api])
        async with http.post(f"{gateway.url}/s/{session.key}{PATHS[api]}", json=body) as response:
            named = response.headers["x-rolltape-ignored-params"]
        assert named == "tool_choice: the engine cannot enforce structural tags; the model is free"
        await session.finish()
    (turn,) = next(iter(rolltape.read(run).rollouts())).turns
    assert TurnFlag.CONSTRAINED not in turn.facts.flags
    assert turn.ignored_params == [named]


async def test_a_gateway_that_is_not_to_constrain_names_what_it_leaves_free(run: Path) -> None:
    async with rig(run, (CALL,), constrain="none") as it:
        opened = await it.open(thinking=False)
        answer = await it.ask(opened, "Compute.", tools=[CALCULATOR], tool_choice="required")
        done = await it.finish(opened)
    assert answer.headers["x-rolltape-ignored-params"] == "tool_choice: not enforced, because of --constrain none"
    assert sent(it) == {}
    assert done["ledger"].keys() == {"trained"}
