"""`Regrading`: grades rollouts that could not be graded when they ended, from the tape. It samples nothing."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

from rolltape.collect.agents.chat import ChatAgent, call_tool
from rolltape.collect.environments import Environments, opened
from rolltape.collect.environments.protocol import (
    AGENT,
    Environment,
    Episode,
    GroupEnvironment,
    Score,
    check_episode,
    compares,
    drives,
)
from rolltape.collect.functions import call_environment, describe_error, time_limit
from rolltape.collect.grading.grades import (
    compare_attempts,
    load_agent_end,
    load_ended,
    record_score,
    score_seats,
    unpack_folder,
)
from rolltape.collect.plan import RolloutIdentity, earlier_collections, seat_agent
from rolltape.collect.records import launch_facts, main_turns
from rolltape.collect.results import OnResults, RolloutResult, ended_result
from rolltape.collect.sandboxes import ContainerOwner, Sandboxes, SandboxKind, open_sandbox
from rolltape.collect.sandboxes.checks import WorkspaceChecks
from rolltape.collect.sandboxes.workspace import remove
from rolltape.collect.tasks import Task, seed_of
from rolltape.errors import CollectError
from rolltape.records.jsonable import canonical_json
from rolltape.records.rollout import UNGRADED, Rollout, RolloutHead, Status
from rolltape.records.turn import Finish
from rolltape.samples import counted_tries
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import RolloutRow, Run

_PROGRAM_END = ("exit_code", "signal")


def is_ungraded(row: RolloutRow) -> bool:
    """Whether a rollout finished, and its reward could not be computed, or not yet."""
    return row.status == Status.FINISHED and row.reward is None and (row.reason or "").startswith(UNGRADED)


class Regrading:
    """Grades rollouts of a run that have no grade."""

    def __init__(
        self,
        tape: Tape,
        environments: Environments,
        *,
        limit_s: float,
        max_concurrent: int = 32,
        with_groups: bool = True,
        with_records: bool = False,
        sandbox: Callable[..., Awaitable[Sandboxes]] | None = None,
    ) -> None:
        """`limit_s` is the time that one call of an environment's, a checker's or a judge's function may take.

        With `with_groups` it also compares groups that are complete. `sandbox` opens the sandbox in which checks of
        files run, in a `scratch` folder; None for bubblewrap if it works.
        """
        owner = ContainerOwner(tape.directory.path, tape.writer)
        self._open_sandbox = sandbox or partial(open_sandbox, SandboxKind.AUTO, None, owner=owner)
        self._tape = tape
        self._environments = environments
        self._limit_s = limit_s
        self._with_groups = with_groups
        self._with_records = with_records
        self._slots = asyncio.Semaphore(max_concurrent)

    async def run(
        self, rows: Sequence[RolloutRow], on_results: OnResults, stopping: asyncio.Event | None = None
    ) -> None:
        """Grade those of `rows` that have no grade, and call `on_results` with the results as they come.

        The rows must be complete groups, as from `find_ungraded`.
        """
        run = self._tape.run()
        jobs: dict[object, list[RolloutRow]] = {}  # the rows of an attempt, or of a group that is compared
        for row in counted_tries(rows):
            by_group = compares(self._environment(row))
            if self._with_groups or not by_group:
                jobs.setdefault((row.group,) if by_group else _attempt_key(row.head), []).append(row)

        async def grade(job: list[RolloutRow]) -> None:
            async with self._slots:
                if stopping is not None and stopping.is_set():
                    return
                rollouts = await asyncio.to_thread(lambda: [run.rollout(*row.key) for row in job])
                environment = self._environment(job[0])
                if compares(environment):
                    scores = await self._grade_group(run, environment, rollouts)
                else:
                    scores = await self._grade_attempt(run, environment, rollouts)
                on_results(await asyncio.to_thread(self._results, run, scores, environment))

        await asyncio.gather(*(grade(job) for job in jobs.values() if any(map(is_ungraded, job))))

    def _environment(self, row: RolloutRow) -> Environment:
        return self._environments.named(launch_facts(row.head).get("environment") or row.environment or "problem")

    async def _grade_attempt(
        self, run: Run, environment: Environment, rollouts: Sequence[Rollout]
    ) -> dict[Rollout, Score]:
        """Score the seats of one attempt. An environment with state gets the recorded replies again."""
        by_seat = {_seat(one.head): one for one in rollouts if one.status is Status.FINISHED}
        try:
            async with AsyncExitStack() as stack:
                ended = {seat: load_ended(one, await self._unpack(run, one, stack)) for seat, one in by_seat.items()}
                episode = await self._begin_again(environment, by_seat)
                async with opened(environment, episode):
                    await self._replay(environment, episode, by_seat)
                    scores = await score_seats(environment, episode, ended, self._limit_s)
        except Exception as error:  # noqa: BLE001 - anybody's environment; the others are graded all the same
            return {one: Score(reward=None, ungraded=describe_error(error)) for one in by_seat.values()}
        return {one: _add_steps(scores[seat], one) for seat, one in by_seat.items()}

    async def _begin_again(self, environment: Environment, by_seat: Mapping[str, Rollout]) -> Episode:
        head = next(iter(by_seat.values())).head
        task, seed = _task(head), seed_of(_attempt_id(head))
        with time_limit(self._limit_s):
            episode = check_episode(await call_environment(environment.name, environment.begin, task, seed))
            if missing := set(episode.seats) - set(by_seat):
                raise CollectError(
                    f"its attempt has no finished rollout for {', '.join(sorted(missing))}; run it again"
                )
        if drives(episode):
            raise CollectError(f"{environment.name} scores while it runs its own agent loop; run it again")
        return episode

    async def _replay(self, environment: Environment, episode: Episode, by_seat: Mapping[str, Rollout]) -> None:
        if _base_agent(next(iter(by_seat.values())).head) != ChatAgent.name:
            return
        replies = {seat: deque(_load_replies(one)) for seat, one in by_seat.items()}
        with time_limit(self._limit_s):
            await _replay(environment.name, episode, replies)

    async def _grade_group(
        self, run: Run, environment: GroupEnvironment, rollouts: Sequence[Rollout]
    ) -> dict[Rollout, Score]:
        head, finished = rollouts[0].head, {one.id: one for one in rollouts if one.status is Status.FINISHED}
        size = _group_size(run, head)
        if len(rollouts) < size or any(one.status is Status.RUNNING for one in rollouts):
            why = f"its group has {len(rollouts)} of {size} attempts; `rolltape collect --resume` runs the rest"
            return dict.fromkeys(finished.values(), Score(reward=None, ungraded=why))
        ended = {one: load_ended(rollout) for one, rollout in finished.items()}
        seed = seed_of(_attempt_id(msgspec.structs.replace(head, attempt=0)))
        scores = await compare_attempts(environment, _task(head), ended, seed, self._limit_s)
        return {finished[one]: score for one, score in scores.items()}

    async def _unpack(self, run: Run, rollout: Rollout, stack: AsyncExitStack) -> WorkspaceChecks | None:
        """Unpack the working directory that was kept. Checks run there in a sandbox again."""
        end = load_agent_end(rollout)
        name = end.get("folder")
        if name is None and any(one in end for one in _PROGRAM_END):
            raise CollectError("its working directory was not kept; run it again")
        if name is None:
            return None
        path = Path(run.location) / name
        if not path.is_file():
            raise CollectError(f"its working directory is not at {path}; copy it there, or run it again")
        scratch = Path(mkdtemp(prefix="rolltape-grade-"))
        stack.callback(remove, scratch)
        workspace = await asyncio.to_thread(unpack_folder, path, scratch)
        sandboxes = await self._open_sandbox(scratch=scratch)
        wanted = (rollout.head.task or {}).get("sandbox")
        sandbox = await stack.enter_async_context(sandboxes.open(workspace, wanted, again=True))
        image = launch_facts(rollout.head).get("image")
        if sandbox.has_image != (image is not None):
            where = "in no container" if image is None else f"in a container of {image}"
            raise CollectError(f"its agent worked {where}; grade it by collect --resume with the --sandbox that it had")
        return WorkspaceChecks(sandboxes, sandbox, workspace)

    def _results(self, run: Run, scores: Mapping[Rollout, Score], environment: Environment) -> list[RolloutResult]:
        for rollout, score in scores.items():
            if rollout.reward is None:
                record_score(self._tape, rollout.id, score, environment.name, rollout.head.try_index)
                if score.ungraded is None and "folder" in (end := load_agent_end(rollout)):
                    (Path(run.location) / end["folder"]).unlink(missing_ok=True)
        return [
            self._result(run.rollout(*rollout.key), score)
            for rollout, score in scores.items()
            if rollout.reward is None
        ]

    def _result(self, rollout: Rollout, score: Score) -> RolloutResult:
        task_index, seat = launch_facts(rollout.head).get("task_index", 0), _seat(rollout.head)
        result = ended_result(rollout, task_index, seat, with_record=self._with_records, before=True)
        return result._replace(reason=score.reason)


def _seat(head: RolloutHead) -> str:
    return str(launch_facts(head).get("seat") or AGENT)


def _base_agent(head: RolloutHead) -> str:
    """The agent's name without the seat."""
    return (head.agent or "").removesuffix(seat_agent("", _seat(head)))


