"""Coroutines as tests, markers for what tests need, and `--fast`; with CI=true nothing is skipped.

A test that is skipped with CI=true fails instead: something that it needs is missing there.
"""

import asyncio
import inspect
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from commands import Cli, Result, rows
from json_lines import check_lines
from markers import NOT_FAST, item_markers, module_markers

_FAST_EXAMPLES = 20  # of a property, with --fast
# Where Hypothesis keeps the settings of a test: it has no other way to lower them from outside.
_SETTINGS = "_hypothesis_internal_use_settings"

# Machines are noisy: how long an example takes says nothing.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell that runs the tests in the background ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests log to trackers stays out of the home directory; they look at this when they are first imported.
_TRACKERS = tempfile.TemporaryDirectory(prefix="trackers-", ignore_cleanup_errors=True)
for _variable in ("TRACKIO_DIR", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
    os.environ[_variable] = _TRACKERS.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out what is slow or needs agents, a browser, npm, containers, Ray or torch; try fewer examples",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast, do not even import a file all of whose tests are left out."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.getoption("--fast") and is_test and module_markers(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item_markers(item):
            item.add_marker(marker)
    if config.getoption("--fast"):
        left_out = [item for item in items if NOT_FAST & {marker.name for marker in item.iter_markers()}]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
        for item in items:
            _limit_examples(item)


def _limit_examples(item: pytest.Item) -> None:
    test = getattr(item, "obj", None)
    given = getattr(test, _SETTINGS, None)
    if given is not None and given.max_examples > _FAST_EXAMPLES:
        limited = hypothesis.settings(given, max_examples=_FAST_EXAMPLES)
        setattr(getattr(test, "__func__", test), _SETTINGS, limited)


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _counted((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _counted((yield))


def _counted(report: Report) -> Report:
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI=true does not allow: {report.longrepr}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process. What it prints as JSON is what the reference says."""
    from rolltape.cli import run as rolltape_command

    def called(*arguments: object) -> Result:
        capsys.readouterr()
        code = rolltape_command([str(argument) for argument in arguments])
        result = Result(code, *capsys.readouterr())
        if "--json" in arguments:
            check_lines(str(arguments[0]), rows(result))
        return result

    return called
