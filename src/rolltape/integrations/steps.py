"""Helps trainers that work by steps: ids for repeated tasks, and positions of earlier steps to go back to."""

import json
from collections import Counter

import msgspec

from rolltape.collect.tasks import Task
from rolltape.groups import Group
from rolltape.integrations.live import LiveGroups
from rolltape.tape.rundir import make_private_folder, write_whole


class TaskNames:
    """Adds a number to the id of a task that is requested again at a step, which `LiveGroups` would refuse."""

    def __init__(self) -> None:
        self._asked: dict[str | None, tuple[int, Counter[str | None]]] = {}  # by split: its step, and requests

    def name(self, task: Task, step: int, split: str | None = None) -> Task:
        """The task, with a number in its id from its second request at the step on."""
        if split not in self._asked or self._asked[split][0] != step:
            self._asked[split] = (step, Counter())
        counts = self._asked[split][1]
        counts[task.id] += 1
        return task if counts[task.id] == 1 else msgspec.structs.replace(task, id=f"{task.id}~{counts[task.id]}")


class StepPositions:
    """Stores the position of a `LiveGroups` before each step in the run's folder.

    It is for trainers whose checkpoints cannot hold our state. The trainer passes its step. If a new process begins at
    a step that an earlier process had begun, it goes back to it: groups of that step and later ones are given again,
    from the tape. Groups of evaluations are never marked as done, so a repeated request gets them from the tape.
    """

    def __init__(self, live: LiveGroups, trainer: str) -> None:
        self._live = live
        self._trainer = trainer
        self._step: int | None = None  # None: no request yet
        self._in_use: dict[str, tuple[Group, str | None]] = {}

    def train_on(self, group: Group, left_out: str | None = None) -> None:
        """Note that the trainer has a group, except what is left out. It is done when the next step begins."""
        self._in_use[group.id] = (group, left_out)

    def begin(self, step: int) -> bool:
        """Begin a step and mark earlier groups as done. Return False if the step has begun already."""
        if step == self._step:
            return False
        folder = self._live.start().tape.directory.path / self._trainer
        position = folder / f"{step}.json"
        if self._step is None and position.exists():
            self._live.load_state_dict(json.loads(position.read_text()))
        else:
            for group, left_out in self._in_use.values():
                group.done(left_out)
            make_private_folder(folder)
            write_whole(position, json.dumps(self._live.state_dict()).encode())
        self._in_use.clear()
        self._step = step
        return True
