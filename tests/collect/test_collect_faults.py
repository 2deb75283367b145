"""What the infrastructure did is not the policy's outcome: no reward, nothing trains, and it is resumed or graded."""

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collect.fake_judge import FakeJudge, Says
from collecting import SUMS, by, collected, collected_at_once, finished_per_task, instant, rollouts, task_file
from commands import Cli
from gateways import eventually
from rolltape.collect import CollectSettings, loops
from rolltape.collect.environments import judge
from rolltape.collect.runners import gateway as gateway_module
from rolltape.collect.sandboxes import SandboxKind
from rolltape.errors import CollectError
from rolltape.gateway.engines import http
from rolltape.gateway.settings import Patience
from rolltape.records.rollout import Status, StopReason
from rolltape.records.sample import Fate
from scripted_engine import Mishap

ASKS = """
import json, sys, urllib.error, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
for _ in range(2):
    try:
        print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
        break
    except urllib.error.HTTPError as error:
        print("sorry", error.code)
"""
IMPATIENT = ASKS.replace("urlopen(request)", "urlopen(request, timeout=1)").replace("urllib.error.HTTPError", "OSError")
IMPATIENT = IMPATIENT.replace('"sorry", error.code', '"sorry"')
ENVIRONMENT = """
import asyncio, threading, time

from rolltape.collect.environments import AGENT, Answer, Opening, Score

in_score = threading.Event()
go_on = threading.Event()


class Slow:
    name = "slow"
    seats = (AGENT,)
    over = False

    def check(self, task):
        pass

    def begin(self, task, seed):
        one = Slow()
        one.task = task.data
        return one

    def opening(self, seat):
        return Opening(messages=[{"role": "user", "content": self.task["prompt"]}])

    def next_seat(self):
        return None if self.over else AGENT

    async def answer(self, seat, reply):
        self.over = True
        return Answer(done=True)

    async def score(self, seat, ended):
        in_score.set()
        blocking_wait()
        return Score(reward=1.0)


def blocking_wait():
    assert go_on.wait(60)


def never(task, ended):
    in_score.set()
    go_on.wait(60)
    return 1.0


async def blocks(assignment):
    time.sleep(3)
    await asyncio.sleep(60)
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "slow_of_faults.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("slow_of_faults", None)
    import slow_of_faults  # type: ignore[import-not-found]

    yield slow_of_faults
    slow_of_faults.go_on.set()


def program(tmp_path: Path, text: str) -> str:
    (tmp_path / "agent.py").write_text(text)
    return f"command:{sys.executable} {tmp_path / 'agent.py'}"


def fates(run: Path) -> set[Fate]:
    return {fate for one in rollouts(run) for fate in rolltape.linearize(one).ledger.totals()}


async def test_a_program_whose_engine_fails_is_broken_and_runs_again(tmp_path: Path) -> None:
    source, run, agent = task_file(tmp_path, SUMS[2:3]), tmp_path / "run", program(tmp_path, ASKS)
    async with instant() as engine:
        engine.mishaps = dict.fromkeys(range(100), Mishap.WRONG_LENGTHS)
        (first,) = await collected(source, run, engine, group_size=1, agent=agent)
        assert (first.status, first.reward) == (Status.FAILED, None)
        assert "the agent ended without a reply to its last request: " in str(first.reason)
        assert Fate.TRAINED not in fates(run)
        engine.mishaps = {}
        (second,) = await collected(source, run, engine, group_size=1, agent=agent, resume=True)
    assert (second.status, second.reward, second.try_index) == (Status.FINISHED, 1.0, 1)


@pytest.mark.parametrize("mishap", [Mishap.ERROR_500, Mishap.GOES, Mishap.ABORTED_AT_ONCE])
async def test_a_program_that_does_not_wait_for_the_error_of_an_engine_is_broken_too(
    mishap: Mishap, tmp_path: Path
) -> None:
    agent = program(tmp_path, IMPATIENT)
    async with instant() as engine:
        engine.mishaps = dict.fromkeys(range(100), mishap)
        (result,) = await collected(task_file(tmp_path, SUMS[2:3]), tmp_path / "run", engine, group_size=1, agent=agent)
    assert (result.status, result.reward) == (Status.FAILED, None)
    assert "the agent ended without a reply to its last request: " in str(result.reason)


async def test_a_program_that_got_over_a_failure_of_the_engine_has_its_own_outcome(tmp_path: Path) -> None:
    async with instant() as engine:
        engine.mishaps = dict.fromkeys(range(3), Mishap.WRONG_LENGTHS)
        agent = program(tmp_path, ASKS)
        (result,) = await collected(task_file(tmp_path, SUMS[2:3]), tmp_path / "run", engine, group_size=1, agent=agent)
    assert (result.status, result.stop_reason) == (Status.FINISHED, StopReason.COMPLETED)


@pytest.mark.parametrize("kind", ["chat", "program"])
@pytest.mark.parametrize("mishap", [Mishap.HANG, Mishap.FREEZES, Mishap.GOES])
async def test_a_time_out_while_the_engine_does_not_answer_is_not_the_policys(
    kind: str, mishap: Mishap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "Patience", partial(Patience, let_go_s=0.3))
    monkeypatch.setattr(http, "ASK_TIMEOUT_S", 1.0)
    source, run = task_file(tmp_path, SUMS[2:3]), tmp_path / "run"
    how: dict[str, Any] = {"group_size": 1, "timeout_s": 5.0}
    if kind == "program":
        how["agent"] = program(tmp_path, ASKS)
    async with instant() as engine:
        engine.mishaps = {0: mishap}
        (first,) = await collected(source, run, engine, **how)
        assert (first.status, first.reward) == (Status.FAILED, None)
        assert "timed out after 5 s, in which the engine did not answer for" in str(first.reason)
        assert Fate.TRAINED not in fates(run)
        if mishap is Mishap.GOES:
            await engine.listen()
        engine.thaw()
        (second,) = await collected(source, run, engine, resume=True, **how)
    assert (second.status, second.reward, second.try_index) == (Status.FINISHED, 1.0, 1)


def test_a_program_that_never_asked_the_model_is_broken_whatever_its_exit_code(tmp_path: Path) -> None:
    agent = program(tmp_path, "print(4)")
    (result,) = collected_at_once(task_file(tmp_path, SUMS[2:3]), tmp_path / "run", group_size=1, agent=agent)
    assert (result.status, result.reward) == (Status.FAILED, None)
    assert "exit code 0 before it had asked the model anything" in str(result.reason)


async def test_code_of_an_environment_that_blocks_delays_nobody_else_and_is_named(
    tmp_path: Path, slow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = {"id": "blocks", "prompt": "?", "environment": "python:slow_of_faults:Slow"}
    tasks: list[dict[str, Any]] = [blocks, dict(SUMS[2])]
    results: list[Any] = []
    blocked = asyncio.Event()

    def ended(some: list[Any]) -> None:
        results.extend(some)
        if [one.task for one in results] == ["sum-3"] * 2:
            blocked.set()  # the others have come to their end while it blocks

    async with instant() as engine:
        with rolltape.open(tmp_path / "run") as tape:
            source = str(task_file(tmp_path, tasks))
            settings = CollectSettings(source=source, group_size=2, timeout_s=30.0, max_concurrent=4, **by(engine))
            running = asyncio.ensure_future(rolltape.Collector(settings, tape).run(on_results=ended))
            assert await asyncio.to_thread(slow.in_score.wait, 30)
            await asyncio.wait_for(blocked.wait(), 30)
            watched = loops.user_loop("slow_of_faults").watched
            await eventually(lambda: watched.culprit is not None)
            slow.go_on.set()
            await running
    assert sorted((one.task, one.reward) for one in results) == [("blocks", 1.0)] * 2 + [("sum-3", 1.0)] * 2
    await eventually(lambda: "the event loop of slow_of_faults was blocked for" in caplog.text)
    assert "by blocking_wait (" in caplog.text
    assert "in Slow.score of environment slow" in caplog.text


def test_a_time_out_for_want_of_an_event_loop_is_not_the_policys(tmp_path: Path, slow: Any) -> None:
    how: dict[str, Any] = {"group_size": 1, "timeout_s": 5.0, "agent": "python:slow_of_faults:blocks"}
    (result,) = collected_at_once(task_file(tmp_path, SUMS[:1]), tmp_path / "run", **how)
    assert (result.status, result.reward) == (Status.FAILED, None)
    assert "an event loop was blocked for" in str(result.reason)
    assert "blocks (" in str(result.reason)


@pytest.mark.parametrize("kind", ["agent", "checker"])
@pytest.mark.parametrize("what", ["SystemExit(0)", "KeyboardInterrupt", "asyncio.CancelledError"])
def test_a_function_that_ends_its_program_ends_its_own_attempt_only(
    kind: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("quitting_of_faults", None)
    quits = "if {}['id'] == 'quits': raise " + what
    (tmp_path / "quitting_of_faults.py").write_text(f"""
