"""What fails fails alone, with its reason; what the model brings on itself is rewarded."""

import asyncio
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import SUMS, by, collected, collected_at_once, finished_per_task, instant, rollouts, task_file
from commands import Cli
from rolltape.collect.collector import Collector
from rolltape.collect.runners import gateway as gateway_module
from rolltape.collect.settings import CollectSettings
from rolltape.errors import TapeWriteError
from rolltape.gateway.gateway import Gateway
from rolltape.records.rollout import Status, StopReason
from rolltape.records.sample import Fate
from rolltape.tape.recording.tape import Tape, open_tape
from rolltape.tiny import shipped_model
from scripted_engine import Mishap, Step

MODULE = """
import asyncio

from rolltape.collect.environments import AGENT, Answer, Opening, Score


class Moody:
    name = "moody"
    seats = (AGENT,)
    over = False

    def check(self, task):
        pass

    def begin(self, task, seed):
        self.mood = task.data["mood"]
        if self.mood == "begin":
            raise RuntimeError("no room")
        if self.mood == "absent":
            return None
        one = Moody()
        one.mood = self.mood
        if self.mood == "seated":
            one.seats = AGENT
        return one

    def opening(self, seat):
        if self.mood == "opening":
            raise RuntimeError("no words")
        if self.mood == "list":
            return [{"role": "user", "content": "Go."}]
        return Opening(messages=[{"role": "user", "content": "Go."}])

    def next_seat(self):
        return None if self.over else AGENT

    async def answer(self, seat, reply):
        if self.mood == "answer":
            raise RuntimeError("no answer")
        if self.mood == "priced":
            return Answer(done=True, reward="much")
        if self.mood == "silent":
            return None
        self.over = True
        return Answer(done=True)

    async def score(self, seat, ended):
        if self.mood == "score":
            raise RuntimeError("no score")
        if self.mood == "text":
            return Score(reward="much")
        if self.mood == "term":
            return Score(reward=1.0, terms={"style": "fine"})
        if self.mood == "canceled":
            raise asyncio.CancelledError
        if self.mood == "left":
            raise GeneratorExit
        if self.mood == "numbered":
            return Score(reward=True, terms={1: True})
        if self.mood == "nan":
            return Score(reward=float("nan"))
        return Score(reward=1.0)


def checker(task, ended):
    if task.get("faulty"):
        raise ValueError("cannot read it")
    return 1.0


def worse(task, one, other):
    return len(other.text) - len(one.text)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moods_of_collect.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("begin", "the environment could not begin: RuntimeError: no room (moods_of_collect.py, line "),
        ("absent", "begin returned None, whose seats are None; return an episode with a tuple of `seats`"),
        ("seated", "whose seats are 'agent'; return an episode with a tuple of `seats`, such as (AGENT,)"),
        ("opening", "RuntimeError: no words (moods_of_collect.py, line "),
        ("list", "the environment opened with [{'role': 'user', 'content': 'Go.'}]; return an Opening"),
        ("answer", "RuntimeError: no answer (moods_of_collect.py, line "),
        ("priced", "the reward of the environment's answer is 'much', a str; give a number"),
        ("silent", "the environment answered with None; return an Answer"),
    ],
)
def test_a_failing_environment_fails_its_own_rollouts_only(mood: str, reason: str, tmp_path: Path) -> None:
    kind = "python:moods_of_collect:Moody"
    tasks = [{"id": "bad", "mood": mood, "environment": kind}, {"id": "good", "mood": "fine", "environment": kind}]
    source, run = task_file(tmp_path, tasks), tmp_path / "run"
    results = collected_at_once(source, run, group_size=2)
    assert {result.status for result in results if result.task == "bad"} == {Status.FAILED}
    assert all(reason in str(result.reason) for result in results if result.task == "bad")
    assert [result.reward for result in results if result.task == "good"] == [1.0, 1.0]
    assert {one.status for one in rollouts(run) if one.head.task_id == "bad"} == {Status.FAILED}
    again = collected_at_once(source, run, group_size=2, resume=True)
    assert [(result.task, result.try_index) for result in again] == [("bad", 1), ("bad", 1)]


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("score", "RuntimeError: no score"),
        ("text", "'much'"),
        ("term", "the score's term 'style' is 'fine', a str; give a number"),
        ("left", "RuntimeError: it raised GeneratorExit"),
        ("canceled", "Moody.score of environment moody raised CancelledError"),
    ],
)
def test_an_environment_that_fails_to_score_leaves_its_own_rollouts_ungraded_only(
    mood: str, reason: str, tmp_path: Path
) -> None:
    kind = "python:moods_of_collect:Moody"
    tasks = [{"id": "bad", "mood": mood, "environment": kind}, {"id": "good", "mood": "fine", "environment": kind}]
    run = tmp_path / "run"
    results = collected_at_once(task_file(tmp_path, tasks), run, group_size=2)
    bad = [result for result in results if result.task == "bad"]
    assert [(one.status, one.reward, one.is_ungraded) for one in bad] == [(Status.FINISHED, None, True)] * 2
    assert all(reason in str(one.reason) for one in bad)
    assert [result.reward for result in results if result.task == "good"] == [1.0, 1.0]
    fates = {one.head.task_id: set(rolltape.linearize(one).ledger.totals()) for one in rollouts(run)}
    assert fates == {"bad": {Fate.DROPPED_FILTERED}, "good": {Fate.TRAINED}}


def test_rewards_and_terms_are_told_as_they_are_recorded(tmp_path: Path) -> None:
    task = {"id": "odd", "mood": "numbered", "environment": "python:moods_of_collect:Moody"}
    (result,) = collected_at_once(task_file(tmp_path, [task]), tmp_path / "run", group_size=1, with_records=True)
    assert result.record is not None
    assert (result.record.reward, result.record.reward_terms) == (1.0, {"1": 1.0})
    (held,) = rollouts(tmp_path / "run")
    assert (held.outcome.reward, held.outcome.reward_terms) == (1.0, {"1": 1.0})


def test_a_reward_that_is_no_number_is_kept_as_it_is(tmp_path: Path) -> None:
    task = {"id": "odd", "mood": "nan", "environment": "python:moods_of_collect:Moody"}
    (result,) = collected_at_once(task_file(tmp_path, [task]), tmp_path / "run", group_size=1)
    assert result.status is Status.FINISHED
    (held,) = rollouts(tmp_path / "run")
    assert held.reward is not None
    assert held.reward != held.reward


def test_a_failing_checker_leaves_its_own_rollouts_ungraded_only(tmp_path: Path) -> None:
    check = "python:moods_of_collect:checker"
    good: dict[str, Any] = {"id": "good", "prompt": "?", "check": check}
    tasks = [good, {**good, "id": "bad", "faulty": True}]
    results = collected_at_once(task_file(tmp_path, tasks), tmp_path / "run", group_size=2)
    bad = [str(result.reason) for result in results if result.task == "bad"]
    raised = "ungraded: ValueError: cannot read it (moods_of_collect.py, line "
    assert [reason.startswith(raised) for reason in bad] == [True, True]
    assert [result.reward for result in results if result.task == "good"] == [1.0, 1.0]
    assert all(rolltape.trace_of(one).steps for one in rollouts(tmp_path / "run"))


async def test_an_engine_that_fails_breaks_the_attempt_without_a_reward(tmp_path: Path) -> None:
    source, run = task_file(tmp_path, SUMS[2:3]), tmp_path / "run"
    async with instant() as engine:
        engine.mishaps = dict.fromkeys(range(4), Mishap.WRONG_LENGTHS)
        (first,) = await collected(source, run, engine, group_size=1)
        engine.mishaps = {}
        assert f"sglang {engine.url}" in str(first.reason)  # the record names what the agent was not told
        (second,) = await collected(source, run, engine, group_size=1, resume=True)
    assert (first.status, first.reward) == (Status.FAILED, None)
    assert (second.status, second.reward) == (Status.FINISHED, 1.0)


async def test_a_tape_that_takes_no_rollout_ends_the_collection_instead_of_passing_over_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = Tape.rollout, 0

    def full_at_the_third(tape: Tape, **fields: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 3:
            raise TapeWriteError("No space left on device")
        return begin(tape, **fields)

    monkeypatch.setattr(Tape, "rollout", full_at_the_third)
    source, run = task_file(tmp_path), tmp_path / "run"
    async with instant() as engine:
        with pytest.raises(TapeWriteError, match="No space left"):
            await collected(source, run, engine, group_size=1, max_concurrent=1)
        await collected(source, run, engine, group_size=1, resume=True)
    assert finished_per_task(run) == {task["id"]: 1 for task in SUMS}


def test_a_full_disk_ends_the_command_with_what_to_do_and_loses_nothing(tmp_path: Path, cli: Cli) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with instant().in_thread() as engine:
        how: list[Any] = [source, "--run", run, "-g", 8, "--max-concurrent", 1]
        how += ["--engine", f"sglang:{engine.url}", "--model", shipped_model()]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        try:
            full = cli("collect", *how)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert full.code == 4
        assert "all before it was; make room on that disk, or make it writable, then --resume continues" in full.err
        kept = {one.id for one in rollouts(run) if one.status is Status.FINISHED}
        assert 0 < len(kept) < 32
        assert cli("collect", *how, "--resume").code == 0
    assert finished_per_task(run) == {task["id"]: 8 for task in SUMS}
    assert kept <= {one.id for one in rollouts(run) if one.status is Status.FINISHED}


def test_a_run_that_cannot_be_made_is_no_full_disk(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    refused = cli("collect", source, "--run", source / "run")
    assert (refused.code, "cannot be made or written" in refused.err) == (4, True)
    assert "--resume" not in refused.err


def test_a_time_out_of_the_policy_counts_in_its_group(tmp_path: Path) -> None:
    task = {"id": "t", "prompt": "?", "answer": 4, "unfinished": {"timeout": -1.0}}
    slow = lambda asked: Step("1 2 3 4", token_delay_s=30.0) if asked.number == 1 else Step("4")  # noqa: E731
    run = tmp_path / "run"
    results = collected_at_once(task_file(tmp_path, [task]), run, slow, group_size=3, timeout_s=2.0)
    assert sorted((result.status, result.reward) for result in results) == [
        (Status.FINISHED, -1.0),
        (Status.FINISHED, 1.0),
        (Status.FINISHED, 1.0),
    ]
    assert {result.stop_reason for result in results} == {StopReason.TIMEOUT, StopReason.COMPLETED}
    assert len({one.head.group for one in rollouts(run)}) == 1


def test_preference_rewards_land_on_the_rollouts_that_earned_them(tmp_path: Path) -> None:
    task = {"id": "t", "environment": "preference", "prompt": "?", "function": "python:moods_of_collect:worse"}
    # Which reply is short has nothing to do with which attempt begins or ends first.
    script = lambda asked: Step("a" * (1 + asked.number), token_delay_s=0.05 * (3, 0, 4, 1, 2)[asked.number])  # noqa: E731
    run = tmp_path / "run"
    told = collected_at_once(task_file(tmp_path, [task]), run, script, group_size=5)
    held = rollouts(run)
    assert {one.id: one.reward for one in held} == {one.rollout: one.reward for one in told}
    rewards = {len(one.turns[0].reply.text): one.reward for one in held if one.turns[0].reply is not None}
    assert rewards == {1: 1.0, 2: 0.75, 3: 0.5, 4: 0.25, 5: 0.0}
    traces = [rolltape.trace_of(one) for one in held]
    assert [trace.total_reward for trace in traces] == [one.reward for one in held]


def test_a_program_that_fails_before_it_asked_anything_is_broken(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("raise SystemExit(3)")
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    (result,) = collected_at_once(task_file(tmp_path, SUMS[:1]), tmp_path / "run", group_size=1, agent=agent)
    assert result.status is Status.FAILED
    assert "exit code 3 before it had asked the model anything" in str(result.reason)


@pytest.mark.parametrize(("exit_code", "turns"), [(0, 3), (1, 1)])
def test_a_program_at_its_turn_cap_has_ended_for_that(exit_code: int, turns: int, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"turns, exit_code, longer, sums_up = {turns}, {exit_code}, '', False\n{ASKING}")
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    source = task_file(tmp_path, SUMS[2:3])
    (result,) = collected_at_once(source, tmp_path / "run", group_size=1, agent=agent, max_turns=2)
    assert result.status is Status.FINISHED
    assert result.stop_reason is (StopReason.MAX_TURNS if turns > 2 else StopReason.COMPLETED)
    assert result.reward == (0.0 if turns > 2 else 1.0)


@pytest.mark.parametrize("sums_up", [False, True])
def test_a_program_whose_context_overflowed_has_ended_for_that_unless_it_got_over_it(
    sums_up: bool, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(f"turns, exit_code, longer, sums_up = 3, 0, 'word ' * 200, {sums_up}\n{ASKING}")
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    source = task_file(tmp_path, SUMS[2:3])
    (result,) = collected_at_once(source, tmp_path / "run", group_size=1, agent=agent, context_budget=150)
    assert result.status is Status.FINISHED
    assert result.stop_reason is (StopReason.COMPLETED if sums_up else StopReason.CONTEXT_OVERFLOW)
    assert result.reward == (1.0 if sums_up else 0.0)
    (held,) = rollouts(tmp_path / "run")
    assert held.outcome.stop_reason is result.stop_reason
    assert [turn.facts.extra.get("over_budget", False) for turn in held.turns][1]


def test_a_program_whose_prompt_was_refused_as_too_long_has_ended_for_that(tmp_path: Path) -> None:
    """It was not even recorded as a turn; still it is what the policy did."""
    given = "turns, exit_code, longer, sums_up = 2, 0, 'word ' * 50_000, False\n"
    (tmp_path / "agent.py").write_text(given + ASKING)
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    source = task_file(tmp_path, SUMS[2:3])
    (result,) = collected_at_once(source, tmp_path / "run", group_size=1, agent=agent, context_budget=150)
    assert (result.status, result.stop_reason) == (Status.FINISHED, StopReason.CONTEXT_OVERFLOW)


@pytest.mark.slow
async def test_hundreds_of_attempts_at_once_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateways: list[Gateway] = []

    def opened(**how: Any) -> Gateway:
        gateways.append(Gateway(**how))
        return gateways[-1]

    monkeypatch.setattr(gateway_module, "Gateway", opened)
    tasks = [{"id": n, "prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(64)]
    most = left = 0

    async with instant() as engine:
        source = str(task_file(tmp_path, tasks))
        settings = CollectSettings(source=source, group_size=8, max_concurrent=256, **by(engine))
        with open_tape(tmp_path / "run") as tape:

            def on_results(_: object) -> None:
                nonlocal most, left
                left = len(gateways[0].service.sessions)
                most = max(most, left)

            await asyncio.wait_for(Collector(settings, tape).run(lambda launch: None, on_results), 120)
    assert most > 128
    assert left == 0
    assert finished_per_task(tmp_path / "run") == {str(n): 8 for n in range(64)}


ASKING = """
import json, sys, urllib.error, urllib.request
told = json.load(sys.stdin)
url = told["openai_base_url"] + "/chat/completions"
messages = told["messages"]
for _ in range(turns):
    body = json.dumps({"model": told["model"], "messages": messages}).encode()
    try:
        asked = urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}))
    except urllib.error.HTTPError as error:
        assert error.code == 429
        break
    choice = json.load(asked)["choices"][0]
    reply = choice["message"]
    if choice["finish_reason"] == "length":
        if not sums_up:
            break
        messages = told["messages"][:1]
        continue
    messages += [reply, {"role": "user", "content": "And? " + longer}]
print(reply["content"])
sys.exit(exit_code)
"""
