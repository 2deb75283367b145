"""The records of `-o`: complete, equal to what the tape has, one whole line each, and never in the way."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import EXAMPLES, ROOT, SUMS, by, collected, collected_at_once, command, instant, rollouts, task_file
from commands import Cli, strict_json
from rolltape.collect.collector import Collector
from rolltape.collect.records import CollectedRecord, RecordFile, build_record
from rolltape.collect.results import RolloutResult
from rolltape.collect.settings import CollectSettings
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import EventKind, Rollout, Status
from rolltape.tape.recording.tape import open_tape
from rolltape.traces import Capture
from rolltape.traces.writer import is_captured
from scripted_engine import Step

MODULE = """
from rolltape.collect.environments import AGENT, Answer, Opening, Score


class Odd:
    name = "odd"
    seats = (AGENT,)
    over = False

    def check(self, task):
        pass

    def begin(self, task, seed):
        one = Odd()
        one.breaks = task.data["breaks"]
        return one

    def opening(self, seat):
        return Opening(messages=[{"role": "user", "content": "Go."}])

    def next_seat(self):
        return None if self.over else AGENT

    async def answer(self, seat, reply):
        self.over = True
        return Answer(done=True, reward=float("inf"), metrics={"hits": 3, "odds": float("nan")})

    async def score(self, seat, ended):
        if self.breaks:
            raise RuntimeError("no score")
        return Score(reward=float("-inf"), terms={"a": float("nan"), "b": 2.0}, reward_data={"x": float("inf")})


def last_word(text):
    from rolltape.collect.environments import ToolAnswer

    return ToolAnswer(text="noted", reward=0.5, done=True)
"""
ODD = {"environment": "python:oddities_of_collect:Odd", "breaks": False}
ASKING = """
import json, sys, urllib.request
told = json.load(sys.stdin)
body = json.dumps({"model": told["model"], "messages": told["messages"]}).encode()
url = told["openai_base_url"] + "/chat/completions"
asked = urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}))
print("it says " + json.load(asked)["choices"][0]["message"]["content"])
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oddities_of_collect.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def records(results: list[RolloutResult]) -> dict[tuple[str, int], CollectedRecord]:
    found = {(one.rollout, one.try_index): one.record for one in results}
    return {key: record for key, record in found.items() if record is not None}


def plain(value: Any) -> Any:
    """As it comes out of a file, so that NaN equals NaN."""
    return json.loads(encode_numbers(value, "a record"))


def of_tape(rollout: Rollout) -> Any:
    """What the tape alone tells of a rollout, in the form of a record."""
    return plain(build_record(rollout).to_dict())


def assert_as_on_the_tape(results: list[RolloutResult], run: Path) -> None:
    told = records(results)
    held = {one.key: one for one in rollouts(run)}
    assert told.keys() == held.keys()
    for key, record in told.items():
        assert plain(record.to_dict()) == of_tape(held[key])


@pytest.mark.parametrize("name", ["problem", "distill", "rubric", "preference", "message", "game"])
def test_records_are_what_the_tape_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    source = EXAMPLES / f"{name}.jsonl"
    results = asyncio.run(collected(source, run, group_size=2, limit=2, max_turns=3, with_records=True))
    assert len(results) >= 4
    assert_as_on_the_tape(results, run)


