"""A task: something to attempt, as its source gave it, and what identifies it within the source."""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from rolltape.errors import TaskError
from rolltape.records.ids import digest_of, task_key
from rolltape.records.jsonable import canonical_json, shown

_ID_FIELDS = ("id", "task_id")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a source.

    The ids of its rollouts are made from `source` and `id`, or from `source` and `data` if it has no id.
    """

    id: str | None = None  # None: its canonical content identifies it
    environment: str | None = None  # None: the one that the command names
    data: dict[str, Any]  # the entry as it came
    source: str = ""  # name and split, the same on every machine
    where: str = ""  # for messages: file and line, item or row

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], *, source: str, where: str) -> Self:
        """Read an entry's own id ("id", else "task_id") and "environment"; null is the same as absent."""
        own_id = next((entry[name] for name in _ID_FIELDS if entry.get(name) is not None), None)
        return cls(
            id=id_text(own_id),
            environment=environment_name(entry.get("environment")),
            data=dict(entry),
            source=source,
            where=where,
        )

    @property
    def key(self) -> bytes:
        """A digest of what identifies it within its source."""
        return digest_of(task_key(self.id, self.data))


def id_text(value: object) -> str | None:
    """A task's id as text: text as it is, a number in its canonical spelling, so that 7, 7.0 and "7" are one id."""
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return canonical_json(value).decode()
    raise TaskError(f"its id is {shown(value)}; give text or a number, or leave the id out")


def environment_name(value: object) -> str | None:
    """The name of a task's environment; None means the one that the command names."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise TaskError(f"its environment is {shown(value)}; give the name of one, or leave it out for the command's")


def seed_of(rollout_id: str) -> int:
    """The seed of an attempt, 63 bits: the same whenever and wherever that rollout runs."""
    return int.from_bytes(digest_of("seed", rollout_id)[:8], "big") >> 1
