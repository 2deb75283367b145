"""A trainer asks for tasks and gets their groups, from threads and from event loops, and goes on after a restart."""

import asyncio
import json
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rolltape
from group_streams import record, stream
from live_jobs import SUMS, function_engine, job, reply_ids, tokenizer, wait_until
from rolltape.errors import CheckpointError, CollectError, EngineError, GroupsError, TaskError
from rolltape.gateway.admin_key import RunningGateway
from rolltape.gateway.engines.protocol import Generation
from rolltape.groups import Group
from rolltape.groups.consumer import find_consumer
from rolltape.integrations import FunctionEngine, LiveGroups, RequestedGroups, weights
from rolltape.integrations.steps import StepPositions
from rolltape.records.rollout import Status
from rolltape.tiny import shipped_model


def right_every_other_time() -> FunctionEngine:
    count = 0

    def say(prompt: str, wanted: Generation) -> str:
        nonlocal count
        count += 1
        return "2" if count % 2 else "no idea"

    return function_engine(say)


def test_groups_come_whole_and_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "3")) as live:
        groups = live.request(SUMS, step=0).wait()
    assert [group.task_id for group in groups] == [task["id"] for task in SUMS]
    assert [group.rewards for group in groups] == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert all(len(group.samples) == 2 and not group.unfinished for group in groups)
    assert groups[0].samples[0].logprobs[groups[0].samples[0].trained_mask].tolist() == [-0.5] * 2


def test_a_group_has_advantages_of_its_rollouts_and_the_version_that_was_announced(tmp_path: Path) -> None:
    with job(tmp_path / "run", right_every_other_time(), max_concurrent=1) as live:
        (group,) = live.request(SUMS[:1], step=0).wait()
        live.announce("after the first step")
        (later,) = live.request(SUMS[:1], step=1).wait()
    assert sorted(sample.advantage or 0.0 for sample in group.samples) == [-0.5, 0.5]
    assert [sample.versions for sample in (*group.samples, *later.samples)] == [
        *[(("0", "0"),)] * 2,
        *[(("after the first step", "after the first step"),)] * 2,
    ]


def test_an_event_loop_awaits_groups_from_an_engine_of_its_own(tmp_path: Path) -> None:
    loops = set()

    async def train() -> list[rolltape.Group]:
        async def sample(prompt_ids: list[int], wanted: Generation) -> tuple[list[int], None, str]:
            loops.add(asyncio.get_running_loop())
            return reply_ids("2", wanted), None, "stop"

        live = job(tmp_path / "run", FunctionEngine(sample))
        try:
            asked = live.request(SUMS, step=0)
            with pytest.raises(GroupsError, match="waiting would block; use await"):
                asked.wait()
            first = [group async for group in asked]
            loops.remove(asyncio.get_running_loop())
            return [*first, *await live.request(SUMS, step=1)]
        finally:
            await asyncio.to_thread(live.close)

    groups = asyncio.run(train())
    assert sorted((group.step, group.task_id) for group in groups) == [(s, t["id"]) for s in (0, 1) for t in SUMS]
    assert len(loops) == 1


def test_requests_for_single_tasks_share_one_collection(tmp_path: Path) -> None:
    async def train(live: LiveGroups) -> list[list[rolltape.Group]]:
        return await asyncio.gather(*(live.request([task], step=0) for task in SUMS))

    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        groups = asyncio.run(train(live))
    assert [[group.task_id for group in one] for one in groups] == [[task["id"]] for task in SUMS]
    kinds = [event.kind for event in rolltape.read(tmp_path / "run").events() if event.kind.startswith("collect")]
    assert kinds == ["collect", "collected"]


