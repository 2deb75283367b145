"""A forward pass of a model folder on this machine, by numpy and by transformers."""

from pathlib import Path

import numpy as np
import pytest

from rolltape.doctor.engine import local_pass
from rolltape.doctor.engine.local_pass import local_scorer, why_no_pass
from rolltape.tiny import shipped_model

PROMPT, REPLY = [400, 500, 600, 700], [800, 900, 1000]


def test_what_cannot_be_run_here_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_pass(shipped_model()) is None
    assert why_no_pass(tmp_path) == "the folder has no weights"
    monkeypatch.setattr(local_pass, "LARGEST", 2**10)
    assert "more than" in (why_no_pass(shipped_model()) or "")


async def test_transformers_gives_what_numpy_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    async with local_scorer(shipped_model()) as score:
        by_numpy = await score(PROMPT, REPLY)
    monkeypatch.setattr(local_pass, "LARGEST_TINY", 0)
    async with local_scorer(shipped_model()) as score:
        by_transformers = await score(PROMPT, REPLY)
    np.testing.assert_allclose(by_transformers, by_numpy, atol=1e-3)
