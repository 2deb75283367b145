"""The result of a check of `rolltape doctor`: what was measured, a verdict, and what to change."""

import enum
from collections.abc import Mapping
from typing import Any

import msgspec


class Severity(enum.StrEnum):
    """The verdicts, from good to bad."""

    OK = "ok"
    NOTE = "note"  # worth knowing, no problem
    WARNING = "warning"  # it works, but costs speed, data or knowledge
    FAULT = "fault"  # training does not use what was sampled, or is impossible


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a diagnosis."""

    part: str = ""  # of the stack: engine, model, session, agent, gateway
    check: str  # its name, in the kit and on the screen
    verdict: Severity
    measured: str
    advice: str | None = None  # what to change, or None
    figures: Mapping[str, Any] = {}  # the numbers behind `measured`, for scripts


def words(name: str) -> str:
    """A name as words: `after_temperature` as "after temperature"."""
    return str(name).replace("_", " ")


# Results of a check without its name, which `named` adds.


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
