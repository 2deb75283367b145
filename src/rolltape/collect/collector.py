"""`Collector`: plans the attempts of one step, has a runner run them, and compares groups when they are complete."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from rolltape.collect.grading.comparisons import GroupComparisons
from rolltape.collect.grading.regrading import Regrading, find_ungraded
from rolltape.collect.limits import EnoughGroups, SpendingLimit, load_usage
from rolltape.collect.plan import (
    CheckedTasks,
    EarlierRollouts,
    PlannedAttempt,
    RolloutIdentity,
    check_model,
    check_resumable,
    check_unchanged,
    describe_taken_groups,
    load_earlier,
    open_tasks,
    plan_attempts,
)
from rolltape.collect.results import OnResults, RolloutResult
from rolltape.collect.runners.attempts import open_collection_sandbox
from rolltape.collect.runners.local import LocalRunner
from rolltape.collect.runners.protocol import AttemptQueue, Runner, RunnerFacts
from rolltape.collect.sandboxes import Confinement
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import GivenSource
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.gateway.gateway import Gateway
from rolltape.groups import RunAheadLimit
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.recording.tape import Tape

log = logging.getLogger("rolltape.collect")


class Launch(NamedTuple):
    """The numbers of attempts at the launch of a collection."""

    tasks: int
    attempts: int  # all, including those done before
    done_before: int
    running_elsewhere: int
    confinement: Confinement = Confinement(None, None)


class _Begun(NamedTuple):
    """The state of a collection that has begun."""

    identity: RolloutIdentity
    earlier: EarlierRollouts
    comparisons: GroupComparisons
    queue: AttemptQueue
    on_results: OnResults


class _AttemptsLeft:
    """How many attempts at a task have not ended. `over` is set when none is left, or the collection has ended."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.over = asyncio.Event()


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

    `rolltape collect` adds a report to this. docs/how-to/collect/index.md has more.

    An open collector gets its tasks while it runs, for example from a trainer:

        collector = rolltape.Collector(settings, tape, is_open=True)
        async with asyncio.TaskGroup() as running:
            running.create_task(collector.run())
            await collector.attempt({"id": "add", "prompt": "What is 47 + 38?", "answer": 85})
            collector.close()
    """

    def __init__(
        self,
        settings: CollectSettings,
        tape: Tape,
        *,
        resume: bool | None = False,
        runner: Runner | None = None,
        gateway: Gateway | None = None,
        run_ahead: RunAheadLimit | None = None,
        is_open: bool = False,
        tasks: CheckedTasks | None = None,
    ) -> None:
        """Read the source and check all settings. Nothing runs yet.

        Arguments:
            settings: What to collect, with which agent, and within which limits.
            tape: The run to record on.
            resume: Continue a collection of the same source and step: run what has not finished. False refuses a source
                that was collected at this step before. None continues if it was.
            runner: Runs attempts, such as a `RayRunner`. By default they run in this process.
            gateway: A running gateway to use. By default the collector starts one.
            run_ahead: Limits how many groups are started ahead of a trainer. By default there is no limit. With one,
                the collector's own gateway keeps its key in the run, where the trainer finds it to hand over weights.
            is_open: Tasks come by `attempt`, until `close`. The source in the settings is then a name.
            tasks: The tasks of these settings, if they were read before the run was made. By default the collector
                reads them.

        Raises a TaskError for tasks that cannot be used, and a CollectError for settings that contradict the run.
        """
        self.settings = settings
        self._run_ahead = run_ahead
        self._tape = tape
        self._source, self._environments = tasks or open_tasks(settings, is_open=is_open)
        self._runner: Runner = runner or LocalRunner(
            settings, tape, self._environments, gateway=gateway, keep_admin_key=run_ahead is not None
        )
        self._run = tape.run()
        check_resumable(tape, self._run, settings, self._source.name, resume=resume)
        self._stopping = asyncio.Event()
        self._queue: AttemptQueue | None = None
        self._begun: _Begun | None = None  # None before it begins and after it ends
        self._changed = asyncio.Event()  # set when it has begun, or ended without beginning
        self._left: dict[int, _AttemptsLeft] = {}  # by task index, for `attempt`
        self._ended = 0
        self._failures: list[tuple[int, str]] = []  # in a row: task index and reason
        self.stopped: str | None = None  # why it ended before everything was done
        self.reached_limit = False  # whether the reason is `max_sampled_tokens`, `max_cost` or `max_time_s`
        self.enough: str | None = None  # why it began no more tasks although some were left: `enough_groups`

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
        self.close()

    def close(self) -> None:
        """Take no more tasks, for an open collector. It ends when all attempts have ended."""
        if self._queue is not None:
            self._queue.close()

    async def attempt(self, task: Mapping[str, Any] | Task) -> None:
        """Attempt one more task, and return when all its attempts have ended. The collector must be open and running.

        Attempts that are already in the run are not made again. Raises a TaskError for a task that cannot be used,
        and a CollectError if the collection ends first.
        """
        await self._changed.wait()
        begun, source = self._still_running(), self._source
        assert isinstance(source, GivenSource)
        index = source.give(task)
        tasks = [(index, source[index])]
        if begun.earlier:
            await self._check_unchanged([one for _, one in tasks])
        begun.comparisons.add_earlier(tasks, begun.earlier, self._environments.of)
        planned = await asyncio.to_thread(lambda: list(self._plan(tasks, begun.identity, begun.earlier)))
        self._still_running()
        left = self._left[index] = _AttemptsLeft(len(planned))
        begun.queue.add(planned)
        if planned:
            await left.over.wait()
        del self._left[index]
        if left.count:
            self._still_running()
        begun.on_results(await begun.comparisons.compare_rest(self._environments.of, index))

    def _still_running(self) -> _Begun:
        if self._begun is None:
            where, why = f"run {self._tape.name}, step {self.settings.step}", self.stopped or "it was ended"
            raise CollectError(
                f"{where}: attempts were requested, but the collection of {self._source.name} ended: {why}"
            )
        return self._begun

    async def run(self, on_launch: Callable[[Launch], None] = _ignore, on_results: OnResults = _ignore) -> None:
        """Collect until every attempt has ended.

        `on_launch` is called once, before the first attempt. `on_results` is called with the results of attempts as
        they end; attempts that are rewarded by comparison come when their group has been compared. A resumed
        collection first grades what could not be graded. If too many attempts in a row fail, or a spending limit is
        reached, it ends early, and `stopped` has the reason.

        Cancelling it ends running attempts. The tape is complete either way, and `resume` continues.
        """
        try:
            await self._collect(on_launch, on_results)
        finally:
            self._begun = None
            self._changed.set()
            for left in self._left.values():
                left.over.set()

    async def _collect(self, on_launch: Callable[[Launch], None], on_results: OnResults) -> None:
        with self._source as source:
            async with self._runner as runner:
                facts = runner.facts
                identity = RolloutIdentity(self._tape.name, self.settings.step, facts.model_name, facts.agent_name)
                earlier = load_earlier(self._run, source.name, self.settings.step)
                check_model(self._tape, earlier, identity.model, self.settings.step)
                if earlier:
                    await self._check_unchanged(source)
                self._record_launch(facts)
                total = len(source) * self.settings.group_size
                on_launch(Launch(len(source), total, earlier.attempts, earlier.running, facts.confinement))
                comparisons = GroupComparisons(self._tape, source, identity, self.settings)
                comparisons.add_earlier(enumerate(source), earlier, self._environments.of)
                try:
                    if earlier.some_unrewarded:
                        await self._grade_earlier(on_results)
                    await self._run_attempts(runner, identity, earlier, comparisons, on_results)
                finally:
                    self.close()
                    on_results([*comparisons.uncompared(), *runner.cancelled])

    def _record_launch(self, facts: RunnerFacts) -> None:
        """Record that the collection begins, and log warnings for the user."""
        missed = describe_taken_groups(self._tape, self._run, self.settings, self._source.name)
        if missed:
            log.warning("%s", missed)
        if facts.confinement.sandbox == "none":
            log.warning("%s", facts.confinement.says)
        # Also recorded on a resume, so that a reader that waits for groups knows which process to watch.
        fixed = self.settings.fixed_by_resume(self._source.name)
        launch = {"settings": fixed, "model": facts.model_name, "sandbox": facts.confinement.sandbox}
        self._tape.append_run_event(EventKind.COLLECT, launch)

    async def _run_attempts(
        self,
        runner: Runner,
        identity: RolloutIdentity,
        earlier: EarlierRollouts,
        comparisons: GroupComparisons,
        on_results: OnResults,
    ) -> None:
        """Run attempts until none is left or a limit is reached, then compare groups that earlier processes began."""
        settings, source = self.settings, self._source
        is_open = isinstance(source, GivenSource)
        attempts = self._plan(() if is_open else enumerate(source), identity, earlier)
        queue = self._queue = AttemptQueue(attempts, settings.step, source.name, self._run_ahead, is_open=is_open)
        groups = EnoughGroups(settings, identity)
        await asyncio.to_thread(groups.add_earlier, self._run, source.name, settings.step)
        spending = SpendingLimit(settings, await asyncio.to_thread(load_usage, self._run, source.name, settings))

        def stop_at_limits() -> None:
            """Begin no more attempts, or no more tasks. Running attempts continue to their end."""
            if spending.explain() is not None:
                queue.stop()
            if groups.explain() is not None:
                queue.stop_after_groups()

        async def on_ended(planned: PlannedAttempt, results: list[RolloutResult]) -> None:
            self._ended += 1
            self._count_failures(planned.task_index, results)
            spending.add([result.usage for result in results])
            stop_at_limits()
            environment = self._environments.of(source[planned.task_index])
            final = await comparisons.add(planned.task_index, environment, results)
            groups.add(final)
            stop_at_limits()
            on_results(final)
            self._count_ended(planned.task_index)

        stop_at_limits()
        self._begun = _Begun(identity, earlier, comparisons, queue, on_results)
        self._changed.set()
        with ExitStack() as stack:
            if settings.max_time_s is not None:
                stack.callback(asyncio.get_running_loop().call_later(settings.max_time_s, queue.stop).cancel)
            await runner.run(queue, identity, on_ended, self._stopping)
        if self._stopping.is_set():
            return
        spent = spending.explain() if queue.is_stopped else None
        if spent is not None and (is_open or await queue.has_left()):
            self.reached_limit, self.stopped = True, spent
            return
        self.enough = groups.explain() if queue.is_stopped else None
        on_results(await comparisons.compare_rest(self._environments.of))
        self._tape.append_run_event(EventKind.COLLECTED, {"step": settings.step, "source": source.name})

    def _count_ended(self, task_index: int) -> None:
        left = self._left.get(task_index)
        if left is not None:
            left.count -= 1
            if not left.count:
                left.over.set()

    async def _check_unchanged(self, tasks: Iterable[Task]) -> None:
        if not self.settings.accept_changed_tasks:
            name, step = self._source.name, self.settings.step
            await asyncio.to_thread(check_unchanged, self._tape, self._run, name, tasks, step)

    async def _grade_earlier(self, on_results: OnResults) -> None:
        """Grade what earlier processes could not grade. Groups are compared when all their attempts have ended."""
        settings = self.settings
        find = partial(find_ungraded, self._run, step=settings.step, source=self._source.name)
        regrading = Regrading(
            self._tape,
            self._environments,
            limit_s=settings.score_timeout_s,
            max_concurrent=settings.max_concurrent,
            with_groups=False,
            with_records=settings.with_records,
            sandbox=partial(open_collection_sandbox, settings, self._tape, None),
        )
        await regrading.run(await asyncio.to_thread(find), on_results, self._stopping)

    def _count_failures(self, task_index: int, results: list[RolloutResult]) -> None:
        """End the collection after so many failures in a row that further attempts would probably fail too."""
        failed = next((one for one in results if one.status is Status.FAILED), None)
        if failed is None:
            self._failures.clear()
            return
        self._failures.append((task_index, str(failed.reason)))
        limit = self.settings.failures_to_end
        is_one_task = len({index for index, _ in self._failures}) == 1 < len(self._source)
        if limit and len(self._failures) >= limit and not is_one_task and not self._stopping.is_set():
            self.stopped = f"{len(self._failures)} attempts in a row failed, the last one: {failed.reason}"
            self.end()

    def _plan(
        self, tasks: Iterable[tuple[int, Task]], identity: RolloutIdentity, earlier: EarlierRollouts
    ) -> Iterator[tuple[PlannedAttempt, Task]]:
        for one in plan_attempts(tasks, self.settings, identity, earlier, self._environments.seats):
            yield one, self._source[one.task_index]
