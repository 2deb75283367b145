"""Deterministic ids: equal inputs give equal ids, and a change of any input changes the id."""

import re
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import NamedTuple

from rolltape.errors import RecordError
from rolltape.records.jsonable import canonical_json, shown

_SAMPLE_DIGITS = 12
_OWN_ADDRESSES = ("api", "compare", "diff")  # of the viewer itself: no run may have them

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_TURN_ID = re.compile(rf"(.+)\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}")
_SHORT_TURN = re.compile(r"[0-9]+\.[0-9]+")


def rollout_id(
    run: str,
    *,
    source: str | None,
    task_id: str | None,
    task: object,
    step: int,
    attempt: int,
    model: str | None,
    agent: str | None,
) -> str:
    """The id of one attempt at one task at one step of one run."""
    (own_id,) = rollout_ids(
        run, source=source, task_id=task_id, task=task, step=step, attempts=[attempt], model=model, agent=agent
    )
    return own_id


def rollout_ids(
    run: str,
    *,
    source: str | None,
    task_id: str | None,
    task: object,
    step: int,
    attempts: Iterable[int],
    model: str | None,
    agent: str | None,
) -> list[str]:
    """The ids of several attempts at one task, much faster than one by one."""
    begun = _hasher("rollout", run, source, task_key(task_id, task), str(step))
    rest = _delimited(model) + _delimited(agent)
    ids = []
    for attempt in attempts:
        hasher = begun.copy()
        hasher.update(_delimited(str(attempt)) + rest)
        ids.append(hasher.hexdigest())
    return ids


def group_id(
    run: str, *, source: str | None, task_id: str | None, task: object, step: int, model: str | None, agent: str | None
) -> str:
    """The id that all attempts at one task at one step share."""
    return digest_of("group", run, source, task_key(task_id, task), str(step), model, agent).hex()


def page_name(run: str, taken: Collection[str] = ()) -> str:
    """The name of a run in addresses of the viewer: its letters and digits, with a number if that name is taken."""
    plain = "".join(one if one.isascii() and one.isalnum() else "-" for one in run).strip("-")[:40] or "run"
    name, number = plain, 1
    while name in taken or name in _OWN_ADDRESSES:
        number += 1
        name = f"{plain}-{number}"
    return name


def join_source(source: str | None, split: str | None) -> str | None:
    """A source with its split as one text, `source#split`: what rollouts are recorded and hashed under.

    `join_source("gsm8k", "test")` is `"gsm8k#test"`. A source may already name the same split.
    """
    if split is None:
        return source
    if not split or "#" in split:
        raise RecordError(f"the split is {split!r}; give a name without '#', such as 'test'")
    named = split_in(source)
    if named not in (None, split):
        raise RecordError(f"source {source!r} names the split {named!r}, and split is {split!r}; give one of them")
    return source if named == split else f"{source or ''}#{split}"


def split_in(source: str | None) -> str | None:
    """The split that a source names after its last `#`; None if it names none. All code that reads splits uses it."""
    _, mark, split = (source or "").rpartition("#")
    return split if mark and split else None


def session_id(rollout: str, try_index: int, ordinal: int) -> str:
    """The id of a rollout's session, by its place in the rollout."""
    return f"{rollout}.{try_index}.{ordinal}"


def turn_id(session: str, sequence: int) -> str:
    """The id of a session's turn, by its place in the session."""
    return f"{session}.{sequence}"


class TurnPlace(NamedTuple):
    """What a turn's id names."""

    id: str
    rollout: str
    try_index: int
    ordinal: int  # of the session
    sequence: int

    @property
    def key(self) -> tuple[str, int]:
        """The rollout and try."""
        return (self.rollout, self.try_index)


def parse_turn_id(turn: object) -> TurnPlace:
    """Parse the id of a turn."""
    parts = _TURN_ID.fullmatch(turn) if isinstance(turn, str) else None
    if parts is None:
        raise RecordError(
            f"turn {shown(turn)}: not a turn's id; give the id of a Turn, which names rollout, try and session"
        )
    return TurnPlace(parts[0], parts[1], int(parts[2]), int(parts[3]), int(parts[4]))


def parse_turn_of(turn: object, rollout: str, try_index: int | None) -> TurnPlace:
    """Parse the id of a turn, which must be of this rollout, and of this try unless `try_index` is None."""
    place = parse_turn_id(turn)
    if place.rollout != rollout or try_index not in (None, place.try_index):
        whose = f"turn {turn} of rollout {rollout}"
        raise RecordError(f"{whose}: that turn belongs to try {place.try_index} of rollout {place.rollout}")
    return place


def is_short_turn(turn: str) -> bool:
    """Whether a turn is named by its places in rollout and session, as in `rolltape trace`: `0.3`."""
    return _SHORT_TURN.fullmatch(turn) is not None


def short_turn(turn: str) -> str:
    """The short name of a turn, by its places in rollout and session: `0.3`."""
    return ".".join(turn.rsplit(".", 2)[1:])


def complete_turn_id(turn: str, rollout: str, try_index: int) -> str:
    """The full id of a turn of this try, from a full or a short one."""
    return parse_turn_of(f"{rollout}.{try_index}.{turn}" if is_short_turn(turn) else turn, rollout, try_index).id


def sample_id(last_turn: str, length: int, trained: Iterable[tuple[int, int]]) -> str:
    """The id of a sample: the last turn in it, and a hash of how many tokens it has and which of them train.

    `trained` are the ranges `[start, stop)` of trained tokens in order, no two of them adjacent.
    """
    ranges = ",".join(f"{start}-{stop}" for start, stop in trained)
    return f"{last_turn}@{digest_of('sample', last_turn, str(length), ranges).hex()[:_SAMPLE_DIGITS]}"


def is_sample_id_of_0_1(sample: str) -> bool:
    """Whether a sample id is one of release 0.1.0, which named the last turn and a policy: `…@exact-f85863f1`.

    Such an id leaves open which tokens train; several of today's samples may end with its turn.
    """
    return "-" in sample.partition("@")[2]


def names_sample(name: str, sample: str) -> bool:
    """Whether a stored sample id, possibly of 0.1.0, may mean the sample with this id."""
    return name == sample or (is_sample_id_of_0_1(name) and last_turn_of(name) == last_turn_of(sample))


def last_turn_of(sample: str) -> str:
    """The turn that a sample's id begins with: the last in it."""
    return sample.partition("@")[0]


def digest_of(*fields: bytes | str | None) -> bytes:
    """A hash over length-delimited fields, so that no field's content can be taken for a boundary."""
    return _hasher(*fields).digest()


def _hasher(*fields: bytes | str | None) -> blake2b:
    return blake2b(b"".join([_delimited(field) for field in fields]), digest_size=16)


def _delimited(field: bytes | str | None) -> bytes:
    data = field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field
    return b"-" if data is None else b"%d:%b" % (len(data), data)


def task_key(task_id: str | None, task: object) -> bytes:
    """What identifies a task within its source: its id, else its canonical content."""
    if task_id is not None:
        return b"id:" + task_id.encode("utf-8", "surrogatepass")
    if task is None:
        raise RecordError("a rollout needs a task: give task_id, or task with the content that identifies it")
    return b"content:" + canonical_json(task)
