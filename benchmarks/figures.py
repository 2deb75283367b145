"""Figures against their targets, and the table that they are printed in."""

import argparse
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
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


Benchmark = Callable[..., Iterable[Figure]]


def shortest_s(work: Callable[[], object], times: int) -> float:
    """The seconds of the quickest of several runs: the one that was disturbed least."""
    return min(seconds(work) for _ in range(times))


def seconds(work: Callable[[], object]) -> float:
    """The seconds that one run takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(benchmarks: dict[str, Benchmark], arguments: list[str] | None = None) -> None:
    """Run the benchmarks asked for and print their figures; with --strict a missed target exits with 1.

    A benchmark whose function has a parameter with the name of an option gets what the option says.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="*", choices=[*benchmarks, []], help="all of them if none is named")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument(
        "--rollouts", type=int, metavar="N", help="size of the runs that collect and view are measured on"
    )
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="a run that view is measured on, instead of a fresh one"
    )
    parser.add_argument("--part", metavar="PART", help="the part of gateway that is run, such as workers or soak")
    parser.add_argument("--workers", metavar="N,N", help="the numbers of workers that gateway compares: 1,2 by default")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="put the figures into RESULTS.md and results.json of this folder"
    )
    asked = parser.parse_args(arguments)
    missed = 0
    for name in asked.which or benchmarks:
        taken = inspect.signature(benchmarks[name]).parameters
        options = {option: vars(asked)[option] for option in ("rollouts", "run", "part", "workers") if option in taken}
        given = {option: value for option, value in options.items() if value is not None}
        figures = list(_with_progress(name, benchmarks[name](**given)))
        Console().print(_table(name, figures))
        if asked.write is not None:
            from benchmarks.results import write_results

            spelled = [f"--{option} {value}" for option, value in given.items()]
            write_results(asked.write, name, figures, " ".join(["python -m benchmarks", name, *spelled]))
        missed += sum(not figure.reached for figure in figures)
    sys.exit(1 if missed and asked.strict else 0)


def _with_progress(name: str, figures: Iterable[Figure]) -> Iterator[Figure]:
    """Print each figure on stderr as it comes, with the machine's load, which tells what else was running."""
    print(f"{name} …", file=sys.stderr)
    for figure in figures:
        print(
            f"  {figure.what}: {short_number(figure.measured)} {figure.unit} (load {os.getloadavg()[0]:.1f})",
            file=sys.stderr,
        )
        yield figure


def _table(name: str, figures: Iterable[Figure]) -> Table:
    table = Table("figure", "measured", "target", "", "note", title=name, title_justify="left")
    for figure in figures:
        sign = "≤" if figure.at_most else "≥"
        target = "" if figure.target is None else f"{sign} {figure.target:,g} {figure.unit}"
        verdict = "" if figure.target is None else "reached" if figure.reached else "MISSED"
        table.add_row(figure.what, f"{short_number(figure.measured)} {figure.unit}", target, verdict, figure.note)
    return table


def short_number(number: float) -> str:
    """A figure in at most three digits, or whole."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
