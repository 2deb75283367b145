"""`GivenSource`: tasks that come one by one while a collection runs, for example from a trainer."""

from collections.abc import Mapping
from typing import Any

from rolltape.collect.sources.entries import RawSource, SourceEntry
from rolltape.collect.sources.opening import CheckTask, check_tasks
from rolltape.collect.tasks import Task, TaskSource
from rolltape.errors import TaskError


class GivenSource(TaskSource):
    """A source that is empty at first."""

    def __init__(self, name: str, split: str | None, check: CheckTask) -> None:
        self._raw = RawSource(name, split, name, ())
        self._check = check
        self._indexes: dict[bytes, int] = {}
        super().__init__(self._raw.joined_name)

    def give(self, value: Mapping[str, Any] | Task) -> int:
        """Check a task, add it, and return its position. TaskError for one that was given before."""
        index = len(self)
        entry = SourceEntry(f"task {index + 1}", value if isinstance(value, Task) else dict(value))
        ((key, task),) = check_tasks(self._raw, [entry], environments=None, check=self._check)
        if (before := self._indexes.setdefault(key, index)) != index:
            raise TaskError(f"{task.where}: it is the same as task {before + 1}; give each task its own id")
        self.add(task)
        self.arrange(range(index + 1))
        return index
