"""constraints-dev.txt pins everything that development asks for, at versions that pyproject.toml allows."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked_for(extra: str) -> Iterator[Requirement]:
    """What an extra asks for, by way of other extras too."""
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "rolltape":
            for other in requirement.extras:
                yield from asked_for(other)
        else:
            yield requirement


def test_the_lock_pins_what_development_asks_for() -> None:
    lines = (ROOT / "constraints-dev.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    wanted = [*map(Requirement, PROJECT["dependencies"]), *asked_for("dev")]
    makefile = (ROOT / "Makefile").read_text()
    wanted += map(Requirement, re.findall(r"'([\w-]+==[\w.]+)'", makefile[: makefile.index("setup: ")]))
    wrong = [
        str(one)
        for one in wanted
        if not one.specifier.contains(versions.get(canonicalize_name(one.name), "0"), prereleases=True)
    ]
    assert wrong == [], "make lock writes it again"
