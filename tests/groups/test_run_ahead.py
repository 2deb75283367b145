"""Collection runs ahead of a trainer as far as it may, and no farther."""

import asyncio
from pathlib import Path

import pytest

import rolltape
from collecting import by, command, instant, task_file
from group_streams import collects, record, stream
from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.errors import GroupsError
from rolltape.tape.recording.tape import Tape
from rolltape.tiny import shipped_model
from taped import finished, python


def test_there_is_room_for_so_many_groups_that_the_trainer_is_not_done_with(tape: Tape) -> None:
    room = rolltape.RunAheadLimit(tape, max_groups=2)
    collects(tape, 1)
    record(tape, "a", 1.0)
    assert room.is_free(0)
    record(tape, "b", 1.0)
    assert not room.is_free(0)
    first = next(stream(tape))
    assert not room.is_free(0)
    first.done()
    assert room.is_free(0)


@pytest.mark.parametrize(("max_steps", "free"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_there_is_room_for_so_many_steps_ahead(tape: Tape, max_steps: int, free: list[int]) -> None:
    room = rolltape.RunAheadLimit(tape, max_steps=max_steps)
    collects(tape, 1)
    record(tape, "a", 1.0, step=0)
    assert [step for step in range(4) if room.is_free(step)] == free
    next(stream(tape)).done()
    assert room.is_free(3)


def test_what_is_skipped_makes_room_too(tape: Tape) -> None:
    room = rolltape.RunAheadLimit(tape, max_groups=1)
    collects(tape, 2)
    record(tape, "a", 1.0)
    assert not room.is_free(0)
    assert list(stream(tape, straggler_s=0.0, late="skip")) == []
    assert room.is_free(0)


def test_groups_of_another_source_take_no_room(tape: Tape) -> None:
    room = rolltape.RunAheadLimit(tape, max_groups=1)
    collects(tape, 1)
    record(tape, "a", 1.0)
    assert not room.is_free(0, "sums")
    assert room.is_free(0, "held-out")


def test_a_trainer_in_another_process_makes_room(tape: Tape) -> None:
    collects(tape, 1)
    record(tape, "a", 1.0)
    room = rolltape.RunAheadLimit(tape, max_groups=1, poll_s=0.01)
    assert not room.is_free(0)
    code = "import sys, rolltape; next(rolltape.open(sys.argv[1]).groups()).done()"
    training = python(code, str(tape.directory.path))
    room.wait_blocking(0)
    finished(training)


def test_bounds_that_make_no_sense_are_refused(tape: Tape) -> None:
    with pytest.raises(GroupsError, match="max_groups is 0; give 1 or more"):
        rolltape.RunAheadLimit(tape, max_groups=0)
    with pytest.raises(GroupsError, match="max_steps is -1; give 0 or more"):
        rolltape.RunAheadLimit(tape, max_steps=-1)


async def test_a_collector_with_a_bound_begins_a_group_when_the_trainer_is_done_with_one(tmp_path: Path) -> None:
    source = task_file(tmp_path)
    ahead: list[int] = []
    async with instant() as engine:
        with rolltape.open(tmp_path / "run") as tape:
            room = rolltape.RunAheadLimit(tape, max_groups=2, poll_s=0.01)
            settings = CollectSettings(source=str(source), group_size=3, **by(engine))
            collector = Collector(settings, tape, run_ahead=room)
            collecting = asyncio.ensure_future(collector.run(lambda launch: None, lambda results: None))
            given: list[str | None] = []
            async for group in tape.groups(step=0, poll_s=0.01):
                begun = {row.head.group for row in tape.run().index()}
                ahead.append(len(begun) - len(given))
                given.append(group.task_id)
                group.done()
            await collecting
    assert sorted(str(task) for task in given) == ["sum-1", "sum-2", "sum-3", "sum-4"]
    assert max(ahead) == 2


@pytest.mark.slow
async def test_the_command_holds_back_for_a_trainer_in_another_process(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    given: list[str | None] = []
    async with instant() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "--max-ahead", 1, "-g", 2)
        collecting = command(source, "--run", run, *how)
        with rolltape.open(run) as tape:
            async for group in tape.groups(step=0, poll_s=0.01):
                begun = {row.head.group for row in tape.run().index()}
                assert len(begun) - len(given) == 1
                given.append(group.task_id)
                group.done()
        _, errors = await asyncio.to_thread(collecting.communicate)
    assert collecting.returncode == 0, errors
    assert given == ["sum-1", "sum-2", "sum-3", "sum-4"]
