"""Tests that are coroutines; and with CI=true nothing is skipped: what is missing there is a failure."""

import asyncio
import inspect
import os
import tempfile
from collections.abc import Generator
from typing import TypeVar

import hypothesis
import pytest

# Machines are noisy: how long an example takes says nothing.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# What tests log to trackio stays out of the home directory; trackio looks at this when it is first imported.
_TRACKIO = tempfile.TemporaryDirectory(prefix="trackio-", ignore_cleanup_errors=True)
os.environ["TRACKIO_DIR"] = _TRACKIO.name

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