import asyncio

def agent(assignment):
    {quits.format("assignment.task")}
    return '4'

def check(task, ended):
    {quits.format("task")}
    return 1.0
""")
    task = (
        {"prompt": "?", "answer": 4} if kind == "agent" else {"prompt": "?", "check": "python:quitting_of_faults:check"}
    )
    source = task_file(tmp_path, [{"id": "quits"} | task, {"id": "stays"} | task])
    agent = {"agent": "python:quitting_of_faults:agent"} if kind == "agent" else {}
    results = collected_at_once(source, tmp_path / "run", group_size=1, **agent)
    by_task = {one.task: one for one in results}
    assert by_task["stays"].reward == 1.0
    assert by_task["quits"].reward is None
    assert f"it raised {what.removeprefix('asyncio.').partition('(')[0]}" in str(by_task["quits"].reason)


def test_a_checker_has_a_time_limit_and_what_it_left_is_graded_by_resuming(tmp_path: Path, slow: Any) -> None:
    task = {"id": "t", "prompt": "?", "check": "python:slow_of_faults:never"}
    source, run = task_file(tmp_path, [task]), tmp_path / "run"
    (first,) = collected_at_once(source, run, group_size=1, score_timeout_s=0.5)
    assert (first.status, first.reward) == (Status.FINISHED, None)
    assert str(first.reason).startswith("ungraded: never had not returned after 0.5 s")
    slow.go_on.set()
    (again,) = collected_at_once(source, run, group_size=1, resume=True)
    assert (again.rollout, again.try_index, again.reward, again.before) == (first.rollout, 0, 1.0, True)
    (held,) = rollouts(run)
    assert (held.outcome.reward, held.outcome.reason, held.outcome.filtered) == (1.0, None, None)


def test_an_environment_that_does_not_return_from_its_score_is_left_behind(tmp_path: Path, slow: Any) -> None:
    task = {"id": "t", "prompt": "?", "environment": "python:slow_of_faults:Slow"}
    source, run = task_file(tmp_path, [task]), tmp_path / "run"
    (first,) = collected_at_once(source, run, group_size=1, score_timeout_s=2.0)
    assert "Slow.score of environment slow had not returned after 2 s" in str(first.reason)
    slow.go_on.set()
    (again,) = collected_at_once(source, run, group_size=1, resume=True)
    assert (again.reward, again.before) == (1.0, True)


RUBRIC = {"id": "r", "environment": "rubric", "prompt": "Say hello.", "criteria": ["polite"]}


@pytest.fixture
def _quick_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_PAUSE_S", 0.001)


@pytest.mark.usefixtures("_quick_judge")
@pytest.mark.parametrize("how", ["resume", "command"])
def test_what_a_judge_that_was_down_left_is_graded_without_sampling(how: str, tmp_path: Path, cli: Cli) -> None:
    source, run, out = task_file(tmp_path, [RUBRIC]), tmp_path / "run", tmp_path / "out.jsonl"
    says = {"now": Says(status=503)}
    with instant().in_thread() as engine, FakeJudge(lambda body: says["now"]).in_thread() as fake:
        judged = ("--judge-url", fake.base_url, "--judge-model", "j")
        engines = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"])
        arguments = ("collect", source, "--run", run, "-g", 2, "-o", out, *engines, *judged)
        first = cli(*arguments)
        assert first.code == 5
        assert "rolltape score" in first.out
        assert fates(run) == {Fate.DROPPED_FILTERED}
        assert engine.requests == 2
        assert cli(*arguments, "--resume").code == 5
        assert len(out.read_text().splitlines()) == 2  # what is as it was has no other line
        says["now"] = Says('{"polite": 5}')
        if how == "resume":
            assert cli(*arguments, "--resume").code == 0
        else:
            assert "2 rollouts to grade" in cli("score", run, "--ungraded", "--dry-run", *judged).out
            graded = cli("score", run, "--ungraded", *judged)
            assert graded.code == 0
            assert "2 rollouts graded, 0 still without a grade" in graded.out
        assert engine.requests == 2
    assert [(one.head.try_index, one.reward, one.outcome.reason) for one in rollouts(run)] == [(0, 0.5, None)] * 2
    assert fates(run) == {Fate.TRAINED}
    if how == "resume":
        last = {line["rollout"]: line.get("reward") for line in map(json.loads, out.read_text().splitlines())}
        assert set(last.values()) == {0.5}


@pytest.mark.usefixtures("_quick_judge")
def test_a_command_that_grades_says_what_it_could_not_grade(tmp_path: Path, cli: Cli) -> None:
    nowhere = {"base_url": "http://127.0.0.1:9/v1", "model": "j"}
    source, run = task_file(tmp_path, [RUBRIC | {"judge": nowhere}]), tmp_path / "run"
    collected_at_once(source, run, group_size=1)
    result = cli("score", run, "--ungraded")
    assert result.code == 5
    assert "0 rollouts graded, 1 still without a grade" in result.out
    assert cli("score", run, "--ungraded", "--step", 7).out.strip() == "0 rollouts graded, 0 still without a grade"


def test_a_late_reward_by_hand_ends_the_want_of_a_grade(tmp_path: Path) -> None:
    task = {"id": "t", "prompt": "?", "check": "python:moodless_of_faults:never"}
    (tmp_path / "moodless_of_faults.py").write_text("def never(task, ended): raise ValueError('no')\n")
    sys.path.insert(0, str(tmp_path))
    try:
        collected_at_once(task_file(tmp_path, [task]), tmp_path / "run", group_size=1)
    finally:
        sys.path.remove(str(tmp_path))
    (held,) = rollouts(tmp_path / "run")
    assert held.outcome.filtered == "ungraded: ValueError: no (moodless_of_faults.py, line 1)"
    with rolltape.open(tmp_path / "run") as tape:
        tape.score(held.id, reward=0.25)
    (row,) = rolltape.read(tmp_path / "run").index()
    assert (row.reward, row.filtered, row.reason) == (0.25, None, None)
    assert fates(tmp_path / "run") == {Fate.TRAINED}


@pytest.mark.parametrize("sandbox", [SandboxKind.NONE, SandboxKind.AUTO])
def test_files_that_a_program_left_are_graded_later(
    sandbox: SandboxKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_check(line: str) -> None:
        (tmp_path / "files_of_faults.py").write_text(f"def check(task, ended):\n    {line}\n")
        sys.modules.pop("files_of_faults", None)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    leaves = "import os\nos.mkdir('deep')\nopen('deep/out.txt', 'w').write('done')\nos.mkfifo('pipe')\n"
    agent = program(tmp_path, f"{ASKS}\n{leaves}os.symlink('/etc', 'out')\n")
    source = task_file(tmp_path, [{"id": "t", "prompt": "?", "check": "python:files_of_faults:check"}])
    run = tmp_path / "run"
    how: dict[str, Any] = {"group_size": 1, "agent": agent, "sandbox": sandbox}
    write_check("raise ValueError('closed')")
    (first,) = collected_at_once(source, run, **how)
    assert str(first.reason).startswith("ungraded: ")
    assert "ValueError: closed" in str(first.reason)
    write_check("return float((ended.folder / 'deep' / 'out.txt').read_text() == 'done')")
    (again,) = collected_at_once(source, run, resume=True, **how)
    assert (again.reward, again.try_index) == (1.0, 0)
    assert not list((run / "logs" / first.rollout).glob("*.tar"))


TALK = """
from rolltape.collect.environments import Answer, ToolAnswer

