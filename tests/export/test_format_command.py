"""`rolltape export --format FRAMEWORK` as a person uses it."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rolltape
from commands import Result
from rolltape.cli import run as rolltape_command
from rolltape.export.formats import FRAMEWORKS
from taped import assistant, first_turn, next_turn, record_side_arrays, user

Cli = Callable[..., Result]


@pytest.fixture
def cli(capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    def called(*arguments: object) -> Result:
        capfdbinary.readouterr()
        code = rolltape_command([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Result(code, out.decode("latin-1"), err.decode())

    return called


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts at a task, one of which forked while weights were updated."""
    path = tmp_path / "exp"
    with rolltape.open(path, name="exp") as tape:
        for attempt in range(2):
            with tape.rollout(task_id="t", step=3, attempt=attempt) as rollout:
                session = rollout.session()
                sampling = {"sampling": {"temperature": 0.7}, "logprob_kind": "after_temperature"}
                turn = first_turn(session, **sampling)
                if attempt == 0:
                    go_on = {**sampling, "logprobs": [-0.1, -0.2, -0.3]}
                    next_turn(session, turn, 1, **go_on)
                    next_turn(session, turn, 2, new_messages=[user("other")], reply=assistant("else"), **go_on)
                rollout.finish(reward=1.0 - attempt)
    return path


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_file_is_written_and_what_it_cannot_carry_is_said(
    cli: Cli, run: Path, framework: str, tmp_path: Path
) -> None:
    out = tmp_path / f"samples{FRAMEWORKS[framework].endings[0]}"
    done = cli("export", run, "--format", framework, "-o", out)
    assert done.code == 0
    *left_out, last = done.err.splitlines()
    assert last == f"rolltape: 3 samples written to {out}"
    assert left_out
    assert all(line.startswith(f"rolltape: {framework}: ") for line in left_out)
    assert out.stat().st_size > 0


def test_json_lines_go_to_standard_output_and_words_beside_them(cli: Cli, run: Path) -> None:
    done = cli("export", run, "--format", "trl")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0]
    assert "one completion for each prompt" in done.err


def test_arrays_go_into_a_pipe(cli: Cli, run: Path) -> None:
    done = cli("export", run, "--format", "areal")
    held = np.load(io.BytesIO(done.out.encode("latin-1")))
    assert held["rewards"].tolist() == [1.0, 1.0, 0.0]


def test_policy_options_reach_the_samples(cli: Cli, run: Path) -> None:
    arguments = ("export", run, "--format", "slime", "--advantage", "normalized", "--branches", "longest")
    rows = [json.loads(line) for line in cli(*arguments).out.splitlines()]
    assert [row["metadata"]["rolltape"]["advantage"] for row in rows] == [1.0, -1.0]
    assert [row["metadata"]["rolltape"]["loss_weight"] for row in rows] == [1.0, 1.0]


def test_prime_rl_has_the_temperature_that_turns_recorded_unless_told(cli: Cli, run: Path) -> None:
    def temperatures(*more: object) -> set[float]:
        rows = [json.loads(line) for line in cli("export", run, "--format", "prime-rl", *more).out.splitlines()]
        assert {row["env_name"] for row in rows} == {"exp"}
        return {
            temperature
            for row in rows
            for temperature, trained in zip(row["temperatures"], row["mask"], strict=True)
            if trained
        }

    assert temperatures() == {0.7}
    assert temperatures("--temperature", "0.5") == {0.5}


def test_versions_are_numbered_by_the_run(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "named", name="named") as tape, tape.rollout(task_id="t", step=0) as rollout:
        first_turn(rollout.session(), weight_version="blue")
        rollout.finish(reward=1.0)
    done = cli("export", tmp_path / "named", "--format", "areal", "-o", tmp_path / "a.npz")
    assert done.code == 0
    assert np.load(tmp_path / "a.npz")["versions"].tolist() == [[-1, -1, -1, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "verl", "-o", "v.jsonl"], "--format verl is written as .npz, but -o v.jsonl ends in .jsonl"),
        (["--format", "slime", "-o", "s.npz"], "--format slime is written as .jsonl or .pt, but"),
        (["--format", "verl", "--what", "turns"], "--format verl writes samples, not --what turns"),
        (["--format", "verl", "--temperature", "1"], "--temperature needs --format prime-rl"),
        (["--format", "tinker", "--without-logprobs"], "--without-logprobs needs --format slime, verl, or skyrl"),
        (["--format", "nemo"], "--format: 'nemo' is not a format; use jsonl, parquet, slime, "),
    ],
)
def test_wrong_usage_is_named(cli: Cli, run: Path, arguments: list[str], says: str) -> None:
    done = cli("export", run, *arguments)
    assert done.code == 2
    assert says in done.err


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("inspect_ai.log", ["--format", "inspect", "-o", "x.eval"], "inspect"),
        ("datasets", ["--what", "conversations", "--format", "datasets", "-o", "folder"], "datasets"),
    ],
)
def test_package_that_is_not_installed_is_wrong_usage(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str], extra: str
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setitem(sys.modules, module, None)
    refused = cli("export", run, *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert f"pip install 'rolltape[{extra}]'" in refused.err


def test_samples_that_lack_what_is_needed_are_an_error_and_leave_no_file(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "d.jsonl"
    done = cli("export", run, "--format", "tinker", "--advantage", "none", "-o", out)
    assert done.code == 4
    assert "tinker needs an advantage, but 3 of 3 samples have none" in done.err
    assert not out.exists()


@pytest.mark.parametrize("form", ["jsonl", "slime", "verl", "trl", "skyrl", "tinker", "areal"])
def test_a_sample_that_cannot_be_built_is_named_and_left_out(cli: Cli, tmp_path: Path, form: str) -> None:
    folder, out = tmp_path / "run", tmp_path / "samples"
    with rolltape.open(folder, name="exp") as tape:
        for attempt, widths in enumerate([(2, 2), (2, 3), (3, 3)]):
            with tape.rollout(task_id="t", step=0, attempt=attempt) as rollout:
                record_side_arrays(rollout, "depths", widths)
                rollout.finish(reward=float(attempt))
    bad = rolltape.read(folder).index()[1].id
    written = cli("export", str(folder), "--format", form, "-o", str(out))
    assert written.code == 3
    assert f"{bad}: a sample of it is left out: side array 'depths' is int16[2] in turn {bad}.0.0.0" in written.err
    assert f"2 samples written to {out}" in written.err


def test_slime_and_verl_go_without_logprobs_where_asked(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "bare", name="bare") as tape, tape.rollout(task_id="t", step=0) as rollout:
        first_turn(rollout.session(), logprobs=None)
        rollout.finish(reward=1.0)
    arguments = ("export", tmp_path / "bare", "--format", "slime", "--policy", "slime")
    refused = cli(*arguments)
    assert refused.code == 4
    assert "slime needs a logprob for each trained token, but 1 of 1 samples have none" in refused.err
    (line,) = cli(*arguments, "--without-logprobs").out.splitlines()
    assert json.loads(line)["rollout_log_probs"] is None
