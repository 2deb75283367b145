"""The table of results that README and docs quote: the latest figures of each benchmark, with machine and date.

`results.json` holds them, and `RESULTS.md` shows them. A benchmark that is run again replaces its own figures alone.
"""

import json
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, short_number
from rolltape import __version__

_HEADING = """\
# Benchmarks

`make bench` writes this page: the latest figures of each benchmark, the machine that they were measured on, and how
busy it was. `make bench BENCH="view"` runs one again. A load well above the number of processors means that other work
slowed the figures down.
"""


def write_results(folder: Path, name: str, figures: Sequence[Figure], command: str) -> None:
    """Put the figures of one benchmark in the place of its earlier ones."""
    file = folder / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results[name] = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "version": __version__,
        "load": round(os.getloadavg()[0], 1),
        "command": command,
        "figures": [figure._asdict() for figure in figures],
    }
    file.write_text(json.dumps(results, indent=1) + "\n")
    (folder / "RESULTS.md").write_text(markdown(results))


def markdown(results: dict[str, Any]) -> str:
    """The page, its benchmarks in the order of their names."""
    parts = [_HEADING]
    for name, result in sorted(results.items()):
        lines = [
            f"## {name}\n",
            f"`{result['command']}`, {result['date']}, rolltape {result['version']}, {result['machine']}, "
            f"load {result['load']}\n",
            "| figure | measured | target | note |",
            "| --- | --- | --- | --- |",
            *(_row(Figure(**figure)) for figure in result["figures"]),
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(figure: Figure) -> str:
    sign = "≤" if figure.at_most else "≥"
    target = "" if figure.target is None else f"{sign} {figure.target:,g} {figure.unit}".rstrip()
    missed = "" if figure.reached else " (missed)"
    cells = (figure.what, f"{short_number(figure.measured)} {figure.unit}", target + missed, figure.note)
    return f"| {' | '.join(cell.replace('|', '/').strip() for cell in cells)} |"


def machine() -> str:
    """Processors, memory, system and Python, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpus = os.cpu_count() or 0
    model = platform.machine()
    if (info := Path("/proc/cpuinfo")).exists() and (found := re.search(r"model name\s*: (.*)", info.read_text())):
        model = found[1].strip()
    python = platform.python_version()
    return f"{cpus} × {model}, {memory:.0f} GiB, {platform.system()}, Python {python}"
