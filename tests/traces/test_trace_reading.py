"""A trace is a function of the tape: of every rollout, however it ended, and of what was said of it later."""

import random
from pathlib import Path
from typing import Any

import pytest

import rolltape
from environments import guesses, only_rollout, trace_at, traced
from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.rollout import Event, EventKind, Rollout, StopReason
from rolltape.tape.journal.entries import encode_event
from rolltape.traces import amend, trace_of
from rolltape.traces.verify import find_problems
from sessions import Recording, event, rollout_of, tool
from taped import assistant, first_turn, next_turn, record_run, record_session, spelled, user


def test_a_rollout_that_nobody_traced_has_a_step_for_each_turn_of_its_main_branch() -> None:
    recording = Recording()
    first = recording.ask([user("fix it")], "run tests")
    recording.ask([user("a title please")], "a title", auxiliary="title")
    recording.go_on(first, [tool("failed")], "a dead end")
    last = recording.go_on(first, [tool("passed")], "done")
    trace = trace_of(rollout_of(recording.session(), reward=1.0))
    assert [step.turns for step in trace.steps] == [(first.id,), (last.id,)]
    assert [step.derived for step in trace.steps] == [True, True]
    assert [(step.messages_from, step.kept_messages, step.prompt) for step in trace.steps] == [
        (None, 0, [user("fix it")]),
        (0, 2, [tool("passed")]),
    ]
    assert trace.whole_prompt(1) == last.prompt_messages
    assert (trace.total_reward, trace.final_reward) == (1.0, 1.0)


