"""What a run holds already is found wherever it lies, without reading all of it, and is not run twice."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rolltape
from collecting import SUMS, collected_at_once, finished_per_task, task_file
from rolltape.collect.plan import RolloutIdentity, RolloutState, check_model, load_earlier
from rolltape.collect.sources import open_source
from rolltape.errors import CollectError
from rolltape.tape.contents import RunContents
from rolltape.tape.recording.tape import open_tape

CHECK = """
moody = True


def check(task, ended):
    assert not (moody and task["id"] == "sum-2"), "in a bad mood"
    return 1.0
"""


def elsewhere(run: Path) -> None:
    rolltape.seal(run, to=run.parent / "elsewhere")


@pytest.mark.parametrize(
    "put_away", [lambda run: None, rolltape.seal, elsewhere], ids=["journals", "here", "elsewhere"]
)
def test_what_has_finished_is_not_run_again_and_what_has_no_grade_is_graded(
    tmp_path: Path, put_away: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moody_checks.py").write_text(CHECK)
    monkeypatch.syspath_prepend(tmp_path)
    import moody_checks  # type: ignore[import-not-found]

    monkeypatch.setattr(moody_checks, "moody", True)
    tasks = [{"id": task["id"], "prompt": "?", "check": "python:moody_checks:check"} for task in SUMS]
    source, run = task_file(tmp_path, tasks), tmp_path / "run"
    first = collected_at_once(source, run, group_size=2)
    ungraded = {one.rollout for one in first if one.is_ungraded}
    assert (len(first), len(ungraded)) == (8, 2)
    put_away(run)
    moody_checks.moody = False
    again = collected_at_once(source, run, group_size=2, resume=True)
    assert [(one.rollout in ungraded, one.try_index, one.reward, one.before) for one in again] == [
        (True, 0, 1.0, True)
    ] * 2
    put_away(run)
    assert collected_at_once(source, run, group_size=2, resume=True) == []
    assert finished_per_task(run) == {task["id"]: 2 for task in SUMS}


def test_what_is_known_is_read_without_listing_rollouts_and_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    results = collected_at_once(source, run, group_size=3)
    tape = rolltape.read(run)
    expected = {row.id for row in tape.index()}

    def listed(_: RunContents) -> None:
        raise AssertionError("rollouts and events were listed")

    for name in ("entries", "events"):
        monkeypatch.setattr(RunContents, name, property(listed))
    known = load_earlier(tape, "tasks.jsonl", 0)
    assert (known.attempts, known.running, known.some_unrewarded) == (12, 0, False)
    assert set(known.states([one.rollout for one in results])) == {RolloutState.FINISHED}
    assert expected == {one.rollout for one in results}
    assert known.states(["00" * 16, "ff" * 16]) == [0, 0]
    assert load_earlier(tape, "tasks.jsonl", 1).states([results[0].rollout]) == [0]
    assert not load_earlier(tape, "others.jsonl", 0)


def test_another_model_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    collected_at_once(source, run, group_size=1)
    known = load_earlier(rolltape.read(run), "tasks.jsonl", 0)
    with open_tape(run) as tape:
        check_model(tape, known, "scripted", 0)
        with pytest.raises(CollectError, match="model_name was 'scripted' and is 'another'"):
            check_model(tape, known, "another", 0)


def test_several_tries_of_one_rollout_are_one_state(tmp_path: Path) -> None:
    def begun(task: str, *endings: str) -> str:
        for ending in endings:
            rollout = tape.rollout(task_id=task, source="s", new_try=True)
            if ending == "finish":
                rollout.finish(reward=1.0)
            elif ending == "unrewarded":
                rollout.finish()
            elif ending == "fail":
                rollout.fail("broke")
        return rollout.id

    with rolltape.open(tmp_path / "run") as tape:
        ids = [
            begun("a", "fail", "finish"),
            begun("b", "finish", "fail"),
            begun("c", "fail", "fail"),
            begun("d", "fail", "runs"),
            begun("e", "unrewarded"),
        ]
        known = load_earlier(tape.run(), "s", 0)
        assert known.states(ids) == [
            RolloutState.BROKEN | RolloutState.FINISHED,
            RolloutState.BROKEN | RolloutState.FINISHED,
            RolloutState.BROKEN,
            RolloutState.BROKEN | RolloutState.RUNNING,
            RolloutState.FINISHED | RolloutState.UNREWARDED,
        ]
        assert (known.attempts, known.running, known.some_unrewarded) == (3, 1, True)
        tape.score(ids[4], reward=0.0)
        assert load_earlier(tape.run(), "s", 0).states(ids[4:]) == [RolloutState.FINISHED]


def test_ids_of_many_attempts_are_those_of_each(tmp_path: Path) -> None:
    identity = RolloutIdentity("run", 3, "model", "chat")
    for task in open_source(task_file(tmp_path, [{"id": "a", "prompt": "?"}, {"prompt": "ü"}])):
        assert identity.rollout_ids(task, range(4), "x") == [
            identity.rollout_id(task, attempt, "x") for attempt in range(4)
        ]
        assert len(set(identity.rollout_ids(task, range(4)))) == 4
