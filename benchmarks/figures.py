"""Figures against their targets, and the table that they are printed in."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Figure(NamedTuple):
    """One measured number. `at_most` says on which side of the target it has to lie; no target: it is told only."""

    what: str
    measured: float
    unit: str
    target: float | None = None
    at_most: bool = True
    note: str = ""

    @property
    def reached(self) -> bool:
        if self.target is None:
            return True
        return self.measured <= self.target if self.at_most else self.measured >= self.target


Benchmark = Callable[[], Iterable[Figure]]


def shortest_s(work: Callable[[], object], times: int) -> float:
    """The seconds of the quickest of several runs: the one that was disturbed least."""
    return min(seconds(work) for _ in range(times))


def seconds(work: Callable[[], object]) -> float:
    """The seconds that one run takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(benchmarks: dict[str, Benchmark], arguments: list[str] | None = None) -> None:
    """Run the benchmarks asked for and print their figures; with --strict a missed target exits with 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="*", choices=[*benchmarks, []], help="all of them if none is named")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    asked = parser.parse_args(arguments)
    missed = 0
    for name in asked.which or benchmarks:
        figures = list(_progress(name, benchmarks[name]()))
        Console().print(_table(name, figures))
        missed += sum(not figure.reached for figure in figures)
    sys.exit(1 if missed and asked.strict else 0)


def _progress(name: str, figures: Iterable[Figure]) -> Iterator[Figure]:
    print(f"{name} …", file=sys.stderr)
    yield from figures


def _table(name: str, figures: Iterable[Figure]) -> Table:
    table = Table("figure", "measured", "target", "", "note", title=name, title_justify="left")
    for figure in figures:
        sign = "≤" if figure.at_most else "≥"
        target = "" if figure.target is None else f"{sign} {figure.target:,g} {figure.unit}"
        verdict = "" if figure.target is None else "reached" if figure.reached else "MISSED"
        table.add_row(figure.what, f"{_short(figure.measured)} {figure.unit}", target, verdict, figure.note)
    return table


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
