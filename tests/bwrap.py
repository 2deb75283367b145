"""For tests of bubblewrap: they are skipped where it does not work, and fail there with CI=true."""

import shutil
import subprocess
from functools import cache

import pytest


def needs_bwrap() -> None:
    if (why := _why_not()) is not None:
        pytest.skip(f"bubblewrap does not work here: {why}")


@cache
def _why_not() -> str | None:
    if shutil.which("bwrap") is None:
        return "it is not installed"
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None