def _attempt_key(head: RolloutHead) -> object:
    """A key that the rollouts of one attempt's seats share."""
    task = head.task_id if head.task_id is not None else canonical_json(head.task)
    return (head.source, head.step, task, head.attempt, head.model, _base_agent(head))


def _attempt_id(head: RolloutHead) -> str:
    """The rollout id from which an attempt's seed is made, the same for all seats."""
    identity = RolloutIdentity(head.run, head.step, head.model or "", _base_agent(head))
    return identity.rollout_id(_task(head), head.attempt)


def _task(head: RolloutHead) -> Task:
    """The task as it was when the rollout was made."""
    return Task(id=head.task_id, data=head.task, source=head.source or "", where=f"rollout {head.id}")


def _group_size(run: Run, head: RolloutHead) -> int:
    began = earlier_collections(run, head.source, head.step)
    return int(began[-1]["settings"]["group_size"]) if began else 1


def _add_steps(score: Score, rollout: Rollout) -> Score:
    step_reward = load_agent_end(rollout).get("step_reward")
    if step_reward is None or score.reward is None:
        return score
    return msgspec.structs.replace(score, reward=score.reward + step_reward)


def _load_replies(rollout: Rollout) -> Iterable[dict[str, Any]]:
    """Yield the replies that the chat agent passed to its environment: those that were not cut."""
    for turn in main_turns(rollout):
        if turn.reply is not None and turn.facts.finish is not Finish.LENGTH:
            flags = [str(flag) for flag in turn.facts.flags]
            yield turn.reply.to_dict() | ({"flags": flags} if flags else {})


