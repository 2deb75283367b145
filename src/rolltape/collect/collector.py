"""`Collector`: plans the attempts of one step, has a runner carry them out, and compares groups once they are whole."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rolltape.collect.comparisons import GroupComparisons
from rolltape.collect.environments import Environments
from rolltape.collect.plan import (
    EarlierRollouts,
    PlannedAttempt,
    RolloutIdentity,
    check_model,
    check_resumable,
    load_earlier,
    plan_attempts,
)
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.local import LocalRunner
from rolltape.collect.runners.protocol import AttemptQueue, Runner
from rolltape.collect.sandboxes import Confinement
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import open_source
from rolltape.collect.tasks import Task
from rolltape.gateway.gateway import Gateway
from rolltape.groups import RunAheadLimit
from rolltape.records.rollout import EventKind
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.collect")


class Launch(NamedTuple):
    """What a collection is about to do."""

    tasks: int
    attempts: int  # all of them, those done before included
    done_before: int
    running_elsewhere: int
    confinement: Confinement = Confinement(None, None)  # what holds the agents


def _ignore(_: object) -> None:
    return


class Collector:
    """Collects one step of one run: each task of a source is attempted `group_size` times.

    Every attempt becomes a rollout on the tape, with its turns, trace, status and reward.

        import asyncio
        import rolltape

        settings = rolltape.CollectSettings(source="sums.jsonl", group_size=8, step=3)
        results = []
        with rolltape.open("runs/sums") as tape:
            asyncio.run(rolltape.Collector(settings, tape).run(on_results=results.extend))
        print(sum(result.reward or 0.0 for result in results))

    `rolltape collect` is this with a report around it. docs/collect.md has more.
    """

    def __init__(
        self,
        settings: CollectSettings,
        tape: Tape,
        *,
        resume: bool = False,
        runner: Runner | None = None,
        gateway: Gateway | None = None,
        run_ahead: RunAheadLimit | None = None,
    ) -> None:
        """Read the source and check all settings. Nothing runs yet.

        Arguments:
            settings: What to collect, by whom, and within which limits.
            tape: The run to record on.
            resume: Go on with a collection of the same source and step: run what has not finished. Without it, a
                source that was collected at this step before is refused.
            runner: What carries out attempts, such as a `RayRunner`. By default they run in this process.
            gateway: A running gateway to use. By default the collector starts one.
            run_ahead: Limits how many groups are started ahead of a trainer. By default there is no limit.

        Raises a TaskError for tasks that cannot be used, and a CollectError for settings that contradict the run.
        """
        self.settings = settings
        self._run_ahead = run_ahead
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
        self._runner: Runner = runner or LocalRunner(settings, tape, self._environments, gateway=gateway)
        self._run = tape.run()
        check_resumable(tape, self._run, settings, self._source.name, resume=resume)
        self._stopping = asyncio.Event()
        self._queue: AttemptQueue | None = None
        self._ended = 0

    @property
    def in_flight(self) -> int:
        """How many attempts have begun and not ended."""
        return 0 if self._queue is None else self._queue.given_out - self._ended

    def end(self) -> None:
        """Begin no more attempts. Those that run have `grace_s` seconds to end."""
        self._stopping.set()

    async def run(
        self,
        on_launch: Callable[[Launch], None] = _ignore,
        on_results: Callable[[list[RolloutResult]], None] = _ignore,
    ) -> None:
        """Collect until every attempt has ended.

        `on_launch` is called once, before the first attempt. `on_results` is called with the results of attempts as
        they end; attempts that are rewarded by comparison come when their group has been compared.

        Cancelling it ends what runs. The tape is complete either way, and `resume` goes on.
        """
        settings = self.settings
        with self._source:
            async with self._runner as runner:
                identity = RolloutIdentity(self._tape.name, settings.step, runner.model_name, runner.agent_name)
                earlier = load_earlier(self._run, self._source.name, settings.step)
                check_model(self._tape, earlier, identity.model, settings.step)
                # Recorded also when it is resumed: whoever waits for groups then knows which process to watch.
                fixed = settings.fixed_by_resume(self._source.name)
                self._tape.append_run_event(
                    EventKind.COLLECT,
                    {"settings": fixed, "model": identity.model, "sandbox": runner.confinement.sandbox},
                )
                total = len(self._source) * settings.group_size
                confinement = runner.confinement
                if confinement.sandbox == "none":
                    log.warning("%s", confinement.says)
                on_launch(Launch(len(self._source), total, earlier.attempts, earlier.running, confinement))
                comparisons = GroupComparisons(self._tape, self._source, identity, settings)
                comparisons.add_earlier(earlier, self._environments.of)

                async def on_ended(planned: PlannedAttempt, results: list[RolloutResult]) -> None:
                    self._ended += 1
                    environment = self._environments.of(self._source[planned.task_index])
                    on_results(await comparisons.add(planned.task_index, environment, results))

                try:
                    attempts = self._plan(identity, earlier)
                    self._queue = AttemptQueue(attempts, settings.step, self._source.name, self._run_ahead)
                    await runner.run(self._queue, identity, on_ended, self._stopping)
                    if not self._stopping.is_set():
                        on_results(await comparisons.compare_rest(self._environments.of))
                        self._tape.append_run_event(
                            EventKind.COLLECTED, {"step": settings.step, "source": self._source.name}
                        )
                finally:
                    on_results([*comparisons.uncompared(), *runner.cancelled])

    def _plan(self, identity: RolloutIdentity, earlier: EarlierRollouts) -> Iterator[tuple[PlannedAttempt, Task]]:
        for one in plan_attempts(self._source, self.settings, identity, earlier, self._environments.seats):
            yield one, self._source[one.task_index]
