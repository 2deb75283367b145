"""Benchmarks' figures in README and on pages are those of benchmarks/results.json, with machine and date."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.results import markdown

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results.json").read_text())
# By page: what is said of a figure, the benchmark, and the figure's name there.
QUOTED: dict[str, list[tuple[str, str, str]]] = {
    "README.md": [
        (r"([\d.]+) ms if short", "gateway", "our CPU a turn, small body"),
        (r"([\d.]+) ms to continue 66 KiB", "gateway", "our CPU a turn, 66 KiB, bridged"),
        (r"([\d.]+) and [\d.]+ times that of rllm-model-gateway", "gateway", "our CPU / theirs, small body"),
        (r"[\d.]+ and ([\d.]+) times that of rllm-model-gateway", "gateway", "our CPU / theirs, 66 KiB, bridged"),
        (r"([\d.]+) MB per 1,000 turns", "gateway", "memory's growth per 1,000 turns"),
        (r"indexed in ([\d.]+) s", "view", "the whole index from scratch"),
        (r"sorted in ([\d.]+) ms", "view", "sorted by task"),
        (r"([\d.]+) bytes a token", "tokens", "on disk"),
    ],
    "docs/reference/engine.md": [
        (r"grew ([\d.]+) times as fast as with transformers", "engine", "alone, against transformers"),
        (r"64 at once ([\d.]+) times as fast", "engine", "64 at once, against transformers"),
        (r"began ([\d.]+) times sooner", "engine", "first token of a second turn, 2,000 tokens"),
    ],
    "docs/how-to/collect/sandbox.md": [
        (r"([\d.]+) times as long as `podman", "containers", "the container of an attempt / podman run"),
        (r"and ([\d.]+) times with a check in it", "containers", "with a check in it / podman run"),
    ],
    "docs/how-to/trackers.md": [
        (r"for ([\d.]+) ms with `show_step`", "tracking", "show_step, 1000 rollouts: the training thread"),
        (r"it takes ([\d.]+) ms", "tracking", "show_batch, 1000 rollouts: the training thread"),
    ],
}
# These name a benchmark without its figures, or figures of another machine.
NOT_HELD = ("docs/architecture.md", "docs/how-to/operate-the-gateway.md", "docs/how-to/train/tokens.md")


@pytest.mark.parametrize("page", QUOTED)
def test_a_page_quotes_what_was_measured(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    for said, benchmark, name in QUOTED[page]:
        (quoted,) = re.findall(said, text)
        (measured,) = (one["measured"] for one in RESULTS[benchmark]["figures"] if one["what"] == name)
        decimals = len(quoted.partition(".")[2])
        assert quoted == f"{measured:.{decimals}f}", (page, name)
        assert RESULTS[benchmark]["date"] in text, (page, benchmark)
        assert RESULTS[benchmark]["machine"].partition(",")[0] in text, (page, benchmark)


def test_the_page_of_results_is_made_of_the_results() -> None:
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == markdown(RESULTS)


def test_every_page_that_names_a_benchmark_is_held_to_it() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    naming = {str(page.relative_to(ROOT)) for page in pages if "python -m benchmarks" in page.read_text()}
    assert naming == {*QUOTED, *NOT_HELD}