def test_a_record_has_all_that_there_is_to_say(tmp_path: Path) -> None:
    tasks = [{"id": "sum", "prompt": "What is 3 + 1?", "system": "Be short.", "answer": 4}]
    source = task_file(tmp_path, tasks)
    (result,) = collected_at_once(source, tmp_path / "run", group_size=1, with_records=True, split="train", step=7)
    assert result.record is not None
    record = plain(result.record.to_dict())
    trace = record.pop("trace")
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 1?"}]
    assert record == {
        "schema": "rolltape.collected/1",
        "rollout": result.rollout,
        "try_index": 0,
        "run": "run",
        "group": rollouts(tmp_path / "run")[0].head.group,
        "source": "tasks.jsonl#train",
        "split": "train",
        "task_index": 0,
        "task_id": "sum",
        "attempt": 0,
        "status": "finished",
        "done": True,
        "stop_reason": "completed",
        "reward": 1.0,
        "content": "4",
        "prompt": asked,
        "messages": [*asked, {"role": "assistant", "content": "4"}],
        "task": tasks[0],
        "info": {
            "agent": "chat",
            "model": "scripted",
            "step": 7,
            "versions": ["v0"],
            "turns": 1,
            "sampled_tokens": 2,
        },
    }
    assert trace == plain(rolltape.trace_of(rollouts(tmp_path / "run")[0]).to_dict())


def test_numbers_that_are_not_finite_are_spelled_as_everywhere(tmp_path: Path, cli: Cli) -> None:
    source, out = task_file(tmp_path, [ODD]), tmp_path / "out.jsonl"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"])
        assert cli("collect", source, "--run", tmp_path / "run", "-g", 1, "-o", out, *how).code == 0
    (record,) = map(strict_json, out.read_text().splitlines())
    assert record["reward"] == {"$float": "nan"}  # infinite both ways
    assert record["reward_terms"] == {"a": {"$float": "nan"}, "b": 2.0}
    assert record["metrics"] == {"hits": 3, "odds": {"$float": "nan"}}
    assert record["trace"]["steps"][0]["reward"] == {"$float": "inf"}
    assert record["trace"]["reward_data"] == {"x": {"$float": "inf"}}


