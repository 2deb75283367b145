"""What the one that follows a run tells the one that answers for it. Applied in any order, twice or once, they come to
the same: of each kind of statement the latest counts."""

from typing import Any

import msgspec

from rolltape.view.summary import Summary

Key = tuple[str, int]  # rollout and try


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a rollout lies: its row in a source, and between which numbers its sessions and its own events are."""

    source: str
    row: int
    sessions: tuple[int, int] = (0, -1)
    events: tuple[int, int] = (0, -1)


class Spot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event that lies apart from the others of its rollout: said late, or by another writer."""

    writer: str
    sequence: int
    source: str
    number: int  # in that source


class Started(msgspec.Struct, frozen=True, tag="started", gc=False):
    """A rollout that was found in a source."""

    key: Key
    group: str
    step: int
    attempt: int
    source: str | None
    task: str | None
    environment: str | None
    agent: str | None
    model: str | None
    tags: tuple[str, ...]
    started_ns: int
    writer: str
    place: Place


class Counted(msgspec.Struct, frozen=True, tag="counted", gc=False):
    """How much there is of a rollout."""

    key: Key
    writer: str
    turns: int
    sampled_tokens: int
    versions: tuple[str, ...]


class Placed(msgspec.Struct, frozen=True, tag="placed", gc=False):
    """Where a rollout lies; `in_full` if it has ended, or its writer has."""

    key: Key
    writer: str
    place: Place
    in_full: bool = True


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A statement about a rollout, or (no key) about the run."""

    key: Key | None
    kind: str
    at_ns: int
    writer: str
    data: dict[str, Any]
    spot: Spot | None  # None: it lies among the rollout's own


class Derived(msgspec.Struct, frozen=True, tag="derived"):
    """What a rollout comes to under the policy, its number in the search index, and what of it cannot be read."""

    key: Key
    summary: Summary | None  # None: it was not asked for, or cannot be had
    search_number: int | None  # None: it was not asked for; NOT_INDEXABLE: it cannot be had
    problems: tuple[str, ...] = ()


class TokenPlace(msgspec.Struct, frozen=True):
    """A token of a sample."""

    rollout: str
    sample_id: str
    token: int
    place: str  # of the trainer's record


class TrainerFigures(msgspec.Struct, frozen=True, tag="trainer"):
    """What a trainer exported for a step, in figures."""

    step: int
    mark: str  # tells this state of the step's files from others
    figures: dict[str, float | None]
    max_mismatch_at: TokenPlace | None = None  # None: no record with a sample's id has a mismatch


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """All that a look at the run found has been told."""

    marks: bytes | None  # from where to go on; None: from the same place as before
    alive: tuple[str, ...]  # the writers that still run
    problems: tuple[str, ...]  # what cannot be read, but for what is missing of single rollouts
    done: bool  # False: the look was cut short, and goes on


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The run cannot be looked at now, for this reason."""

    what: str


Report = Started | Counted | Placed | Said | Derived | TrainerFigures | Looked | Failed


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A rollout to be read: for its summary, for the search index, or for both."""

    key: Key
    place: Place
    spots: tuple[Spot, ...]
    summary: bool
    search: bool
