"""The public names of collecting: their examples run, and old names still work."""

import importlib
import inspect
import itertools
import sys
import textwrap
from pathlib import Path

import pytest

import rolltape
from collecting import SUMS, collected_at_once, finished_per_task, rollouts, task_file


def example(documented: object) -> str:
    """The first indented lines of a docstring."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("    "))
    block = itertools.takewhile(lambda line: not line or line.startswith("    "), lines[first:])
    return textwrap.dedent("\n".join(block))


def test_the_example_of_the_collector_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task_file(tmp_path, SUMS[:1], "sums.jsonl")
    exec(example(rolltape.Collector), {})
    assert finished_per_task(tmp_path / "runs" / "sums", step=3) == {"sum-1": 8}
    assert float(capsys.readouterr().out) == sum(one.reward or 0.0 for one in rollouts(tmp_path / "runs" / "sums"))


def test_the_example_of_an_environment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "contains.py").write_text(example(rolltape.Environment))
    tasks = [{"id": answer, "prompt": "What is 3 + 1?", "answer": answer} for answer in ("4", "5")]
    results = collected_at_once(
        task_file(tmp_path, tasks), tmp_path / "run", group_size=1, environment="python:contains:Contains"
    )
    assert {result.task: result.reward for result in results} == {"4": 1.0, "5": 0.0}
    sys.modules.pop("contains", None)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("rolltape.collect", "Source", "TaskSource"),
        ("rolltape.collect.agents", "Outcome", "AgentOutcome"),
        ("rolltape.collect.filters", "standing", "active_filters"),
    ],
)
def test_old_names_warn_and_are_the_new_ones(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(home, old) is getattr(home, new)


def test_the_old_home_of_the_ray_runner_warns() -> None:
    sys.modules.pop("rolltape.collect.cluster", None)
    with pytest.warns(DeprecationWarning, match="rolltape.collect"):
        cluster = importlib.import_module("rolltape.collect.cluster")
    assert cluster.RayRunner is importlib.import_module("rolltape.collect").RayRunner


def test_every_public_name_is_there() -> None:
    for module in (
        "rolltape.collect",
        "rolltape.collect.agents",
        "rolltape.collect.environments",
        "rolltape.collect.filters",
    ):
        home = importlib.import_module(module)
        assert [name for name in home.__all__ if not hasattr(home, name)] == []
