"""What an environment hands over is on the tape as it was at that moment, and cannot break its rollout."""

import asyncio
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from environments import guesses, only_rollout, trace_at, trace_events, traced
from rolltape.errors import ClosedError, RecordError
from rolltape.records.rollout import StopReason
from rolltape.tape.journal.entries import Batch
from rolltape.tape.recording.tape import open_tape
from rolltape.traces import TraceWriter
from taped import assistant, first_turn, next_turn, python, user


@pytest.mark.parametrize("stop_reason", [None, *StopReason])
def test_what_an_environment_changes_after_a_step_changes_nothing(tmp_path: Path, stop_reason: StopReason) -> None:
    messages, state = [user("hello")], {"board": [1, 2], "seen": {"a": 1}}
    reply = None if stop_reason in (StopReason.TIMEOUT, StopReason.CONTEXT_OVERFLOW) else assistant("hi")
    with traced(tmp_path / "run") as (_, writer):
        writer.step(prompt=messages, policy_response=reply, env_state=state, stop_reason=stop_reason, done=True)
        messages[0]["content"] = "changed"
        messages.append(user("more"))
        state["board"].append(3)  # type: ignore[attr-defined]
        state["seen"]["a"] = 2  # type: ignore[index]
        if reply is not None:
            reply["content"] = "changed"
    (step,) = trace_at(tmp_path / "run").steps
    assert (step.prompt, step.env_state) == ([user("hello")], {"board": [1, 2], "seen": {"a": 1}})
    assert step.policy_response == (None if reply is None else assistant("hi"))
    assert (step.stop_reason, step.done) == (stop_reason, True)


def test_numbers_stay_numbers_and_absent_fields_are_left_out(tmp_path: Path) -> None:
    data = {"score": np.float32(0.5), "odds": [math.inf, math.nan], "seed": 2**70, "text": "nan", "none": None}
    with traced(tmp_path / "run") as (_, writer):
        writer.step(reward=np.float64(0.25), reward_data=data, done=np.bool_(False), metrics={})
    (step,) = trace_at(tmp_path / "run").to_dict()["steps"]
    assert step.keys() == {"index", "reward", "done", "reward_data", "metrics"}
    odds = step["reward_data"].pop("odds")
    assert (odds[0], math.isnan(odds[1])) == (math.inf, True)
    assert step["reward_data"] == {"score": 0.5, "seed": 2**70, "text": "nan", "none": None}
    assert (step["reward"], step["done"], step["metrics"]) == (0.25, False, {})


def test_history_is_stored_once(tmp_path: Path) -> None:
    sizes = {}
    for steps in (100, 200):
        with traced(tmp_path / str(steps)) as (_, writer):
            prompts = guesses(writer, steps)
        trace = trace_at(tmp_path / str(steps))
        assert [trace.whole_prompt(index) for index in range(steps)] == prompts
        assert all(len(step.prompt or ()) == 1 for step in trace.steps)
        sizes[steps] = len(json.dumps(trace_events(tmp_path / str(steps))))
    assert sizes[200] < 2.1 * sizes[100]


def test_two_conversations_side_by_side_are_each_stored_once(tmp_path: Path) -> None:
    seats = {seat: [user(f"you are {seat}")] for seat in "XO"}
    prompts = []
    with traced(tmp_path / "run") as (_, writer):
        for move in range(20):
            messages = seats["XO"[move % 2]]
            prompts.append(list(messages))
            reply = assistant(f"to {move}")
            writer.step(prompt=messages, policy_response=reply)
            messages += [reply, user(f"the other went to {move + 1}")]
    trace = trace_at(tmp_path / "run")
    assert [trace.whole_prompt(step.index) for step in trace.steps] == prompts
    assert [step.messages_from for step in trace.steps[:5]] == [None, None, 0, 1, 2]
    assert sum(len(step.prompt or ()) for step in trace.steps) == 20