def test_what_could_not_be_graded_has_a_record_with_its_reason_and_nothing_made_up(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (result,) = collected_at_once(task_file(tmp_path, [ODD | {"breaks": True}]), run, group_size=1, with_records=True)
    assert result.record is not None
    record = result.record.to_dict()
    assert (record["status"], record["done"], record["reason"]) == (
        "finished",
        True,
        "ungraded: RuntimeError: no score (oddities_of_collect.py, line 30)",
    )
    assert record["content"] == "4"
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    assert not {"reward", "reward_terms", "task_id"} & record.keys()
    assert record["trace"]["reason"] == "ungraded: RuntimeError: no score (oddities_of_collect.py, line 30)"
    assert "total_reward" not in record["trace"]
    assert len(record["trace"]["steps"]) == 1
    assert_as_on_the_tape([result], run)


def test_what_a_tool_said_last_is_in_the_conversation_and_in_the_trace(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "last_word", "arguments": {"text": "bye"}}\n</tool_call>'
    task = {"environment": "message", "prompt": "Go.", "tools": ["python:oddities_of_collect:last_word"]}
    script = lambda asked: call  # noqa: E731
    (result,) = collected_at_once(
        task_file(tmp_path, [task]), tmp_path / "run", script, group_size=1, with_records=True
    )
    assert result.record is not None
    assert result.record.stop_reason == "tool_stopped"
    assert result.record.messages is not None
    assert result.record.messages[-1]["content"] == "noted"
    (step,) = rolltape.trace_of(rollouts(tmp_path / "run")[0]).steps
    assert step.extra is not None
    assert [one["content"] for one in step.extra["tool_results"]] == ["noted"]


@pytest.mark.parametrize("capture", [Capture.ALL, Capture.OFF])
def test_how_a_program_ended_is_recorded_whether_or_not_it_is_traced(capture: Capture, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKING)
    agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    run = tmp_path / "run"
    how: dict[str, Any] = {"group_size": 1, "agent": agent, "with_records": True, "capture": capture}
    (result,) = collected_at_once(task_file(tmp_path, SUMS[2:3]), run, **how)
    assert result.record is not None
    assert result.record.info.exit_code == 3
    assert result.record.content == "it says 4\n"
    assert result.record.messages is not None
    assert [message["role"] for message in result.record.messages] == ["user", "assistant"]
    assert (result.record.trace is None) == (capture is Capture.OFF)
    assert rolltape.trace_of(rollouts(run)[0]).extra == {"exit_code": 3, "text": "it says 4\n"}


def test_without_traces_nothing_of_them_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = collected_at_once(task_file(tmp_path), run, group_size=2, capture=Capture.OFF, with_records=True)
    assert not [event for event in rolltape.read(run).events() if event.kind == EventKind.TRACE]
    assert [record.trace for record in records(results).values()] == [None] * 8
    assert [rolltape.trace_of(one).total_reward for one in rollouts(run)] == [one.reward for one in rollouts(run)]


def test_of_sampled_traces_the_id_decides(tmp_path: Path, cli: Cli) -> None:
    source, run, out = task_file(tmp_path), tmp_path / "run", tmp_path / "out.jsonl"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"], "--traces", "sampled:0.5")
        assert cli("collect", source, "--run", run, "-g", 8, "-o", out, *how).code == 0
    wanted = {one.id for one in rollouts(run) if is_captured(one.id, Capture.SAMPLED, 0.5)}
    traced = {event.rollout for event in rolltape.read(run).events() if event.kind == EventKind.TRACE}
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < len(wanted) < 32
    assert traced == wanted
    assert {record["rollout"] for record in told if "trace" in record} == wanted


async def test_what_is_cancelled_is_told_with_its_reason_and_as_far_as_it_came(tmp_path: Path) -> None:
    asked = asyncio.Event()
    task = {"environment": "message", "prompt": "Go.", "tools": ["python:oddities_of_collect:last_word"], "answer": 1}

    def script(request: Any) -> Step:
        asked.set()
        return Step("1 2 3 4", token_delay_s=60.0)

    results: list[RolloutResult] = []
    async with instant(script) as engine:
        settings = CollectSettings(
            source=str(task_file(tmp_path, [task])), group_size=2, with_records=True, **by(engine)
        )
        with open_tape(tmp_path / "run") as tape:
            running = asyncio.ensure_future(Collector(settings, tape).run(lambda launch: None, results.extend))
            await asyncio.wait_for(asked.wait(), 60)
            running.cancel()
            await asyncio.wait({running})
    assert [one.status for one in results] == [Status.FAILED] * 2
    for record in records(results).values():
        assert record.reason == "cancelled before it had ended"
        assert record.trace is not None
        assert record.trace.reason == "cancelled before it had ended"
    assert_as_on_the_tape(results, tmp_path / "run")


@pytest.mark.parametrize("capture", [Capture.ALL, Capture.OFF])
def test_what_timed_out_broke_or_was_rejected_has_a_trace_that_says_so(capture: Capture, tmp_path: Path) -> None:
    fine = {"prompt": "?", "answer": 4}
    tasks = [{"id": "slow", **fine}, {"id": "broken", **ODD, "breaks": True}, {"id": "rejected", **fine}]
    slow = lambda asked: Step("1 2 3 4", token_delay_s=30.0 if "?" in asked.prompt and not asked.number else 0)  # noqa: E731
    run = tmp_path / "run"
    how: dict[str, Any] = {"group_size": 1, "max_concurrent": 1, "timeout_s": 6.0, "capture": capture}
    collected_at_once(task_file(tmp_path, tasks), run, slow, **how)
    held = {one.head.task_id: one for one in rollouts(run)}
    with open_tape(run) as tape:
        tape.filter(held["rejected"].id, "too easy")
    traces = {one.head.task_id: rolltape.trace_of(one) for one in rollouts(run)}
    slow_one, broken, rejected = (traces[name] for name in ("slow", "broken", "rejected"))
    assert (slow_one.status, slow_one.stop_reason, slow_one.total_reward) == ("finished", "timeout", 0.0)
    assert slow_one.extra == {"timed_out": True}
    why = "ungraded: RuntimeError: no score (oddities_of_collect.py, line 30)"
    assert (broken.status, broken.reason, broken.total_reward) == ("finished", why, None)
    assert (rejected.status, rejected.filtered) == ("finished", "too easy")
    for trace in traces.values():
        assert trace.steps[0].prompt
        assert [step.derived for step in trace.steps] == [capture is Capture.OFF or trace is slow_one]


def test_a_resumed_collection_goes_on_in_the_same_file(tmp_path: Path, cli: Cli) -> None:
    source, run, out = task_file(tmp_path), tmp_path / "run", tmp_path / "out.jsonl"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"], "-g", 2, "-o", out)
        bad = ("--agent", "python:oddities_of_collect:nobody")
        assert cli("collect", source, "--run", run, *how, *bad).code == 2
        assert not out.exists()
        assert cli("collect", source, "--run", run, *how).code == 0
        assert cli("collect", source, "--run", run, *how, "--resume").code == 0
        assert cli("collect", source, "--run", run, *how, "--step", 1).code == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["info"]["step"] for record in told] == [0] * 8 + [1] * 8
    assert {record["rollout"] for record in told} == {one.id for one in rollouts(run)}


