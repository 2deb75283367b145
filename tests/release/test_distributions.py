"""The wheel and the sdist: complete, small, and the same when they are built again."""

import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from distributions import SDIST, WHEEL, build, contents, digest, faults
from rolltape import __version__

pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


def test_wheel_and_sdist_are_whole_and_built_twice_are_the_same(built: Path, tmp_path: Path) -> None:
    assert faults(built) == []
    assert {path.name for path in built.iterdir()} == {WHEEL, SDIST}
    build(tmp_path)
    assert {name: digest(tmp_path / name) for name in (WHEEL, SDIST)} == {
        name: digest(built / name) for name in (WHEEL, SDIST)
    }


def test_the_package_in_the_sdist_is_that_in_the_wheel(built: Path) -> None:
    in_wheel = {name for name in contents(built / WHEEL) if name.startswith("rolltape/")}
    in_sdist = {name.removeprefix("src/") for name in contents(built / SDIST) if name.startswith("src/")}
    assert in_sdist == in_wheel


def test_metadata_name_version_license_and_extras(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        metadata = message_from_bytes(wheel.read(f"rolltape-{__version__}.dist-info/METADATA"))
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == (
        "rolltape",
        __version__,
        "Apache-2.0",
    )
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"parquet", "query", "torch", "ray", "all"} <= set(metadata.get_all("Provides-Extra", []))
    plain = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert not any(one.startswith(("pyarrow", "duckdb", "torch")) for one in plain)
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in metadata.get_all("Classifier", [])


def test_the_wheel_runs_without_the_repository(built: Path, tmp_path: Path) -> None:
    """Its own files alone: the demo's tasks, the scripted session, the shipped model and the page are found."""
    with zipfile.ZipFile(built / WHEEL) as wheel:
        wheel.extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from rolltape.cli import run"
    commands = [
        ["demo", "--scripted"],
        ["demo", "--tasks", "tasks"],
        ["collect", "tasks/problem.jsonl", "--limit", "1", "-g", "1", "--force-no-thinking"],
        ["view", "runs/collected", "--static", "page"],
    ]
    check = (
        f"{program}\nimport rolltape\nassert rolltape.__file__.startswith({str(tmp_path)!r})\n"
        f"for command in {commands!r}:\n    assert run(command) == 0, command"
    )
    done = subprocess.run([sys.executable, "-P", "-c", check], cwd=empty, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (empty / "page").is_dir()
