"""The collector: which attempts there are, who runs them, groups compared when they are whole, all of it on a run."""

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rolltape.collect.comparisons import Groups
from rolltape.collect.earlier import Known, known_of
from rolltape.collect.environments import Environments
from rolltape.collect.plan import Identity, Planned, check_model, check_resumable, planned
from rolltape.collect.result import Result
from rolltape.collect.runners.local import LocalRunner
from rolltape.collect.runners.protocol import Runner, Work
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import open_source
from rolltape.collect.tasks import Task
from rolltape.gateway.gateway import Gateway
from rolltape.groups import Room
from rolltape.records.rollout import EventKind
from rolltape.tape.recording.tape import Tape


class Launch(NamedTuple):
    """What a collection is about to do."""

    tasks: int
    attempts: int  # all there are
    done_before: int
    running_elsewhere: int


class Collector:
    """Collects one step of one run."""

    def __init__(
        self,
        settings: CollectSettings,
        tape: Tape,
        *,
        resume: bool = False,
        runner: Runner | None = None,
        gateway: Gateway | None = None,
        room: Room | None = None,
    ) -> None:
        """Read and check the source and all that is named; nothing runs yet.

        By default it runs in this process, through a gateway of its own unless one is given that runs already, and as
        far ahead of a trainer as it can.
        """
        self.settings = settings
        self._room = room
        self._tape = tape
        self._environments = Environments(settings.environment, settings.judge)
        self._source = open_source(
            settings.source,
            split=settings.split,
            limit=settings.limit,
            shuffle_seed=settings.seed,
            name=settings.source_name,
            check=lambda task: self._environments.of(task).check(task),
        )
        own = LocalRunner(settings, tape, self._environments, gateway=gateway) if runner is None else runner
        self._runner: Runner = own
        self._run = tape.run()
        check_resumable(tape, self._run, settings, self._source.name, resume=resume)
        self._told_to_end = asyncio.Event()
        self._work: Work | None = None
        self._ended = 0

    @property
    def in_flight(self) -> int:
        """Attempts that have begun and not ended."""
        return 0 if self._work is None else self._work.given_out - self._ended

    def end(self) -> None:
        """Begin no more attempts; those that run have their grace time."""
        self._told_to_end.set()

    async def run(self, on_launch: Callable[[Launch], None], on_results: Callable[[list[Result]], None]) -> None:
        """Collect, and tell of attempts as they end, or where they are compared once that is done.

        Cancelling it ends what runs; the tape is whole either way.
        """
        settings = self.settings
        with self._source:
            async with self._runner as runner:
                identity = Identity(self._tape.name, settings.step, runner.model_name, runner.agent_name)
                known = known_of(self._run, self._source.name, settings.step)
                check_model(self._tape, known, identity.model, settings.step)
                # Also when it is resumed: who waits for its groups then knows whose life to look at.
                kept = settings.to_be_kept(self._source.name)
                self._tape.note(EventKind.COLLECT, {"settings": kept, "model": identity.model})
                total = len(self._source) * settings.group_size
                on_launch(Launch(len(self._source), total, known.attempts, known.running))
                groups = Groups(self._tape, self._source, identity, settings)
                groups.take_up(known, self._environments.of)

                async def on_ended(one: Planned, results: list[Result]) -> None:
                    self._ended += 1
                    environment = self._environments.of(self._source[one.place])
                    on_results(await groups.add(one.place, environment, results))

                try:
                    self._work = Work(self._attempts(identity, known), settings.step, self._source.name, self._room)
                    await runner.run(self._work, identity, on_ended, self._told_to_end)
                    if not self._told_to_end.is_set():
                        on_results(await groups.compare_rest(self._environments.of))
                        self._tape.note(EventKind.COLLECTED, {"step": settings.step, "source": self._source.name})
                finally:
                    on_results([*groups.left(), *runner.cancelled])

    def _attempts(self, identity: Identity, known: Known) -> Iterator[tuple[Planned, Task]]:
        for one in planned(self._source, self.settings, identity, known, self._environments.seats):
            yield one, self._source[one.place]
