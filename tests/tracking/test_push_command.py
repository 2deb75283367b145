"""`rolltape push`: a run on a tracker, once, again, while it grows, and what it says of what it cannot do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rolltape
from commands import Result, rows
from rolltape.cli import run as rolltape_command
from rolltape.records.rollout import EventKind
from tracked import record_conversation, record_steps, stored_metrics, stored_traces


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_steps(tmp_path / "exp", steps=2, attempts=3)


@pytest.fixture
def project(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def push(capsys: pytest.CaptureFixture[str]) -> Any:
    def called(*arguments: object) -> Result:
        capsys.readouterr()
        code = rolltape_command(["push", *map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return called


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_run_is_pushed_to_trackio_split_by_split(push: Any, run: Path, project: str) -> None:
    result = push(run, "--to", f"trackio:{project}")
    assert result.code == 0
    assert result.out.splitlines() == [
        "step 0, test: 1 rollout, 1 trace, mean reward 0.5",
        "step 0, train: 3 rollouts, 3 traces, mean reward 1",
        "step 1, test: 1 rollout, 1 trace, mean reward 0.5",
        "step 1, train: 3 rollouts, 3 traces, mean reward 1",
        f"4 steps and 8 traces pushed to trackio:{project}",
    ]
    assert f"trackio show --project {project}" in result.err
    assert len(stored_traces(project)) == 8


def test_pushing_again_adds_what_is_new_and_repeats_nothing(push: Any, run: Path, project: str) -> None:
    push(run, "--to", f"trackio:{project}", "--step", 0)
    result = push(run, "--to", f"trackio:{project}")
    assert result.out.splitlines()[-1] == f"2 steps and 4 traces pushed to trackio:{project}; 2 steps already there"
    again = push(run, "--to", f"trackio:{project}", "--json")
    assert [(row["step"], row["split"], row["there_already"]) for row in rows(again)] == [
        (0, "test", True),
        (0, "train", True),
        (1, "test", True),
        (1, "train", True),
    ]
    assert len(stored_traces(project)) == 8
    assert len(stored_metrics(project)) == 4


def test_file_of_lines_takes_the_same_steps_and_repeats_nothing(push: Any, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    assert push(run, "--to", file, "--split", "train").code == 0
    with file.open("ab") as cut:
        cut.write(b'{"split": "test", "step": 0, "summ')  # as a killed process leaves it
    assert push(run, "--to", file).out.splitlines()[-1] == (
        f"2 steps and 2 traces pushed to {file}; 2 steps already there"
    )
    whole = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert [(line["step"], line["split"], len(line["traces"])) for line in whole] == [
        (0, "train", 3),
        (1, "train", 3),
        (0, "test", 1),
        (1, "test", 1),
    ]
    assert whole[0]["metrics"]["train/reward/mean"] == 1.0
    assert whole[0]["summary"]["fates"] == {"trained": 27}


def test_limit_and_choice_of_traces(push: Any, run: Path, tmp_path: Path) -> None:
    def rewards(*options: object) -> list[float]:
        file = tmp_path / f"{'-'.join(map(str, options))}.jsonl"
        push(run, "--to", file, "--step", 0, "--split", "train", *options)
        return [trace["total_reward"] for trace in lines(file)[0]["traces"]]

    assert rewards("--max-traces", 2) == [0.0, 1.0]
    assert rewards("--max-traces", 2, "--choose", "rewards") == [0.0, 2.0]
    assert rewards("--max-traces", 0) == []
    assert rewards("--max-traces", -1) == []


def test_choice_does_not_depend_on_the_order_in_which_rollouts_ran(push: Any, tmp_path: Path) -> None:
    shown = {}
    for name, order in {"up": range(8), "down": range(7, -1, -1)}.items():
        path = tmp_path / name
        with rolltape.open(path, name="exp") as tape:
            for attempt in order:
                record_conversation(tape, attempt=attempt, reward=float(attempt % 3))
        for choice in ("first", "uniform", "rewards"):
            file = tmp_path / f"{name}-{choice}.jsonl"
            push(path, "--to", file, "--max-traces", 3, "--choose", choice)
            shown[name, choice] = [trace["rollout"] for trace in lines(file)[0]["traces"]]
    for choice in ("first", "uniform", "rewards"):
        assert shown["up", choice] == shown["down", choice]


def test_rollouts_whose_source_names_no_split_are_of_the_default_one(push: Any, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        record_conversation(tape, source="sums")
    file = tmp_path / "steps.jsonl"
    push(tmp_path / "exp", "--to", file, "--default-split", "eval")
    assert [line["split"] for line in lines(file)] == ["eval"]


def test_failed_rollouts_are_shown_and_have_no_part_in_the_reward(push: Any, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        record_conversation(tape, reward=1.0)
        tape.rollout(task_id="count", step=0, attempt=1).fail("the sandbox is gone")
    file = tmp_path / "steps.jsonl"
    push(tmp_path / "exp", "--to", file)
    (line,) = lines(file)
    assert [(trace["status"], trace.get("reason")) for trace in line["traces"]] == [
        ("finished", None),
        ("failed", "the sandbox is gone"),
    ]
    assert line["metrics"]["train/reward/mean"] == 1.0
    assert line["metrics"]["train/rollouts/failed"] == 1


def test_step_with_rollouts_that_run_is_left_for_the_next_push(push: Any, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        record_conversation(tape, step=0)
        running = tape.rollout(task_id="count", step=1)
        result = push(tmp_path / "exp", "--to", file)
        assert result.out.splitlines()[-1] == f"1 step and 1 trace pushed to {file}"
        assert "step 1 of train: 1 rollout still running; push again later, or use --follow" in result.err
        running.finish(reward=0.0)
    push(tmp_path / "exp", "--to", file)
    assert [line["step"] for line in lines(file)] == [0, 1]


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_step_that_is_being_collected_is_left_alone_though_nothing_of_it_runs_now(
    push: Any, tmp_path: Path, follow: list[str]
) -> None:
    file, command = tmp_path / "steps.jsonl", [sys.executable, "-m", "rolltape.cli", "push", str(tmp_path / "exp")]
    with rolltape.open(tmp_path / "exp", name="exp") as tape:
        settings = {"step": 0, "source": "sums#train", "group_size": 1}
        tape.append_run_event(EventKind.COLLECT, {"settings": settings})
        record_conversation(tape, source="sums#train")
        record_conversation(tape, source="sums#train", step=1)
        record_conversation(tape, source="sums#train", step=2)
        if follow:
            pushing = subprocess.Popen([*command, "--to", str(file), *follow], stdout=subprocess.PIPE, text=True)
            assert pushing.stdout is not None
            assert pushing.stdout.readline().startswith("step 1,")
        else:
            assert "step 0 of train: still being collected; push again" in push(tmp_path / "exp", "--to", file).err
        record_conversation(tape, source="sums#train", attempt=1, reward=0.0)
        tape.append_run_event(EventKind.COLLECTED, {"step": 0, "source": "sums#train"})
    if follow:
        pushing.communicate(timeout=60)
    else:
        push(tmp_path / "exp", "--to", file)
    assert {line["step"]: line["summary"]["rollouts"] for line in lines(file)} == {0: 2, 1: 1, 2: 1}


def test_following_a_run_pushes_steps_as_they_end_and_stops_with_its_writers(tmp_path: Path) -> None:
    path, file = tmp_path / "exp", tmp_path / "steps.jsonl"
    with rolltape.open(path, name="exp") as tape:
        record_conversation(tape, step=0)
        command = [sys.executable, "-m", "rolltape.cli", "push", str(path), "--to", str(file), "--follow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            record_conversation(tape, step=1)
            assert following.stdout.readline() == "step 0, train: 1 rollout, 1 trace, mean reward 1\n"
            record_conversation(tape, step=1, attempt=1, reward=0.0)
            tape.close()
            assert following.stdout.read().splitlines() == [
                "step 1, train: 2 rollouts, 2 traces, mean reward 0.5",
                f"2 steps and 3 traces pushed to {file}",
            ]
    assert following.returncode == 0


def test_follower_that_is_interrupted_keeps_what_it_pushed(tmp_path: Path) -> None:
    path, file = tmp_path / "exp", tmp_path / "steps.jsonl"
    with rolltape.open(path, name="exp") as tape:
        record_conversation(tape, step=0)
        record_conversation(tape, step=1)
        command = [sys.executable, "-m", "rolltape.cli", "push", str(path), "--to", str(file), "--follow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            following.stdout.readline()
            os.kill(following.pid, signal.SIGINT)
            assert following.wait(30) == 130
    assert [line["step"] for line in lines(file)] == [0]


INTERRUPTED_WHILE_FINALIZING = """
import signal, sys
from rolltape.cli import main
from rolltape.tape.index.index import Index
close = Index.close
def interrupted(index):
    close(index)
    signal.raise_signal(signal.SIGINT)
