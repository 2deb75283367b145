"""Environments by name, one of a user's own, and the example tasks."""

import sys
from pathlib import Path

import pytest

from rolltape.collect import Task, open_source
from rolltape.collect.environments import ENVIRONMENT_NAMES, GroupEnvironment, environment_named
from rolltape.errors import TaskError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "src" / "rolltape" / "demo" / "tasks").glob("*.jsonl"))


def test_an_environment_has_the_name_that_it_is_found_by_and_one_compares() -> None:
    named = {name: environment_named(name) for name in ENVIRONMENT_NAMES}
    assert all(environment.name == name for name, environment in named.items())
    assert [name for name, environment in named.items() if isinstance(environment, GroupEnvironment)] == ["preference"]


def test_unknown_name_is_told() -> None:
    with pytest.raises(TaskError) as caught:
        environment_named("chess")
    assert str(caught.value) == (
        f"there is no environment 'chess'; there are {', '.join(ENVIRONMENT_NAMES)}, "
        "gymnasium:NAME, openenv:NAME, verifiers:NAME, and python:module:Class"
    )


def test_a_package_that_is_missing_is_told_from_one_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = "rolltape.collect.environments.others.gymnasium"
    for name in [one for one in sys.modules if one == others or one.partition(".")[0] == "gymnasium"]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "gymnasium", None)
        with pytest.raises(TaskError, match=r"^gymnasium:X: .*not installed; pip install 'rolltape\[gymnasium\]'$"):
            environment_named("gymnasium:X")
    (tmp_path / "gymnasium.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=r"^gymnasium:X: gymnasium is installed but cannot be imported: .*gymnasium"):
        environment_named("gymnasium:X")
    monkeypatch.delitem(sys.modules, "gymnasium")


def test_class_of_ones_own_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env_own.py").write_text(
        "class Own:\n"
        "    name = 'own'\n"
        "    def check(self, task): ...\n"
        "    def begin(self, task, seed): ...\n"
        "class Half:\n"
        "    name = 'half'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "env_own", raising=False)
    assert environment_named("python:env_own:Own").name == "own"
    with pytest.raises(TaskError, match="makes something without check, begin"):
        environment_named("python:env_own:Half")


def test_each_kind_has_example_tasks() -> None:
    assert {path.stem for path in EXAMPLES} == set(ENVIRONMENT_NAMES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_tasks_are_good(path: Path) -> None:
    def check(task: Task) -> None:
        environment_named(str(task.environment)).check(task)

    tasks = list(open_source(path, environments=ENVIRONMENT_NAMES, check=check))
    assert {task.environment for task in tasks} == {path.stem}
    for task in tasks:
        episode = environment_named(path.stem).begin(task, 1)
        assert episode.next_seat() in episode.seats
        assert all(episode.opening(seat).messages for seat in episode.seats)
