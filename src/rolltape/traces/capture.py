"""Which rollouts are traced: none, all, or a share chosen by their ids."""

import enum

from rolltape.errors import RecordError
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import shown


class Capture(enum.StrEnum):
    """How many rollouts a trace is recorded of."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"


def captures(rollout: str, capture: Capture | str, fraction: float | None) -> bool:
    """Whether a rollout is traced. Of those sampled the id decides: the same ones on every machine and every try."""
    if capture not in list(Capture):
        known = ", ".join(Capture)
        raise RecordError(f"rollout {rollout}: {shown(capture)} is no Capture; known are {known}")
    if capture != Capture.SAMPLED:
        if fraction is not None:
            raise RecordError(f"rollout {rollout}: fraction {shown(fraction)} goes with capture 'sampled' alone")
        return capture == Capture.ALL
    if fraction is None or not 0 <= fraction <= 1:
        raise RecordError(
            f"rollout {rollout}: capture 'sampled' with fraction {shown(fraction)}; give one between 0 and 1"
        )
    return int.from_bytes(digest_of("trace", rollout)[:8]) < fraction * 2**64
