"""`rolltape view` as it is typed."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from rolltape.cli import run as rolltape_command
from taped import record_run


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    command = [sys.executable, "-m", "rolltape.cli", "view", str(tmp_path / "run"), "--port", "0", "--key", "k"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/exp\?key=k", address)
        with urllib.request.urlopen(address.replace("/exp", "/api/runs")) as answer:
            assert b'"name":"exp"' in answer.read()
        worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path / "run")
    for arguments, code, said in (
        ([str(tmp_path / "nothing")], 3, "no run there"),
        ([str(tmp_path / "run"), "--host", "0.0.0.0"], 2, "give --key as well"),
        ([str(tmp_path / "run"), "--keep-secrets"], 2, "--keep-secrets needs --static"),
        (["--static", str(tmp_path / "out"), str(tmp_path / "run"), "nope"], 2, "holds no rollout"),
        (
            ["--static", str(tmp_path / "out"), str(tmp_path / "run"), "--annotate"],
            2,
            "--annotate: --static writes files, without a server",
        ),
        (
            ["--static", str(tmp_path / "out"), str(tmp_path / "run"), "--share", "1"],
            2,
            "--share: --static writes files, without a server",
        ),
        (["--static", str(tmp_path / "run" / "run.json"), str(tmp_path / "run")], 4, "cannot be written"),
    ):
        assert rolltape_command(["view", *arguments]) == code
        assert said in capsys.readouterr().err