def test_a_turn_after_the_last_recorded_step_is_not_forgotten(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        session = rollout.session()
        first = first_turn(session)
        writer.step(turn=first, reward=0.5)
        next_turn(session, first, finish="length", error="too long")
        rollout.finish(reward=0.5, stop_reason="max_tokens")
    trace = trace_at(tmp_path / "run")
    assert [(step.index, step.derived, step.finish, step.error) for step in trace.steps] == [
        (0, False, "stop", None),
        (1, True, "length", "too long"),
    ]
    assert (trace.stop_reason, trace.total_reward, trace.final_reward) == (StopReason.MAX_TOKENS, 0.5, None)


def test_failed_rejected_and_filtered_rollouts_have_traces_with_their_reasons(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for name in ("failed", "cancelled", "filtered", "running"):
            rollout = tape.rollout(task_id=name, source="gsm8k:train", step=3, tags=["hard"])
            writer = rolltape.TraceWriter(rollout)
            writer.step(prompt=[user(name)], reward=0.5)
            if name == "failed":
                rollout.fail("the sandbox is gone")
            elif name == "cancelled":
                rollout.fail("cancelled by the user")
            elif name == "filtered":
                rollout.finish(reward=writer.final(reward=0.5))
                tape.filter(rollout.id, "no spread")
                tape.tag(rollout.id, "easy")
        traces = {str(trace.task_id): trace for trace in map(trace_of, tape.run().rollouts())}
    shown = {name: (trace.status, trace.reason, trace.filtered, trace.total_reward) for name, trace in traces.items()}
    assert shown == {
        "failed": ("failed", "the sandbox is gone", None, None),
        "cancelled": ("failed", "cancelled by the user", None, None),
        "filtered": ("finished", None, "no spread", 1.0),
        "running": ("running", None, None, None),
    }
    assert {name: trace.steps[0].prompt for name, trace in traces.items()} == {name: [user(name)] for name in traces}
    assert (traces["failed"].tags, traces["filtered"].tags) == (("hard",), ("easy",))
    assert (traces["failed"].source, traces["failed"].step) == ("gsm8k:train", 3)


def test_comparisons_land_on_their_rollouts_when_they_come_shuffled(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        group = []
        for attempt in range(8):
            with tape.rollout(task_id="essay", attempt=attempt) as rollout:
                rolltape.TraceWriter(rollout).step(
                    prompt=[user("write")], policy_response=assistant(f"essay {attempt}")
                )
                rollout.finish()
                group.append((attempt, rollout.id))
        random.Random(0).shuffle(group)
        for attempt, rollout_id in group:
            tape.score(rollout_id, reward=attempt / 8)
            amend(tape, rollout_id, step=0, reward_data={"wins": attempt, "against": [7 - attempt]}, by="judge")
            amend(tape, rollout_id, extra={"essay": attempt})
        traces = [trace_of(rollout) for rollout in tape.run().rollouts()]
    for trace in traces:
        (step,) = trace.steps
        assert step.policy_response == assistant(f"essay {trace.attempt}")
        assert step.reward_data == {"wins": trace.attempt, "against": [7 - trace.attempt]}
        assert (trace.extra, trace.total_reward) == ({"essay": trace.attempt}, trace.attempt / 8)


def test_of_what_is_said_again_the_latest_counts_and_the_rest_stays(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        writer.step(env_state={"board": [1], "rng": object()}, reward=0.25, extra={"kept": 1})
        rollout.finish(reward=writer.final(reward=0.5, reward_data={"grade": "B"}))
    with rolltape.open(tmp_path / "run") as tape:
        amend(tape, rollout.id, step=0, env_state={"board": [2]})
        amend(tape, rollout.id, reward_data={"grade": "A"})
        tape.score(rollout.id, reward=1.0)
    read = only_rollout(tmp_path / "run")
    trace = trace_of(read)
    (step,) = trace.steps
    assert (step.env_state, step.extra, step.reward, step.unrecorded) == ({"board": [2]}, {"kept": 1}, 0.25, {})
    assert trace.reward_data == {"grade": "A"}
    assert (trace.total_reward, trace.final_reward) == (1.0, 0.75)
    assert len([one for one in read.events if one.kind == EventKind.TRACE]) == 4
    assert find_problems(read) == []


def test_a_derived_step_can_be_amended(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1, turns=3)
    with rolltape.open(tmp_path / "run") as tape:
        amend(tape, rollout_id, step=1, reward_data={"grade": 0.5})
    read = only_rollout(tmp_path / "run")
    assert [step.reward_data for step in trace_of(read).steps] == [None, {"grade": 0.5}, None]
    assert [step.derived for step in trace_of(read).steps] == [True] * 3
    assert find_problems(read) == []


def test_a_bad_amendment_is_refused(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1)
    with rolltape.open(tmp_path / "run") as tape:
        with pytest.raises(RecordError, match="step 0: reward_data is 'good', a str; give an object"):
            amend(tape, rollout_id, step=0, reward_data="good")  # type: ignore[arg-type]
        with pytest.raises(RecordError, match="final: nothing to amend; give reward_data, env_state, extra"):
            amend(tape, rollout_id)
        with pytest.raises(RecordError, match="cannot be JSON"):
            amend(tape, rollout_id, extra={"rng": object()})
        with pytest.raises(NoSuchRollout):
            amend(tape, "f00", extra={"a": 1})


def test_a_turns_own_reward_is_no_part_of_the_total(tmp_path: Path) -> None:
    with traced(tmp_path / "run") as (rollout, writer):
        turn = first_turn(rollout.session(), reward=0.125)
        writer.step(turn=turn, reward=0.5)
        rollout.finish(reward=writer.final(reward=1.0))
    trace = trace_at(tmp_path / "run")
    assert (trace.total_reward, trace.final_reward, trace.steps[0].turn_rewards) == (1.5, 1.0, {turn.id: 0.125})


def test_sealing_changes_no_trace_and_pruned_turns_leave_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with traced(path) as (rollout, writer):
        writer.step(turn=record_session(rollout, 2)[0], reward=float("inf"), env_state={"n": float("-inf")})
        guesses(writer, 3)
    before, trace = spelled(only_rollout(path)), trace_at(path)
    report = rolltape.seal(path)
    assert (report.rollouts, len(report.removed)) == (1, 1)
    assert spelled(only_rollout(path)) == before
    assert trace_at(path) == trace
    assert (rolltape.read(path).problems(), rolltape.read(path).verify_shards()) == ([], [])
    with rolltape.open(path) as tape:
        amend(tape, rollout.id, step=1, extra={"late": True})
    rolltape.seal(path)
    assert trace_at(path).steps[1].extra == {"late": True}
    rolltape.prune(path, before_step=1)
    pruned = trace_at(path)
    assert pruned.pruned == ("turns",)
    assert [step.reward for step in pruned.steps] == [float("inf"), 0.0, 0.0, 0.0]
    assert (pruned.steps[0].prompt, pruned.steps[1].prompt) == (None, [user("guess a number")])
    assert find_problems(only_rollout(path)) == []


def test_an_older_program_that_does_not_know_the_kind_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with traced(path) as (rollout, _):
        rollout.append_event(encode_event("from-the-future", rollout.head.key, {"field": 1}))
    rolltape.seal(path)
    read = only_rollout(path)
    assert [one.data for one in read.events if one.kind == "from-the-future"] == [{"field": 1}]
    assert rolltape.read(path).problems() == []


def told(*data: dict[str, Any], reward: float | None = None) -> Rollout:
    """A rollout of no turns about which this was said."""
    events: list[Event] = [event(place, EventKind.TRACE, one) for place, one in enumerate(data, -len(data))]
    return rollout_of(reward=reward, events=events)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([{"step": 1}], "step 0 of its trace is missing"),
        ([{"step": 3}], "step 0 of its trace is missing, and 2 more"),
        (
            [{"step": 0, "turns": ["r.0.0.4"]}],
            "step 0 of its trace is of turn r.0.0.4, which the rollout does not have",
        ),
        ([{"step": 4, "amends": True, "extra": {}}], "step 4 of its trace was amended, but there is no such step"),
        (
            [{"step": 0, "prompt": []}, {"step": 1, "prompt": [], "messages_from": 0, "kept_messages": 2}],
            "step 1 of its trace keeps 2 messages of step 0, which has 0",
        ),
        (
            [{"step": 0, "reward": 0.5}, {"step": None, "reward": 0.25}],
            "it was finished with the reward 1.0, its trace sums to 0.75",
        ),
    ],
)
def test_what_contradicts_itself_is_named(data: list[dict[str, Any]], problem: str) -> None:
    assert find_problems(told(*data, reward=1.0)) == [problem]
