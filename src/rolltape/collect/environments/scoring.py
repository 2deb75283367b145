"""Scores: of attempts that ran into a limit, from a user's function, and the text or file that is scored."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rolltape.collect.environments.protocol import Ended, Score
from rolltape.collect.environments.task_fields import PromptFields
from rolltape.records.jsonable import as_float
from rolltape.records.rollout import StopReason

Worth = float | Literal["check"]

_FINISHED = (StopReason.COMPLETED, StopReason.TOOL_STOPPED)
_MAX_FILE_BYTES = 16 * 2**20


class RewardFields(PromptFields, frozen=True, kw_only=True):
    """Fields of a task that is rewarded."""

    # The reward of an attempt that ran into a limit (a time-out, too many turns, an overflow, calls that cannot be
    # read), for all of them or by stop reason; "check": what it left is scored as if it had finished.
    unfinished: Worth | dict[StopReason, Worth] = 0.0


def score_unfinished(fields: RewardFields, stop_reason: StopReason) -> Score | None:
    """The score of an attempt that ran into a limit; None if it did not, or if what it left is to be scored."""
    if stop_reason in _FINISHED:
        return None
    given = fields.unfinished
    worth = given.get(stop_reason, 0.0) if isinstance(given, dict) else given
    return None if worth == "check" else Score(reward=worth, reward_data={"unfinished": str(stop_reason)})


def parse_score(value: object, where: str) -> Score:
    """What a function returned as a score: a Score, a number, a truth value, or an object.

    `reward` and `terms` of an object are the score's own. Its other fields go into `reward_data`.
    """
    if isinstance(value, Score):
        return value
    if isinstance(value, Mapping):
        given = dict(value)
        reward = given.pop("reward", None)
        terms = {str(name): as_float(term, f"{where}: {name}") for name, term in given.pop("terms", {}).items()}
        return Score(
            reward=None if reward is None else as_float(reward, f"{where}: the reward"), terms=terms, reward_data=given
        )
    return Score(reward=as_float(value, f"{where}: the reward"))


class Submission(msgspec.Struct, frozen=True):
    """The text to score, or why there is none."""

    text: str = ""
    missing: str | None = None


def read_submission(ended: Ended, file: str | None) -> Submission:
    """The last text of an agent, or the text of a file that it left. Links out of its directory are not followed."""
    if file is None:
        return Submission(ended.text)
    if ended.folder is None:
        return Submission(missing=f"{file} is to be checked, and this agent has no working directory")
    path = os.path.realpath(ended.folder / file)
    if not Path(path).is_relative_to(os.path.realpath(ended.folder)):
        return Submission(missing=f"{file} leads out of the working directory")
    try:
        # A plain open would wait for the writer of a pipe.
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