def test_attempts_that_broke_are_listed_with_their_reasons(tmp_path: Path) -> None:
    def say(prompt: str, wanted: Generation) -> str:
        if "2 + 1" in prompt:
            raise RuntimeError("out of memory")
        return "2"

    with job(tmp_path / "run", function_engine(say)) as live:
        whole, broken = live.request(SUMS[:2], step=0).wait()
    assert (whole.missing, whole.unfinished) == (0, ())
    assert (broken.missing, broken.rollouts, broken.samples) == (2, (), ())
    assert [one.status for one in broken.unfinished] == [Status.FAILED] * 2
    assert all("RuntimeError: out of memory" in str(one.reason) for one in broken.unfinished)


def test_evaluation_is_kept_apart_by_its_split(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        (trained,) = live.request(SUMS[:1], step=0, split="train").wait()
        (evaluated,) = live.request(SUMS[:1], step=0, split="eval", group_size=1).wait()
    assert (trained.source, len(trained.rollouts)) == ("sums#train", 2)
    assert (evaluated.source, len(evaluated.rollouts)) == ("sums#eval", 1)


def test_a_task_twice_in_a_step_is_refused(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        live.request(SUMS[:1], step=0).wait()
        with pytest.raises(GroupsError, match="task 'sum-1' of step 0 was given before; ask for a task once a step"):
            live.request(SUMS[:1], step=0).wait()
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        (not_acknowledged,) = live.request(SUMS[:1], step=0).wait()
        assert not_acknowledged.again
        not_acknowledged.done()
        live.request(SUMS[:1], step=1).wait()
        with pytest.raises(GroupsError, match=r"was given before.*use load_state_dict"):
            live.request(SUMS[:1], step=0).wait()


def test_a_task_that_cannot_be_used_fails_its_request_alone(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        with pytest.raises(TaskError, match="no_such"):
            live.request([{"id": "odd", "environment": "no_such"}], step=0).wait()
        assert len(live.request(SUMS, step=0).wait()) == len(SUMS)


def test_an_engine_that_always_fails_ends_the_request_with_its_reason(tmp_path: Path) -> None:
    def say(prompt: str, wanted: Generation) -> str:
        raise RuntimeError("out of memory")

    with (
        job(tmp_path / "run", function_engine(say), max_failures=4, max_concurrent=1) as live,
        pytest.raises(CollectError, match=r"4 attempts in a row failed, the last one: .*out of memory"),
    ):
        live.request(SUMS, step=0).wait()


def test_a_restarted_trainer_gets_what_was_done_after_its_checkpoint_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def say(prompt: str, wanted: Generation) -> str:
        asked.append(1)
        return "2"

    with job(tmp_path / "run", function_engine(say)) as live:
        for step in range(3):
            for group in live.request(SUMS[:2], step=step).wait():
                group.done()
            if step == 0:
                checkpoint = live.state_dict()
    sampled = len(asked)

    with job(tmp_path / "run", function_engine(say)) as live:
        live.load_state_dict(checkpoint)
        with pytest.raises(GroupsError, match="was given before"):
            live.request(SUMS[:1], step=0).wait()
        again = [group for step in (1, 2) for group in live.request(SUMS[:2], step=step).wait()]
        fresh = live.request(SUMS[:2], step=3).wait()
        for group in again:
            group.done()
    assert [(group.step, group.task_id, group.again) for group in again] == [
        (step, task["id"], True) for step in (1, 2) for task in SUMS[:2]
    ]
    assert not any(group.again for group in fresh)
    assert len(asked) == sampled + 4

    with job(tmp_path / "run", function_engine(say)) as live, pytest.raises(GroupsError, match="was given before"):
        live.request(SUMS[:1], step=1).wait()


def test_a_trainer_that_went_back_too_far_can_go_on_from_the_later_checkpoint(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for step in range(4):
            record(tape, "t", 0.0, 1.0, step=step)
        live = LiveGroups(tape)
        checkpoints = [live.state_dict()]
        for group in stream(tape, group_size=2, limit=3):
            group.done()
            checkpoints.append(live.state_dict())
        given: dict[int, list[int]] = {}
        for at in (1, 3, 0, 2, 3):
            live.load_state_dict(checkpoints[at])
            assert live.state_dict() == checkpoints[at]
            groups = list(stream(tape, group_size=2))
            given[at] = [group.step for group in groups]
            groups[0].done()
        live.close()
    assert given == {at: list(range(at, 4)) for at in (1, 3, 0, 2)}


def test_a_position_of_a_step_is_replaced_whole(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        StepPositions(live, "trainer").begin(1)
        with (tmp_path / "run" / "trainer" / "1.json").open() as held:
            positions = StepPositions(live, "trainer")
            positions.begin(0)
            (group,) = live.request(SUMS[:1], step=0).wait()
            positions.train_on(group)
            positions.begin(1)
            # Whoever has it open, as a process that died in the middle has left it, sees the old one to its end.
            assert json.load(held)["position"] is None
        assert json.loads((tmp_path / "run" / "trainer" / "1.json").read_text())["position"] is not None


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    with job(tmp_path / "a", function_engine(lambda prompt, wanted: "2")) as live:
        checkpoint = live.state_dict()
    with (
        job(tmp_path / "b", function_engine(lambda prompt, wanted: "2")) as live,
        pytest.raises(GroupsError, match=r"'run': 'a'.*'run': 'b'"),
    ):
        live.load_state_dict(checkpoint)


def test_new_weights_wait_for_replies_in_flight_to_be_interrupted(tmp_path: Path) -> None:
    begun = asyncio.Event()
    versions: list[str] = []

    async def sample(prompt_ids: list[int], wanted: Generation) -> tuple[list[int], list[float], str]:
        begun.set()
        if not versions:
            await asyncio.Event().wait()  # until it is interrupted
        ids = reply_ids("2", wanted)
        return ids, [-0.5] * len(ids), "stop"

    async def train(live: LiveGroups) -> list[rolltape.Group]:
        asked = live.request(SUMS[:1], step=0)
        while not begun.is_set():
            await asyncio.sleep(0.01)
        async with live.new_weights("1"):
            versions.append("1")
        return await asked

    with job(tmp_path / "run", FunctionEngine(sample)) as live:
        (group,) = asyncio.run(train(live))
    assert {sample.versions for sample in group.samples} == {(("1", "1"),)}


def test_a_run_that_others_fill_is_followed(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as filling:
        follower = LiveGroups(tmp_path / "run", consumer="follower", source="sums")
        with follower as live:
            asked = live.request(SUMS[1:3], step=0)
            filling.request(SUMS, step=0).wait()
            groups = asked.wait()
            one = live.request(step=0, limit=1).wait()
    assert [group.task_id for group in groups] == [task["id"] for task in SUMS[1:3]]
    assert len(one) == 1
    assert one[0].task_id in {SUMS[0]["id"], SUMS[3]["id"]}


def test_a_request_for_no_tasks_of_a_run_that_others_fill_gives_no_groups(tmp_path: Path) -> None:
    with LiveGroups(tmp_path / "run") as live:
        assert live.request([], step=0).wait() == []


def test_a_task_that_is_asked_for_twice_is_refused_by_its_id(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        with pytest.raises(GroupsError, match="task 'sum-1' is in the request twice; ask for a task once a step"):
            live.request([SUMS[0], SUMS[1], SUMS[0]], step=0)
        first, second = (live.request(SUMS[:1], step=0) for _ in range(2))
        assert [group.task_id for group in first.wait()] == ["sum-1"]
        with pytest.raises(GroupsError, match="task 'sum-1' of step 0 was given before"):
            second.wait()


def test_two_requests_that_wait_for_one_task_of_a_run_that_others_fill_are_refused(tmp_path: Path) -> None:
    with (
        job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as filling,
        LiveGroups(tmp_path / "run", consumer="follower", source="sums") as live,
    ):
        first = live.request(SUMS[:2], step=0)
        with pytest.raises(GroupsError, match="another request waits for task 'sum-2' already"):
            live.request(SUMS[1:3], step=0).wait()
        filling.request(SUMS[:2], step=0).wait()
        assert len(first.wait()) == 2


def test_a_task_of_a_request_that_was_cancelled_can_be_asked_for_again(tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def say(prompt: str, wanted: Generation) -> str:
        asked.set()
        go_on.wait()
        return "2"

    with job(tmp_path / "run", function_engine(say)) as live:
        first = live.request(SUMS[:1], step=0)
        asked.wait()
        first.cancel()
        go_on.set()
        (group,) = live.request(SUMS[:1], step=0).wait()
    assert (group.task_id, len(rolltape.read(tmp_path / "run").index())) == ("sum-1", 2)


def test_a_group_that_is_taken_for_a_request_that_was_cancelled_is_given_to_the_next(tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        consumer = find_consumer(live.tape, "trainer")
        with consumer.lock:  # a stream looks for the group, and cannot go on
            first = live.request(SUMS[:1], step=0)
            wait_until(consumer.claim.is_taken)
            first.cancel()
        (group,) = live.request(SUMS[:1], step=0).wait()
        group.done()


def test_a_followed_group_that_is_taken_for_a_request_that_was_cancelled_is_given_to_the_next(tmp_path: Path) -> None:
    with (
        job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as filling,
        LiveGroups(tmp_path / "run", consumer="other") as live,
    ):
        filling.request(SUMS[:1], step=0).wait()
        consumer = find_consumer(live.tape, "other")
        with consumer.lock:
            first = live.request(SUMS[:1], step=0)
            wait_until(consumer.claim.is_taken)
            first.cancel()
            with pytest.raises(GroupsError, match="cancelled"):
                first.wait()
        (group,) = live.request(SUMS[:1], step=0).wait()
        group.done()


def second_sum_after(go_on: threading.Event) -> FunctionEngine:
    """An engine that answers the second sum when it may."""

    async def sample(prompt_ids: list[int], wanted: Generation) -> tuple[list[int], list[float], str]:
        if "What is 2 + 1?" in tokenizer().decode(prompt_ids):
            await asyncio.to_thread(go_on.wait)
        ids = reply_ids("2", wanted)
        return ids, [-0.5] * len(ids), "stop"

    return FunctionEngine(sample, model="said", logprob_kind="raw")


def test_a_caller_that_is_cancelled_while_it_awaits_all_gets_all_when_it_awaits_again(tmp_path: Path) -> None:
    go_on = threading.Event()

    async def train() -> list[str | None]:
        request = live.request(SUMS[:2], step=0)
        waiting = asyncio.ensure_future(all_of(request))
        await asyncio.to_thread(wait_until, lambda: bool(request._waited_for))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        return [group.task_id for group in await request]

    async def all_of(request: RequestedGroups) -> list[Group]:
        return await request

    with job(tmp_path / "run", second_sum_after(go_on)) as live:
        assert asyncio.run(train()) == ["sum-1", "sum-2"]


def test_a_request_that_ends_early_gives_back_what_was_waited_for(tmp_path: Path) -> None:
    go_on = threading.Event()
    with job(tmp_path / "run", second_sum_after(go_on)) as live, ThreadPoolExecutor() as pool:
        request = live.request(SUMS[:2], step=0)
        waiting = pool.submit(request.wait)
        wait_until(lambda: bool(find_consumer(live.tape, "trainer").held))
        request.cancel()
        with pytest.raises(GroupsError, match="cancelled"):
            waiting.result()
        go_on.set()
        assert [group.task_id for group in live.request(SUMS[:2], step=0).wait()] == ["sum-1", "sum-2"]


def test_weights_for_a_run_that_no_gateway_fills_are_refused(tmp_path: Path) -> None:
    with (
        LiveGroups(tmp_path / "run") as live,
        pytest.raises(GroupsError, match="no gateway that keeps its key there records in it now"),
    ):
        live.update_weights(tmp_path, "1")


def test_a_gateway_that_ends_while_it_is_asked_to_load_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = RunningGateway("http://127.0.0.1:9", tmp_path / "run")
    monkeypatch.setattr(weights, "find_gateways", lambda run: [gone])
    monkeypatch.setattr(weights, "read_admin_key", lambda run: "key")
    with (
        LiveGroups(tmp_path / "run") as live,
        pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/weights/update: "),
    ):
        live.update_weights(tmp_path, "1")


def test_a_group_that_was_pickled_has_everything_but_its_consumer(tmp_path: Path) -> None:
    with job(tmp_path / "run", right_every_other_time()) as live:
        (group,) = live.request(SUMS[:1], step=0).wait()
        copy = pickle.loads(pickle.dumps(group))
        with pytest.raises(GroupsError, match="call done\\(\\) and give_back\\(\\) where it was taken"):
            copy.done()
        group.done()
    assert (copy.id, copy.task_id, copy.rewards) == (group.id, group.task_id, group.rewards)
    assert [turn.id for rollout in copy.rollouts for turn in rollout.turns] == [
        turn.id for rollout in group.rollouts for turn in rollout.turns
    ]
    for ours, theirs in zip(group.samples, copy.samples, strict=True):
        assert (ours.ids == theirs.ids).all()
        assert (ours.id, ours.advantage, ours.versions) == (theirs.id, theirs.advantage, theirs.versions)


def live_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rolltape-live")]


def test_a_start_that_fails_leaves_nothing_behind_and_can_be_tried_again(tmp_path: Path) -> None:
    live = job(tmp_path / "run", function_engine(lambda prompt, wanted: "2"), model=str(tmp_path / "model"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            live.request(SUMS[:1], step=0)
        assert live_threads() == []
    shutil.copytree(shipped_model(), tmp_path / "model")
    with live:
        assert len(live.request(SUMS[:1], step=0).wait()) == 1


def test_who_waits_while_it_is_closed_is_told_so_and_so_is_who_asks_afterwards(tmp_path: Path) -> None:
    asked = threading.Event()

    async def sample(prompt_ids: list[int], wanted: Generation) -> tuple[list[int], list[float], str]:
        asked.set()
        await asyncio.Event().wait()
        return [], [], "stop"

    live = job(tmp_path / "run", FunctionEngine(sample, model="said", logprob_kind="raw")).start()
    request = live.request(SUMS[:1], step=0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(request.wait)
        asked.wait()
        live.close()
        with pytest.raises(GroupsError, match="closed"):
            waiting.result()
    for ask in (request.wait, live.start, live.state_dict):
        with pytest.raises(GroupsError, match="closed"):
            ask()
    assert live_threads() == []


@pytest.mark.parametrize("reply", [None, ([1], [-0.5]), (["a"], [-0.5], "stop"), ([1], ["a"], "stop")])
def test_a_function_that_returns_something_else_is_an_engine_that_failed(tmp_path: Path, reply: Any) -> None:
    async def sample(prompt_ids: list[int], wanted: Generation) -> Any:
        return reply

    with job(tmp_path / "run", FunctionEngine(sample, model="said", logprob_kind="raw"), group_size=1) as live:
        (group,) = live.request(SUMS[:1], step=0).wait()
    assert "the function is to return ids" in (group.unfinished[0].reason or "")


@pytest.mark.parametrize("state", [{}, {"position": "abc"}, {"position": [1]}, {"position": ["a", "b", 3]}])
def test_a_state_that_is_none_is_refused_before_anything_is_given_again(tmp_path: Path, state: dict[str, Any]) -> None:
    with job(tmp_path / "run", function_engine(lambda prompt, wanted: "2")) as live:
        live.request(SUMS[:1], step=0).wait()[0].done()
        before = live.state_dict()
        with pytest.raises(GroupsError, match="not a state from state_dict"):
            live.load_state_dict({"run": "run", "consumer": "trainer", **state})
        assert live.state_dict() == before
