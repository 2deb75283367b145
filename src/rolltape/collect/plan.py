"""Which attempts there are, which of them are done already, and whether a run may be resumed with these settings."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import Source
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.records.ids import rollout_id
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.run import Run
from rolltape.tape.tape import Tape


class Planned(NamedTuple):
    """One attempt at one task. Its place in the source and its number are fixed at launch."""

    place: int  # of the task in its source
    attempt: int
    seats: tuple[str, ...]
    again: bool  # it was tried before, and broke


class Known(NamedTuple):
    """What a run holds already, by rollout id."""

    done: frozenset[bytes]  # finished: not to be run again
    broken: frozenset[bytes]  # to be run again, as another try
    unrewarded: frozenset[bytes]  # finished, and without a reward so far
    attempts: int  # that the finished ones belong to: those of several seats count once
    running: int  # by somebody who is alive
    models: frozenset[str | None]  # that were asked


def known_of(run: Run, source: str, step: int) -> Known:
    """What became of the rollouts of a source at a step so far."""
    done: set[bytes] = set()
    broken: set[bytes] = set()
    running: set[bytes] = set()
    unrewarded: set[bytes] = set()
    attempts: set[tuple[str | None, str, int]] = set()
    models: set[str | None] = set()
    for row in run.index():
        if row.head.step != step or row.head.source != source:
            continue
        key = bytes.fromhex(row.id)
        models.add(row.head.model)
        match row.outcome.status:
            case Status.FINISHED:
                done.add(key)
                attempts.add((row.head.source, row.head.task_id or row.head.group, row.head.attempt))
                if row.outcome.reward is None:
                    unrewarded.add(key)
            case Status.RUNNING:
                running.add(key)
            case _:
                broken.add(key)
    return Known(
        done=frozenset(done | running),
        broken=frozenset(broken - done - running),
        unrewarded=frozenset(unrewarded),
        attempts=len(attempts),
        running=len(running - done),
        models=frozenset(models),
    )


def seat_name(agent: str, seat: str) -> str:
    """The agent in the record and the id of a seat's rollout: each seat is a rollout of its own."""
    return agent if seat == AGENT else f"{agent}:{seat}"


class Identity(NamedTuple):
    """What besides a task and its attempt goes into the ids of rollouts."""

    run: str
    step: int
    model: str
    agent: str

    def of(self, task: Task, attempt: int, seat: str = AGENT) -> str:
        return rollout_id(
            self.run,
            source=task.source,
            task_id=task.id,
            task=task.data,
            step=self.step,
            attempt=attempt,
            model=self.model,
            agent=seat_name(self.agent, seat),
        )


def planned(
    source: Source,
    settings: CollectSettings,
    identity: Identity,
    known: Known,
    seats: Callable[[Task], tuple[str, ...]],
) -> Iterator[Planned]:
    """The attempts to run, task by task; `seats` says which seats a task's episodes have."""
    for place, task in enumerate(source):
        names = seats(task)
        for attempt in range(settings.group_size):
            keys = [bytes.fromhex(identity.of(task, attempt, seat)) for seat in names]
            if not all(key in known.done for key in keys):
                yield Planned(place, attempt, names, any(key in known.broken or key in known.done for key in keys))


def check_resumable(tape: Tape, run: Run, settings: CollectSettings, source_name: str, *, resume: bool) -> None:
    """Refuse a step that was collected before: without `resume`, or with settings that differ, saying which."""
    kept = settings.to_be_kept(source_name)
    earlier = [event.data for event in run.events() if event.kind == EventKind.COLLECT]
    same_step = [data["settings"] for data in earlier if data["settings"].get("step") == settings.step]
    if same_step and not resume:
        raise CollectError(
            f"run {tape.name} was collected into at step {settings.step} before; give --resume to go on, "
            "another --step or another --run"
        )
    if resume and not same_step:
        raise CollectError(f"run {tape.name} holds no collection at step {settings.step}; leave --resume out")
    for before in same_step[-1:]:
        differ = [name for name in kept if name not in before or before[name] != kept[name]]
        if differ:
            said = "; ".join(f"{name} was {before.get(name)!r} and is {kept[name]!r}" for name in differ)
            raise CollectError(f"run {tape.name} cannot be resumed at step {settings.step}: {said}")


def check_model(tape: Tape, known: Known, model: str, step: int) -> None:
    """Refuse to go on with another model: it would begin every attempt anew, under other ids."""
    others = sorted(str(name) for name in known.models if name != model)
    if others:
        raise CollectError(
            f"run {tape.name} cannot be resumed at step {step}: model_name was {others[0]!r} and is {model!r}"
        )
