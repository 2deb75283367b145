"""What a hostile look from outside found: each was wrong once."""

import asyncio
import logging
import resource
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rolltape
from gateways import CALCULATOR, Api, Rig, eventually, rig, user
from rolltape.gateway.gateway import Gateway
from rolltape.records.turn import Finish
from rolltape.tiny import shipped_model
from scripted_engine import Json, Mishap, tool_call

CALL = tool_call("calculator", {"expression": "1+1"})


def without_reasoning(message: Json) -> list[Json]:
    """A reply as clients of Chat Completions send it back, and the result of its call."""
    call = message["tool_calls"][0]
    echo = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
    return [echo, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]


async def test_of_replies_that_differ_in_dropped_reasoning_the_one_whose_call_comes_back_is_continued(
    run: Path,
) -> None:
    thoughts = ["one way", "another way"]
    script = [*(f"<think>\n{thought}\n</think>\n\n{CALL}" for thought in thoughts), "done", "done"]
    async with rig(run, script) as it:
        opened = await it.open()
        given = [(await it.ask(opened, "q", tools=[CALCULATOR])).json["choices"][0]["message"] for _ in thoughts]
        for message in given:
            await it.ask(opened, [user("q"), *without_reasoning(message)], tools=[CALCULATOR])
        for thought, said in zip(thoughts, it.engine.said[2:], strict=True):
            assert thought in said.asked.prompt
        finished = await it.finish(opened)
    assert finished["ledger"].keys() == {"trained"}  # both were delivered, and gone on from


async def test_without_ids_the_latest_of_such_replies_is_continued_though_an_earlier_one_was_before(run: Path) -> None:
    script = ["<think>\nfirst\n</think>\n\nyes", "ok", "<think>\nsecond\n</think>\n\nyes", "ok"]
    async with rig(run, script, thinking_retention="all") as it:
        opened = await it.open()
        for _ in range(2):
            await it.ask(opened, "q")
            await it.ask(opened, [user("q"), {"role": "assistant", "content": "yes"}, user("more")])
        assert "second" in it.engine.said[3].asked.prompt


async def test_a_stop_string_that_an_interruption_splits_ends_the_reply_all_the_same(run: Path) -> None:
    text = "abcdefgh STOPHERE and what comes after"
    async with rig(run, [text]) as it:
        ids = it.engine.tokenizer.encode(text, add_special_tokens=False).ids
        inside = next(count for count in range(len(ids)) if "STO" in it.engine.text_of(ids[:count]))
        it.engine.allowance = asyncio.Semaphore(inside)
        opened = await it.open()
        asking = it.asking(opened, "q", Api.MESSAGES, stop_sequences=["STOPHERE", "never"])
        await eventually(it.engine.allowance.locked)
        await it.call("POST", "/weights/pause")
        it.engine.allowance = None
        await it.call("POST", "/weights/resume", {"version": "v1"})
        reply = (await asking).json
        assert it.engine.said[0].finish == "abort"
        assert "STOPHERE" not in it.engine.text_of(it.engine.said[0].ids)
    assert (reply["content"][0]["text"], reply["stop_reason"]) == ("abcdefgh", "stop_sequence")
    assert reply["stop_sequence"] == "STOPHERE"
    (turn,) = it.turns()
    assert turn.facts.finish is Finish.STOP_STRING
    sampled = it.engine.text_of(turn.sampled_ids.tolist())
    assert "STOPHERE" in sampled
    assert "after" not in sampled
    assert len(turn.facts.segments) == 2


async def test_a_body_that_is_not_in_its_encoding_is_refused_and_no_failure_of_the_gateway(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        answer = await it.call("POST", f"/s/{opened['key']}/v1/chat/completions", b"plain", Content_Encoding="gzip")
        assert answer.status == 400
        assert "gzip" in answer.error


async def test_a_key_in_the_wrong_place_is_not_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(run) as it:
        key = (await it.open())["key"]
        with caplog.at_level(logging.DEBUG):
            for path in (f"/sessions/{key}", f"//s/{key}/v1/models", f"/v1/s/{key}/v1/models"):
                assert (await it.call("GET", path)).status == 404
    assert caplog.text.count(" 404 ") == 3
    assert key not in caplog.text


async def test_another_session_of_a_rollout_is_shown_with_that_rollouts_figures(run: Path) -> None:
    async with rig(run) as it:
        first = await it.open(task_id="sum", step=12, attempt=3)
        second = await it.open(rollout=first["rollout"])
        assert (second["task_id"], second["step"], second["attempt"]) == ("sum", 12, 3)


async def test_a_reward_given_with_an_earlier_session_of_a_rollout_counts(run: Path) -> None:
    async with rig(run) as it:
        first = await it.open()
        second = await it.open(rollout=first["rollout"])
        await it.ask(second, "q")
        assert not (await it.finish(first, reward=0.5, reward_terms={"tests": 0.5}))["rollout_ended"]
        ended = await it.finish(second)
        assert [sample["reward"] for sample in ended["samples"]] == [0.5]
    (rollout,) = rolltape.read(run).rollouts()
    assert rollout.reward == 0.5


async def test_a_finish_that_could_not_be_written_can_be_made_again(run: Path) -> None:
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        async with rig(run) as it:
            opened = await it.open()
            await it.ask(opened, "q")
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            path = f"/sessions/{opened['session']}/finish"
            assert (await it.call("POST", path, {"reward": 1.0})).status == 500
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert (await it.call("POST", path, {"reward": 1.0})).status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    (rollout,) = rolltape.read(run).rollouts()
    assert rollout.reward == 1.0


@pytest.mark.parametrize("forced", [{"stop": [""]}, {"seed": 2**70}])
async def test_sampling_that_no_engine_could_apply_opens_no_session(run: Path, forced: dict[str, Any]) -> None:
    async with rig(run) as it:
        assert (await it.call("POST", "/sessions", {"task_id": "t", "forced": forced})).status == 400


async def test_a_replay_passes_over_what_had_failed(run: Path, tmp_path: Path) -> None:
    async with rig(run, ["said in the end"]) as it:
        it.engine.mishaps = dict.fromkeys(range(3), Mishap.TRUNCATED)
        opened = await it.open()
        assert (await it.ask(opened, "q")).status == 502
        assert (await it.ask(opened, "q", retry=1)).status == 200
        await it.finish(opened)
    engine = f"replay:{run}#{opened['rollout']}"
    async with (
        Gateway(engine=engine, model=shipped_model(), tape=tmp_path / "again") as gateway,
        aiohttp.ClientSession() as http,
    ):
        again = Rig(gateway, it.engine, tmp_path / "again", http)
        answer = await again.ask(await again.open(), "q")
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "said in the end"
