"""Run the fast tests on each supported Python that is found, or on the lowest versions of dependencies.

`make test-pythons` and `make test-lowest`. Each has an environment of its own with the extra `query`, and runs tests
that need no more: all of the tape, the samples, the APIs, the exports and the command line, and a gateway and a
collection from end to end. A Python that is not found is listed, and fails nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
# What the tests below need beside the package itself.
TOOLS = ("hypothesis>=6.100", "jsonschema>=4.20", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "pyyaml")
TESTS = (
    *("tests/records", "tests/tape", "tests/tree", "tests/samples", "tests/traces", "tests/groups", "tests/tiny"),
    *("tests/export", "tests/prompts", "tests/wire", "tests/demo", "tests/test_extras.py", "tests/deploy", "tests/cli"),
    *("tests/gateway/test_gateway_sessions.py", "tests/collect/test_collect_command.py"),
)
# These need clients, datasets, inspect-ai or scipy besides.
LEFT_OUT = (
    *("tests/export/test_dataset_push.py", "tests/export/test_export_conversations.py"),
    *("tests/export/test_round_trip_importers.py", "tests/tiny/test_sampling.py"),
    *("tests/wire/test_wire_gemini.py", "tests/wire/test_wire_messages.py"),
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--lowest", action="store_true", help="the lowest versions, on the lowest Python found")
    arguments.add_argument("versions", nargs="*", default=VERSIONS, help="Pythons: 3.11 3.12 3.13")
    asked = arguments.parse_args()
    found = {version: python for version in asked.versions if (python := find_python(version)) is not None}
    if missing := [version for version in asked.versions if version not in found]:
        print(f"not found here, and not tested: Python {', '.join(missing)}", flush=True)
    failed = []
    for version, python in list(found.items())[: 1 if asked.lowest else None]:
        name = "lowest" if asked.lowest else version
        own = install(python, ROOT / f".venv-{name}", lowest_versions() if asked.lowest else [])
        print(f"Python {version}: {python}", flush=True)
        command = [str(own), "-m", "pytest", "--fast", "-n", "2", *TESTS, *(f"--ignore={one}" for one in LEFT_OUT)]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "CI": ""}).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def find_python(version: str) -> str | None:
    """An interpreter of a version that can make environments: on the path, or among those of pyenv."""
    by_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    candidates = [shutil.which(f"python{version}"), *map(str, reversed(by_pyenv))]
    script = f"import sys, venv, sqlite3, ssl; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
    for python in filter(None, candidates):
        if subprocess.run([python, "-c", script], capture_output=True).returncode == 0:
            return python
    return None


def install(python: str, folder: Path, pinned: list[str]) -> Path:
    """The interpreter of an environment with the package and what its tests need."""
    own, marker = folder / "bin" / "python", folder / ".installed"
    project = ROOT / "pyproject.toml"
    if not marker.exists() or marker.stat().st_mtime < project.stat().st_mtime:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pinned))
        command = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-c", str(constraints), "-e", f"{ROOT}[query]", *TOOLS], check=True)
        marker.touch()
    return own


def lowest_versions() -> list[str]:
    """The direct dependencies of the plain install and of the extras that are tested, each at its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = [*project["dependencies"], *extras["parquet"], *extras["query"]]
    return [re.sub(r">=", "==", bound) for bound in bounds if ">=" in bound]


if __name__ == "__main__":
    main()
