"""Sessions over HTTP: opened, used, looked at, finished, dropped, and refused."""

import asyncio
import json
import sys
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytest

import rolltape
from agent_assignments import ScriptedEpisode, assigned, connected
from gateways import PATHS, Api, body_of, eventually, rig, slowly, streamed_text_of, text_of
from rolltape.collect.agents import agent_named
from rolltape.collect.environments.protocol import AGENT, Answer
from rolltape.errors import BadRequest
from rolltape.export.files import json_line
from rolltape.export.schema import SAMPLE, RowKind
from rolltape.gateway import wire
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.wire.messages.dialect import MessagesDialect
from rolltape.records.rollout import Status

APIS = list(Api)


async def test_a_session_is_reached_by_its_path_by_bearer_and_by_x_api_key(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open()
        for header in ({}, {"authorization": f"Bearer {opened['key']}"}, {"x_api_key": opened["key"]}):
            path = f"/s/{opened['key']}/v1/chat/completions" if not header else "/v1/chat/completions"
            answer = await it.call("POST", path, body_of(Api.CHAT, "hello"), **header)
            assert answer.status == 200, answer.raw
            assert answer.headers["x-rolltape-session"] == opened["session"]
        assert opened["openai_base_url"] == f"{it.gateway.url}/s/{opened['key']}/v1"
        assert opened["anthropic_base_url"] == f"{it.gateway.url}/s/{opened['key']}"
        assert (await it.finish(opened))["turns"] == 3


async def test_an_api_that_is_registered_has_its_base_url_and_its_variables_wherever_agents_look(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NewDialect(MessagesDialect):
        sdk = "new"
        variables = ("NEW_URL", "NEW_KEY", "NEW_MODEL")

        def base_url(self, root: str) -> str:
            return f"{root}/new"

    monkeypatch.setattr(wire, "DIALECTS", (*wire.DIALECTS, NewDialect()))
    script = tmp_path / "program.py"
    script.write_text("import json, os, sys\nprint(json.dumps([json.load(sys.stdin), dict(os.environ)]))\n")
    async with rig(run) as it:
        opened = await it.open()
        assert opened["new_base_url"] == f"{it.gateway.url}/s/{opened['key']}/new"
        session = await it.gateway.open_session(task_id="another")
        place = {"new": f"{it.gateway.url}/s/{session.key}/new"}
        assert session.base_urls.items() >= place.items()
        given = assigned(ScriptedEpisode(Answer()), tmp_path, connections={AGENT: connected(session)})
        outcome = await agent_named(f"command:{sys.executable} {script}").run(given)
    told, variables = json.loads(outcome.ended[AGENT].text)
    assert told["new_base_url"] == variables["NEW_URL"] == place["new"]
    assert (variables["NEW_KEY"], variables["NEW_MODEL"]) == (session.key, "the-model")


async def test_what_a_session_is_opened_with_is_on_the_tape(run: Path) -> None:
    spec: dict[str, Any] = {
        "task_id": "gsm8k/1",
        "task": {"question": "2 + 2"},
        "step": 3,
        "attempt": 2,
        "source": "gsm8k",
        "split": "train",
        "agent": "swe",
        "tags": ["hard"],
        "extra": {"seed": 1},
    }
    async with rig(run) as it:
        opened = await it.open(**spec)
        await it.finish(opened, reward=1, reward_terms={"format": 0.5}, stop_reason="max_turns", reason="enough")
    rollout = rolltape.read(run).rollout(opened["rollout"])
    head, outcome = rollout.head, rollout.outcome
    assert (head.task_id, head.task, head.step, head.attempt) == ("gsm8k/1", spec["task"], 3, 2)
    assert (head.source, head.agent, head.tags, head.extra) == ("gsm8k#train", "swe", ("hard",), {"seed": 1})
    assert (outcome.status, outcome.reward, outcome.stop_reason, outcome.reason) == (
        Status.FINISHED,
        1.0,
        "max_turns",
        "enough",
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "task_id"),
        ({"task_id": "t", "colour": "red"}, "colour"),
        ({"task_id": 5}, "task_id"),
        ({"task_id": "t", "step": "one"}, "step"),
        ({"task_id": "t", "step": -1}, "step"),
        ({"task_id": "t", "step": 2**70}, "step"),
        ({"task_id": "t", "max_turns": -1}, "max_turns"),
        ({"task_id": "t", "context_budget": -5}, "context_budget"),
        ({"task_id": "t", "sampling": {"warmth": 1}}, "warmth"),
        ({"task_id": "t", "sampling": {"temperature": -1}}, "temperature"),
        ({"task_id": "t", "forced": {"top_p": 7}}, "top_p"),
        ({"rollout": "nowhere"}, "nowhere"),
        ({"task_id": "t", "rollout": "r"}, "task_id"),
    ],
)
async def test_a_bad_spec_is_refused_with_the_field_that_is_wrong(run: Path, spec: dict[str, Any], says: str) -> None:
    async with rig(run) as it:
        answer = await it.call("POST", "/sessions", spec)
        assert answer.status == 400, answer.raw
        assert says in answer.error
        assert not len(it.gateway.service.sessions)


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b'{"task": ' + b"[" * 100_000, b'{"task_id": "\xff"}'])
async def test_a_body_that_is_no_spec_is_refused(run: Path, body: bytes) -> None:
    async with rig(run) as it:
        assert (await it.call("POST", "/sessions", body)).status == 400


