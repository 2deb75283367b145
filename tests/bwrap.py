"""For tests of bubblewrap: they are skipped where it is not installed, and fail there with CI=true."""

import shutil

import pytest


def needs_bwrap() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
