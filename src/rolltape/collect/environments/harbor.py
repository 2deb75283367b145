"""The environment `harbor`: work in a container, rewarded by the tests of a Harbor task in the same container.

The tests are copied to /tests when all processes of the agent have ended. They write the reward to
/logs/verifier/reward.txt or reward.json.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.environments.protocol import Ended, Episode, Score
from rolltape.collect.environments.scoring import RewardFields, Worth, read_submission, score_unfinished
from rolltape.collect.environments.single import SingleReply
from rolltape.collect.environments.task_fields import check_prompt, parse_fields
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError, TaskError
from rolltape.records.rollout import StopReason

_OUTPUT = 2000  # characters of the end of the tests' output
_REWARDS = ("verifier/reward.json", "verifier/reward.txt")  # below the logs; the first existing one counts


class HarborTests(msgspec.Struct, frozen=True, kw_only=True):
    """The tests of a task."""

    tests: str  # a folder of this machine
    digest: str | None = None  # of its contents: with other tests it is another task
    timeout_s: float = 600.0
    env: dict[str, str] = {}


class HarborFields(RewardFields, frozen=True, kw_only=True):
    """Fields of a task of Harbor."""

    harbor: HarborTests | None = None
    unfinished: Worth | dict[StopReason, Worth] = "check"  # by default, unfinished work is tested too


class HarborEnvironment:
    """A task of Harbor."""

    name = "harbor"

    def check(self, task: Task) -> None:
        fields = parse_fields(task, HarborFields)
        check_prompt(fields)
        if fields.harbor is None or not Path(fields.harbor.tests, "test.sh").is_file():
            raise TaskError("it has no harbor.tests with a test.sh; collect from harbor:FOLDER")

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_fields(task, HarborFields)
        return SingleReply(fields, partial(_score, fields))


async def _score(fields: HarborFields, ended: Ended) -> Score:
    tests = fields.harbor
    assert tests is not None
    if (unfinished := score_unfinished(fields, ended.stop_reason)) is not None:
        return unfinished
    if ended.checks is None or ended.checks.logs is None:
        raise CollectError("tasks of Harbor need a container; give --sandbox podman or docker, and an agent in it")
    ended.checks.clear_logs("verifier")
    end = await ended.run(
        ["/bin/bash", "/tests/test.sh"], copies={"/tests": Path(tests.tests)}, env=tests.env, timeout_s=tests.timeout_s
    )
    shown = {
        "exit_code": end.exit_code,
        "timed_out": end.timed_out or None,
        "stdout": end.stdout[-_OUTPUT:] or None,
        "stderr": end.stderr[-_OUTPUT:] or None,
    }
    rewards = _read_rewards(msgspec.structs.replace(ended, folder=ended.checks.logs))
    if rewards is None:
        how = "did not end in time" if end.timed_out else f"ended with {end.exit_code}"
        raise CollectError(
            f"its tests {how} and wrote no reward that is a number: {(end.stdout + end.stderr)[-_OUTPUT:]}"
        )
    reward = rewards.pop("reward", None)
    return Score(
        reward=sum(rewards.values()) / len(rewards) if reward is None else reward,
        terms=rewards,
        reward_data={name: value for name, value in shown.items() if value is not None},
    )


def _read_rewards(ended: Ended) -> dict[str, float] | None:
    """The rewards by name, or None if there is no readable one."""
    for file in _REWARDS:
        found = read_submission(ended, file)
        if found.missing is not None:
            continue
        try:
            given: Any = json.loads(found.text)
            named = given if isinstance(given, dict) else {"reward": given}
            rewards = {str(name): float(value) for name, value in named.items()}
        except (ValueError, TypeError):
            return None
        return rewards if rewards and all(map(math.isfinite, rewards.values())) else None
    return None
