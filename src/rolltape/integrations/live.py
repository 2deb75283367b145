"""`LiveGroups`: a trainer requests tasks, and gets their groups while it runs."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

import msgspec

from rolltape.collect.runners.gateway import make_gateway
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import Task
from rolltape.errors import GroupsError
from rolltape.gateway.engines.function import FunctionEngine
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.weights import check_weights
from rolltape.groups import Group, Skipped
from rolltape.groups.consumer import find_consumer
from rolltape.groups.pending import EventOrder
from rolltape.groups.stream import GroupOptions
from rolltape.integrations.background import BackgroundLoop
from rolltape.integrations.requested import RequestedGroups
from rolltape.integrations.step_collections import StepCollection, StepCollections
from rolltape.integrations.weights import WeightChange, ask_gateways
from rolltape.records.ids import join_source
from rolltape.records.policy import Credit, CutPolicy
from rolltape.samples.summary import open_for_recording
from rolltape.tape.recording.tape import Tape

_ID_DIGITS = 16  # of a task that has no id
_ONCE_A_STEP = "ask for a task once a step"


class LiveGroups:
    """The groups of a run for a trainer, while it trains. They are collected here, or by other processes.

    With `collect`, each task that the trainer requests is attempted `group_size` times, through a gateway in front of
    the engine. Without it, a run is followed that other processes fill: `rolltape collect`, or programs at a gateway.

    Example:

        settings = rolltape.CollectSettings(source="math", group_size=8, model="checkpoints/qwen3-8b")
        live = LiveGroups("runs/exp1", collect=settings, engine="sglang:http://10.0.0.5:30000", version="0")
        groups = live.request([{"id": "t1", "prompt": "What is 2 + 2?", "answer": 4}], step=0).wait()
        for group in groups:
            print(group.rewards, [sample.advantage for sample in group.samples], group.unfinished)
            group.done()

    `request` returns a `RequestedGroups`, for threads (`for group in …`, `.wait()`) and for coroutines (`async for
    group in …`, `await …`). A group is given when all its attempts have ended. Attempts that failed are in
    `group.unfinished`, each with a reason. A group with nothing to train is given too, without samples.

    Tasks are mappings, as in a task file; without an `id` their content identifies them. Request a task once per step.
    Tasks of an evaluation have a separate `split`, so that they never mix with those of the training.

    `announce` names the weights that the engine has now; `new_weights` changes them while replies are in flight.

    Call `group.done()` when the optimizer has taken its step, and save `state_dict()` with each checkpoint, and once
    before the first step, for a process that ends before its first checkpoint.
    `load_state_dict` goes back: groups that were done after the checkpoint are given again from the tape, with
    `group.again` set, when they are requested again. Attempts that had not ended are run then.

    The gateway and the agents run in an event loop in a separate thread. Use this object from any thread; `close` ends
    it.
    """

    def __init__(
        self,
        tape: Tape | str | PathLike[str],
        *,
        collect: CollectSettings | None = None,
        engine: str | Engine | Sequence[str | Engine] = (),
        source: str | None = None,
        policy: CutPolicy | str = "exact",
        credit: Credit | None = None,
        consumer: str = "trainer",
        max_staleness: int | None = None,
        version: str | None = None,
    ) -> None:
        """Name the run; nothing starts before the first request.

        Arguments:
            tape: The run, or its folder. A tape that is given stays open.
            collect: What to collect, with which agent, and within which limits. Its `source` is the name of the tasks'
                source in the record, and its `model` the folder with the tokenizer. None: follow a run that other
                processes fill.
            engine: The engine behind the gateway, or several: a `FunctionEngine`, any `Engine`, or text such as
                "vllm:http://127.0.0.1:8000". By default the engines that `collect` names.
            source: If a run is followed, the source whose groups to take. None: all.
            policy: How rollouts are cut into samples.
            credit: Which numbers samples carry, such as `rolltape.Credit(advantage="normalized")`.
            consumer: The name under which groups are taken.
            max_staleness: Skip groups with a trained token that is more than so many weight versions behind the newest.
            version: The weight version that the engine has at the start. None: the engine reports it.
        """
        self._given = tape
        self._settings = collect
        given = [engine] if isinstance(engine, str) or not isinstance(engine, Sequence) else list(engine)
        self._engines: list[Engine] = [one for one in given if not isinstance(one, str)]
        if names := tuple(one for one in given if isinstance(one, str)):
            if self._engines or collect is None:
                raise GroupsError("engine: give engines of one kind, all objects or all texts, together with collect")
            self._settings = msgspec.structs.replace(collect, engines=names)
        self._source = source
        self._options: GroupOptions = {
            "policy": policy,
            "credit": credit,
            "consumer": consumer,
            "max_staleness": max_staleness,
            "with_empty": True,
        }
        self._version = version
        self._lock = threading.Lock()
        self._is_closed = False
        self.tape: Tape
        self._background: BackgroundLoop | None = None
        self._stack = AsyncExitStack()
        self._gateway: Gateway | None = None
        self._taking = ThreadPoolExecutor(1, "rolltape-live-groups")
        self._taking_turns = asyncio.Lock()  # a request takes what one before it gave back
        self._collections: StepCollections | None = None
        self._followed: set[tuple[int | None, str | None, str | None]] = set()  # step, split, task of open requests

    def start(self) -> Self:
        """Open the run, and start the gateway. The first request does so too. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                raise GroupsError(f"the live groups of run {self.tape.name} are closed; make new ones")
            if self._background is None:
                self.tape = self._given if isinstance(self._given, Tape) else open_for_recording(self._given)
                self._background = BackgroundLoop("rolltape-live")
                try:
                    self._background.submit(self._start()).result()
                except BaseException:
                    self._end()
                    raise
        return self

    async def _start(self) -> None:
        if self._settings is not None:
            self._gateway = await self._stack.enter_async_context(
                make_gateway(self._settings, self.tape, self._engines)
            )
            self._collections = StepCollections(self._settings, self.tape, self._gateway)
            if self._version is not None:
                self._gateway.announce(self._version)

    def close(self) -> None:
        """End the gateway and all running attempts. Groups that were given and are not done are given again later."""
        with self._lock:
            if self._background is not None:
                self._is_closed = True
                self._end()
                self._taking.shutdown()

    def _end(self) -> None:
        assert self._background is not None
        self._background.submit(self._close()).result()
        self._background.close()
        self._background = None
        if self.tape is not self._given:
            self.tape.close()

    async def _close(self) -> None:
        if self._collections is not None:
            await self._collections.end()
        await self._stack.aclose()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def gateway(self) -> Gateway:
        """The gateway, if this collects. Call its methods only in its own event loop."""
        self.start()
        if self._gateway is None:
            raise GroupsError("this follows a run that others fill, without a gateway; give collect")
        return self._gateway

    def request(
        self,
        tasks: Iterable[Mapping[str, Any] | Task] | None = None,
        *,
        step: int | None = None,
        split: str | None = None,
        group_size: int | None = None,
        limit: int | None = None,
    ) -> RequestedGroups:
        """Request the groups of tasks at a step. It returns at once. Wait for the result, or iterate over it.

        Arguments:
            tasks: Mappings, as in a task file. None: all tasks of the run that is followed.
            step: The training step that they are for. None: any, if a run is followed.
            split: For example "eval", for tasks that are not trained on.
            group_size: Attempts at each task. None: the size in `collect`, or of the collection that is followed.
            limit: End after so many groups, if a run is followed.
        """
        self.start()
        assert self._background is not None
        wanted = None if tasks is None else [with_id(task) for task in tasks]
        repeated = [task for task, count in Counter(task.id for task in wanted or ()).items() if count > 1]
        if repeated:
            raise GroupsError(f"task {repeated[0]!r} is in the request twice; {_ONCE_A_STEP}")
        if self._settings is None:
            producing = self._follow(wanted, step, split, group_size, limit)
        elif wanted is None or step is None:
            raise GroupsError("tasks and step are needed to collect; without them a run that others fill is followed")
        else:
            producing = self._collect(wanted, step, split, group_size or self._settings.group_size)
        order = {} if wanted is None else {task.id: index for index, task in enumerate(wanted)}
        return RequestedGroups(self._background, producing, order, self._blocked_loops())

    def _blocked_loops(self) -> set[asyncio.AbstractEventLoop]:
        """The event loops in which functions sample: to wait there without `await` would block forever."""
        loops = (engine.loop for engine in self._engines if isinstance(engine, FunctionEngine))
        return {loop for loop in loops if loop is not None}

    async def _collect(
        self, tasks: Sequence[Task], step: int, split: str | None, group_size: int
    ) -> AsyncGenerator[Group, None]:
        assert self._collections is not None
        collection = await self._collections.open(step, split, group_size)
        collection.requests += 1
        taking = {asyncio.ensure_future(self._collect_one(collection, task)) for task in tasks}
        ended: asyncio.Queue[asyncio.Task[list[Group]]] = asyncio.Queue()
        for one in taking:
            one.add_done_callback(ended.put_nowait)
        try:
            while taking:
                taking.remove(one := await ended.get())
                for group in one.result():
                    yield group
        finally:
            for one in taking:
                one.cancel()
            for left in await asyncio.gather(*taking, return_exceptions=True):
                _give_back(left if isinstance(left, list) else ())
            collection.requests -= 1

    async def _collect_one(self, collection: StepCollection, task: Task) -> list[Group]:
        """The groups of a task once its attempts have ended: one, or one for each seat of a game."""
        await collection.attempt(task)
        settings = collection.collector.settings
        options: GroupOptions = {
            **self._options,
            "step": settings.step,
            "source": collection.collector.source_name,
            "task_ids": [str(task.id)],
            "complete": False,
        }
        groups, skipped = await self._take(options)
        if not groups and not skipped:
            raise GroupsError(
                f"run {self.tape.name}: task {task.id!r} of step {settings.step} was given before; {_ONCE_A_STEP}, "
                "use load_state_dict to go back to a checkpoint, and begin a new training in a new run"
            )
        return groups

    async def _take(self, options: GroupOptions) -> tuple[list[Group], list[Skipped]]:
        """Take the groups that there are now. Those of a request that is cancelled meanwhile are given back."""
        async with self._taking_turns:
            taking = asyncio.get_running_loop().run_in_executor(self._taking, _take, self.tape, options)
            try:
                return await asyncio.shield(taking)
            except asyncio.CancelledError:
                _give_back((await taking)[0])
                raise

    async def _follow(
        self,
        tasks: Sequence[Task] | None,
        step: int | None,
        split: str | None,
        group_size: int | None,
        limit: int | None,
    ) -> AsyncGenerator[Group, None]:
        if tasks is not None and not tasks:
            return
        options: GroupOptions = {
            **self._options,
            "step": step,
            "source": join_source(self._source, split),
            "task_ids": None if tasks is None else [str(task.id) for task in tasks],
            "group_size": group_size,
            "limit": limit if tasks is None else len(tasks),
        }
        waited_for = {(step, split, task.id) for task in tasks or ()}
        if again := sorted(str(task) for _, _, task in waited_for & self._followed):
            raise GroupsError(
                f"run {self.tape.name}: another request waits for task {again[0]!r} already; {_ONCE_A_STEP}"
            )
        self._followed |= waited_for
        stream = self.tape.groups(**options)
        try:
            async for group in stream:
                yield group
        finally:
            self._followed -= waited_for
            stream.close()

    def announce(self, version: str) -> None:
        """Announce the weight version that the engine has from now on. Replies in flight are not interrupted."""
        if self._settings is None:
            self.start().tape.announce_version(version)
        else:
            self.gateway.service.weights.announce(version)

    def new_weights(self, version: str) -> WeightChange:
        """A `with` or `async with` block in which the engine's weights may change.

        No reply begins within it. Replies in flight are interrupted, and continue afterwards under the new version.
        After an exception, the version stays as it was.
        """
        gateway = self.gateway
        assert self._background is not None
        return WeightChange(self._background, gateway, version)

    def update_weights(self, folder: str | PathLike[str], version: str) -> int:
        """Make SGLang, vLLM or the tiny engine load the weights in a folder. Replies in flight continue under them.

        Returns how many replies were in flight. If a run is followed, the request goes to the gateways that fill it:
        those of this user, on this machine, that store their key in the run, as `rolltape serve` and `rolltape collect
        --max-ahead` do.
        """
        check_weights(folder, version)
        if self._settings is None:
            return ask_gateways(self.start().tape.directory.path, Path(folder), version)
        gateway = self.gateway
        assert self._background is not None
        return self._background.submit(gateway.update_weights(fspath(folder), version)).result()

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint: which groups are done. It is small, and can be written as JSON."""
        self.start()
        position = find_consumer(self.tape, self._options["consumer"]).position()
        return {
            "run": self.tape.name,
            "consumer": self._options["consumer"],
            "position": None if position is None else list(position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint: groups that were done after it are given again when they are requested."""
        self.start()
        own = {"run": self.tape.name, "consumer": self._options["consumer"]}
        try:
            saved = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise GroupsError(f"not a state from state_dict: {error}") from None
        if (other := {"run": saved.run, "consumer": saved.consumer}) != own:
            raise GroupsError(f"the checkpoint is of {other}, this is {own}; give the run and the consumer of both")
        assert self._background is not None
        if self._collections is not None:
            self._background.submit(self._collections.end()).result()
        find_consumer(self.tape, own["consumer"]).rewind(self.tape, saved.position)


class _State(msgspec.Struct):
    """The content of a `state_dict`."""

    run: str
    consumer: str
    position: EventOrder | None


def _take(tape: Tape, options: GroupOptions) -> tuple[list[Group], list[Skipped]]:
    stream = tape.groups(**options)
    return list(stream), stream.skipped


def _give_back(groups: Iterable[Group]) -> None:
    for group in groups:
        group.give_back()


def first_rank_failed(error: Exception) -> GroupsError:
    """The error for the other ranks of a training. The original error may not be picklable."""
    return GroupsError(f"the first rank, which collects for all, failed with {type(error).__name__}: {error}")


def with_id(given: Mapping[str, Any] | Task) -> Task:
    """A task with an id, which identifies its groups."""
    task = given if isinstance(given, Task) else Task.from_entry(given, source="", where="")
    return task if task.id is not None else msgspec.structs.replace(task, id=task.key.hex()[:_ID_DIGITS])
