"""The plain install: what works without pyarrow and DuckDB, and what names the extra that it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from rolltape.demo import record_scripted

_HIDE = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"pyarrow", "duckdb", "pytz"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of a process in which the packages of extras cannot be imported."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "sitecustomize.py").write_text(_HIDE)
    source = Path(__file__).parents[1] / "src"
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{source}"}


def rolltape_in(plain: dict[str, str], *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rolltape.cli", *map(str, arguments)]
    return subprocess.run(command, env=plain, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_a_run_is_collected_listed_checked_and_exported_without_extras(tmp_path: Path, plain: dict[str, str]) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "add", "prompt": "What is 2 + 2?", "answer": 4}\n')
    run = tmp_path / "run"
    collected = rolltape_in(
        plain,
        "collect",
        tmp_path / "tasks.jsonl",
        "--run",
        run,
        "-g",
        2,
        "--force-no-thinking",
        "-o",
        tmp_path / "o.jsonl",
    )
    assert collected.returncode == 0, collected.stderr
    for command in ("ls", "check", "ledger", "samples"):
        shown = rolltape_in(plain, command, run)
        assert shown.returncode == 0, shown.stderr
    exported = rolltape_in(plain, "export", run, "-o", tmp_path / "samples.jsonl")
    assert exported.returncode == 0, exported.stderr
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2
    page = rolltape_in(plain, "view", run, "--static", tmp_path / "page")
    assert page.returncode == 0, page.stderr


def test_what_needs_an_extra_names_it_on_one_line(tmp_path: Path, plain: dict[str, str]) -> None:
    run = tmp_path / "run"
    record_scripted(run)
    needed = {
        ("query", run, "SELECT 1"): ("duckdb", "query"),
        ("seal", run): ("pyarrow", "parquet"),
        ("export", run, "-o", tmp_path / "samples.parquet"): ("pyarrow", "parquet"),
        ("collect", tmp_path / "tasks.parquet", "--run", tmp_path / "other"): ("pyarrow", "parquet"),
    }
    (tmp_path / "tasks.parquet").write_bytes(b"PAR1")
    for command, (package, extra) in needed.items():
        refused = rolltape_in(plain, *command)
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert refused.stderr == (
            f"rolltape: this needs {package}, which is not installed; pip install 'rolltape[{extra}]'\n"
        )
    rolltape.seal(run)
    refused = rolltape_in(plain, "ls", run)
    assert (refused.returncode, refused.stderr.count("rolltape[parquet]")) == (2, 1)
