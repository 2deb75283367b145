"""Some rollouts of a large run, read without holding the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rolltape
from taped import record_run, record_session, spelled


@pytest.mark.parametrize(
    "put_away",
    [lambda run: None, rolltape.seal, lambda run: rolltape.seal(run, to=run.parent / "elsewhere")],
    ids=["journals", "here", "elsewhere"],
)
def test_the_latest_tries_of_some_are_read(tmp_path: Path, put_away: Callable[[Path], object]) -> None:
    ids = record_run(tmp_path / "run", rollouts=6)
    with rolltape.open(tmp_path / "run") as tape:
        again = tape.rollout(task_id="task-2", step=2, new_try=True)
        record_session(again, 1)
        again.fail("no sandbox")
        tape.score(ids[4], reward=0.5)
    put_away(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    expected = {one: spelled(run.rollout(one)) for one in (ids[2], ids[4])}
    found = run.latest([ids[4], ids[2], "0" * 32])
    assert {one: spelled(rollout) for one, rollout in found.items()} == expected
    assert (found[ids[2]].head.try_index, found[ids[4]].reward) == (1, 0.5)
    assert (run.latest([]), run.noticed()) == ({}, [])


def test_a_snapshot_gives_some_rollouts_as_they_were(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    with run.snapshot() as held:
        with rolltape.open(tmp_path / "run") as tape:
            tape.score(ids[0], reward=9.0)
        assert held.latest(ids[:1])[ids[0]].reward == 0.0
        assert len(held.index()) == 3
    assert run.latest(ids[:1])[ids[0]].reward == 9.0
