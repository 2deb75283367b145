"""Which attempts there are, which of them are done already, and whether a run may be resumed with these settings."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rolltape.collect.earlier import Known, State
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import Source
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.records.ids import rollout_ids
from rolltape.records.rollout import EventKind
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import Run

_TAKEN = int(State.TAKEN)  # a plain number: a flag takes ten times as long


class Planned(NamedTuple):
    """One attempt at one task. Its place in the source and its number are fixed at launch."""

    place: int  # of the task in its source
    attempt: int
    seats: tuple[str, ...]
    again: bool  # it was tried before, and broke


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
        """The rollout of one attempt."""
        return self.all_of(task, [attempt], seat)[0]

    def all_of(self, task: Task, attempts: Iterable[int], seat: str = AGENT) -> list[str]:
        """The rollouts of several attempts."""
        return rollout_ids(
            self.run,
            source=task.source,
            task_id=task.id,
            task=task.data,
            step=self.step,
            attempts=attempts,
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
    attempts = range(settings.group_size)
    for place, task in enumerate(source):
        # Seats cost the beginning of an episode, which a task that is done and has one seat is spared.
        if known and all(state & _TAKEN for state in known.of(identity.all_of(task, attempts))):
            continue
        names = seats(task)
        by_seat = [known.of(identity.all_of(task, attempts, seat)) if known else [0] * len(attempts) for seat in names]
        for attempt, states in enumerate(zip(*by_seat, strict=True)):
            if not all(state & _TAKEN for state in states):
                yield Planned(place, attempt, names, any(states))


def check_resumable(tape: Tape, run: Run, settings: CollectSettings, source_name: str, *, resume: bool) -> None:
    """Refuse a source that was collected at this step before: without `resume`, or with settings that differ."""
    kept = settings.to_be_kept(source_name)
    earlier = [event.data["settings"] for event in run.remarks(EventKind.COLLECT)]
    same = [data for data in earlier if (data.get("step"), data.get("source")) == (settings.step, source_name)]
    if same and not resume:
        raise CollectError(
            f"run {tape.name}: {source_name} was collected into it at step {settings.step} before; "
            "give --resume to go on, another --step or another --run"
        )
    if resume and not same:
        raise CollectError(
            f"run {tape.name} holds no collection of {source_name} at step {settings.step}; leave --resume out"
        )
    for before in same[-1:]:
        differ = [name for name in kept if name not in before or before[name] != kept[name]]
        if differ:
            said = "; ".join(f"{name} was {before.get(name)!r} and is {kept[name]!r}" for name in differ)
            raise CollectError(f"run {tape.name} cannot be resumed at step {settings.step}: {said}")


def check_model(tape: Tape, known: Known, model: str, step: int) -> None:
    """Refuse to go on with another model: it would begin every attempt anew, under other ids."""
    others = sorted(name for name in known.models if name != model)
    if others:
        raise CollectError(
            f"run {tape.name} cannot be resumed at step {step}: model_name was {others[0]!r} and is {model!r}"
        )
