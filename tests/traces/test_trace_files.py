"""Traces as lines of strict JSON and on the screen."""

import json
import math
from pathlib import Path

import pytest

import rolltape
from commands import Result, rows
from environments import guesses, trace_at, traced
from rolltape.cli import run as rolltape_command
from rolltape.errors import ExportError
from rolltape.export import read_traces, traces_to_jsonl
from rolltape.traces import trace_of
from taped import assistant, record_run, user


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A game without a gateway, which ends in a NaN."""
    with traced(tmp_path / "run") as (rollout, writer):
        guesses(writer, 2)
        writer.step(prompt={"question": "\x1b[31mwho?"}, policy_response={"text": "me"}, env_state={"odds": math.nan})
        rollout.finish(reward=writer.final(reward=1.0, reward_data={"won": True}), stop_reason="max_turns")
    return tmp_path / "run"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    capsys.readouterr()
    code = rolltape_command([str(argument) for argument in arguments])
    return Result(code, *capsys.readouterr())


def test_a_file_of_traces_is_strict_json_and_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    record_run(tmp_path / "turns", rollouts=2)
    runs = [rolltape.read(path), rolltape.read(tmp_path / "turns")]
    traces = [trace_of(rollout) for run in runs for rollout in run.rollouts()]
    assert traces_to_jsonl(traces, tmp_path / "traces.jsonl") == 3
    lines = rows(Result(0, (tmp_path / "traces.jsonl").read_text(), ""))
    assert {line["schema"] for line in lines} == {"rolltape.trace/1"}
    assert lines[0]["steps"][2]["env_state"] == {"odds": {"$float": "nan"}}
    assert [line["total_reward"] for line in lines] == [1.0, 0.0, 1.0]
    again = list(read_traces(tmp_path / "traces.jsonl"))
    assert repr(again) == repr(traces)
    assert again[0].whole_prompt(1) == [user("guess a number"), assistant("is it 0?"), user("no, it is not 0")]


def test_whole_prompts_are_written_on_request(path: Path) -> None:
    steps = trace_at(path).to_dict(whole_prompts=True)["steps"]
    assert [len(step["prompt"]) for step in steps] == [1, 3, 1]
    assert not any(step.keys() & {"messages_from", "kept_messages"} for step in steps)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"schema": "rolltape.trace/1", "run": 3}\n')
    with pytest.raises(ExportError, match=r"row 1: not a rolltape\.trace/1"):
        list(read_traces(tmp_path / "odd.jsonl"))
    (tmp_path / "odd.jsonl").write_text('{"schema": "rolltape.trace/2"}\n')
    with pytest.raises(ExportError, match=r"schema is 'rolltape\.trace/2'; this reads 'rolltape\.trace/1'"):
        list(read_traces(tmp_path / "odd.jsonl"))


def test_the_command_prints_a_trace_for_people(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = call(capsys, "trace", path)
    assert shown.code == 0
    assert shown.out.splitlines()[1:] == [
        "step 0  reward 0",
        '  user: "guess a number"',
        '  → "is it 0?"',
        "step 1  reward 0",
        '  user: "no, it is not 0"',
        '  → "is it 1?"',
        "step 2",
        '  prompt: {"question":"\\u001b[31mwho?"}',
        '  → {"text":"me"}',
        '  env_state: {"odds":{"$float":"nan"}}',
        "total 1 = 0 in 2 steps + 1 at the end",
        '  reward_data: {"won":true}',
    ]


def test_the_command_prints_json_for_scripts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (printed,) = rows(call(capsys, "trace", path, "--json"))
    (exported,) = rows(call(capsys, "export", path, "--what", "traces"))
    assert printed == exported
    assert (printed["stop_reason"], len(printed["steps"])) == ("max_turns", 3)
    (whole,) = rows(call(capsys, "trace", path, "--json", "--whole-prompts"))
    assert [len(step["prompt"]) for step in whole["steps"]] == [1, 3, 1]


def test_traces_are_no_columns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = call(capsys, "export", path, "--what", "traces", "-o", path / "traces.parquet")
    assert (refused.code, refused.err) == (
        2,
        "rolltape: --what traces: traces have no Parquet form; use --format jsonl\n",
    )


def test_check_looks_at_traces_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "check", path).code == 0
    with rolltape.open(path) as tape:
        rolltape.traces.amend(tape, tape.run().index()[0].id, step=7, extra={"a": 1})
    broken = call(capsys, "check", path, "--json")
    assert broken.code == 1
    assert (
        json.loads(broken.out.splitlines()[0])["what"] == "step 7 of its trace was amended, but there is no such step"
    )
