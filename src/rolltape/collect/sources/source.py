"""`TaskSource`: tasks that were read once and are kept on disk, in the order in which to launch them."""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Self

from rolltape.collect.tasks import Task
from rolltape.errors import SourceError
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import decode_json, encode_json


class TaskSource:
    """A sequence of tasks. Each access reads the task afresh.

    A change of the source's file does not change it. Several threads may read it. `close` frees the space on disk; so
    does the end of the object.
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
    """An order by the seed and each task's own key: adding tasks leaves the order of the others as it was."""
    ranks = [digest_of("shuffle", str(seed), key) for key in keys]
    return array("Q", sorted(range(len(keys)), key=ranks.__getitem__))
