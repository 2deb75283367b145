"""Collections of one attempt by an agent that is a script, in a sandbox."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bwrap import needs_bwrap
from collecting import collected, instant, rollouts, task_file
from rolltape.collect.results import RolloutResult
from rolltape.collect.sandboxes import ContainerSettings, SandboxKind

KINDS = (SandboxKind.BWRAP, pytest.param(SandboxKind.PODMAN, marks=pytest.mark.containers), SandboxKind.NONE)


def python_of(sandbox: SandboxKind) -> str:
    """The Python of a sandbox: of this machine, or of the image."""
    return "python3" if sandbox.has_images else sys.executable


async def attack(
    place: Path, script: str, task: dict[str, Any], *, sandbox: SandboxKind = SandboxKind.BWRAP, **settings: Any
) -> list[RolloutResult]:
    """Collect one attempt of an agent that is a script."""
    if sandbox.has_images:
        from podman import needs_podman

        settings = {"container": ContainerSettings(image=needs_podman()), **settings}
    else:
        needs_bwrap()
    (place / "attacker.py").write_text(script)
    settings = {"sandbox": sandbox, "group_size": 1, "timeout_s": 60.0, **settings}
    async with instant() as engine:
        port = int(engine.url.rpartition(":")[2])
        given = {"id": "t", "prompt": "What is 3 + 1?", "answer": 4, "engine": port, "run": str(place / "run")} | task
        source = task_file(place, [given])
        agent = f"command:{python_of(sandbox)} {place / 'attacker.py'}"
        return await collected(source, place / "run", engine, agent=agent, **settings)


def printed(place: Path) -> str:
    (one,) = rollouts(place / "run")
    folder = place / "run" / "logs" / one.id
    assert (folder / "stderr.txt").read_text() == ""
    return (folder / "stdout.txt").read_text()
