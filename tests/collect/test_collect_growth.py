"""Groups that grow: a collection resumed with a larger group size keeps its attempts and adds the others."""

import logging
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import SUMS, by, collected, collected_at_once, finished_per_task, instant, rollouts, task_file
from commands import Cli
from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.tiny import shipped_model
from scripted_engine import Asked


def alternating(asked: Asked) -> str:
    """Every other reply is right for the first task, whose answer is 2."""
    return "2" if asked.number % 2 else "9"


def taken(run: Path, **options: Any) -> list[rolltape.Group]:
    with rolltape.open(run) as tape:
        return list(tape.groups(step=0, idle_s=0.0, poll_s=0.001, **options))


def test_a_larger_group_keeps_its_attempts_and_adds_the_others(tmp_path: Path, cli: Cli) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    first = {one.rollout for one in collected_at_once(source, run, group_size=4)}
    added = collected_at_once(source, run, group_size=8, resume=True)
    assert sorted({one.attempt for one in added}) == [4, 5, 6, 7]
    assert not first & {one.rollout for one in added}
    assert finished_per_task(run) == {task["id"]: 8 for task in SUMS}
    assert {one.head.try_index for one in rollouts(run)} == {0}
    assert collected_at_once(source, run, group_size=8, resume=True) == []
    assert cli("check", run).code == 0
    assert len(cli("ls", run, "--json").out.splitlines()) == 32


def test_the_report_of_a_group_that_has_grown_claims_nothing_about_the_whole_group(tmp_path: Path, cli: Cli) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    with instant(lambda asked: "2" if asked.number < 2 else "9").in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "--run", run)
        first = cli("collect", source, *how, "-g", 2)
        second = cli("collect", source, *how, "-g", 4, "--resume")
    assert "rewards differ in 0 of 1 group" in first.out  # both are right
    assert second.out.startswith("of the attempts that ran now:\n")
    assert "rewards differ" not in second.out  # both of these are wrong, and the group has both kinds


def test_advantages_of_a_group_that_has_grown_are_over_all_its_attempts(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    collected_at_once(source, run, alternating, group_size=2, max_concurrent=1)
    collected_at_once(source, run, lambda asked: "9", group_size=4, resume=True)
    (group,) = taken(run)
    assert sorted(reward or 0.0 for reward in group.rewards) == [0.0, 0.0, 0.0, 1.0]
    assert sorted(sample.advantage or 0.0 for sample in group.samples) == [-0.25, -0.25, -0.25, 0.75]


async def test_a_follower_waits_for_the_attempts_that_are_added(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    async with instant() as engine:
        await collected(source, run, engine, group_size=2)
        settings = CollectSettings(source=str(source), group_size=4, **by(engine))
        with rolltape.open(run) as tape:
            collector = Collector(settings, tape, resume=True)
            sizes: list[int] = []

            def on_launch(_: object) -> None:
                # The event of the resumed collection is on the tape, and none of its attempts has begun.
                sizes.extend(len(group.rollouts) for group in tape.groups(step=0, idle_s=0.0, poll_s=0.001))

            await collector.run(on_launch)
            sizes.extend(len(group.rollouts) for group in tape.groups(step=0, idle_s=0.0, poll_s=0.001))
    assert sizes == [4]


def test_a_group_that_a_trainer_is_done_with_is_not_given_again_when_it_grows_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, run = task_file(tmp_path, SUMS[:2]), tmp_path / "run"
    collected_at_once(source, run, group_size=2)
    with rolltape.open(run) as tape:
        done = next(tape.groups(step=0))
        done.done()
    with caplog.at_level(logging.WARNING, "rolltape.collect"):
        collected_at_once(source, run, group_size=4, resume=True)
    (warning,) = [one.getMessage() for one in caplog.records if "grow" in one.getMessage()]
    assert "groups grow from 2 to 4 attempts, but 'trainer' has taken 1 of them already" in warning
    (other,) = taken(run)
    assert (other.id == done.id, len(other.rollouts), other.again) == (False, 4, False)
    assert sorted(len(group.rollouts) for group in taken(run, consumer="another")) == [4, 4]


def test_a_group_that_was_given_and_not_done_is_given_again_with_all_attempts_and_marked(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[:1]), tmp_path / "run"
    collected_at_once(source, run, group_size=2)
    assert [len(group.rollouts) for group in taken(run)] == [2]
    collected_at_once(source, run, group_size=4, resume=True)
    assert [(len(group.rollouts), group.again) for group in taken(run)] == [(4, True)]


def test_attempts_that_are_compared_are_compared_anew_with_those_that_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compares_of_growth.py").write_text(
        "def larger(task, one, other):\n    return int(one.text) - int(other.text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = {"id": "a", "environment": "preference", "prompt": "?", "function": "python:compares_of_growth:larger"}
    source, run = task_file(tmp_path, [task]), tmp_path / "run"
    collected_at_once(source, run, lambda asked: "53"[asked.number], group_size=2, max_concurrent=1)
    assert {one.head.attempt: one.reward for one in rollouts(run)} == {0: 1.0, 1: 0.0}
    collected_at_once(source, run, lambda asked: "9", group_size=3, resume=True)
    assert {one.head.attempt: one.reward for one in rollouts(run)} == {0: 0.5, 1: 0.0, 2: 1.0}
