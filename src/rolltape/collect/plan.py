"""Plan a collection: its tasks and attempts, which of them are already in the run, and whether it may be resumed."""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.collect.agents import is_program
from rolltape.collect.environments import Environments
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.sandboxes import SandboxNetwork, refuse_image
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import GivenSource, open_source
from rolltape.collect.tasks import Task, TaskSource
from rolltape.errors import CollectError, TaskError
from rolltape.groups.consumer import taken_groups
from rolltape.records.ids import rollout_ids
from rolltape.records.jsonable import canonical_json, shown
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.index.index import STATUS_CODES
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import Run

_SHOWN_CHANGES = 3


class CheckedTasks(NamedTuple):
    """The tasks of a collection, and the environments that checked them."""

    source: TaskSource
    environments: Environments


def open_tasks(settings: CollectSettings, *, is_open: bool = False) -> CheckedTasks:
    """The checked tasks of a collection. With `is_open` there are none yet, and each is checked when it is added."""
    environments = Environments(settings.environment, settings.judge)

    def check(task: Task) -> None:
        environments.of(task).check(task)
        if is_program(settings.agent):
            _check_sandbox(settings, task.data.get("sandbox"))

    try:
        environments.named(settings.environment)
    except TaskError as error:
        raise CollectError(f"--environment: {error}") from None
    if is_open:
        return CheckedTasks(GivenSource(settings.source_name or settings.source, settings.split, check), environments)
    source = open_source(
        settings.source,
        split=settings.split,
        limit=settings.limit,
        shuffle_seed=settings.seed,
        name=settings.source_name,
        check=check,
    )
    return CheckedTasks(source, environments)


def _check_sandbox(settings: CollectSettings, wanted: object) -> None:
    """Raise TaskError for a task whose sandbox this collection cannot provide."""
    try:
        if settings.has_images:
            settings.container.for_task(wanted, SandboxNetwork(settings.sandbox_network))
        else:
            refuse_image(wanted)
    except CollectError as error:
        raise TaskError(str(error)) from None


class RolloutState(enum.IntFlag):
    """The state of a rollout in a run, over all its tries; 0 if it was never started."""

    FINISHED = 1
    BROKEN = 2  # failed or lost
    RUNNING = 4  # in a process that is alive
    UNREWARDED = 8  # finished, without a reward so far
    TAKEN = FINISHED | RUNNING  # must not run again


_TAKEN = int(RolloutState.TAKEN)  # an int, since flag operations take ten times as long
_STATES = {
    Status.RUNNING: RolloutState.RUNNING,
    Status.FINISHED: RolloutState.FINISHED,
    Status.FAILED: RolloutState.BROKEN,
    Status.LOST: RolloutState.BROKEN,
}


class EarlierRollouts:
    """The rollouts of a source at a step that are already in a run, by id."""

    def __init__(self, rows: npt.NDArray[Any], models: frozenset[str]) -> None:
        """`rows` are those of `Run.standings`, `models` the names of the models that were used."""
        self.models = models
        finished = rows["status"] == STATUS_CODES[Status.FINISHED]
        states = np.array([_STATES[status] for status in sorted(STATUS_CODES, key=STATUS_CODES.__getitem__)], np.uint8)
        self._ids, places = np.unique(rows["id"], return_inverse=True)
        self._states = np.zeros(len(self._ids), np.uint8)
        np.bitwise_or.at(self._states, places, states[rows["status"]])
        np.bitwise_or.at(self._states, places[finished & ~rows["rewarded"]], np.uint8(RolloutState.UNREWARDED))
        self.attempts = _count_distinct(rows["attempt"][finished])  # an attempt of several seats counts once
        self.running = int((self._states & RolloutState.TAKEN == RolloutState.RUNNING).sum())

    @property
    def some_unrewarded(self) -> bool:
        """Whether one of them has finished without a reward so far."""
        return bool((self._states & RolloutState.UNREWARDED).any())

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    def states(self, rollouts: Sequence[str]) -> list[int]:
        """The RolloutState of each rollout, as an int."""
        if not self:
            return [0] * len(rollouts)
        ids = np.frombuffer(bytes.fromhex("".join(rollouts)), self._ids.dtype)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        states: list[int] = np.where(self._ids[places] == ids, self._states[places], 0).tolist()
        return states


def _count_distinct(values: npt.NDArray[Any]) -> int:
    # Much faster here than numpy's unique.
    return int(np.count_nonzero(np.diff(np.sort(values)))) + bool(len(values))


def load_earlier(run: Run, source: str, step: int) -> EarlierRollouts:
    """Read the rollouts of a source at a step from a run."""
    models = {str(began["model"]) for began in earlier_collections(run, source, step) if "model" in began}
    return EarlierRollouts(run.standings(step=step, source=source), frozenset(models))


def earlier_collections(run: Run, source: str | None, step: int) -> list[dict[str, Any]]:
    """The launch events of collections of a source at a step, the oldest first: `settings`, `model`."""
    began = (event.data for event in run.remarks(EventKind.COLLECT))
    return [one for one in began if (one["settings"].get("step"), one["settings"].get("source")) == (step, source)]


class PlannedAttempt(NamedTuple):
    """One attempt at one task. Its position in the source and its number are fixed at launch."""

    task_index: int
    attempt: int
    seats: tuple[str, ...]
    again: bool  # an earlier try broke


def seat_agent(agent: str, seat: str) -> str:
    """The agent's name in the record and id of a seat's rollout. Each seat of an attempt is a rollout of its own."""
    return agent if seat == AGENT else f"{agent}:{seat}"


