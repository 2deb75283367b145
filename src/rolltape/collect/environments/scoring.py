"""Score attempts: by the checkers of a task, by a user's function, or as attempts that ran into a limit."""

import asyncio
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import regex

from rolltape.collect.environments.protocol import NEEDS_PROGRAM, Ended, Score
from rolltape.collect.environments.task_fields import PromptFields, check_path, check_prompt
from rolltape.collect.functions import PREFIX, call_function, current_time_limit, function_named
from rolltape.errors import CollectError, TaskError
from rolltape.records.jsonable import as_float, shown
from rolltape.records.rollout import StopReason

Worth = float | Literal["check"]

_FINISHED = (StopReason.COMPLETED, StopReason.TOOL_STOPPED)
_MAX_FILE_BYTES = 16 * 2**20
_KINDS = ("exact", "number", "regex", "function", "command")
_CHECK_S = 300.0
_PATTERN_S = 10.0  # for a task's pattern on a reply: backtracking may take forever on a text that a policy wrote for it
_OUTPUT = 2000  # characters of the end of a command's output
# A minus after a digit or a bracket is an operator.
_NUMBER = re.compile(
    r"(?:(?<![0-9)\]])[-−])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
)


class RewardFields(PromptFields, frozen=True, kw_only=True):
    """Fields of a task that is rewarded."""

    # The reward of an attempt that ran into a limit (a time-out, too many turns, an overflow, unreadable calls), for
    # all limits or by stop reason; "check": it is scored as if it had finished.
    unfinished: Worth | dict[StopReason, Worth] = 0.0


class SubmissionFields(RewardFields, frozen=True, kw_only=True):
    """Fields of a task whose reply a judge or a function reads."""

    file: str | None = None  # of the working directory, read instead of the last text

    def check(self) -> None:
        """Raise TaskError for a task without a prompt, or with a file outside the working directory."""
        check_prompt(self)
        if self.file is not None:
            check_path(self.file, "its file")


def score_unfinished(fields: RewardFields, stop_reason: StopReason) -> Score | None:
    """The score of an attempt that ran into a limit; None if it did not, or if it is scored as usual."""
    if stop_reason in _FINISHED:
        return None
    given = fields.unfinished
    worth = given.get(stop_reason, 0.0) if isinstance(given, dict) else given
    return None if worth == "check" else Score(reward=worth, reward_data={"unfinished": str(stop_reason)})


def parse_score(value: object, where: str) -> Score:
    """A function's result as a score: a Score, a number, a truth value, or an object.

    `reward` and `terms` of an object are the score's own. Its other fields go into `reward_data`.
    """
    if isinstance(value, Score):
        return value
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise CollectError(f"{where}: the result {shown(value)} has no 'reward'; add it, with None for no reward")
        given = dict(value)
        reward = given.pop("reward")
        given_terms = given.pop("terms", None) or {}
        if not isinstance(given_terms, Mapping):
            raise CollectError(f"{where}: terms is {shown(given_terms)}; give an object of numbers")
        terms = {str(name): as_float(term, f"{where}: {name}") for name, term in given_terms.items()}
        return Score(
            reward=None if reward is None else as_float(reward, f"{where}: the reward"), terms=terms, reward_data=given
        )
    return Score(reward=as_float(value, f"{where}: the reward"))


class Submission(msgspec.Struct, frozen=True):
    """The text to score, or why there is none."""

    text: str = ""
    missing: str | None = None


def read_submission(ended: Ended, file: str | None) -> Submission:
    """The last text of an agent, or the text of a file of its directory. Links out of that are not followed."""
    if file is None:
        return Submission(ended.text)
    if ended.folder is None:
        raise CollectError(f"{file} is to be checked, and this agent left no working directory; {NEEDS_PROGRAM}")
    path = os.path.realpath(ended.folder / file)
    if not Path(path).is_relative_to(os.path.realpath(ended.folder)):
        return Submission(missing=f"{file} leads out of the working directory")
    try:
        # A plain open of a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return Submission(missing=f"{file} is not a plain file")
            content = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        return Submission(missing=f"{file} cannot be read: {error.strerror}")
    if len(content) > _MAX_FILE_BYTES:
        return Submission(missing=f"{file} has more than {_MAX_FILE_BYTES} bytes")
    return Submission(content.decode(errors="replace"))


class AnswerCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checker. Exactly one of the first five fields is given, and names its kind."""

    exact: str | None = None  # the whole text, without white space around it
    number: float | None = None  # the last number in the text
    regex: str | None = None  # found anywhere in the text
    function: str | None = None  # "python:module:function", called with the task's entry and the Ended
    command: str | list[str] | None = None  # run in the working directory; right if its exit code is 0
    tolerance: float = 1e-6  # of a number: absolute
    relative_tolerance: float = 0.0  # of a number: as a share of the right one
    ignore_case: bool = False
    extract: str | None = None  # a regular expression: its last match, or the first group of that, is checked
    file: str | None = None  # of the working directory, checked instead of the last text
    files: dict[str, str] = {}  # of a command: written to the working directory before, replacing the agent's files
    keep: list[str] = []  # of a command: files such as "conftest.py" that are not restored from the task
    timeout_s: float | None = None  # of a command, and of a function in a sandbox; None for --score-timeout
    sandbox: bool = True  # of a function: it runs in a sandbox, if the agent did

    @property
    def kind(self) -> str:
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


class CheckFields(RewardFields, frozen=True, kw_only=True):
    """Fields of a task with a reference answer or a checker."""

    answer: Any = None
    check: str | AnswerCheck | list[AnswerCheck] | None = None


def parse_checks(fields: CheckFields) -> tuple[AnswerCheck, ...]:
    """A task's checkers; raises TaskError if it has none, or an invalid one."""
    given = fields.check
    checks = (
        given if isinstance(given, list) else [given if isinstance(given, AnswerCheck) else _check_by_answer(fields)]
    )
    if not checks:
        raise TaskError("its check is an empty list; give at least one checker")
    for check in checks:
        _validate(check)
    return tuple(checks)


async def run_checks(checks: Sequence[AnswerCheck], entry: Mapping[str, Any], ended: Ended) -> Score:
    """Run all checkers. The reward is the lowest of their rewards."""
    scores = [await _run_check(check, entry, ended) for check in checks]
    if len(scores) == 1:
        return scores[0]
    rewards = [score.reward for score in scores if score.reward is not None]
    return Score(
        reward=min(rewards) if len(rewards) == len(scores) else None,
        terms={name: term for score in scores for name, term in score.terms.items()},
        reward_data={"checks": [dict(score.reward_data or {}) for score in scores]},
        ungraded=next((score.ungraded for score in scores if score.ungraded), None),
    )