async def _replay(name: str, episode: Episode, replies: Mapping[str, "deque[dict[str, Any]]"]) -> None:
    """Bring an episode to the state in which its attempt ended. Its tools are called again."""
    openings = {seat: await call_environment(name, episode.opening, seat) for seat in episode.seats}
    calls = dict.fromkeys(openings, 0)
    while (seat := await call_environment(name, episode.next_seat)) is not None and replies[seat]:
        reply, opening = replies[seat].popleft(), openings[seat]
        if not reply.get("tool_calls"):
            await call_environment(name, episode.answer, seat, reply)
            continue
        tools = {tool.name: tool for tool in opening.tools}
        for call in reply["tool_calls"]:
            if calls[seat] == opening.max_tool_calls:
                return
            calls[seat] += 1
            await call_tool(tools, call["function"])


def find_ungraded(run: Run, *, step: int | None = None, source: str | None = None) -> list[RolloutRow]:
    """All rollouts of the groups and attempts in which one has no grade."""
    rows = [row for row in run.index() if step in (None, row.step) and source in (None, row.source)]
    attempts = {(row.source, row.step, row.task_id, row.attempt) for row in rows if is_ungraded(row)}
    groups = {row.group for row in rows if is_ungraded(row)}
    return [row for row in rows if row.group in groups or (row.source, row.step, row.task_id, row.attempt) in attempts]
