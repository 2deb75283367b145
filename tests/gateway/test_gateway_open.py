"""An open gateway: which session a request belongs to that nobody opened one for."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from yarl import URL

import rolltape
from gateways import CALCULATOR, PATHS, Answer, Api, Rig, body_of, eventually, rig, slowly, text_of, user
from rolltape.collect.rewards import late_rewards, record_rewards
from rolltape.errors import BadRequest
from rolltape.gateway import identity
from rolltape.gateway.identity import Attempts, Identity, read_identity
from rolltape.records.rollout import Rollout, Status
from rolltape.records.sample import Fate
from scripted_engine import Asked, Json, Step, tool_call


async def ask(
    it: Rig, messages: str | list[Json], api: Api = Api.CHAT, path: str = "", metadata: Any = None, **headers: Any
) -> Answer:
    fields = {} if metadata is None else {"metadata": metadata}
    headers.setdefault("x_api_key", "one-for-all")
    answer = await it.call("POST", path + PATHS[api], body_of(api, messages, **fields), **headers)
    assert answer.status == 200, answer.raw
    return answer


def rollouts(run: Path) -> list[Rollout]:
    return sorted(rolltape.read(run).rollouts(), key=lambda one: (one.head.task_id or "", one.head.attempt))


def numbered(asked: Asked) -> str:
    return f"reply {asked.number}"


async def test_conversations_without_any_name_are_rollouts_of_their_own(run: Path) -> None:
    """16 requests of a framework that has one URL and one key: 4 conversations on each of 2 tasks, 2 turns each."""
    async with rig(run, numbered, open=True) as it:

        async def converse(task: str) -> None:
            said: list[Json] = [user(task)]
            first = text_of(Api.CHAT, await ask(it, said))
            await ask(it, [*said, {"role": "assistant", "content": first}, user("go on")])

        await asyncio.gather(*(converse(task) for task in ("a", "b") for _ in range(4)))
        assert len(it.gateway.service.sessions) == 8
    found = rollouts(run)
    assert [len(one.turns) for one in found] == [2] * 8
    assert [one.head.attempt for one in found] == [0, 1, 2, 3] * 2
    assert len({one.head.group for one in found}) == 2
    for one in found:
        linearized = rolltape.linearize(one, "exact")
        assert linearized.ledger.totals() == {Fate("trained"): linearized.ledger.sampled}
        assert len(list(linearized.samples())) == 1


async def test_conversations_with_equal_first_replies_stay_apart(run: Path) -> None:
    """Four attempts at one prompt, in parallel; the first reply of each is the same."""

    def reply(asked: Asked) -> str:
        return "Sure." if asked.prompt.count("go on") == 0 else f"reply {asked.number}"

    async with rig(run, reply, open=True) as it:
        first_replies = asyncio.Barrier(4)

        async def converse() -> None:
            said: list[Json] = [user("a task")]
            for _ in range(3):
                text = text_of(Api.CHAT, await ask(it, said))
                said += [{"role": "assistant", "content": text}, user("go on")]
                await first_replies.wait()

        await asyncio.gather(*(converse() for _ in range(4)))
    found = rollouts(run)
    assert [len(one.turns) for one in found] == [3] * 4
    assert all(len(list(rolltape.linearize(one, "exact").samples())) == 1 for one in found)


@pytest.mark.parametrize("order", ["ababbaba", "aabbabba"])
async def test_conversations_with_equal_replies_stay_apart_by_what_was_said_between_them(run: Path, order: str) -> None:
    """Two attempts at one prompt. The model says the same to both, and what it is told differs."""
    async with rig(run, lambda _: "Sure.", open=True) as it:
        said: dict[str, list[Json]] = {name: [user("a task")] for name in "ab"}
        for name in order:
            reply = {"role": "assistant", "content": text_of(Api.CHAT, await ask(it, said[name]))}
            said[name] += [reply, user(f"go on, {name}")]
    turns = [[turn.prompt_messages for turn in one.turns] for one in rollouts(run)]
    assert [len(one) for one in turns] == [4, 4]
    assert [one[-1][2]["content"] for one in turns] == ["go on, a", "go on, b"]
    assert all(one[-1][: len(prompt)] == prompt for one in turns for prompt in one)


async def test_a_session_ends_while_conversations_with_the_same_replies_go_on_in_others(run: Path) -> None:
    """Three attempts at one prompt get equal replies. One is finished while it waits, and another one goes on."""

    def reply(asked: Asked) -> Step:
        return Step("one " * 2000, token_delay_s=0.1) if "wait" in asked.prompt else Step("Sure.")

    async with rig(run, reply, open=True) as it:
        asked: list[Json] = [user("a task")]
        for _ in range(3):
            await ask(it, asked)
        said = [*asked, {"role": "assistant", "content": "Sure."}]
        waiting = asyncio.ensure_future(ask(it, [*said, user("wait")]))
        await it.requested(4)
        (session,) = (one for one in it.gateway.service.sessions if one.in_flight)
        finishing = asyncio.ensure_future(it.finish({"session": session.id}, drain_s=30.0))
        await eventually(lambda: session.ended is not None)
        await ask(it, [*said, user("go on")])
        waiting.cancel()
        assert (await finishing)["rollout_ended"]
        assert len(it.gateway.service.open_sessions) == len(it.gateway.service.sessions) == 2


async def test_a_call_that_comes_back_by_its_id_goes_on_whatever_else_was_changed(run: Path) -> None:
    script = [tool_call("calculator", {"expression": "1"}), "done"]
    async with rig(run, script, open=True) as it:
        tools = {"tools": [CALCULATOR]}
        body = body_of(Api.CHAT, [user("compute")], **tools)
        first = (await it.call("POST", PATHS[Api.CHAT], body, x_api_key="k")).json["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
        again = body_of(Api.CHAT, [user("compute, and now is 12:01"), first, result], **tools)
        assert (await it.call("POST", PATHS[Api.CHAT], again, x_api_key="k")).status == 200
        assert len(it.gateway.service.sessions) == 1


@pytest.mark.parametrize("api", list(Api))
async def test_a_conversation_goes_on_in_its_session_whichever_api_it_speaks(run: Path, api: Api) -> None:
    async with rig(run, numbered, open=True) as it:
        said: list[Json] = [user("hello")]
        for _ in range(3):
            text = text_of(api, await ask(it, said, api))
            said += [{"role": "assistant", "content": text}, user("go on")]
        await ask(it, "hello", api)
        assert len(it.gateway.service.sessions) == 2
    assert sorted(len(one.turns) for one in rollouts(run)) == [1, 3]


async def test_a_cache_mark_that_moves_to_the_last_message_opens_no_session(run: Path) -> None:
    """Agents on litellm mark the last message for a provider's cache. A mark makes parts of a text."""

    def marked(text: str) -> Json:
        return user(text) | {"content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}

    async with rig(run, numbered, open=True) as it:
        first = {"role": "assistant", "content": text_of(Api.CHAT, await ask(it, [marked("hello")]))}
        plain = user("hello") | {"content": [{"type": "text", "text": "hello"}]}
        second = {"role": "assistant", "content": text_of(Api.CHAT, await ask(it, [plain, first, marked("go on")]))}
        await ask(it, [user("hello"), first, user("go on"), second, marked("go on")])
    assert [len(one.turns) for one in rollouts(run)] == [3]


async def test_a_retry_of_a_reply_that_nobody_got_opens_no_session(run: Path) -> None:
    async with rig(run, slowly("a b c d e f", 0.05), open=True) as it:
        lost = asyncio.ensure_future(ask(it, "hello"))
        await it.requested(1)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        sessions = it.gateway.service.sessions
        await eventually(lambda: all(session.in_flight == 0 for session in sessions))
        assert text_of(Api.CHAT, await ask(it, "hello")) == "a b c d e f"
        assert len(sessions) == 1


async def test_a_request_says_in_headers_what_it_is_for(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        about: dict[str, Any] = {"x_rolltape_task": "math-17", "x_rolltape_step": "12", "x_rolltape_split": "train"}
        for name in ("s1", "s2", "s1"):
            await ask(it, "hello", **about, x_rolltape_session=name, x_rolltape_tags="hard,long")
        await ask(it, "hello", **about, x_rolltape_session="s9", x_rolltape_attempt="7")
    found = rollouts(run)
    assert [(one.head.task_id, one.head.step, one.head.attempt) for one in found] == [
        ("math-17", 12, 0),
        ("math-17", 12, 1),
        ("math-17", 12, 7),
    ]
    assert [len(one.turns) for one in found] == [2, 1, 1]
    assert {one.head.source for one in found} == {"open#train"}
    assert found[0].head.tags == ("hard", "long")
    assert [one.head.foreign_ids for one in found] == [("s1",), ("s2",), ("s9",)]
    assert len({one.head.group for one in found}) == 1


async def test_many_conversations_that_begin_alike_go_on_in_their_sessions(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        firsts = [text_of(Api.CHAT, await ask(it, "a task")) for _ in range(80)]
        for text in firsts:
            await ask(it, [user("a task"), {"role": "assistant", "content": text}, user("go on")])
        assert len(it.gateway.service.sessions) == 80


async def test_a_title_belongs_to_the_conversation_that_it_quotes(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        await ask(it, "Write a poem about salt.")
        await ask(it, "Compute 3 + 4.")
        instructions = {"role": "system", "content": "Generate a concise title for this conversation."}
        await ask(it, [instructions, user("Write a poem about salt.")])
        memories = {"role": "system", "content": "You extract memories from documents."}
        await ask(it, [memories, user("A document.")])
    found = {
        one.turns[0].prompt_messages[-1]["content"]: [turn.facts.auxiliary for turn in one.turns]
        for one in rollouts(run)
    }
    assert found == {
        "Write a poem about salt.": [None, "session title"],
        "Compute 3 + 4.": [None],
        "A document.": [None],
    }


async def test_a_session_that_is_named_is_found_with_any_key(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        for key in ("a", "b"):
            await ask(it, "hello", x_rolltape_session="s", x_api_key=key)
        assert len(it.gateway.service.sessions) == 1


async def test_a_retry_of_a_request_that_never_came_is_an_attempt_of_its_own(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        first = text_of(Api.CHAT, await ask(it, "hello"))
        second = text_of(Api.CHAT, await ask(it, "hello", x_stainless_retry_count="1"))
        assert first != second
    assert [len(one.turns) for one in rollouts(run)] == [1, 1]


async def test_an_id_of_another_key_does_not_lead_into_its_session(run: Path) -> None:
    script = [tool_call("calculator", {"expression": "1"}), "done"]
    async with rig(run, script, open=True) as it:
        body = body_of(Api.CHAT, "compute", tools=[CALCULATOR])
        first = (await it.call("POST", PATHS[Api.CHAT], body, x_api_key="a")).json["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
        again = body_of(Api.CHAT, [user("compute"), first, result], tools=[CALCULATOR])
        assert (await it.call("POST", PATHS[Api.CHAT], again, x_api_key="b")).status == 200
        assert len(it.gateway.service.sessions) == 2


async def test_refused_requests_of_many_keys_leave_nothing_behind(run: Path) -> None:
    async with rig(run, open=True) as it:
        for number in range(50):
            answer = await it.call("POST", PATHS[Api.CHAT], b"no json", x_api_key=f"key-{number}")
            assert answer.status == 400
        gc.collect()
        assert len(it.gateway.service.open_sessions._works) == 0


async def test_a_comma_in_a_path_is_written_encoded(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        path = f"/with/task=a%2Cb%2Fc,session=s{PATHS[Api.CHAT]}"
        url = URL(it.gateway.url + path, encoded=True)  # else the client decodes it
        async with it.http.post(url, json=body_of(Api.CHAT, "hello")) as response:
            assert response.status == 200
    (found,) = rollouts(run)
    assert found.head.task_id == "a,b/c"


async def test_a_request_says_the_same_in_its_path_or_metadata(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        await ask(it, "hello", path="/with/session=s1,task=t1,step=3")
        metadata: Any = {"rolltape_session": "s1", "rolltape_task": "t1", "rolltape_step": "3"}
        await ask(it, "hello", metadata=metadata)
        await ask(it, "hello", x_session_id="s1", x_rolltape_task="other")  # the session is known already
        assert len(it.gateway.service.sessions) == 1
    (found,) = rollouts(run)
    assert (found.head.task_id, found.head.step, len(found.turns)) == ("t1", 3, 3)


async def test_a_request_that_names_another_task_than_its_session_is_told_so(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        for about, told in (
            ({"x_rolltape_task": "t1", "x_rolltape_step": "3"}, None),
            ({"x_rolltape_task": "t1"}, None),
            ({"x_rolltape_task": "t2"}, "x-rolltape-task 't2': the session was opened with 't1'"),
            ({"x_rolltape_step": "4", "x_rolltape_attempt": "0"}, "x-rolltape-step 4: the session was opened with 3"),
        ):
            headers: dict[str, Any] = {"x_rolltape_session": "s1", **about}
            assert (await ask(it, "hello", **headers)).headers.get("x-rolltape-ignored-params") == told
        assert len(it.gateway.service.sessions) == 1
    (found,) = rollouts(run)
    assert [bool(turn.ignored_params) for turn in found.turns] == [False, False, True, True]


async def test_a_rollout_is_found_and_rewarded_by_the_name_of_its_session(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        for name in ("s1", "s2"):
            await ask(it, f"hello {name}", x_session_id=name)
    read = rolltape.read(run)
    assert [read.rollout(name).turns[0].prompt_messages[-1]["content"] for name in ("s2", "s1")] == [
        "hello s2",
        "hello s1",
    ]
    with rolltape.open(run) as tape:
        record_rewards(tape, late_rewards(read, [{"rollout": "s2", "reward": 0.5}]))
    assert [read.rollout(name).reward for name in ("s1", "s2")] == [None, 0.5]


@pytest.mark.parametrize("counted", [10_000, 0], ids=["in memory", "looked up"])
async def test_gateways_of_one_run_number_the_attempts_of_a_group_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    monkeypatch.setattr(identity, "_COUNTED", counted)
    given = []
    with rolltape.open(tmp_path, name="exp") as first, rolltape.open(tmp_path) as second:
        gateways = [(tape, Attempts(tape, "it")) for tape in (first, second)]
        for _, attempts in gateways:
            await attempts.prepare()
        for tape, attempts in gateways * 3:
            given.append(attempts.next(task_id="a", step=0, source="open"))
            tape.rollout(task_id="a", source="open", model="it", attempt=given[-1], new_try=True)
            assert len(attempts._next) <= counted
    assert given == [0, 1, 2, 3, 4, 5]


async def test_a_gateway_that_is_started_again_goes_on_counting_attempts(run: Path) -> None:
    for _ in range(2):
        async with rig(run, numbered, open=True) as it:
            for name in ("a", "b"):
                await asyncio.gather(*(ask(it, f"hello {name}", x_rolltape_task=name) for _ in range(2)))
            await ask(it, "hello", x_rolltape_task="a", x_rolltape_step="1")
    keys = [(one.head.task_id, one.head.step, one.head.attempt, one.head.try_index) for one in rollouts(run)]
    assert sorted(keys) == [
        *(("a", 0, attempt, 0) for attempt in range(4)),
        *(("a", 1, attempt, 0) for attempt in range(2)),
        *(("b", 0, attempt, 0) for attempt in range(4)),
    ]


async def test_requests_that_name_one_new_session_at_once_share_it(run: Path) -> None:
    for name in ("earlier", "later"):  # the later gateway looks for the session in the journal of the earlier one
        async with rig(run, numbered, open=True) as it:
            await asyncio.gather(*(ask(it, f"hello {number}", x_session_id=name) for number in range(4)))
            assert len(it.gateway.service.sessions) == 1
    assert [len(rolltape.read(run).rollout(name).turns) for name in ("earlier", "later")] == [4, 4]


async def test_a_split_that_makes_no_sense_is_refused(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        answer = await it.call("POST", PATHS[Api.CHAT], body_of(Api.CHAT, "hello"), x_rolltape_split="a#b")
        assert (answer.status, "give a name without '#'" in answer.raw.decode()) == (400, True)


async def test_the_sdks_send_them_as_default_headers(run: Path) -> None:
    async with rig(run, numbered, open=True) as it:
        headers = {"x-rolltape-session": "a", "x-rolltape-task": "t"}
        async with openai.AsyncOpenAI(base_url=f"{it.gateway.url}/v1", api_key="k", default_headers=headers) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        async with anthropic.AsyncAnthropic(base_url=it.gateway.url, api_key="k", default_headers=headers) as other:
            await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
    (found,) = rollouts(run)
    assert (found.head.task_id, len(found.turns)) == ("t", 2)


async def test_a_session_that_nobody_finishes_ends_when_it_is_idle(run: Path) -> None:
    async with rig(run, numbered, open=True, open_idle_s=0.2) as it:
        await ask(it, "hello")
        await eventually(lambda: len(it.gateway.service.sessions) == 0)
        await ask(it, "hello")
        (found,) = [one for one in rollouts(run) if one.outcome is not None and one.outcome.status is Status.FINISHED]
        assert found.outcome.reason == "no request for 0.2 s"
        assert found.outcome.reward is None
    assert [one.head.attempt for one in rollouts(run)] == [0, 1]


async def test_counting_tokens_opens_no_session(run: Path) -> None:
    async with rig(run, open=True) as it:
        body = {"model": "m", "messages": [user("hello")]}
        counted = await it.call("POST", "/v1/messages/count_tokens", body, x_api_key="k")
        assert counted.json["input_tokens"] > 1
        assert len(it.gateway.service.sessions) == 0


@pytest.mark.parametrize(
    ("headers", "path", "named"),
    [
        ({"x-rolltape-step": "-1"}, None, "x-rolltape-step"),
        ({"x-rolltape-attempt": "two"}, None, "x-rolltape-attempt"),
        ({"x-rolltape-task": "t" * 513}, None, "513 characters"),
        ({}, "session", "NAME=VALUE"),
        ({}, "reward=1", "NAME=VALUE"),
        ({}, "session=a,session=b", "once each"),
        ({}, "task=%00", "printable"),
    ],
)
def test_what_makes_no_sense_is_refused(headers: dict[str, str], path: str | None, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        read_identity(headers, path, None)


def test_headers_come_before_path_and_metadata() -> None:
    metadata = {"rolltape_session": "c", "rolltape_tags": ["x", "y"]}
    assert read_identity({"x-rolltape-session": "a"}, "session=b,task=t", metadata) == Identity(
        session="a", task="t", tags=("x", "y")
    )
    assert read_identity({"session-id": "d"}, None, metadata).session == "c"
    assert read_identity({"session-id": "d"}, None, None).session == "d"


async def test_the_base_url_of_a_named_session_answers_as_that_of_any_session(run: Path) -> None:
    """Claude Code sends HEAD to its base URL before its first request."""
    async with rig(run, "hello", open=True) as it:
        opened = await it.open()
        paths = ["/", f"/s/{opened['key']}", "/with/session=a1,task=t", "/with/session=a1,task=t/"]
        assert [(await it.call("HEAD", path)).status for path in paths] == [200] * 4
        assert len(it.gateway.service.sessions) == 1
