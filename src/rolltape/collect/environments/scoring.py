"""What an attempt is worth: when it ran into a limit, and when a Python function says so."""

from collections.abc import Mapping
from typing import Literal

from rolltape.collect.environments.prompts import Prompted
from rolltape.collect.environments.protocol import Score
from rolltape.records.jsonable import as_float
from rolltape.records.rollout import StopReason

Worth = float | Literal["check"]

_FINISHED = (StopReason.COMPLETED, StopReason.TOOL_STOPPED)


class Rewarded(Prompted, frozen=True, kw_only=True):
    """Fields of a task that is rewarded."""

    # The reward of an attempt that ran into a limit (a time-out, too many turns, an overflow, calls that cannot be
    # read), for all of them or by stop reason; "check": what it left is looked at as if it had finished.
    unfinished: Worth | dict[StopReason, Worth] = 0.0


def score_of_unfinished(fields: Rewarded, stop_reason: StopReason) -> Score | None:
    """The score of an attempt that ran into a limit; None: it did not, or what it left is to be looked at."""
    if stop_reason in _FINISHED:
        return None
    given = fields.unfinished
    worth = given.get(stop_reason, 0.0) if isinstance(given, dict) else given
    return None if worth == "check" else Score(reward=worth, reward_data={"unfinished": str(stop_reason)})


def score_from(value: object, where: str) -> Score:
    """What a function returned as a score: a Score, a number, a truth value, or an object.

    Of an object, `reward` and `terms` are the score's own, and the rest goes into its reward_data.
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
