"""`make bench` writes one page of figures; a benchmark that is run again replaces its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.figures import Figure, main


def growth(rollouts: int = 5) -> Iterator[Figure]:
    yield Figure("time for a turn", rollouts / 10, "ms", target=1.0)
    yield Figure("turns a second", 1234.5, "", target=2000, at_most=False, note="one process | one core")


def disk() -> Iterator[Figure]:
    yield Figure("bytes a token", 11.0, "B")


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main({"growth": growth, "disk": disk}, list(arguments))
    assert ended.value.code == 0


def test_figures_are_written_with_machine_and_date_and_replaced_by_name(tmp_path: Path) -> None:
    run("--write", str(tmp_path))
    first = (tmp_path / "RESULTS.md").read_text()
    assert "| time for a turn | 0.5 ms | ≤ 1 ms |  |" in first
    assert "| turns a second | 1,234 | ≥ 2,000 (missed) | one process / one core |" in first
    assert first.index("## disk") < first.index("## growth")
    assert " GiB, " in first
    run("growth", "--rollouts", "20", "--write", str(tmp_path))
    second = (tmp_path / "RESULTS.md").read_text()
    assert "| time for a turn | 2 ms | ≤ 1 ms (missed) |  |" in second
    assert "`python -m benchmarks growth --rollouts 20`" in second
    assert second[: second.index("## growth")] == first[: first.index("## growth")]


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("disk")
    assert list(tmp_path.iterdir()) == []
