"""Which rollouts there are is decided by the inputs, and by all of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from collecting import SUMS, collected_at_once, finished_per_task, rollouts, task_file
from rolltape.collect.tasks import seed_of
from rolltape.errors import CollectError


def ids(run: Path) -> set[str]:
    return {one.id for one in rollouts(run)}


def test_equal_inputs_give_equal_ids_in_any_order(tmp_path: Path) -> None:
    source = task_file(tmp_path)
    hows: dict[str, dict[str, Any]] = {"a": {"max_concurrent": 1}, "b": {"seed": 7}}
    for place, how in hows.items():
        (tmp_path / place).mkdir()
        collected_at_once(source, tmp_path / place / "run", group_size=2, **how)
    assert ids(tmp_path / "a" / "run") == ids(tmp_path / "b" / "run")
    assert len(ids(tmp_path / "a" / "run")) == 8


@pytest.mark.parametrize("other", [{"split": "test"}, {"model_name": "another"}, {"step": 1}, {"source_name": "else"}])
def test_any_other_input_gives_other_ids(tmp_path: Path, other: dict[str, Any]) -> None:
    source = task_file(tmp_path)
    for place, how in (("a", {}), ("b", other)):
        (tmp_path / place).mkdir()
        collected_at_once(source, tmp_path / place / "run", group_size=1, **how)
    assert ids(tmp_path / "a" / "run").isdisjoint(ids(tmp_path / "b" / "run"))


def test_another_run_has_other_ids(tmp_path: Path) -> None:
    source = task_file(tmp_path)
    for name in ("one", "two"):
        collected_at_once(source, tmp_path / name, group_size=1)
    assert ids(tmp_path / "one").isdisjoint(ids(tmp_path / "two"))


def test_one_run_holds_several_steps(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    for step in (0, 1):
        collected_at_once(source, run, group_size=2, step=step)
    held = rollouts(run)
    assert finished_per_task(run, 0) == finished_per_task(run, 1) == {task["id"]: 2 for task in SUMS}
    by_step = [{one.head.group for one in held if one.head.step == step} for step in (0, 1)]
    assert by_step[0].isdisjoint(by_step[1])
    assert len({seed_of(one.id) for one in held}) == len(held) == 16


def test_a_step_is_not_collected_twice_unasked(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    collected_at_once(source, run, group_size=1)
    with pytest.raises(CollectError, match=r"run run: tasks.jsonl was collected into it at step 0 before; give --res"):
        collected_at_once(source, run, group_size=1)
    with pytest.raises(CollectError, match=r"holds no collection of tasks.jsonl at step 1; leave --resume out"):
        collected_at_once(source, run, group_size=1, step=1, resume=True)


def test_one_step_takes_several_sources_each_resumed_for_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train, test = task_file(tmp_path), task_file(tmp_path, SUMS[:1], "test.jsonl")
    collected_at_once(train, run, group_size=2)
    collected_at_once(test, run, group_size=3)
    assert collected_at_once(train, run, group_size=2, resume=True) == []
    assert Counter(one.head.source for one in rollouts(run)) == {"tasks.jsonl": 8, "test.jsonl": 3}
    with pytest.raises(CollectError, match=r"holds no collection of tasks.jsonl#test at step 0"):
        collected_at_once(train, run, group_size=2, split="test", resume=True)


def test_resuming_with_other_settings_names_them(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    collected_at_once(source, run, group_size=2, max_turns=4)
    with pytest.raises(CollectError, match=r"group_size was 2 and is 1; max_turns was 4 and is 5"):
        collected_at_once(source, run, group_size=1, max_turns=5, resume=True)
    assert collected_at_once(source, run, group_size=2, max_turns=4, max_concurrent=3, resume=True) == []


def test_resuming_with_another_model_is_refused(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    collected_at_once(source, run, group_size=1, model_name="a")
    with pytest.raises(CollectError, match="model_name was 'a' and is 'b'"):
        collected_at_once(source, run, group_size=1, model_name="b", resume=True)