@pytest.mark.slow
def test_what_is_compared_only_after_a_resume_is_written_then_with_its_reward(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    judge = "def longer(task, one, other):\n    return len(one.text) - len(other.text)\n"
    (tmp_path / "oddities_of_comparing.py").write_text(judge)
    task = {"id": "t", "environment": "preference", "prompt": "Go.", "function": "python:oddities_of_comparing:longer"}
    source, run, out = task_file(tmp_path, [task]), tmp_path / "run", tmp_path / "out.jsonl"
    last = lambda asked: Step("a" * (1 + asked.number), token_delay_s=60.0 * (asked.number == 2))  # noqa: E731
    arguments = [source, "--run", run, "-g", 3, "--grace", 0, "-o", out, "--json"]
    with instant(last).in_thread() as engine:
        how = ["--engine", f"sglang:{engine.url}", "--model", by(engine)["model"]]
        process = command(*arguments, *how)
        while len(finished := counted(run)) < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        events = [json.loads(line) for line in process.communicate()[0].splitlines()]
    told = [event for event in events if event["event"] == "rollout"]
    assert sorted((one["status"], one["reason"]) for one in told) == [
        ("failed", "cancelled before it had ended"),
        ("finished", "ungraded: its group is not compared yet"),
        ("finished", "ungraded: its group is not compared yet"),
    ]
    (cancelled,) = map(json.loads, out.read_text().splitlines())
    assert cancelled["reason"] == "cancelled before it had ended"
    with instant(lambda asked: "a" * 9).in_thread() as engine:
        result = cli("collect", *arguments[:-1], "--engine", f"sglang:{engine.url}", *how[2:], "--resume")
    assert result.code == 0
    assert "t           3   0.5  0.4082  0 to 1" in result.out
    assert "1 rollout, 1 turn, " in result.out
    lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert {line["rollout"]: line["reward"] for line in lines} == {one.id: one.reward for one in counted(run)}
    assert {one.id for one in finished} < {line["rollout"] for line in lines}
    assert all(line["trace"]["total_reward"] == line["reward"] for line in lines)
    assert {line["task_index"] for line in lines} == {0}


def counted(run: Path) -> list[Rollout]:
    held = rollouts(run) if (run / "run.json").exists() else []
    return [one for one in held if one.status is Status.FINISHED]


def some_record(tmp_path: Path) -> CollectedRecord:
    run = tmp_path / "some"
    with rolltape.open(run) as tape, tape.rollout(task_id="a") as rollout:
        rollout.finish(reward=1.0)
    return build_record(rollouts(run)[0])


def test_a_line_after_half_a_line_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"schema":"rolltape.coll')
    file = RecordFile(out, print)
    file.add(some_record(tmp_path))
    file.close()
    _, whole = out.read_text().splitlines()
    assert json.loads(whole)["task_id"] == "a"


def test_a_pipe_has_each_line_once(tmp_path: Path, cli: Cli) -> None:
    source, run, out = task_file(tmp_path), tmp_path / "run", tmp_path / "out"
    os.mkfifo(out)
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"], "-g", 2)
        assert cli("collect", source, "--run", run, *how).code == 0
        held = os.open(out, os.O_RDWR)  # so that neither end waits for the other
        assert cli("collect", source, "--run", run, *how, "--resume", "-o", out).code == 0
    lines = os.read(held, 2**20).splitlines()
    os.close(held)
    told = [json.loads(line)["rollout"] for line in lines]
    assert sorted(told) == sorted(one.id for one in rollouts(run))


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    file = RecordFile(Path("/dev/full"), told.append)
    for _ in range(3):
        file.add(some_record(tmp_path / str(_)))
    assert file.lost == 3
    (line,) = told
    assert "No space left on device" in line


def test_a_collection_with_a_full_disk_for_its_records_ends_well_and_says_so(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", by(engine)["model"], "-g", 2, "-o", "/dev/full")
        result = cli("collect", task_file(tmp_path), "--run", run, *how)
    assert result.code == 4
    assert result.err.count("No space left on device") == 1
    assert "8 records are missing" in result.err
    assert [one.status for one in rollouts(run)] == [Status.FINISHED] * 8


def test_records_do_not_go_into_the_file_of_the_tasks(tmp_path: Path, cli: Cli) -> None:
    source = task_file(tmp_path)
    before = source.read_bytes()
    result = cli("collect", source, "--run", tmp_path / "run", "-o", source)
    assert result.code == 4
    assert "this is the file of the tasks" in result.err
    assert source.read_bytes() == before
    assert not (tmp_path / "run").exists()


def test_records_that_cannot_be_written_at_all_are_noticed_before_anything_runs(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "nowhere" / "out.jsonl"
    result = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", "-o", out)
    assert result.code == 4
    assert f"-o {out}: there is no folder {out.parent}; make it, or name a file in another one" in result.err
    assert not (tmp_path / "run").exists()


KILLED_AT_A_RECORD = """
import os, signal, sys
from rolltape.cli.app import main
from rolltape.collect.records import RecordFile

add, left = RecordFile.add, int(sys.argv.pop(1))


def dies(file, record):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # the tape has it, the file has not
    add(file, record)


RecordFile.add = dies
sys.exit(main())
"""


@pytest.mark.slow
def test_killed_between_the_tape_and_the_file_again_and_again_no_line_is_lost(tmp_path: Path, cli: Cli) -> None:
    source, run, out = task_file(tmp_path), tmp_path / "run", tmp_path / "out.jsonl"
    with instant().in_thread() as engine:
        how = ["--engine", f"sglang:{engine.url}", "--model", by(engine)["model"], "-g", "8", "-o", str(out)]
        arguments = ["collect", str(source), "--run", str(run), *how]
        for rounds in range(2):
            resumed = ["--resume"] if rounds else []
            script = [sys.executable, "-c", KILLED_AT_A_RECORD, str(3 + rounds), *arguments, *resumed]
            ended = subprocess.run(script, capture_output=True, timeout=120, check=False, cwd=ROOT)
            assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        assert cli(*arguments, "--resume").code == 0
        fresh = tmp_path / "fresh.jsonl"
        assert cli(*arguments[:-1], fresh, "--resume").code == 0
    held = {(one.id, one.head.try_index): of_tape(one) for one in rollouts(run) if one.status is not Status.LOST}
    assert len(held) == 32
    for file in (out, fresh):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert {(line["rollout"], line["try_index"]): line for line in lines} == held
        assert len(lines) == 32
    rebuilt = tmp_path / "rebuilt.jsonl"
    assert cli("export", run, "--what", "records", "-o", rebuilt).code == 0
    assert sorted(rebuilt.read_text().splitlines()) == sorted(fresh.read_text().splitlines())