def test_an_edited_history_keeps_what_it_shares(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (_, writer):
        writer.step(prompt=[user("a"), user("b"), user("c")], policy_response=assistant("d"))
        writer.step(prompt=[user("a"), user("b"), user("summary")])
    step = trace_at(tmp_path / "run").steps[1]
    assert (step.messages_from, step.kept_messages, step.prompt) == (0, 2, [user("summary")])


def test_a_step_of_a_turn_has_that_turns_messages_and_stores_none(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        session = rollout.session()
        first = first_turn(session)
        writer.step(turn=first, prompt=[user("hello")], policy_response=assistant("hi"), reward=0.5)
        second = next_turn(session, first)
        writer.step(turn=second.id, policy_response={"parsed": 3})
        third = next_turn(session, second, 1)
        writer.step(turn=[second, third])
    assert [data.keys() & {"prompt", "policy_response"} for data in trace_events(tmp_path / "run")] == [
        set(),
        {"policy_response"},
        set(),
    ]
    trace = trace_at(tmp_path / "run")
    assert [step.prompt for step in trace.steps] == [
        [user("hello")],
        [user("go on 0")],
        [assistant("reply 0"), user("go on 1")],
    ]
    assert [step.policy_response for step in trace.steps] == [assistant("hi"), {"parsed": 3}, assistant("reply 1")]
    assert trace.whole_prompt(2) == third.prompt_messages
    lengths = [(step.prompt_tokens, step.sampled_tokens, step.finish) for step in trace.steps]
    assert lengths == [(3, 2, "stop"), (7, 3, "length"), (12, 6, "length")]
    assert (trace.versions, [step.derived for step in trace.steps]) == (("7", "8"), [False] * 3)


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompt": "a text"}, "step 0: prompt is 'a text', a str; give a list of messages, or an object"),
        ({"prompt": ["a text"]}, "step 0: prompt: message 0 is 'a text', a str; give objects"),
        (
            {"prompt": [{"content": {1, 2}}]},
            "step 0: prompt cannot be JSON: Object of type set is not JSON serializable",
        ),
        ({"policy_response": [1]}, "step 0: policy_response is [1], a list; give an object"),
        ({"reward": "0.5"}, "step 0: reward is '0.5', a str; give a number"),
        ({"done": "yes"}, "step 0: done is 'yes', a str; give True or False"),
        ({"stop_reason": "bored"}, "step 0: stop_reason: 'bored' is not a StopReason; known are "),
        ({"turn": 3}, "step 0: turns: 3 is a int; give a Turn, or its id"),
        ({"turn": "f00.0.0.0"}, "step 0: turn f00.0.0.0 is of another rollout or try; name turns of this one"),
        ({"env_state": {"rng": object()}}, "step 0: env_state: 'rng' cannot be JSON: Object of type object is not"),
        ({"env_state": Odd()}, "step 0: env_state cannot be read: RuntimeError"),
    ],
)
def test_a_value_that_cannot_be_kept_is_left_out_and_said_so(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        writer.step(extra={"kept": True}, **given)
        writer.step(extra={"kept": True})
    first, second = trace_at(tmp_path / "run").steps
    assert (first.extra, second.extra, second.unrecorded) == ({"kept": True}, {"kept": True}, {})
    ((_, found),) = first.unrecorded.items()
    assert found.startswith(f"rollout {rollout.id}, {why}")


def test_of_an_object_the_members_that_can_be_kept_are(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (_, writer):
        writer.step(env_state={"board": [1], "rng": object(), "odds": math.nan}, reward=1.0)
    (step,) = trace_at(tmp_path / "run").steps
    assert step.env_state is not None
    assert (step.env_state["board"], math.isnan(step.env_state["odds"]), step.reward) == ([1], True, 1.0)
    assert step.unrecorded.keys() == {"env_state.rng"}


def test_a_prompt_that_was_not_kept_is_not_built_on(tmp_path: Path) -> None:
    bad = [user("a"), {"role": "user", "content": b"bytes"}]
    with traced(tmp_path / "run") as (_, writer):
        writer.step(prompt=[user("a")], policy_response=assistant("b"))
        writer.step(prompt=bad)
        writer.step(prompt=bad)
        writer.step(prompt=[user("a"), assistant("b"), user("c")])
    trace = trace_at(tmp_path / "run")
    assert [trace.whole_prompt(index) for index in range(4)] == [
        [user("a")],
        None,
        None,
        [user("a"), assistant("b"), user("c")],
    ]


def test_the_total_is_the_sum_and_a_finish_with_another_is_refused(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        for _ in range(3):
            writer.step(reward=np.float32(0.1))
        with pytest.raises(
            RecordError, match=r"its reward is 2\.0, but those of its steps and the final one sum to 1\.3"
        ):
            writer.final(reward=1.0, total=2.0)
        assert writer.final(reward=1.0, total=np.float32(1.3)) == pytest.approx(1.3)
        with pytest.raises(RecordError, match="finish it with what `final` returns"):
            rollout.finish(reward=1.0)
        rollout.finish(reward=writer.total_reward)
    trace = trace_at(tmp_path / "run")
    assert trace.total_reward == pytest.approx(1.3)
    assert trace.final_reward == 1.0
    assert [step.reward for step in trace.steps] == [float(np.float32(0.1))] * 3


def test_a_reward_that_is_not_finite_is_the_total_too(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        writer.step(reward=math.nan)
        rollout.finish(reward=writer.final(reward=1.0))
    total = trace_at(tmp_path / "run").total_reward
    assert total is not None
    assert math.isnan(total)


def test_off_records_nothing_and_copies_nothing_yet_adds_up(tmp_path: Path) -> None:
    class Untouchable(dict[str, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("it was looked at")

    with traced(tmp_path / "run", capture="off") as (rollout, writer):
        writer.step(prompt=[Untouchable(role="user")], env_state=Untouchable(a=1), reward=0.5)
        rollout.finish(reward=writer.final(reward=1, reward_data=Untouchable(a=1)))
    assert trace_events(tmp_path / "run") == []
    trace = trace_at(tmp_path / "run")
    assert (trace.total_reward, trace.final_reward, trace.steps) == (1.5, 1.5, ())


def test_sampled_rollouts_are_chosen_by_their_ids(tmp_path: Path) -> None:
    chosen = []
    for name in ("first", "second"):
        with rolltape.open(tmp_path / name, name="exp") as tape:
            order = range(200) if name == "first" else reversed(range(200))
            made = {task: tape.rollout(task_id=str(task)) for task in order}
            chosen.append({task for task in made if TraceWriter(made[task], "sampled", fraction=0.3).captures})
    assert chosen[0] == chosen[1]
    assert 40 < len(chosen[0]) < 80


@pytest.mark.parametrize(
    ("capture", "fraction", "message"),
    [
        ("some", None, "capture is 'some'; give one of off, sampled, all"),
        ("sampled", None, "capture 'sampled' with fraction None; give one between 0 and 1"),
        ("sampled", 1.5, "capture 'sampled' with fraction 1.5"),
        ("all", 0.5, "fraction 0.5 needs capture 'sampled'"),
    ],
)
def test_a_capture_that_makes_no_sense_is_refused(
    tmp_path: Path, capture: str, fraction: float | None, message: str
) -> None:
    with traced(tmp_path / "run") as (rollout, _), pytest.raises(RecordError, match=message):
        TraceWriter(rollout, capture, fraction=fraction)


def test_a_rollout_has_one_writer_and_takes_no_step_after_its_end(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        with pytest.raises(RecordError, match="has a TraceWriter already"):
            TraceWriter(rollout)
        rollout.finish()
        with pytest.raises(ClosedError, match="is finished already"):
            writer.step(reward=1.0)


def test_a_step_outlives_its_process_without_a_finish(tmp_path: Path) -> None:
    code = (
        "import os, sys, rolltape\n"
        "writer = rolltape.TraceWriter(rolltape.open(sys.argv[1]).rollout(task_id='a'))\n"
        "writer.step(prompt=[{'role': 'user', 'content': 'hello'}], reward=0.5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    python(code, str(tmp_path / "run")).communicate(timeout=60)
    trace = trace_at(tmp_path / "run")
    assert (trace.status, trace.reason, trace.total_reward) == (
        "lost",
        "its writer ended, and the tape shows no finish",
        None,
    )
    assert [(step.prompt, step.reward) for step in trace.steps] == [([user("hello")], 0.5)]


def test_on_an_event_loop_steps_need_no_await_and_share_a_commit(tmp_path: Path) -> None:
    async def environment(writer: TraceWriter) -> None:
        for index in range(3):
            writer.step(prompt=[user("hello")], env_state={"n": index})
            await asyncio.sleep(0)

    async def main() -> list[str]:
        with open_tape(tmp_path / "run") as tape:
            rollouts = [tape.rollout(task_id=str(task)) for task in range(8)]
            commits: list[str] = []
            connection = tape._writer._journal._connection
            connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
            await asyncio.gather(*(environment(TraceWriter(rollout)) for rollout in rollouts))
            for rollout in rollouts:
                rollout.finish()
            return commits

    commits = asyncio.run(main())
    assert len(commits) <= 4 + 8
    assert len(trace_events(tmp_path / "run")) == 24


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_full_disk_loses_steps_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_loop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    full = False
    plain = Batch.insert

    def insert(batch: Batch, connection: sqlite3.Connection) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        plain(batch, connection)

    monkeypatch.setattr(Batch, "insert", insert)

    def environment() -> Iterator[None]:
        nonlocal full
        with traced(tmp_path / "run") as (_, writer):
            writer.step(prompt=[user("a")], policy_response=assistant("b"))
            yield
            full = True
            writer.step(prompt=[user("a"), assistant("b"), user("c")], policy_response=assistant("d"))
            writer.step(prompt=[user("a"), assistant("b"), user("c"), assistant("d"), user("e")])
            yield
            full = False
            writer.step(prompt=[user("a"), assistant("b"), user("c"), assistant("d"), user("e")], reward=1.0)
            assert writer.lost == 2

    async def at_leisure() -> None:
        for _ in environment():
            await asyncio.sleep(0.01)

    if on_loop:
        asyncio.run(at_leisure())
    else:
        assert list(environment()) == [None, None]
    trace = trace_at(tmp_path / "run")
    assert [step.index for step in trace.steps] == [0, 3]
    assert trace.whole_prompt(3) == [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert "could not be written" in caplog.text
    assert only_rollout(tmp_path / "run").status == "finished"


def test_a_keyword_that_is_no_object_of_a_trace_is_a_type_error(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (_, trace):
        with pytest.raises(TypeError, match="unexpected keyword argument 'env_stat'; the objects of a trace are"):
            trace.step(env_stat={"a": 1})  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected keyword argument 'prompt'"):
            trace.final(prompt=[])  # type: ignore[call-arg]
        assert trace.step(env_state={"a": 1}) == 0