class RolloutIdentity(NamedTuple):
    """The parts of rollout ids besides the task and the number of the attempt."""

    run: str
    step: int
    model: str
    agent: str

    def rollout_id(self, task: Task, attempt: int, seat: str = AGENT) -> str:
        return self.rollout_ids(task, [attempt], seat)[0]

    def rollout_ids(self, task: Task, attempts: Iterable[int], seat: str = AGENT) -> list[str]:
        return rollout_ids(
            self.run,
            source=task.source,
            task_id=task.id,
            task=task.data,
            step=self.step,
            attempts=attempts,
            model=self.model,
            agent=seat_agent(self.agent, seat),
        )


def plan_attempts(
    tasks: Iterable[tuple[int, Task]],
    settings: CollectSettings,
    identity: RolloutIdentity,
    earlier: EarlierRollouts,
    seats: Callable[[Task], tuple[str, ...]],
) -> Iterator[PlannedAttempt]:
    """Yield the attempts to run, task by task. `seats` returns a task's seats."""
    attempts = range(settings.group_size)
    for task_index, task in tasks:
        # Asking for seats begins an episode, which is skipped for a finished task with one seat.
        if earlier and all(state & _TAKEN for state in earlier.states(identity.rollout_ids(task, attempts))):
            continue
        names = seats(task)
        by_seat = [
            earlier.states(identity.rollout_ids(task, attempts, seat)) if earlier else [0] * len(attempts)
            for seat in names
        ]
        for attempt, states in enumerate(zip(*by_seat, strict=True)):
            if not all(state & _TAKEN for state in states):
                yield PlannedAttempt(task_index, attempt, names, any(states))


def check_resumable(tape: Tape, run: Run, settings: CollectSettings, source_name: str, *, resume: bool | None) -> None:
    """Refuse a source that was collected at this step before, without `resume` or with different settings.

    With None it is resumed if there is something to resume.
    """
    fixed = settings.fixed_by_resume(source_name)
    same = [began["settings"] for began in earlier_collections(run, source_name, settings.step)]
    if same and resume is False:
        raise CollectError(
            f"run {tape.name}: {source_name} was collected into it at step {settings.step} before; "
            "give --resume to continue, another --step, or another --run"
        )
    if resume and not same:
        raise CollectError(
            f"run {tape.name} holds no collection of {source_name} at step {settings.step}; leave --resume out"
        )
    for before in same[-1:]:
        differ = [name for name in fixed if name not in before or before[name] != fixed[name]]
        if "group_size" in before and fixed["group_size"] > before["group_size"]:
            differ.remove("group_size")  # attempts are numbered: existing ones stay, and new ones are added
        if differ:
            changes = "; ".join(f"{name} was {before.get(name)!r} and is {fixed[name]!r}" for name in differ)
            raise CollectError(
                f"run {tape.name} cannot be resumed at step {settings.step}: {changes}; "
                "give the earlier values, or another --step"
            )


def describe_taken_groups(tape: Tape, run: Run, settings: CollectSettings, source_name: str) -> str | None:
    """A warning if groups that a trainer has taken already have grown since, or None."""
    sizes = [one["settings"]["group_size"] for one in earlier_collections(run, source_name, settings.step)]
    if not sizes or settings.group_size <= sizes[-1]:
        return None
    groups = {head.group for head in run.group_heads(step=settings.step, source=source_name)}
    counts = {name: len(groups & taken) for name, taken in taken_groups(tape).items()}
    taken_by = ", ".join(f"{name!r} has taken {count}" for name, count in sorted(counts.items()) if count)
    return taken_by and (
        f"groups grow from {sizes[-1]} to {settings.group_size} attempts, but {taken_by} of them already; a consumer "
        "takes a group once, so it never gets the added attempts"
    )


def check_model(tape: Tape, earlier: EarlierRollouts, model: str, step: int) -> None:
    """Refuse to continue with another model, which would start every attempt again, under other ids."""
    others = sorted(name for name in earlier.models if name != model)
    if others:
        raise CollectError(
            f"run {tape.name} cannot be resumed at step {step}: model_name was {others[0]!r} and is {model!r}; "
            "use the same model, or another --step"
        )


def check_unchanged(tape: Tape, run: Run, source_name: str, tasks: Iterable[Task], step: int) -> None:
    """Refuse tasks whose content differs from that of the run's rollouts with the same task id."""
    heads = run.group_heads(step=step, source=source_name)
    held = {head.task_id: head.task for head in heads if None not in (head.task_id, head.task)}
    changes = (
        f"{task.where}: {_describe_change(held[task.id], task.data)}"
        for task in tasks
        if task.id in held and canonical_json(held[task.id]) != canonical_json(task.data)
    )
    shown_changes = list(islice(changes, _SHOWN_CHANGES))
    if not shown_changes:
        return
    more = sum(1 for _ in changes)
    raise CollectError(
        f"run {tape.name} cannot be resumed at step {step}, since tasks have changed: {'; '.join(shown_changes)}"
        f"{f'; and {more} more' if more else ''}; "
        "give the earlier tasks, another --step, or --accept-changed-tasks to mix both in their groups"
    )


def _describe_change(before: Any, now: Any) -> str:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return f"it was {shown(before)} and is {shown(now)}"
    names = [name for name in {**before, **now} if name not in before or name not in now or before[name] != now[name]]
    return ", ".join(
        f"{name} was {shown(before[name]) if name in before else 'not there'} "
        f"and is {shown(now[name]) if name in now else 'not there'}"
        for name in names
    )
