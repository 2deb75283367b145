"""What a check of `rolltape doctor` returns: what was measured, a verdict, and what to change."""

import enum
from collections.abc import Mapping
from typing import Any

import msgspec


class Severity(enum.StrEnum):
    """How bad a result is, from good to bad."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    WARNING = "warning"  # it works, and costs speed, data or knowledge
    FAULT = "fault"  # what is trained is not what was sampled, or nothing can be trained


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a diagnosis."""

    part: str = ""  # of the stack: engine, model, session, agent, gateway
    check: str  # its name, in the kit and on the screen
    verdict: Severity
    measured: str
    advice: str | None = None  # what to change; None: nothing
    figures: Mapping[str, Any] = {}  # the numbers behind `measured`, for scripts


def words(name: str) -> str:
    """A name in words: `after_temperature` as "after temperature"."""
    return str(name).replace("_", " ")


# Results of a check, whose name whoever runs it adds with `named`.


def ok(measured: str, /, **figures: Any) -> CheckResult:
    """A result with nothing to change."""
    return CheckResult(check="", verdict=Severity.OK, measured=measured, figures=figures)


def note(measured: str, advice: str | None = None, /, **figures: Any) -> CheckResult:
    """A result that is worth knowing."""
    return CheckResult(check="", verdict=Severity.NOTE, measured=measured, advice=advice, figures=figures)


def warning(measured: str, advice: str, /, **figures: Any) -> CheckResult:
    """A result that costs speed, data or knowledge."""
    return CheckResult(check="", verdict=Severity.WARNING, measured=measured, advice=advice, figures=figures)


def fault(measured: str, advice: str, /, **figures: Any) -> CheckResult:
    """A result that makes training wrong or impossible."""
    return CheckResult(check="", verdict=Severity.FAULT, measured=measured, advice=advice, figures=figures)


def named(check: str, result: CheckResult) -> CheckResult:
    """A result with the name of its check, unless it has one."""
    return msgspec.structs.replace(result, check=result.check or check)
