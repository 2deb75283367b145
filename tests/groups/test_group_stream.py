"""Groups are given when they are complete, with what a trainer needs of them."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from group_streams import SOURCE, begin, collected, collects, record, stream, tasks
from rolltape.errors import GroupsError, PolicyError
from rolltape.groups.consumer import Consumer, find_consumer
from rolltape.records.policy import Advantage, Credit
from rolltape.records.rollout import Event
from rolltape.tape.recording.tape import Tape, open_tape
from rolltape.tape.run import RolloutRow
from rolltape.tape.rundir import Place
from rolltape.tape.shards.publish import Publisher
from rolltape.tape.shards.seal import make_run
from taped import finished, first_turn, python, record_side_arrays


def test_a_group_is_given_once_its_last_attempt_has_ended(tape: Tape) -> None:
    collects(tape, 2)
    begin(tape, "a", 0).finish(reward=1.0)
    last = begin(tape, "a", 1)
    assert list(stream(tape)) == []
    last.finish(reward=0.0)
    (group,) = stream(tape)
    assert (group.task_id, group.step, group.missing, group.again) == ("a", 0, 0, False)
    assert group.rewards == [1.0, 0.0]


def test_its_samples_have_advantages_and_loss_weights(tape: Tape) -> None:
    collects(tape, 3)
    record(tape, "a", 1.0, 0.0, 0.5)
    (group,) = stream(tape)
    assert [sample.advantage for sample in group.samples] == [0.5, -0.5, 0.0]
    assert [sample.loss_weight for sample in group.samples] == [1.0, 1.0, 1.0]
    assert [sample.rollout for sample in group.samples] == [rollout.id for rollout in group.rollouts]


def test_what_is_given_is_what_a_reader_of_the_run_gets(tape: Tape) -> None:
    collects(tape, 2)
    record(tape, "a", 1.0, 0.0)
    (group,) = stream(tape, policy="keep-head")
    read = list(rolltape.samples_of_group(list(tape.run().rollouts()), "keep-head"))
    assert [sample.id for sample in group.samples] == [sample.id for sample in read]
    for ours, theirs in zip(group.samples, read, strict=True):
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_array_equal(ours.trained_mask, theirs.trained_mask)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


def test_groups_come_step_by_step_and_one_step_can_be_asked_for(tape: Tape) -> None:
    for step in (1, 0):
        collects(tape, 1, step)
        record(tape, f"at-{step}", 1.0, step=step)
    assert tasks(list(stream(tape, step=1, consumer="one"))) == ["at-1"]
    assert tasks(list(stream(tape))) == ["at-0", "at-1"]


def test_one_source_can_be_asked_for_so_that_an_evaluation_is_not_trained_on(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    with tape.rollout(task_id="a", source="held-out") as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=1.0)
    collected(tape)
    assert [group.source for group in tape.groups(step=0, source="sums")] == ["sums"]
    (other,) = stream(tape, group_size=1)
    assert other.source == "held-out"


def test_a_step_is_over_when_its_collection_is_and_all_its_groups_are_given(tape: Tape) -> None:
    collects(tape, 2)
    record(tape, "whole", 1.0, 0.0)
    begin(tape, "broken", 0).finish(reward=1.0)
    begin(tape, "broken", 1).fail("the engine died")
    waiting = tape.groups(step=0, poll_s=0.001)
    assert next(waiting).task_id == "whole"
    collected(tape)
    broken = next(waiting)
    assert (broken.task_id, broken.rewards, broken.missing) == ("broken", [1.0], 1)
    assert list(waiting) == []


async def test_the_same_from_a_coroutine_while_attempts_end(tape: Tape) -> None:
    collects(tape, 2)
    opened = [begin(tape, task, attempt) for task in ("a", "b") for attempt in range(2)]

    async def end() -> None:
        for rollout in opened:
            await asyncio.sleep(0.01)
            rollout.finish(reward=1.0)
        collected(tape)

    ending = asyncio.ensure_future(end())
    assert [group.task_id async for group in tape.groups(step=0, poll_s=0.001)] == ["a", "b"]
    await ending


async def test_a_caller_that_is_cancelled_loses_no_group(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    waiting = tape.groups(poll_s=0.001)
    taking = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert (await anext(waiting)).task_id == "a"


def test_groups_come_from_another_process_as_it_records(tape: Tape) -> None:
    recording = python(RECORDING, str(tape.directory.path))
    given = [group.task_id for group in tape.groups(step=0, poll_s=0.01)]
    assert given == ["t0", "t1", "t2"]
    finished(recording)


RECORDING = """
import sys, time, rolltape
from group_streams import collects, collected, record
with rolltape.open(sys.argv[1]) as tape:
    collects(tape, 2)
    for task in range(3):
        time.sleep(0.05)
        record(tape, f"t{task}", 1.0, 0.0)
    collected(tape)