open_ = False


def ask(task, seed):
    said = yield "first?"
    second = yield Answer(messages=[{"role": "user", "content": "second?"}], reward=0.25)
    return float(said == second)


def note(text: str) -> ToolAnswer:
    return ToolAnswer(text="noted", reward=0.5)


def check(task, ended):
    assert open_, "closed"
    return 1.0 if ended.text == "done" else 0.0
"""


def test_an_environment_with_a_state_goes_through_the_recorded_replies_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talk_of_faults.py").write_text(TALK)
    monkeypatch.syspath_prepend(tmp_path)
    import talk_of_faults  # type: ignore[import-not-found]

    tools = {"tools": ["python:talk_of_faults:note"], "check": "python:talk_of_faults:check"}
    source = task_file(tmp_path, [{"id": "t", "environment": "message", "prompt": "Go.", **tools}])
    call = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}\n</tool_call>'
    script = lambda asked: "done" if "noted" in asked.prompt else call  # noqa: E731
    (first,) = collected_at_once(source, tmp_path / "run", script, group_size=1)
    assert first.reason == "ungraded: AssertionError: closed (talk_of_faults.py, line 18)"
    talk_of_faults.open_ = True
    (again,) = collected_at_once(source, tmp_path / "run", script, group_size=1, resume=True)
    assert (again.reward, again.before) == (1.5, True)
    (held,) = rollouts(tmp_path / "run")
    assert (held.reward, held.outcome.reward_terms) == (1.5, {"tools": 0.5})


def test_a_task_that_was_edited_under_its_id_is_refused_with_the_difference(tmp_path: Path, cli: Cli) -> None:
    source, run = task_file(tmp_path, SUMS[:2]), tmp_path / "run"
    broken = lambda asked: "" if "What is 2" in asked.prompt else "2"  # noqa: E731
    collected_at_once(source, run, broken, group_size=2)
    task_file(tmp_path, [SUMS[0] | {"prompt": "What is one and one?", "hint": "two"}, SUMS[1]])
    with pytest.raises(
        CollectError, match=r"tasks have changed: .*line 1: prompt was 'What is 1 \+ 1\?' and is 'What is o"
    ):
        collected_at_once(source, run, group_size=2, resume=True)
    with pytest.raises(CollectError, match="hint was not there and is 'two'; give the earlier tasks"):
        collected_at_once(source, run, group_size=2, resume=True)
    collected_at_once(source, run, group_size=2, resume=True, accept_changed_tasks=True)


def test_a_collection_whose_attempts_fail_in_a_row_ends_and_goes_on_later(tmp_path: Path, cli: Cli) -> None:
    tasks = [{"id": n, "prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(40)]
    source, run = task_file(tmp_path, tasks), tmp_path / "run"
    with instant(lambda asked: "4").in_thread() as engine:
        engine.mishaps = dict.fromkeys(range(10_000), Mishap.WRONG_LENGTHS)
        engines = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"])
        how = ("collect", source, "--run", run, "-g", 1, "--max-concurrent", 2, "--max-failures", 5, *engines)
        result = cli(*how)
        assert result.code == 5
        assert "stopped: 5 attempts in a row failed, the last one: " in result.err
        assert 5 <= len(rollouts(run)) <= 7
        engine.mishaps = {}
        assert cli(*how, "--resume").code == 0
    assert finished_per_task(run) == {str(n): 1 for n in range(40)}


def test_failures_of_one_task_do_not_end_a_collection(tmp_path: Path) -> None:
    read = "told = json.load(sys.stdin)"
    agent = program(tmp_path, ASKS.replace(read, f"{read}\nif told['task']['id'] == 'sum-1': sys.exit(0)"))
    how: dict[str, Any] = {"group_size": 4, "max_failures": 3, "max_concurrent": 1, "agent": agent}
    results = collected_at_once(task_file(tmp_path, SUMS[:2]), tmp_path / "run", **how)
    assert [(one.task, one.status) for one in results] == [("sum-1", Status.FAILED)] * 4 + [
        ("sum-2", Status.FINISHED)
    ] * 4


@pytest.mark.parametrize("flag", ["--timeout", "--score-timeout"])
@pytest.mark.parametrize("value", ["-1", "0", "nan"])
def test_a_time_limit_below_zero_is_refused(flag: str, value: str, tmp_path: Path, cli: Cli) -> None:
    result = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", flag, value)
    assert result.code == 2
    assert f"{flag} {value}: give more than 0 seconds" in result.err
    with pytest.raises(CollectError, match="timeout_s is -1; give more than 0"):
        CollectSettings(source="x", timeout_s=-1)


def test_a_module_that_raises_on_import_is_an_error_and_no_traceback(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_of_faults.py").write_text("\nraise ValueError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for named in (
        ("--agent", "python:raises_of_faults:agent"),
        ("--environment", "python:raises_of_faults:Environment"),
    ):
        result = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", *named)
        assert result.code == 2
        assert "its module raised ValueError: not today" in result.err
        assert "raises_of_faults.py, line 2" in result.err
        assert "Traceback" not in result.err


def test_rewards_that_are_not_finite_are_left_out_of_the_mean_and_counted(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_of_faults.py").write_text(
        "def check(task, ended):\n    return float('nan') if task['id'] == 'sum-1' else 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tasks = [{"id": task["id"], "prompt": "?", "check": "python:odd_of_faults:check"} for task in SUMS[:2]]
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"])
        result = cli("collect", task_file(tmp_path, tasks), "--run", tmp_path / "run", "-g", 1, *how)
    assert result.code == 0
    assert "mean reward 1, 1 reward not finite" in result.out
    assert math.isnan(next(one.reward for one in rollouts(tmp_path / "run") if one.head.task_id == "sum-1") or 0.0)


def write_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    """A module with `open_`, which is False until a test sets it."""
    (tmp_path / "switch_of_faults.py").write_text(f"open_ = False\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("switch_of_faults", None)
    import switch_of_faults  # type: ignore[import-not-found]

    return switch_of_faults


def test_a_group_that_could_not_be_compared_is_compared_by_the_command(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = "def longer(task, one, other):\n    assert open_, 'closed'\n    return len(one.text) - len(other.text)\n"
    switch = write_switch(tmp_path, monkeypatch, longer)
    task = {"id": "t", "environment": "preference", "prompt": "Say.", "function": "python:switch_of_faults:longer"}
    run = tmp_path / "run"
    results = collected_at_once(task_file(tmp_path, [task]), run, lambda asked: "a" * (1 + asked.number), group_size=3)
    assert {one.reason for one in results} == {
        "ungraded: not compared: AssertionError: closed (switch_of_faults.py, line 3)"
    }
    assert cli("score", run, "--ungraded").code == 5
    switch.open_ = True
    assert cli("score", run, "--ungraded").code == 0
    assert sorted(one.reward or 0.0 for one in rollouts(run)) == [0.0, 0.5, 1.0]
    assert fates(run) == {Fate.TRAINED}


WORDS = """
from rolltape.collect.environments import Game


