"""Gymnasium's environments, stepped by replies of a scripted engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, Space, Text

import rolltape
from collecting import collected_at_once, rollouts, task_file
from rolltape.collect.environments import environment_named
from rolltape.collect.tasks import Task
from rolltape.errors import SourceError, TaskError
from rolltape.records.rollout import Status, StopReason
from scripted_engine import Asked

CLOSED: list[int] = []


class Doors(gymnasium.Env[Any, Any]):
    """Three doors; the seed says behind which one the prize is. A wrong one costs, and the third is the last."""

    observation_space: Space[Any] = Text(max_length=100)
    action_space: Space[Any] = Discrete(3, start=1)

    def __init__(self, **options: Any) -> None:
        self.penalty: float = options.get("penalty", -0.25)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.prize, self.opened = seed % 3 + 1, 0
        return "Three doors are closed.", {"seed": seed}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.opened += 1
        if action == 2 and self.prize == 3:
            raise RuntimeError("the door is stuck")
        is_right = action == self.prize
        return f"Door {action} is empty.", 1.0 if is_right else self.penalty, is_right, self.opened == 3, {}

    def close(self) -> None:
        CLOSED.append(self.prize)


class Sliders(Doors):
    observation_space = Box(0, 1, (2,))
    action_space = Box(0, 1, (2,))


def text_of(observation: Any, info: dict[str, Any]) -> str:
    return f"I see: {observation} {info}"


def door_of(text: str) -> int:
    if text not in ("first", "second", "third"):
        raise ValueError("Say first, second or third.")
    return ("first", "second", "third").index(text) + 1


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("Doors-v0", Doors, disable_env_checker=True)
    gymnasium.register("Sliders-v0", Sliders, disable_env_checker=True)
    CLOSED.clear()
    yield
    del gymnasium.registry["Doors-v0"], gymnasium.registry["Sliders-v0"]


def test_replies_are_actions_and_steps_are_rewarded(tmp_path: Path) -> None:
    def script(asked: Asked) -> str:
        return "I open 2." if "Door 1" in asked.prompt else "Door 1!"

    results = collected_at_once("gymnasium:Doors-v0", tmp_path / "run", script, limit=2, group_size=2)
    assert {one.task: (one.reward, one.turns) for one in results} == {"seed-0": (1.0, 1), "seed-1": (0.75, 2)}
    assert len(CLOSED) == 4
    second = next(one for one in rollouts(tmp_path / "run") if one.head.task_id == "seed-1")
    assert [(step.reward, step.env_state) for step in rolltape.trace_of(second).steps] == [
        (-0.25, {"action": "1", "observation": "Door 1 is empty."}),
        (1.0, {"action": "2", "observation": "Door 2 is empty."}),
    ]
    assert second.turns[0].prompt_messages[0]["content"] == (
        "Your actions are the numbers from 1 to 3. Answer with the number of one.\nThree doors are closed."
    )


def test_an_answer_that_is_no_action_is_told_and_one_too_many_ends_the_attempt(tmp_path: Path) -> None:
    task = {"id": "a", "seed": 0, "malformed": {"then": "tell", "reward": -0.1, "at_most": 1}}

    def script(asked: Asked) -> str:
        return "4" if "There is no number in your answer." in asked.prompt else "the left one"

    (result,) = collected_at_once(
        task_file(tmp_path, [task]), tmp_path / "run", script, group_size=1, environment="gymnasium:Doors-v0"
    )
    assert (result.stop_reason, result.turns, result.reward) == (StopReason.PARSE_ERROR, 2, -0.2)


def test_a_number_too_long_for_python_is_no_action_and_breaks_nothing(tmp_path: Path) -> None:
    (result,) = collected_at_once(
        task_file(tmp_path, [{"id": "a", "seed": 0}]),
        tmp_path / "run",
        lambda asked: "1" if "is not an action. Your actions are" in asked.prompt else "1 or " + "9" * 5000,
        group_size=1,
        environment="gymnasium:Doors-v0",
    )
    assert (result.reason, result.turns, result.reward) == (None, 2, 1.0)


def test_the_limit_of_the_environment_is_the_policys_outcome(tmp_path: Path) -> None:
    source = task_file(tmp_path, [{"id": "a", "seed": 1, "options": {"penalty": -1.0}}])
    (result,) = collected_at_once(
        source, tmp_path / "run", lambda _: "1", group_size=1, environment="gymnasium:Doors-v0"
    )
    assert (result.status, result.stop_reason, result.reward) == (Status.FINISHED, StopReason.MAX_TURNS, -3.0)


def test_an_environment_that_raises_has_broken_the_attempt_and_is_closed(tmp_path: Path) -> None:
    source = task_file(tmp_path, [{"id": "a", "seed": 2}])
    (result,) = collected_at_once(
        source, tmp_path / "run", lambda _: "2", group_size=1, environment="gymnasium:Doors-v0"
    )
    assert (result.status, result.reward, CLOSED) == (Status.FAILED, None, [3])
    assert "the door is stuck" in str(result.reason)


def test_without_a_seed_in_the_task_attempts_begin_differently_and_always_alike(tmp_path: Path) -> None:
    source = task_file(tmp_path, [{"id": "a"}])
    how: dict[str, Any] = {"group_size": 4, "environment": "gymnasium:Doors-v0"}
    seeds: list[list[int]] = []
    for _ in range(2):
        run = tmp_path / f"{len(seeds)}" / "run"
        collected_at_once(source, run, lambda _: "1", **how)
        seeds.append([(rolltape.trace_of(one).reward_data or {})["seed"] for one in rollouts(run)])
    assert sorted(seeds[0]) == sorted(seeds[1])
    assert len(set(seeds[0])) == 4


def test_functions_of_ones_own_give_texts_and_actions(tmp_path: Path) -> None:
    own = f"python:{__name__}"
    task = {
        "id": "a",
        "seed": 0,
        "prompt": "Choose.",
        "observation": f"{own}:text_of",
        "action": f"{own}:door_of",
    }

    def script(asked: Asked) -> str:
        return "first" if "Say first, second or third." in asked.prompt else "1"

    (result,) = collected_at_once(
        task_file(tmp_path, [task]), tmp_path / "run", script, group_size=1, environment="gymnasium:Sliders-v0"
    )
    assert result.reward == 1.0
    (rollout,) = rollouts(tmp_path / "run")
    assert rollout.turns[0].prompt_messages[0]["content"] == "Choose.\nI see: Three doors are closed. {'seed': 0}"


def test_what_cannot_be_used_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="gymnasium:Doors-v0 has no last task; give --limit"):
        collected_at_once("gymnasium:Doors-v0", tmp_path / "run")
    with pytest.raises(TaskError, match=r"gymnasium:NoSuch-v0 cannot be made: NameNotFound"):
        environment_named("gymnasium:NoSuch-v0")
    sliders = environment_named("gymnasium:Sliders-v0")
    with pytest.raises(TaskError, match=r'observations of gymnasium:Sliders-v0 are Box.*add "observation"'):
        sliders.check(Task(data={}))
    with pytest.raises(TaskError, match="write python:module:function"):
        sliders.check(Task(data={"observation": "text_of"}))


def test_what_an_environment_draws_is_shown_without_a_terminals_codes() -> None:
    async def first() -> str:
        episode: Any = environment_named("gymnasium:FrozenLake-v1").begin(Task(data={"seed": 0}), seed=1)
        await episode.open()
        try:
            return str(episode.opening("agent").messages[0]["content"])
        finally:
            await episode.close()

    assert asyncio.run(first()) == (
        "Your actions are the numbers from 0 to 3. Answer with the number of one.\n"
        "[S]FFF\nFHFH\nFFFH\nHFFG\nObservation: 0"
    )