async def test_a_task_and_attempt_that_were_used_are_refused_unless_it_is_another_try(run: Path) -> None:
    async with rig(run) as it:
        await it.open(attempt=1)
        answer = await it.call("POST", "/sessions", {"task_id": "t", "attempt": 1})
        assert answer.status == 400
        assert "on the tape already" in answer.error
        assert (await it.open(attempt=1, new_try=True))["try"] == 1


async def test_finish_gives_samples_as_export_writes_them(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        await it.ask(opened, "hello")
        done = await it.finish(opened, reward=0.5, policy="keep-head")
    made = rolltape.linearize(rolltape.read(run).rollout(opened["rollout"]), "keep-head")
    exported = [json.loads(json_line(SAMPLE.row(sample), RowKind.SAMPLE)) for sample in made.samples()]
    assert done["samples"] == exported
    assert done["ledger"] == {"trained": len(it.engine.said[0].ids)}
    assert (done["rollout_ended"], done["turns"], done["interrupted"]) == (True, 1, 0)


@pytest.mark.parametrize(
    "ending", [{"policy": "kind"}, {"reward_terms": {"a": 1}}, {"reward": "much"}, {"colour": 1}, {"stop_reason": "x"}]
)
async def test_a_bad_ending_leaves_the_session_open(run: Path, ending: dict[str, Any]) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = await it.open()
        refused = await it.call("POST", f"/sessions/{opened['session']}/finish", ending)
        assert refused.status == 400, refused.raw
        assert (await it.ask(opened, "hello")).status == 200
        await it.finish(opened)


async def test_a_drop_without_a_reason_in_words_is_refused(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        assert (await it.call("DELETE", f"/sessions/{opened['session']}", {"reason": ""})).status == 400
        assert (await it.ask(opened, "hello")).status == 200


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("ends", ["finish", "drop"])
async def test_after_the_close_a_request_is_refused_for_good(run: Path, api: Api, ends: str) -> None:
    async with rig(run) as it:
        opened = await it.open()
        if ends == "finish":
            await it.finish(opened)
        else:
            assert (await it.call("DELETE", f"/sessions/{opened['session']}", {"reason": "sandbox died"})).status == 200
        late = await it.ask(opened, "hello", api)
        assert (late.status, late.headers["x-should-retry"]) == (503, "false")
        assert opened["session"] in late.error
        again = await it.call("POST", f"/sessions/{opened['session']}/finish", {})
        assert again.status == 404
    outcome = rolltape.read(run).rollout(opened["rollout"]).outcome
    assert (outcome.status, outcome.reason) == (
        (Status.FINISHED, None) if ends == "finish" else (Status.FAILED, "sandbox died")
    )


async def test_a_rollout_ends_with_the_last_of_its_sessions(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        first = await it.open()
        second = await it.open(rollout=first["rollout"])
        assert second["rollout"] == first["rollout"]
        assert second["key"] != first["key"]
        await it.ask(first, "one")
        await it.ask(second, "two")
        done = await it.finish(first, reward=0.25)
        assert (done["rollout_ended"], done["samples"]) == (False, None)
        done = await it.finish(second, reward=1.0)
        assert (done["rollout_ended"], len(done["samples"])) == (True, 2)
    outcome = rolltape.read(run).rollout(first["rollout"]).outcome
    assert (outcome.status, outcome.reward) == (Status.FINISHED, 1.0)


async def test_finish_waits_for_the_turn_in_flight(run: Path) -> None:
    async with rig(run, slowly("a reply that takes a while", 0.02)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        done = await it.finish(opened)
        assert (done["turns"], done["interrupted"]) == (1, 0)
        assert text_of(Api.CHAT, await asking) == "a reply that takes a while"
        assert done["ledger"].keys() == {"trained"}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_takes_longer_than_finish_waits_is_interrupted_and_its_client_told(
    run: Path, api: Api, stream: bool
) -> None:
    async with rig(run, slowly("word " * 300, 0.05)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello", api, stream=stream)
        await it.requested(1)
        done = await it.finish(opened, drain_s=0.15)
        assert (done["turns"], done["interrupted"]) == (1, 1)
        assert done["ledger"].keys() == {"masked:aborted"}
        answer = await asking
        assert b"closed before the reply" in answer.raw
        assert answer.status == (200 if stream else 503)
        if stream and api is not Api.CHAT:
            assert ("word " * 300).startswith(streamed_text_of(api, answer))
        assert it.engine.aborted


async def test_finish_during_a_pause_does_not_wait_for_the_resume(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        await it.gateway.pause()
        asking = it.asking(opened, "hello")
        await eventually(lambda: it.gateway.service.sessions.of_id(opened["session"]).in_flight == 1)
        done = await it.finish(opened, drain_s=0.1)
        assert (done["turns"], done["interrupted"]) == (1, 1)
        assert (await asking).status == 503


async def test_two_finishes_at_once_end_it_once(run: Path) -> None:
    async with rig(run, slowly("a reply", 0.02)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        path = f"/sessions/{opened['session']}/finish"
        answers = await asyncio.gather(*(it.call("POST", path, {"reward": 1}) for _ in range(3)))
        assert sorted(answer.status for answer in answers) == [200, 404, 404]
        await asking


async def test_sessions_are_listed_and_looked_at_without_their_keys(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        opened = [await it.open(attempt=attempt) for attempt in range(3)]
        await it.ask(opened[1], "hello", logit_bias={"5": 1})
        listed = await it.call("GET", "/sessions")
        assert [one["session"] for one in listed.json["sessions"]] == [one["session"] for one in opened]
        looked = await it.call("GET", f"/sessions/{opened[1]['session']}")
        (turn,) = looked.json["turns"]
        assert (turn["finish"], turn["delivery"], looked.json["in_flight"]) == ("stop", "delivered", 0)
        assert turn["sampled_tokens"] == len(it.engine.said[0].ids)
        assert not any(one["key"].encode() in answer.raw for one in opened for answer in (listed, looked))
        assert (await it.call("GET", "/sessions/nope")).status == 404


@pytest.mark.parametrize("api", APIS)
async def test_without_a_session_the_error_says_how_to_open_one(run: Path, api: Api) -> None:
    async with rig(run) as it:
        for headers in ({}, {"x_api_key": "sk-wrong"}):
            answer = await it.call("POST", PATHS[api], body_of(api, "hello"), **headers)
            assert (answer.status, answer.headers["x-should-retry"]) == (401, "false")
            assert "POST /sessions" in answer.error
            assert "sk-wrong" not in answer.error


async def test_a_rollout_that_nobody_finished_has_failed_with_the_gateway(run: Path) -> None:
    async with rig(run) as it:
        opened = await it.open()
        await it.ask(opened, "hello")
    outcome = rolltape.read(run).rollout(opened["rollout"]).outcome
    assert outcome.status is Status.FAILED
    assert "gateway ended" in (outcome.reason or "")


async def test_the_library_opens_asks_and_finishes_as_http_does(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        session = await it.gateway.open_session(task_id="t")
        async with it.http.post(f"{session.openai_base_url}/chat/completions", json=body_of(Api.CHAT, "hi")) as answer:
            assert answer.status == 200
        with pytest.raises(BadRequest, match="colour"):
            await session.finish(colour="red")
        done = await session.finish(reward=1.0)
        assert done.linearized is not None
        assert len(done.linearized) == 1
        with pytest.warns(DeprecationWarning, match="Finished.made is now Finished.linearized"):
            assert done.made is done.linearized
        with pytest.raises(BadRequest, match="colour"):
            await it.gateway.open_session(colour="red")


async def test_two_hundred_sessions_leave_nothing_behind(run: Path) -> None:
    async with rig(run, lambda _: "ok") as it:
        for attempt in range(200):
            opened = await it.open(attempt=attempt)
            await it.ask(opened, "hello")
            await it.finish(opened, samples=False)
        await eventually(lambda: it.gateway.service.pool.in_flight == 0)
        assert _state(it.gateway) == {}


def _state(gateway: Gateway) -> dict[str, int]:
    """What a gateway still holds, the keys of ended sessions aside."""
    service = gateway.service
    held: dict[str, Sized] = {
        "sessions": service.sessions._by_id,
        "keys": service.sessions._by_key,
        "open sessions": service.open_sessions,
        "engines": service.pool._of_session,
        "in flight": service.pool._in_flight,
        "rollouts": service.tape._writer._open,
    }
    return {name: len(one) for name, one in held.items() if len(one)}
