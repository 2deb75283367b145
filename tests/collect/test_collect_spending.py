"""Limits of what a collection may spend: no attempt begins above them, those that run end, and it can be resumed."""

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from collect.fake_judge import FakeJudge, Says, in_turn
from collecting import SUMS, by, collected, finished_per_task, instant, rollouts, task_file
from commands import Cli
from rolltape.collect.collector import Collector
from rolltape.collect.limits import EnoughGroups
from rolltape.collect.plan import RolloutIdentity
from rolltape.collect.results import RolloutResult
from rolltape.collect.settings import CollectSettings
from rolltape.errors import CollectError
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.recording.tape import open_tape
from rolltape.tiny import shipped_model


async def collect_within(source: Path, run: Path, *, resume: bool = False, **settings: Any) -> Collector:
    with open_tape(run) as tape:
        collector = Collector(CollectSettings(source=str(source), max_concurrent=1, **settings), tape, resume=resume)
        await collector.run()
    return collector


def sampled(run: Path) -> list[int]:
    return [sum(len(turn.sampled_ids) for turn in one.turns) for one in rollouts(run)]


async def test_no_attempt_begins_once_so_many_tokens_are_sampled_and_a_higher_limit_continues(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with instant() as engine:
        how = {"group_size": 2, **by(engine)}
        first = await collect_within(source, run, max_sampled_tokens=1, **how)
        (each,) = sampled(run)
        assert first.stopped == f"{each} tokens were sampled, and --max-sampled-tokens is 1"
        assert first.reached_limit
        again = await collect_within(source, run, resume=True, max_sampled_tokens=each, **how)
        assert (again.reached_limit, len(rollouts(run))) == (True, 1)
        higher = await collect_within(source, run, resume=True, max_sampled_tokens=3 * each, **how)
        assert (higher.reached_limit, len(rollouts(run))) == (True, 3)
        last = await collect_within(source, run, resume=True, max_sampled_tokens=8 * each, **how)
    assert (last.stopped, last.reached_limit) == (None, False)  # it is reached, and nothing is left
    assert finished_per_task(run) == {task["id"]: 2 for task in SUMS}


async def test_a_collection_that_reached_a_limit_is_not_over_for_a_trainer(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with instant() as engine:
        await collect_within(source, run, group_size=1, max_sampled_tokens=1, **by(engine))
        with open_tape(run) as tape:
            assert tape.run().remarks(EventKind.COLLECTED) == []
        await collect_within(source, run, resume=True, group_size=1, **by(engine))
        with open_tape(run) as tape:
            assert len(tape.run().remarks(EventKind.COLLECTED)) == 1


async def test_attempts_that_run_when_a_limit_is_reached_go_on_to_their_end(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    (tmp_path / "gate_of_spending.py").write_text(_WAITING_AGENT)
    results: list[RolloutResult] = []
    async with instant() as engine:
        settings = CollectSettings(
            source=str(source),
            group_size=1,
            max_concurrent=3,
            max_sampled_tokens=1,
            grace_s=0.0,
            agent="python:gate_of_spending:agent",
            **by(engine),
        )
        with pytest.MonkeyPatch.context() as patch, open_tape(run) as tape:
            patch.syspath_prepend(tmp_path)
            import gate_of_spending  # type: ignore[import-not-found]

            collector = Collector(settings, tape)
            gate_of_spending.first_ended = lambda: bool(results)
            await collector.run(on_results=results.extend)
    assert collector.reached_limit
    assert [one.status for one in results] == [Status.FINISHED] * 3
    assert len(rollouts(run)) == 3


_WAITING_AGENT = """
import asyncio

import aiohttp

first_ended = None


async def agent(assignment):
    if assignment.task["id"] != "sum-1":
        while not first_ended():
            await asyncio.sleep(0.01)
    seat = assignment.connections["agent"]
    body = {"model": seat.model, "messages": [{"role": "user", "content": "?"}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {seat.key}"}) as http:
        async with http.post(f"{seat.openai_base_url}/chat/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]
"""


async def test_prices_make_a_cost_of_prompt_and_sampled_tokens(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with instant() as engine:
        prices = {"price_in": 1e6, "price_out": 2e6, "group_size": 1, **by(engine)}
        stopped = await collect_within(source, run, max_cost=0.5, **prices)
        (turn,) = rollouts(run)[0].turns
        cost = len(turn.prompt_ids) + 2 * len(turn.sampled_ids)
        assert stopped.stopped == f"the cost is {cost}, and --max-cost is 0.5"
        results = await collected(source, run, engine, resume=True, max_cost=1e9, **(prices | {"group_size": 1}))
    assert len(results) == 3
    assert all(one.usage.cost == one.usage.prompt_tokens + 2 * one.usage.sampled_tokens for one in results)


@asynccontextmanager
async def endpoint(**usage: Any) -> AsyncIterator[dict[str, Any]]:
    """Settings for an endpoint that answers 4 and reports this usage."""
    choice = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
    async with FakeJudge(in_turn(Says(body=json.dumps({"choices": [choice], "usage": usage})))) as served:
        yield {"engines": (f"openai:{served.base_url}",), "model": "some-gpt", "group_size": 1}


async def test_the_cost_that_an_endpoint_reports_counts_and_so_do_its_tokens(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with endpoint(prompt_tokens=10, completion_tokens=5, cost=0.25) as hosted:
        by_cost = await collect_within(source, run, max_cost=0.5, **hosted)
        assert (by_cost.stopped, len(rollouts(run))) == ("the cost is 0.5, and --max-cost is 0.5", 2)
        by_tokens = await collect_within(source, run, resume=True, max_sampled_tokens=15, **hosted)
    assert by_tokens.stopped == "15 tokens were sampled, and --max-sampled-tokens is 15"
    assert len(rollouts(run)) == 3


async def test_a_cost_that_nobody_reports_stops_the_collection_and_prices_continue_it(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with endpoint(prompt_tokens=10, completion_tokens=5) as hosted:
        unknown = await collect_within(source, run, max_cost=0.5, **hosted)
        assert unknown.stopped is not None
        assert "does not report what a turn costs; give --price-in, --price-out" in unknown.stopped
        priced = await collect_within(source, run, resume=True, max_cost=0.5, price_in=1, price_out=1, **hosted)
    assert (priced.stopped, len(rollouts(run))) == (None, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_cost": 1.0}, "max_cost is 1, but nothing has a price; give price_in and price_out"),
        ({"price_in": 1.0}, "price_in and price_out go together; give both"),
        ({"max_sampled_tokens": 0}, "max_sampled_tokens is 0; give 1 or more"),
        ({"max_cost": float("nan"), "price_in": 1.0, "price_out": 1.0}, "max_cost is nan; give more than 0"),
    ],
)
def test_limits_that_could_never_hold_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CollectError, match=message):
        CollectSettings(source="x", **settings)


def test_the_command_says_why_it_stopped_and_has_an_exit_code_of_its_own(tmp_path: Path, cli: Cli) -> None:
    source, run = task_file(tmp_path, SUMS[:2]), tmp_path / "run"
    with instant().in_thread() as engine:
        engines = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "--max-concurrent", 1)
        how = ("collect", source, "--run", run, "-g", 1, *engines, "--price-in", 1, "--price-out", 1)
        result = cli(*how, "--max-sampled-tokens", 1)
        assert result.code == 7
        assert (
            "tokens were sampled, and --max-sampled-tokens is 1; --resume with a higher limit continues" in result.err
        )
        assert "cost " in result.out
        again = cli(*how, "--resume", "--max-cost", 1e-12, "--json")
        assert again.code == 7
        assert json.loads(again.out.splitlines()[-1])["stopped"].endswith("--max-cost is 1e-12")
        assert cli(*how, "--resume").code == 0
    assert finished_per_task(run) == {task["id"]: 1 for task in SUMS[:2]}


async def test_no_attempt_begins_once_the_time_is_over(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    async with instant() as engine:
        first = await collect_within(source, run, max_time_s=1e-6, group_size=2, **by(engine))
        assert (first.stopped, first.reached_limit) == ("1e-06 s have passed, which is --max-time", True)
        assert len(rollouts(run)) < 8
        last = await collect_within(source, run, resume=True, max_time_s=3600.0, group_size=2, **by(engine))
    assert (last.stopped, last.reached_limit) == (None, False)
    assert finished_per_task(run) == {task["id"]: 2 for task in SUMS}


async def test_no_task_begins_once_enough_groups_have_rewards_that_differ(tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    answers = iter([2, 2, 3, 0, 4, 0, 5, 0])  # the first task is always solved, the others every other time
    async with instant(lambda asked: str(next(answers))) as engine:
        how = {"group_size": 2, **by(engine)}
        first = await collect_within(source, run, enough_groups=1, **how)
        assert (first.stopped, first.reached_limit) == (None, False)
        assert first.enough == "rewards differ in 1 group, and --enough-groups is 1"
        assert finished_per_task(run) == {"sum-1": 2, "sum-2": 2}
        with open_tape(run) as tape:
            assert len(tape.run().remarks(EventKind.COLLECTED)) == 1, "it is over for a trainer"
        again = await collect_within(source, run, resume=True, enough_groups=1, **how)
        assert again.enough is not None
        assert len(rollouts(run)) == 4
        more = await collect_within(source, run, resume=True, enough_groups=3, **how)
    assert more.enough is None, "all tasks are done"
    assert finished_per_task(run) == {task["id"]: 2 for task in SUMS}


def test_rewards_that_are_not_finite_do_not_count_as_rewards_that_differ() -> None:
    """Such a group has no advantages, as `rolltape filter --no-spread` says."""
    settings = CollectSettings(source="sums", group_size=2, enough_groups=1)
    groups = EnoughGroups(settings, RolloutIdentity("exp", 0, "tiny", "chat"))
    for task, rewards in (("a", [1.0, math.nan]), ("b", [math.nan, float("nan")]), ("c", [math.inf, 0.0])):
        groups.add([_ended(task, attempt, reward) for attempt, reward in enumerate(rewards)])
    assert groups.explain() is None
    groups.add([_ended("d", attempt, reward) for attempt, reward in enumerate([1.0, 0.0])])
    assert groups.explain() == "rewards differ in 1 group, and --enough-groups is 1"


def _ended(task: str, attempt: int, reward: float) -> RolloutResult:
    return RolloutResult(f"{task}{attempt}", 0, 0, task, attempt, "agent", Status.FINISHED, None, reward=reward)
