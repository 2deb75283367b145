"""What the id of a turn names: rollout, try, session and sequence number."""

import re
from typing import NamedTuple

from rolltape.errors import RecordError
from rolltape.records.jsonable import shown

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_TURN_ID = re.compile(rf"(.+)\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}")


class TurnPlace(NamedTuple):
    """What a turn's id names."""

    id: str
    rollout: str
    try_index: int
    ordinal: int
    sequence: int

    @property
    def key(self) -> tuple[str, int]:
        return (self.rollout, self.try_index)


def turn_place(turn: object) -> TurnPlace:
    """The place of a turn, by its id."""
    parts = _TURN_ID.fullmatch(turn) if isinstance(turn, str) else None
    if parts is None:
        raise RecordError(
            f"turn {shown(turn)}: not a turn's id; give the id of a Turn, which names rollout, try and session"
        )
    return TurnPlace(parts[0], parts[1], int(parts[2]), int(parts[3]), int(parts[4]))


def turn_of(turn: object, rollout: str, try_index: int | None) -> TurnPlace:
    """The place of a turn that is to be one of this rollout, and of this try unless that is None."""
    place = turn_place(turn)
    if place.rollout != rollout or try_index not in (None, place.try_index):
        whose = f"turn {turn} of rollout {rollout}"
        raise RecordError(f"{whose}: that turn belongs to try {place.try_index} of rollout {place.rollout}")
    return place
