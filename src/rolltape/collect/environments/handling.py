"""What is done about calls that cannot be read and tools that fail: the policy that a task states, and its count."""

from collections import Counter
from typing import Annotated, Literal

import msgspec

from rolltape.collect.environments.checks import Checked

Then = Literal["tell", "end"]


class Handling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tell` the model what was wrong and go on, or `end` the attempt."""

    then: Then = "tell"
    reward: float = 0.0  # each time
    at_most: Annotated[int, msgspec.Meta(ge=0)] | None = None  # telling ends with one more; None: no limit


class Handled(Checked, frozen=True, kw_only=True):
    """Fields of a task that states a policy."""

    malformed: Then | Handling = "tell"  # calls that cannot be read, or do not fit their tool
    tool_error: Then | Handling = "tell"  # what a tool's function raises


class Mishaps:
    """What went wrong in one attempt so far."""

    def __init__(self, fields: Handled) -> None:
        self._handling = {
            "malformed": _handling(fields.malformed),
            "tool_error": _handling(fields.tool_error),
        }
        self.counts: Counter[str] = Counter()
        self.ended_by: str | None = None  # the kind that ended the attempt

    def count(self, kind: str) -> Handling:
        """Count one more; `ended_by` says afterwards whether it was the last."""
        handling = self._handling[kind]
        self.counts[kind] += 1
        spent = handling.at_most is not None and self.counts[kind] > handling.at_most
        if handling.then == "end" or spent:
            self.ended_by = kind
        return handling


def _handling(given: Then | Handling) -> Handling:
    return given if isinstance(given, Handling) else Handling(then=given)
