"""A function as an engine, for example the client with which a training framework samples."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs
from rolltape.gateway.turn.constraints import Ability
from rolltape.records.turn import NO_IDS, Finish, LogprobKind

T = TypeVar("T")

SampledReply = tuple[Sequence[int], Sequence[float | None] | None, str]  # ids, logprobs, how it ended
SampleFunction = Callable[[list[int], Generation], Awaitable[SampledReply | Generated]]


class FunctionEngine:
    """Samples with an async function, `(prompt_ids, wanted) -> ids, logprobs, finish`.

    Example:

        async def sample(prompt_ids, wanted):
            output = await client.generate(
                input_ids=prompt_ids,
                max_new_tokens=wanted.sampling.max_tokens,
                temperature=wanted.sampling.temperature,
                stop_token_ids=wanted.stop_ids,
                request_id=wanted.id,
            )
            return output.ids, output.logprobs, output.finish_reason

        engine = FunctionEngine(sample, model="qwen3-8b", logprob_kind="after_temperature")

    `wanted` is a `Generation`. Its important fields are `sampling` (temperature, top_p, top_k, seed, stop, max_tokens,
    …; for None take the neutral value), `stop_ids`, `id` (unique), and `session` (requests of one session share
    prefixes; route them to one server).

    The function returns the sampled ids, including the stop id if it ended on one; a logprob for each, or None; and
    "stop", "length" or "abort" (interrupted: the gateway continues from these ids). To report more, such as the weight
    version or routed experts, it returns a `Generated`. An exception is an error of the engine: the request is
    retried, and fails after three errors.

    The function runs in the event loop in which the engine was made, so that it may use objects of that loop. If the
    engine was made outside of a loop, the function runs in the gateway's.
    """

    token_faithful = True
    abilities = frozenset[Ability]()
    streams = False

    def __init__(
        self,
        function: SampleFunction,
        *,
        name: str = "function engine",
        model: str | None = None,
        context: int | None = None,
        logprob_kind: LogprobKind | str | None = None,
        applies: Iterable[str] = ("temperature", "top_p", "top_k", "max_tokens"),
        abort: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Wrap a function; nothing is called yet.

        Arguments:
            function: See above.
            name: For messages.
            model: The model's name in the record.
            context: The limit of tokens of prompt and reply together.
            logprob_kind: The distribution of the logprobs: "raw", "after_temperature", "after_truncation".
            applies: The sampling parameters that the function applies. Agents are told which ones are ignored.
            abort: Called with the `id` of a request that must end now; the function then returns the ids sampled so
                far, with "abort". Without it the call is cancelled, and its sampled ids are lost.
        """
        self.name = name
        self.applies = frozenset(applies)
        self._function = function
        self._facts = EngineFacts(model=model, context=context)
        self._kind = None if logprob_kind is None else LogprobKind(logprob_kind)
        self._abort = abort
        self._running: dict[str, asyncio.Future[SampledReply | Generated]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None  # in which the function runs; None for the gateway's
        with contextlib.suppress(RuntimeError):
            self.loop = asyncio.get_running_loop()

    async def facts(self) -> EngineFacts:
        return self._facts

    async def generate(self, wanted: Generation) -> Generated:
        where = f"{self.name}, generation {wanted.id}"
        running = self._running[wanted.id] = self._call(lambda: self._function(wanted.prompt_ids.tolist(), wanted))
        try:
            reply = await running
        except asyncio.CancelledError:
            if wanted.id in self._running:  # cancelled from outside, not by `abort`
                raise
            return Generated(ids=NO_IDS, logprobs=None, finish=Finish.ABORT)
        except Exception as error:
            raise EngineFault(f"{where}: the function raised {type(error).__name__}: {error}") from error
        finally:
            self._running.pop(wanted.id, None)
        if isinstance(reply, Generated):
            return reply
        try:
            ids, logprobs, finish = reply
            array = sampled_ids([int(token) for token in ids], where)
            return Generated(
                ids=array,
                logprobs=None if logprobs is None else sampled_logprobs(logprobs, array, where),
                finish=parse_finish(finish, FINISHES, where),
                logprob_kind=self._kind,
            )
        except (TypeError, ValueError) as error:
            raise EngineFault(
                f"{where}: the function is to return ids, logprobs, and a reason to end: {error}"
            ) from error

    async def abort(self, generation_id: str) -> None:
        end = self._abort
        if end is not None:
            await self._call(lambda: end(generation_id))
        elif (running := self._running.pop(generation_id, None)) is not None:
            running.cancel()

    def _call(self, function: Callable[[], Awaitable[T]]) -> "asyncio.Future[T]":
        """Call a function of the engine's owner in the engine's event loop."""

        async def call() -> T:
            return await function()

        if self.loop is None or self.loop is asyncio.get_running_loop():
            return asyncio.ensure_future(call())
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self.loop))

    async def close(self) -> None:
        return
