"""Where the output goes: a reader that left, a full disk, an encoding that lacks a character, Ctrl-C."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from commands import Cli

PRINTING = ["--help", "ls", "tree", "samples", "ledger", "show", "export", "query", "check", "seal", "prune"]


def arguments(verb: str, run: Path, rollout_id: str) -> list[str]:
    more = {
        "tree": [rollout_id],
        "show": [rollout_id],
        "query": ["SELECT * FROM rollouts"],
        "prune": ["--before-step", "2", "--dry-run"],
    }
    return [verb] if verb == "--help" else [verb, str(run), *more.get(verb, [])]


def process(
    *arguments: str, stdout: int | None = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rolltape", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("verb", PRINTING)
def test_a_closed_pipe_is_no_error(run: Path, rollout_id: str, verb: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = process(*arguments(verb, run, rollout_id), stdout=writer, PYTHONUNBUFFERED=unbuffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("verb", PRINTING)
def test_a_full_disk_is_one_line(run: Path, rollout_id: str, verb: str, unbuffered: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = process(*arguments(verb, run, rollout_id), stdout=full, PYTHONUNBUFFERED=unbuffered)
    os.close(full)
    said = b"rolltape: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (4, said)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
@pytest.mark.parametrize("verb", ["--help", "ls", "show"])
def test_a_closed_output_is_no_error(run: Path, rollout_id: str, verb: str, closed: str) -> None:
    command = shlex.join([sys.executable, "-m", "rolltape", *arguments(verb, run, rollout_id)])
    done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed != ">&-")


@pytest.mark.slow
def test_an_encoding_that_lacks_a_character_gets_its_escape(tmp_path: Path) -> None:
    run = tmp_path / "exp"
    with rolltape.open(run) as tape, tape.rollout(task_id="größe 🙂", step=1) as rollout:
        rollout.session().record_turn(
            prompt_messages=[{"role": "user", "content": "größe"}],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-1.0],
            reply={"role": "assistant", "content": "日本"},
            finish="stop",
        )
        rollout.finish(reward=1.0)
    for verb in ("ls", "tree", "show"):
        done = process(verb, str(run), PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.isascii()
    assert rb"gr\xf6\xdfe" in process("ls", str(run), PYTHONIOENCODING="ascii").stdout
    (row,) = process("ls", str(run), "--json", PYTHONIOENCODING="ascii").stdout.splitlines()
    assert row.isascii()
    assert json.loads(row)["task_id"] == "größe 🙂"
    missing = process("ls", str(tmp_path / "é"), PYTHONIOENCODING="ascii")
    assert (missing.returncode, missing.stderr.count(b"\n")) == (3, 1)


def test_an_interrupt_is_one_line(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_location: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rolltape, "read", interrupted)
    result = cli("ls", run)
    assert (result.code, result.out, result.err) == (130, "", "rolltape: interrupted\n")


@pytest.mark.parametrize("module", ["typer", "rolltape.cli.exits"])
def test_an_interrupt_while_modules_are_imported_is_one_line(module: str) -> None:
    program = f"""
import signal, sys
class Interrupted:
    def find_spec(name, *_):
        if name == "{module}":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted)
from rolltape.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rolltape: interrupted\n")


def test_a_file_of_the_run_that_cannot_be_read_is_named(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_location: str) -> None:
        raise PermissionError(13, "Permission denied", "run.json")

    monkeypatch.setattr(rolltape, "read", refused)
    result = cli("ls", run)
    assert (result.code, result.out, result.err) == (3, "", "rolltape: run.json: Permission denied\n")
