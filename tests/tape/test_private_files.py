"""A run is for its owner alone, whatever the umask: its folders are made 0700, its files 0600."""

import asyncio
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rolltape
from collecting import collected, instant, task_file
from commands import Cli
from rolltape.samples.summary import open_for_recording
from rolltape.tape.run import read
from rolltape.tokens import score_sample, write_tokens
from taped import first_turn


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(run: Path) -> dict[str, str]:
    """What is not as it should be."""
    found = {run: 0o700, **{path: 0o700 if path.is_dir() else 0o600 for path in run.rglob("*")}}
    wrong = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    return {str(path.relative_to(run)): oct(mode) for path, mode in wrong.items() if mode != found[path]}


@pytest.mark.usefixtures("umask")
def test_what_recording_reading_sealing_and_exporting_write_is_for_the_owner(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    with open_for_recording(run) as tape, tape.rollout(task_id="t") as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=1.0)
        next(tape.groups(step=0, group_size=1))
        assert any(path.name.endswith("-wal") for path in run.rglob("*"))
        assert cli("ls", run).code == 0
        assert modes(run) == {}
    samples = list(rolltape.linearize(next(read(run).rollouts()), "exact").samples())
    write_tokens(run, 0, [score_sample(sample, [-1.0] * len(sample.ids)) for sample in samples])
    assert cli("seal", run).code == 0
    assert cli("export", run, "-o", run / "samples.jsonl").code == 0
    assert cli("seal", run, "--to", tmp_path / "published").code == 0
    assert (modes(run), modes(tmp_path / "published")) == ({}, {})


@pytest.mark.usefixtures("umask")
def test_what_a_collection_writes_is_for_the_owner(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("print(4)")
    source, agent = task_file(tmp_path), f"command:{sys.executable} {tmp_path / 'agent.py'}"

    async def collect() -> None:
        async with instant() as engine:
            await collected(source, tmp_path / "run", engine, agent=agent)

    asyncio.run(collect())
    assert list((tmp_path / "run" / "logs").rglob("stdout.txt"))
    assert modes(tmp_path / "run") == {}


def test_a_folder_that_is_shared_stays_shared(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o750)
    with open_for_recording(run):
        pass
    assert modes(run) == {".": "0o750"}


def test_an_export_elsewhere_is_as_the_umask_has_it(tmp_path: Path, cli: Cli) -> None:
    with open_for_recording(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        first_turn(rollout.session())
    before = os.umask(0o022)
    try:
        assert cli("export", tmp_path / "run", "-o", tmp_path / "samples.jsonl").code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "samples.jsonl").stat().st_mode) == 0o644