Index.close = interrupted
main()
"""


def test_an_interrupt_that_python_drops_while_it_finalizes_still_ends_the_command(tmp_path: Path) -> None:
    path, file = tmp_path / "exp", tmp_path / "steps.jsonl"
    with rolltape.open(path, name="exp") as tape:
        record_conversation(tape, step=0)
        record_conversation(tape, step=1)
        command = [sys.executable, "-c", INTERRUPTED_WHILE_FINALIZING, "push", str(path), "--to", str(file), "--follow"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "rolltape: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "comet:x"], 2, "--to comet:x: unknown tracker; use wandb:PROJECT, mlflow:EXPERIMENT, otel:URL, "),
        (["--to", "wandb"], 2, "--to wandb: it names no place; use wandb:PROJECT, "),
        (["--to", "x.jsonl", "--project", "p"], 2, "--project p: --to x.jsonl names the place; leave --project out"),
        (["--to", "tensorboard:exp/run.json"], 4, "exp/run.json"),
        (["--to", "x.jsonl", "--step", "9"], 2, "--step 9: no rollouts match in run exp"),
        (["--to", "none/x.jsonl"], 4, "none/x.jsonl: No such file or directory"),
        (["--to", "trackio:registry-x"], 4, "trackio: project 'registry-x' cannot be opened"),
        (["--to", "x.jsonl", "--policy", "greedy"], 2, "--policy: there is no policy 'greedy'"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    push: Any, run: Path, arguments: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    result = push(run, *arguments)
    assert result.code == code
    assert result.err.startswith(f"rolltape: {message}")
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "to", "extra"),
    [
        ("wandb", "wandb:sums", "wandb"),
        ("mlflow", "mlflow:sums", "mlflow"),
        ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel:http://127.0.0.1:1", "otel"),
        ("tensorboard", "tensorboard:logs", "tensorboard"),
        ("trackio", "trackio:sums", "trackio"),
    ],
)
def test_tracker_that_is_not_installed_is_named(
    push: Any, run: Path, monkeypatch: pytest.MonkeyPatch, module: str, to: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = push(run, "--to", to)
    assert result.code == 2
    assert f"the tracker {extra} needs {module.partition('.')[0]}, which is not installed" in result.err
    assert f"pip install 'rolltape[{extra}]'" in result.err


def test_project_as_an_option_of_its_own_still_works_with_a_note(push: Any, run: Path, project: str) -> None:
    result = push(run, "--to", "trackio", "--project", project)
    assert "--to trackio is deprecated; use --to trackio:PROJECT" in result.err
    assert len(stored_traces(project)) == 8


def test_rollouts_link_to_the_page_of_their_run_and_no_key_of_it_is_told(push: Any, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="sums / qwen3") as tape:
        rollout = record_conversation(tape)
    file = tmp_path / "steps.jsonl"
    push(tmp_path / "exp", "--to", file, "--view-url", "https://host/view/?key=secret")
    assert lines(file)[0]["pages"] == [f"https://host/view/sums---qwen3/rollout/{rollout}?try=0"]


@pytest.mark.parametrize(
    "part", ["run.Run._get_username", "sqlite_storage.SQLiteStorage.get_logs", "utils.TRACKIO_DIR"]
)
def test_trackio_that_is_built_otherwise_is_named(
    push: Any, run: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.delattr(f"trackio.{part}")
    result = push(run, "--to", "trackio:sums")
    assert result.code == 4
    assert part.rpartition(".")[2] in result.err
    assert "does not fit this rolltape" in result.err
