"""Each group is given once: what is done is not given again, what was not acknowledged is."""

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

import rolltape
from group_streams import begin, collects, record, stream, tasks
from rolltape.errors import GroupsError
from rolltape.records.rollout import EventKind
from rolltape.tape.recording.tape import Tape
from taped import finished, python


def test_after_a_restart_what_was_done_is_not_given_and_what_was_not_is_given_again(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp") as first:
        collects(first, 1)
        for task in "abc":
            record(first, task, 1.0)
        waiting = stream(first)
        next(waiting).done()
        assert next(waiting).task_id == "b"
        waiting.close()
    with rolltape.open(tmp_path / "exp") as second:
        given = list(stream(second))
        assert [(group.task_id, group.again) for group in given] == [("b", True), ("c", False)]
        for group in given:
            group.done()
            group.done()
    with rolltape.open(tmp_path / "exp") as third:
        assert list(stream(third)) == []
        said = [event.data["state"] for event in third.run().remarks(EventKind.GROUP)]
    assert said == ["given", "done", "given", "given", "given", "done", "done"]


def test_a_process_that_is_killed_between_give_and_done_is_given_it_again(tmp_path: Path) -> None:
    run = tmp_path / "exp"
    with rolltape.open(run) as tape:
        collects(tape, 1)
        record(tape, "a", 1.0)
    killed = python(
        "import os, sys, rolltape; next(rolltape.open(sys.argv[1]).groups()); print('given', flush=True); "
        "os.kill(os.getpid(), 9)",
        str(run),
    )
    output, _ = killed.communicate(timeout=60)
    assert output == "given\n"
    with rolltape.open(run) as tape:
        (group,) = stream(tape)
        assert group.again


def test_in_one_process_a_group_is_given_once_also_by_a_second_stream(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    (group,) = stream(tape)
    assert list(stream(tape)) == []
    group.done()
    assert list(stream(tape)) == []


def test_a_block_that_is_left_by_an_exception_gives_it_back(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    waiting = stream(tape)
    with pytest.raises(ZeroDivisionError), next(waiting):
        _ = 1 / 0
    with next(waiting) as group:
        assert group.task_id == "a"
    assert list(waiting) == []


def test_groups_come_although_the_index_is_made_again_meanwhile(tape: Tape) -> None:
    collects(tape, 1)
    for task in "abc":
        record(tape, task, 1.0)
    for group in stream(tape, limit=2):
        group.done()
    shutil.rmtree(tape.directory.path / "cache")
    record(tape, "d", 1.0)
    assert tasks(list(stream(tape))) == ["c", "d"]


def test_consumers_do_not_take_from_each_other(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    for consumer in ("trainer", "evaluator"):
        (group,) = stream(tape, consumer=consumer)
        group.done()
    assert list(stream(tape)) == []


def test_a_second_process_of_the_same_name_is_refused_while_the_first_takes_groups(tape: Tape) -> None:
    waiting = tape.groups()
    code = "import sys, rolltape; rolltape.open(sys.argv[1]).groups(consumer=sys.argv[2]).close()"
    finished(python(code, str(tape.directory.path), "another"))
    refused = python(code, str(tape.directory.path), "trainer")
    said = refused.communicate(timeout=60)[1]
    assert f"another process ({os.getpid()}) takes groups as consumer 'trainer' now; end it" in said
    with (
        rolltape.open(tape.directory.path) as again,
        pytest.raises(GroupsError, match=r"on another opening of the tape"),
    ):
        again.groups()
    waiting.close()
    finished(python(code, str(tape.directory.path), "trainer"))
    with pytest.raises(GroupsError):
        tape.groups(consumer="")


def test_a_forked_child_neither_takes_its_parents_groups_nor_keeps_its_name(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    record(tape, "b", 1.0)
    waiting = stream(tape)
    first = next(waiting)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        for take in (lambda: next(waiting), lambda: stream(tape), first.done):
            try:
                take()
                os.write(writing, b"taken;")
            except GroupsError:
                os.write(writing, b"refused;")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"refused;" * 3
    assert next(waiting).task_id == "b"


def test_a_child_that_outlives_a_killed_trainer_does_not_keep_its_name(tmp_path: Path) -> None:
    run = tmp_path / "exp"
    with rolltape.open(run) as tape:
        collects(tape, 1)
        record(tape, "a", 1.0)
    code = (
        "import os, sys, rolltape; stream = rolltape.open(sys.argv[1]).groups(); next(stream); child = os.fork()\n"
        "if child: print(child, flush=True); os.kill(os.getpid(), 9)\n"
        "else: os.close(1); os.close(2); import time; time.sleep(60)"
    )
    child = int(python(code, str(run)).communicate(timeout=60)[0])
    try:
        with rolltape.open(run) as tape:
            (group,) = stream(tape)
            assert group.again
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_loop_that_ends_in_the_middle_of_a_look_loses_no_group(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    record(tape, "b", 1.0)
    waiting = stream(tape)

    async def begin_to_take() -> None:
        taking = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)
        taking.cancel()

    async def take() -> str | None:
        return (await anext(waiting)).task_id

    asyncio.run(begin_to_take())
    assert asyncio.run(take()) == "a"
    asyncio.run(begin_to_take())
    assert next(waiting).task_id == "b"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_order_of_ends_tries_looks_and_seals_each_group_is_given_once_and_whole(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    size, names = 3, [f"t{number}" for number in range(6)]
    given: list[rolltape.Group] = []
    with rolltape.open(tmp_path / "exp") as trainer:
        collects(trainer, size)
        work = [(task, attempt) for task in names for attempt in range(size)]
        rng.shuffle(work)
        writers = [rolltape.open(tmp_path / "exp") for _ in range(2)]
        while work:
            task, attempt = work.pop()
            rollout = begin(rng.choice(writers), task, attempt, new_try=True)
            if rng.random() < 0.2:
                rollout.fail("the engine died")
                work.insert(0, (task, attempt))
            else:
                rollout.finish(reward=float(rng.randrange(2)))
            if rng.random() < 0.2:
                place = rng.randrange(2)
                writers[place].close()
                writers[place] = rolltape.open(tmp_path / "exp")
            if rng.random() < 0.2:
                rolltape.seal(tmp_path / "exp")
            if rng.random() < 0.3:
                given += stream(trainer)
        for writer in writers:
            writer.close()
        given += stream(trainer)
    assert sorted(str(task) for task in tasks(given)) == names
    assert all([rollout.head.attempt for rollout in group.rollouts] == [0, 1, 2] for group in given)
    assert all(len(group.samples) == size for group in given)
