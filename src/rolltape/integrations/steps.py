"""What trainers ask for at a step: tasks that come twice, and what was done before, to go back to."""

import json
from collections import Counter

import msgspec

from rolltape.collect.tasks import Task
from rolltape.groups import Group
from rolltape.integrations.live import LiveGroups
from rolltape.tape.rundir import make_private_folder, write_whole


class TaskNames:
    """Ids for tasks that a trainer asks for more than once at a step, which `LiveGroups` refuses: a number is added."""

    def __init__(self) -> None:
        self._asked: dict[str | None, tuple[int, Counter[str | None]]] = {}  # by split: its step, and how often which

    def name(self, task: Task, step: int, split: str | None = None) -> Task:
        """The task, with a number in its id from the second time on that it is asked for at the step."""
        if split not in self._asked or self._asked[split][0] != step:
            self._asked[split] = (step, Counter())
        counts = self._asked[split][1]
        counts[task.id] += 1
        return task if counts[task.id] == 1 else msgspec.structs.replace(task, id=f"{task.id}~{counts[task.id]}")


class StepPositions:
    """Keeps the position of a `LiveGroups` before each step in the run's folder.

    It is for trainers whose checkpoints hold nothing of ours. The trainer says which step it is at. Where a new process
    begins at a step that an earlier one had begun, it goes back to there: what was collected for that step and later
    ones is given again, from the tape. Evaluations are never done: whoever asks for one again gets it from the tape.
    """

    def __init__(self, live: LiveGroups, trainer: str) -> None:
        self._live = live
        self._trainer = trainer
        self._step: int | None = None  # None: nothing was asked for yet
        self._in_use: dict[str, tuple[Group, str | None]] = {}

    def train_on(self, group: Group, left_out: str | None = None) -> None:
        """Note that the trainer has a group, but for what is left out. It is done when the next step begins."""
        self._in_use[group.id] = (group, left_out)

    def begin(self, step: int) -> bool:
        """Begin a step, and say so, unless it has begun: what was trained on before is done."""
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
