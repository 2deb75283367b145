"""`Task`: something to attempt. `TaskSource`: tasks in the order in which they are launched."""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec

from rolltape.errors import SourceError, TaskError
from rolltape.records.ids import digest_of, task_key
from rolltape.records.jsonable import canonical_json, decode_json, encode_json, shown

_ID_FIELDS = ("id", "task_id")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a source.

    The ids of its rollouts are made from `source` and `id`, or from `source` and `data` if it has no id.
    """

    id: str | None = None  # None if its canonical content identifies it
    environment: str | None = None  # None for the one that the command names
    data: dict[str, Any]  # the unchanged entry
    source: str = ""  # name and split, the same on every machine
    where: str = ""  # for messages: file and line, item or row

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], *, source: str, where: str) -> Self:
        """Read an entry's own id ("id", else "task_id") and "environment"; null means absent."""
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
        """A digest that identifies the task within its source."""
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
    """The seed of an attempt, 63 bits: always and everywhere the same for this rollout."""
    return int.from_bytes(digest_of("seed", rollout_id)[:8], "big") >> 1


class TaskSource:
    """A sequence of tasks. Each access reads the task afresh.

    Changes of the source's file have no effect. Several threads may read it. `close`, or deleting the object, frees the
    space on disk.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # with the split: the `source` of its rollouts
        # Unlinked from the start, so a killed process leaves nothing behind.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._ends = array("Q", [0])
        self._order: Sequence[int] = range(0)
        self._closing = weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Task:
        return self._read(self._order[index])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the space on disk. The tasks cannot be read any more."""
        self._closing()

    def add(self, task: Task) -> None:
        """Store a task; `arrange` puts it into the sequence."""
        record = encode_json([task.id, task.environment, task.where, task.data], task.where)[0]
        try:
            self._file.write(record)
        except OSError as error:
            raise self._full(error) from None
        self._ends.append(self._ends[-1] + len(record))

    def arrange(self, order: Sequence[int]) -> None:
        """Set the sequence: which stored tasks it has, and in which order."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._full(error) from None
        self._order = order

    def _read(self, index: int) -> Task:
        start, end = self._ends[index], self._ends[index + 1]
        task_id, environment, where, data = decode_json(os.pread(self._file.fileno(), end - start, start))
        return Task(id=task_id, environment=environment, where=where, data=data, source=self.name)

    def _full(self, error: OSError) -> SourceError:
        return SourceError(
            f"{self.name}: its tasks cannot be stored in {tempfile.gettempdir()}: {error.strerror}; "
            "free space there, or set TMPDIR"
        )


def shuffled(keys: Sequence[bytes], seed: int) -> Sequence[int]:
    """An order by the seed and each task's own key: new tasks do not change the order of the others."""
    ranks = [digest_of("shuffle", str(seed), key) for key in keys]
    return array("Q", sorted(range(len(keys)), key=ranks.__getitem__))
