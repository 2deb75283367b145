"""`Collector`: plans the attempts of one step, has a runner carry them out, and compares groups once they are whole."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from rolltape.collect.environments import Environments
from rolltape.collect.grading.comparisons import GroupComparisons
from rolltape.collect.grading.regrading import Regrading, find_ungraded
from rolltape.collect.plan import (
    EarlierRollouts,
    PlannedAttempt,
    RolloutIdentity,
    check_model,
    check_resumable,
    check_unchanged,
    load_earlier,
    plan_attempts,
)
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.local import LocalRunner
from rolltape.collect.runners.protocol import AttemptQueue, Runner
from rolltape.collect.sandboxes import Confinement, open_sandbox
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import open_source
from rolltape.collect.tasks import Task
from rolltape.gateway.gateway import Gateway
from rolltape.groups import RunAheadLimit
from rolltape.records.rollout import EventKind, Status
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
        self._failures: list[tuple[int, str]] = []  # in a row: task index and reason
        self.stopped: str | None = None  # why it ended itself before everything was done

    @property
    def source_name(self) -> str:
        """The name of the source, with its split, as rollouts have it."""
        return self._source.name

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
        they end; attempts that are rewarded by comparison come when their group has been compared. Resumed, it first
        grades what could not be graded. If too many attempts in a row fail, it ends early, and `stopped` says why.

        Cancelling it ends what runs. The tape is complete either way, and `resume` goes on.
        """
        settings = self.settings
        with self._source:
            async with self._runner as runner:
                identity = RolloutIdentity(self._tape.name, settings.step, runner.model_name, runner.agent_name)
                earlier = load_earlier(self._run, self._source.name, settings.step)
                check_model(self._tape, earlier, identity.model, settings.step)
                if earlier and not settings.accept_changed_tasks:
                    await asyncio.to_thread(check_unchanged, self._tape, self._run, self._source, settings.step)
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
                    self._count_failures(planned.task_index, results)
                    environment = self._environments.of(self._source[planned.task_index])
                    on_results(await comparisons.add(planned.task_index, environment, results))

                try:
                    if earlier.some_unrewarded:
                        await self._grade_earlier(on_results)
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

    async def _grade_earlier(self, on_results: Callable[[list[RolloutResult]], None]) -> None:
        """Grade what earlier processes could not grade. Groups are compared when all their attempts are there."""
        settings = self.settings
        find = partial(find_ungraded, self._run, step=settings.step, source=self._source.name)
        regrading = Regrading(
            self._tape,
            self._environments,
            limit_s=settings.score_timeout_s,
            max_concurrent=settings.max_concurrent,
            with_groups=False,
            with_records=settings.with_records,
            sandbox=partial(
                open_sandbox,
                settings.sandbox,
                None,
                hidden=[self._tape.directory.path],
                reads=settings.sandbox_read,
                passed=settings.pass_env,
            ),
        )
        await regrading.run(await asyncio.to_thread(find), on_results, self._stopping)

    def _count_failures(self, task_index: int, results: list[RolloutResult]) -> None:
        """End the collection once so many attempts in a row have failed that the next ones will fail too."""
        failed = next((one for one in results if one.status is Status.FAILED), None)
        if failed is None:
            self._failures.clear()
            return
        self._failures.append((task_index, str(failed.reason)))
        limit = self.settings.failures_to_end
        is_one_task = len({index for index, _ in self._failures}) == 1 < len(self._source)
        if limit and len(self._failures) >= limit and not is_one_task and not self._stopping.is_set():
            self.stopped = f"{len(self._failures)} attempts in a row failed, the last one: {failed.reason}"
            self._stopping.set()

    def _plan(self, identity: RolloutIdentity, earlier: EarlierRollouts) -> Iterator[tuple[PlannedAttempt, Task]]:
        for one in plan_attempts(self._source, self.settings, identity, earlier, self._environments.seats):
            yield one, self._source[one.task_index]
