"""Limits of requests: no engine and no judge gets more at a time, or more in a minute, than it is said to bear."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from collect.fake_judge import FakeJudge, Says
from collecting import collected, instant, rollouts, task_file
from commands import Cli
from gateways import rig, scripted, slowly
from rolltape.collect.environments.judge import Judge
from rolltape.gateway.engines.request_limit import RequestLimit, RequestQueue
from rolltape.records.rollout import Status
from scripted_engine import Step

GRADES = '{"polite": {"reason": "yes", "grade": 10}}'
POLITE = {"environment": "rubric", "criteria": ["polite"]}


class Clock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def test_requests_begin_evenly_spaced_in_the_order_in_which_they_came() -> None:
    clock, began = Clock(), list[tuple[int, float]]()
    queue = RequestQueue(RequestLimit(per_minute=30), now=clock.now, sleep=clock.sleep)
    for number in range(4):
        async with queue.turn() as is_awaited:
            assert is_awaited
            began.append((number, clock.now()))
    assert began == [(0, 0.0), (1, 2.0), (2, 4.0), (3, 6.0)]
    clock.now_s = 100.0
    async with queue.turn():
        assert clock.now() == 100.0, "time in which nobody asked is not made up for by a wait"


async def test_a_caller_that_leaves_the_queue_takes_no_slot_with_it() -> None:
    queue, left, may_end = RequestQueue(RequestLimit(at_once=1)), asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def request(name: str, leaving: asyncio.Event | None = None) -> None:
        async with queue.turn(leaving) as is_awaited:
            order.append(f"{name} {'begins' if is_awaited else 'left'}")
            if name == "first":
                await may_end.wait()

    first = asyncio.ensure_future(request("first"))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(request("second", left)), asyncio.ensure_future(request("third"))]
    await asyncio.sleep(0)
    left.set()
    await waiting[0]
    may_end.set()
    await asyncio.gather(first, waiting[1])
    assert order == ["first begins", "second left", "third begins"]


@pytest.mark.parametrize("wrong", [{"at_once": 0}, {"per_minute": 0.0}, {"per_minute": float("nan")}])
def test_a_limit_that_allows_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="or leave it out"):
        RequestLimit(**wrong)


async def test_an_engine_has_no_more_requests_at_a_time_than_its_limit(tmp_path: Path) -> None:
    source, most = task_file(tmp_path), {}
    for limit in (RequestLimit(), RequestLimit(at_once=2)):
        async with instant(lambda asked: Step("4", token_delay_s=0.1)) as engine:
            results = await collected(
                source, tmp_path / f"run-{limit.at_once}", engine, group_size=4, engine_limit=limit
            )
        assert [one.status for one in results] == [Status.FINISHED] * 16
        most[limit.at_once] = engine.most_at_once
    assert most[2] == 2 < most[None]


async def test_a_change_of_weights_does_not_wait_for_requests_in_the_queue(tmp_path: Path) -> None:
    engine = scripted(slowly("4 5 6 7", 0.05), conversation=lambda asked: None)
    async with rig(tmp_path / "run", engine, engine_limit=RequestLimit(at_once=1)) as it:
        asking = [it.asking(await it.open(task_id=f"t{n}"), "?") for n in range(3)]
        await it.requested(1)
        async with asyncio.timeout(20):
            assert await it.gateway.pause() == 1
        await it.gateway.resume("7")
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 3
        assert engine.most_at_once == 1


async def test_a_judge_has_no_more_requests_at_a_time_than_its_limit_over_all_tasks(tmp_path: Path) -> None:
    tasks, most = [{**POLITE, "id": name, "prompt": f"Say {name}."} for name in ("hello", "bye")], {}
    for limit in (None, RequestLimit(at_once=1)):
        async with FakeJudge(lambda _: Says(GRADES, delay_s=0.05)) as fake, instant() as engine:
            judge = Judge(base_url=fake.base_url, model="one", limit=limit)
            run = tmp_path / f"run-{limit is None}"
            await collected(task_file(tmp_path, tasks), run, engine, group_size=4, judge=judge)
        assert [one.reward for one in rollouts(run)] == [1.0] * 8
        most[limit] = fake.most_at_once
    assert most[RequestLimit(at_once=1)] == 1 < most[None]


def test_flags_that_make_no_sense_are_named(tmp_path: Path, cli: Cli) -> None:
    for flag in ("--engine-per-minute", "--judge-per-minute"):
        failed = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", flag, "0")
        assert failed.code == 2
        assert f"{flag} 0: give a number of requests above 0" in failed.err


async def test_an_attempt_whose_time_runs_out_in_the_queue_is_not_blamed(tmp_path: Path) -> None:
    async with instant(lambda asked: Step("4", token_delay_s=2.0)) as engine:
        limit = RequestLimit(at_once=1)
        results = await collected(
            task_file(tmp_path), tmp_path / "run", engine, group_size=1, timeout_s=3.0, engine_limit=limit
        )
    waited = [one for one in results if one.status is not Status.FINISHED]
    assert waited
    assert {one.reward for one in waited} == {None}
    assert all("limit of requests" in str(one.reason) for one in waited)