class Words(Game):
    seats = ("first", "second")

    def __init__(self, options, rng):
        self.said = []

    def rules(self, seat):
        return "Say a word."

    def view(self, seat):
        return "Your turn."

    def to_move(self):
        return None if len(self.said) == 2 else self.seats[len(self.said)]

    def play(self, seat, text):
        self.said.append(text)

    def state(self):
        return {"said": list(self.said)}

    def reward(self, seat):
        assert open_, "closed"
        return float(len(self.said[self.seats.index(seat)]))
"""


def test_all_seats_of_a_match_are_graded_again_from_what_each_of_them_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = write_switch(tmp_path, monkeypatch, WORDS)
    source = task_file(tmp_path, [{"id": "m", "environment": "game", "game": "python:switch_of_faults:Words"}])
    run = tmp_path / "run"
    results = collected_at_once(source, run, lambda asked: "a" * (1 + asked.number), group_size=1)
    assert [(one.seat, one.reason) for one in results] == [
        (seat, "ungraded: AssertionError: closed (switch_of_faults.py, line 28)") for seat in ("first", "second")
    ]
    switch.open_ = True
    again = collected_at_once(source, run, group_size=1, resume=True)
    assert sorted((one.seat, one.reward, one.before) for one in again) == [
        ("first", 1.0, True),
        ("second", 2.0, True),
    ]