"""


def test_groups_come_from_nodes_that_publish_shards(tape: Tape, tmp_path: Path) -> None:
    shared = Place(tmp_path / "shared")
    make_run(shared, tape.directory)
    tape.directory.add_published(shared.url)
    collects(tape, 2)
    with rolltape.open(tmp_path / "one", name="exp") as one, rolltape.open(tmp_path / "two", name="exp") as two:
        begin(one, "a", 0).finish(reward=1.0)
        Publisher(one, shared).publish()
        assert list(stream(tape)) == []
        begin(two, "a", 1).finish(reward=0.0)
        Publisher(two, shared).publish()
        (group,) = stream(tape)
    assert group.rewards == [1.0, 0.0]
    assert len(group.samples) == 2


def test_a_group_that_is_sealed_before_it_is_given_is_read_from_its_shard(tape: Tape) -> None:
    collects(tape, 2)
    with rolltape.open(tape.directory.path) as other:
        record(other, "a", 1.0, 0.0)
    find_consumer(tape, "trainer").refresh()
    report = rolltape.seal(tape.directory.path)
    assert len(report.removed) == 1
    (group,) = stream(tape)
    assert [sample.advantage for sample in group.samples] == [0.5, -0.5]
    group.done()
    assert list(stream(tape)) == []


def test_an_attempt_that_broke_is_waited_for_and_its_next_try_counts(tape: Tape) -> None:
    collects(tape, 2)
    begin(tape, "a", 0).finish(reward=1.0)
    begin(tape, "a", 1).fail("the engine died")
    assert list(stream(tape)) == []
    begin(tape, "a", 1, new_try=True).finish(reward=0.0)
    (group,) = stream(tape)
    assert [(rollout.head.attempt, rollout.head.try_index) for rollout in group.rollouts] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("late", ["give", "skip"])
def test_when_its_time_is_over_a_group_is_given_without_stragglers_or_skipped(tape: Tape, late: str) -> None:
    collects(tape, 3)
    begin(tape, "a", 0).finish(reward=1.0)
    begin(tape, "a", 1).finish(reward=0.0)
    straggler = begin(tape, "a", 2)
    waiting = stream(tape, straggler_s=0.0, late=late)
    given = list(waiting)
    if late == "give":
        assert [(group.rewards, group.missing) for group in given] == [([1.0, 0.0], 1)]
        assert waiting.skipped == []
    else:
        assert given == []
        assert [skipped.reason for skipped in waiting.skipped] == ["late: 2 of 3 attempts had finished with a reward"]
    straggler.finish(reward=1.0)
    assert list(stream(tape)) == []


def test_while_no_attempt_has_finished_those_that_run_are_no_stragglers(tape: Tape) -> None:
    collects(tape, 2)
    running = [begin(tape, "a", attempt) for attempt in range(2)]
    assert list(stream(tape, straggler_s=0.0)) == []
    for rollout in running:
        rollout.finish(reward=1.0)
    (group,) = stream(tape, straggler_s=0.0)
    assert group.missing == 0


def test_the_attempts_of_a_process_that_died_are_missing_ones(tape: Tape) -> None:
    collects(tape, 2)
    begin(tape, "a", 0).finish(reward=1.0)
    dying = python(
        "import os, sys, rolltape; from group_streams import begin; "
        "begin(rolltape.open(sys.argv[1]), 'a', 1); os._exit(0)",
        str(tape.directory.path),
    )
    finished(dying)
    assert list(stream(tape)) == []
    (group,) = stream(tape, straggler_s=0.0)
    assert (group.rewards, group.missing) == ([1.0], 1)


def test_rewards_that_come_late_are_waited_for(tape: Tape) -> None:
    collects(tape, 2)
    record(tape, "a", 1.0, None)
    assert list(stream(tape)) == []
    unrewarded = next(row for row in tape.run().index() if row.outcome.reward is None)
    tape.score(unrewarded.id, reward=0.5, by="judge")
    (group,) = stream(tape)
    assert group.rewards == [1.0, 0.5]


def test_nobody_waits_for_rewards_that_the_credit_does_not_need(tape: Tape) -> None:
    collects(tape, 2)
    record(tape, "a", None, None)
    (group,) = stream(tape, credit=Credit(advantage=Advantage.NONE))
    assert [sample.advantage for sample in group.samples] == [None, None]


def test_a_filtered_rollout_has_no_sample_and_counts_in_the_baseline(tape: Tape) -> None:
    collects(tape, 2)
    record(tape, "a", 1.0, 0.0)
    tape.filter(tape.run().index()[0].id, "too easy")
    (group,) = stream(tape)
    assert [sample.advantage for sample in group.samples] == [-0.5]


def test_a_group_with_nothing_to_train_is_skipped_for_good(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    (row,) = tape.run().index()
    tape.filter(row.id, "too easy")
    waiting = stream(tape)
    assert list(waiting) == []
    assert [skipped.reason for skipped in waiting.skipped] == ["nothing to train in 1 rollouts under exact"]
    tape.filter(row.id, None)
    assert list(stream(tape)) == []


def test_a_group_whose_samples_cannot_be_built_is_skipped_and_the_others_are_given(
    tape: Tape, caplog: pytest.LogCaptureFixture
) -> None:
    collects(tape, size=1)
    for task, widths in (("a", (2, 2)), ("b", (2, 3)), ("c", (3, 3))):
        with tape.rollout(task_id=task, source=SOURCE, step=0, attempt=0) as rollout:
            record_side_arrays(rollout, "routed_experts", widths)
            rollout.finish(reward=1.0)
    collected(tape)
    waiting = stream(tape, step=0)
    assert tasks(list(waiting)) == ["a", "c"]
    (skipped,) = waiting.skipped
    assert "its samples cannot be built: side array 'routed_experts' is int16[2] in turn" in skipped.reason
    assert f"group {skipped.group} of step 0 cannot be given: side array 'routed_experts'" in caplog.text


def test_groups_of_weights_too_far_behind_are_skipped(tape: Tape) -> None:
    collects(tape, 1)
    for version in ("1", "2", "3"):
        tape.announce_version(version)
        record(tape, f"by-{version}", 1.0, version=version)
    assert find_consumer(tape, "other").index.versions() == ()
    waiting = stream(tape, max_staleness=1)
    assert tasks(list(waiting)) == ["by-2", "by-3"]
    assert [skipped.reason for skipped in waiting.skipped] == [
        "stale: sampled by weights 1, the newest are 3, max_staleness is 1"
    ]
    assert find_consumer(tape, "trainer").index.versions() == tape.run().versions() == ("1", "2", "3")


def test_versions_that_nobody_announced_are_ordered_as_a_reader_of_the_run_has_them(tape: Tape) -> None:
    collects(tape, 1)
    for version in ("b", "a"):
        record(tape, f"by-{version}", 1.0, version=version)
    tape.announce_version("c")
    assert len(list(stream(tape))) == 2
    assert find_consumer(tape, "trainer").index.versions() == tape.run().versions() == ("b", "a", "c")


def test_after_a_restart_versions_of_groups_that_are_done_still_count(tape: Tape) -> None:
    with rolltape.open(tape.directory.path) as collecting:
        collects(collecting, 1)
        for version in ("1", "2"):
            record(collecting, f"by-{version}", 1.0, version=version)
    rolltape.seal(tape.directory.path)
    for group in stream(tape):
        if group.task_id == "by-2":
            group.done()
    tape.close()
    with rolltape.open(tape.directory.path) as again:
        waiting = stream(again, max_staleness=0)
        assert list(waiting) == []
        assert [skipped.reason for skipped in waiting.skipped] == [
            "stale: sampled by weights 1, the newest are 2, max_staleness is 0"
        ]


def test_a_tape_gives_groups_itself(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    assert tasks(list(tape.groups(step=0, policy="exact", max_staleness=0, complete=True, idle_s=0.0))) == ["a"]


def test_without_complete_what_has_ended_is_given_as_it_is(tape: Tape) -> None:
    begin(tape, "a", 0).finish(reward=1.0)
    begin(tape, "a", 1)
    begin(tape, "b", 0)
    (group,) = tape.groups(complete=False)
    assert (group.task_id, group.rewards) == ("a", [1.0])


def test_a_size_that_is_given_goes_before_that_of_the_collection(tape: Tape) -> None:
    collects(tape, 4)
    record(tape, "a", 1.0, 0.0)
    assert list(stream(tape)) == []
    assert len(list(stream(tape, group_size=2))) == 1


def test_a_size_that_nobody_says_is_an_error(tape: Tape) -> None:
    record(tape, "a", 1.0)
    with pytest.raises(GroupsError, match="no collection on the tape says how many attempts it has; give group_size"):
        list(tape.groups(poll_s=0.001))


def test_options_that_make_no_sense_are_refused(tape: Tape) -> None:
    wrong: list[dict[str, Any]] = [{"group_size": 0}, {"max_staleness": -1}, {"limit": 0}, {"late": "never"}]
    wrong += [{"max_staleness": "x"}, {"group_size": 1.5}, {"step": "x"}, {"consumer": "a/b"}]
    wrong += [{"idle_s": "x"}, {"poll_s": -1}, {"straggler_s": float("nan")}, {"resume_s": -0.1}, {"task_ids": "a"}]
    for options in wrong:
        with pytest.raises(GroupsError, match=next(iter(options))):
            tape.groups(**options)
    with pytest.raises(PolicyError):
        tape.groups(policy="unknown")


def test_a_limit_ends_the_stream_and_the_next_one_goes_on(tape: Tape) -> None:
    collects(tape, 1)
    for task in "abc":
        record(tape, task, 1.0)
    assert tasks(list(tape.groups(limit=2))) == ["a", "b"]
    assert tasks(list(tape.groups(limit=1))) == ["c"]


def test_a_look_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = open_tape(tmp_path / "run")  # without summaries, which are news as well
    read: list[tuple[int, int]] = []
    add = Consumer._add

    def counted(self: Consumer, rows: Iterable[RolloutRow], events: Iterable[Event]) -> None:
        read.append((len(list(rows)), len(list(events))))
        add(self, rows, events)

    monkeypatch.setattr(Consumer, "_add", counted)
    collects(tape, 50)
    record(tape, "a", *[1.0] * 49)
    consumer = find_consumer(tape, "trainer")
    consumer.refresh()
    assert read == [(49, 1)]
    consumer.refresh()
    begin(tape, "a", 49).finish(reward=1.0)
    consumer.refresh()
    assert read[1:] == [(0, 0), (1, 0)]
