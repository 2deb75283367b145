"""vLLM's `/inference/v1/generate`: what a training client is given equals the tape, and its prompts chain by ids."""

from pathlib import Path
from typing import Any

import openai
import pytest

import rolltape
from gateways import CALCULATOR, Answer, Rig, rig, tiny_gateway, user
from rolltape.cli import run as rolltape_command
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.turn import Finish
from rolltape.tiny import shipped_model
from scripted_engine import Json, tool_call
from told_tokens import LONG, encoded, on_tape, post, told

renderers = pytest.importorskip("renderers")
client_of_renderers = pytest.importorskip("renderers.client")
configs = pytest.importorskip("renderers.configs")

PATH = "/inference/v1/generate"


async def ask(it: Rig, opened: Json, ids: list[int], params: Json | None = None, **fields: Any) -> Answer:
    asked = {"logprobs": 1, **(params or {})}
    return await post(it, opened, PATH, token_ids=ids, sampling_params=asked, return_token_ids=True, **fields)


async def test_the_client_of_renderers_takes_turns_that_chain_by_ids(run: Path) -> None:
    """It is what verifiers (0.4.0) trains with."""
    tokenizer = FolderTokenizer(shipped_model())
    renderer = renderers.create_renderer(tokenizer, configs.Qwen3RendererConfig(enable_thinking=False))
    generate = client_of_renderers.generate
    script = [tool_call("calculator", {"expression": "1"}), "It is 1."]
    async with rig(run, script) as it:
        opened = await it.open()
        messages: Any = [user("What is 1?")]
        tools: Any = [CALCULATOR["function"]]
        given: dict[str, Any] = {"renderer": renderer, "messages": messages, "tools": tools, "model": "it"}
        async with openai.AsyncOpenAI(base_url=opened["openai_base_url"], api_key="any") as client:
            first = await generate(client=client, sampling_params={"max_tokens": 100}, **given)
            assert [call.name for call in first["tool_calls"]] == ["calculator"]
            result: Any = [{"role": "tool", "content": "1"}]
            bridged = renderer.bridge_to_next_turn(first["prompt_ids"], first["completion_ids"], result, tools=tools)
            assert bridged is not None
            second = await generate(client=client, prompt_ids=bridged.token_ids, **given)
        assert it.engine.violations == []
        await it.finish(opened, reward=1.0)
    turns = it.turns()
    for got, turn in zip((first, second), turns, strict=True):
        told_ids = (got["prompt_ids"], got["completion_ids"], got["completion_logprobs"])
        assert told_ids == on_tape(turn)
    assert (first["finish_reason"], second["finish_reason"], second["content"]) == ("tool_calls", "stop", "It is 1.")
    assert [turn.facts.extra["api"] for turn in turns] == ["generate"] * 2
    assert [turn.ignored_params for turn in turns] == [[], []]
    (rollout,) = rolltape.read(run).rollouts()
    (sample,) = rolltape.linearize(rollout, "exact").samples()
    assert sample.ids.tolist() == turns[-1].tokens.to_numpy().tolist()
    assert rolltape_command(["check", str(run)]) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_replies_tells_the_ids_of_its_turn(run: Path, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with rig(run, ["It is é.", "It is è."]) as it:
        opened, prompt = await it.open(), encoded(it, "Say it:")
        answer = await ask(it, opened, prompt, {"n": 2}, **options)
        await it.finish(opened)
    turns = {turn.facts.extra.get("choice", 0): on_tape(turn) for turn in it.turns()}
    for index, turn in turns.items():
        got = told(answer, index)
        assert (got.ids, got.logprobs) == (turn.ids, turn.logprobs)
        assert turn.prompt_ids == prompt
    last = answer.events[-1]
    assert last["request_id"].startswith("generate-tokens-")
    assert last["usage"]["completion_tokens"] == sum(len(turn.ids) for turn in turns.values())
    tokens = [one for event in answer.events for choice in event["choices"] for one in choice["logprobs"]["content"]]
    assert [one["token"] for one in tokens] == [f"token_id:{one}" for turn in turns.values() for one in turn.ids]
    assert answer.raw.endswith(b"data: [DONE]\n\n") is stream


async def test_ids_that_the_client_names_end_a_reply_as_those_of_the_model_do(run: Path) -> None:
    async with tiny_gateway(run, forced={"seed": 7}) as it:
        opened = await it.open()
        prompt = encoded(it, "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n")
        whole = told(await ask(it, opened, prompt, {"max_tokens": 50})).ids
        ending = whole[2]
        answer = await ask(it, opened, prompt, {"max_tokens": 50, "stop_token_ids": [ending]})
        await it.finish(opened)
    turn = it.turns()[-1]
    assert told(answer).ids == whole[: whole.index(ending) + 1] == turn.sampled_ids.tolist()
    assert (turn.facts.finish, turn.facts.extra["stop_ids"]) == (Finish.STOP, [ending])
    assert rolltape_command(["check", str(run)]) == 0


async def test_a_reply_has_the_room_of_the_gateway_where_nothing_is_said(run: Path) -> None:
    async with rig(run, [LONG * 3], max_reply_tokens=30) as it:
        opened = await it.open()
        answer = await post(it, opened, PATH, token_ids=[1, 2, 3], sampling_params={"min_tokens": 5, "top_k": 0})
    (choice,) = answer.json["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"]), choice["logprobs"]) == ("length", 30, None)
    assert answer.headers["x-rolltape-ignored-params"] == "sampling_params.min_tokens: not known here; ignored"
    assert it.engine.said[0].asked.body["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"sampling_params": {}}, "token_ids is missing; give a list of token ids"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids is []; give a list of token ids"),
        ({"token_ids": [1, "x"], "sampling_params": {}}, "token_ids[1] is 'x'; give token ids"),
        ({"token_ids": [1]}, "sampling_params is missing; give an object"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [None]}}, "sampling_params.stop_token_ids[0] is"),
        ({"token_ids": [-1], "sampling_params": {}}, "the prompt's id 0 is -1, which the model does not have"),
        ({"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}}, "features is"),
    ],
)
async def test_what_cannot_be_continued_is_refused(run: Path, body: Json, said: str) -> None:
    async with rig(run) as it:
        answer = await post(it, await it.open(), PATH, **body)
    assert (answer.status, answer.error[: len(said)]) == (400, said)