def last_number(text: str) -> float | None:
    """The last number of a text, with or without commas between thousands."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None


def _check_by_answer(fields: CheckFields) -> AnswerCheck:
    """The checker for `answer`: the one that `check` names, else the one for the type of the answer."""
    how, answer = fields.check, fields.answer
    if isinstance(how, str) and how.startswith(PREFIX):
        return AnswerCheck(function=how)
    if how is not None and how not in ("exact", "number", "regex"):
        raise TaskError(f"its check is {how!r}; there are exact, number, regex, python:module:function, and objects")
    if answer is None:
        wanted = "neither an answer nor a check" if how is None else f"the check {how!r} and no answer"
        raise TaskError(f'it has {wanted}; add "answer" (text or a number), or a "check" that says what is right')
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    if how is None and not is_number and not isinstance(answer, str):
        raise TaskError(f'its answer is of type {type(answer).__name__}; give text or a number, or a "check" for it')
    how = how or ("number" if is_number else "exact")
    if how == "number":
        number = float(answer) if is_number else last_number(str(answer))
        if number is None:
            raise TaskError(
                f"its check is 'number', but there is no number in its answer {answer!r}; correct one of them"
            )
        return AnswerCheck(number=number)
    return AnswerCheck(**{how: str(answer)})  # type: ignore[arg-type]


def _validate(check: AnswerCheck) -> None:
    kinds = [kind for kind in _KINDS if getattr(check, kind) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none of them"
        raise TaskError(f"its check has {has}; give one of {', '.join(_KINDS)}")
    for name in ("regex", "extract"):
        pattern = getattr(check, name)
        try:
            regex.compile(pattern or "")
        except regex.error as error:
            raise TaskError(f"its check.{name} {pattern!r} is not a regular expression: {error}; correct it") from None
    if check.tolerance < 0 or check.relative_tolerance < 0:
        raise TaskError("its check has a tolerance below 0; give 0 or more")
    if check.function is not None:
        function_named(check.function)
    if check.file is not None:
        check_path(check.file, "its check.file")
    for name in check.files:
        check_path(name, "its check.files")
    if check.command is not None and not check.command:
        raise TaskError("its check.command is empty; give a program and its arguments")


async def _run_check(check: AnswerCheck, entry: Mapping[str, Any], ended: Ended) -> Score:
    if check.command is not None:
        return await _run_command(check, check.command, entry, ended)
    if check.function is not None:
        if check.sandbox and ended.checks is not None and ended.checks.is_confined:
            return await ended.checks.call(check.function, entry, ended, timeout_s=_time_limit(check))
        return parse_score(await call_function(function_named(check.function), entry, ended), check.function)
    submission = read_submission(ended, check.file)
    text = submission.text if submission.missing is None else None
    why = submission.missing
    try:
        if text is not None and check.extract is not None:
            text = await asyncio.to_thread(_extract, check.extract, text)
            why = None if text is not None else f"nothing matches {check.extract!r}"
        right, seen = (False, None) if text is None else await asyncio.to_thread(_CHECKERS[check.kind], check, text)
    except TimeoutError:
        why = f"its check's pattern took more than {_PATTERN_S:g} s on a text of {len(text or ''):,} characters"
        raise TaskError(f"{why}; write a pattern that does not backtrack") from None
    data = {"check": check.kind, "wanted": getattr(check, check.kind), "seen": seen, "right": right, "why": why}
    return Score(reward=float(right), reward_data={name: value for name, value in data.items() if value is not None})


def _time_limit(check: AnswerCheck) -> float:
    return check.timeout_s or current_time_limit() or _CHECK_S


async def _run_command(check: AnswerCheck, command: str | list[str], entry: Mapping[str, Any], ended: Ended) -> Score:
    end = await ended.run(
        command, files=check.files, shipped=entry.get("files") or {}, keep=check.keep, timeout_s=_time_limit(check)
    )
    right = end.exit_code == 0 and not end.timed_out
    data = {"check": "command", "right": right, "exit_code": end.exit_code, "signal": end.signal}
    data |= {"timed_out": end.timed_out or None, "set_aside": list(end.set_aside) or None}
    data |= {"stdout": end.stdout[-_OUTPUT:] or None, "stderr": end.stderr[-_OUTPUT:] or None}
    return Score(reward=float(right), reward_data={name: value for name, value in data.items() if value is not None})


def _extract(pattern: str, text: str) -> str | None:
    found = list(regex.finditer(pattern, text, timeout=_PATTERN_S, concurrent=True))
    return None if not found else found[-1][1 if found[-1].re.groups else 0]


def _check_exact(check: AnswerCheck, text: str) -> tuple[bool, object]:
    wanted, seen = (check.exact or "").strip(), text.strip()
    same = wanted.casefold() == seen.casefold() if check.ignore_case else wanted == seen
    return same, seen


def _check_number(check: AnswerCheck, text: str) -> tuple[bool, object]:
    seen, wanted = last_number(text), check.number or 0.0
    if seen is None:
        return False, None
    return abs(seen - wanted) <= max(check.tolerance, check.relative_tolerance * abs(wanted)), seen


def _check_regex(check: AnswerCheck, text: str) -> tuple[bool, object]:
    flags = regex.IGNORECASE if check.ignore_case else 0
    found = regex.search(check.regex or "", text, flags, timeout=_PATTERN_S, concurrent=True)
    return found is not None, None if found is None else found[0]


_CHECKERS: dict[str, Callable[[AnswerCheck, str], tuple[bool, object]]] = {
    "exact": _check_exact,
    "number": _check_number,
    "regex": _check_regex,
}
