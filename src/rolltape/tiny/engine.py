"""The tiny engine: a model that runs in its own thread beside the event loop."""

import asyncio
import enum
import threading
import uuid
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from rolltape.errors import CheckpointError, EngineError, EngineStopped, PromptError, SamplingError
from rolltape.tiny.batch import RequestBatch
from rolltape.tiny.checkpoint import ModelConfig
from rolltape.tiny.linear import one_blas_thread
from rolltape.tiny.model import Qwen3
from rolltape.tiny.prefixes import Prefixes
from rolltape.tiny.request import EngineReply, Piece, Request, VersionedModel
from rolltape.tiny.sampling import Sampling
from rolltape.tiny.text import StopStrings, TokenTexts

_T = TypeVar("_T")


class InFlightPolicy(enum.StrEnum):
    """What happens to replies in flight when weights change or the engine pauses."""

    ABORT = "abort"  # they end with the ids sampled so far
    FINISH = "finish"  # they continue under the weights with which they began


class TinyEngine:
    """Generates replies: `async with TinyEngine(folder) as engine: reply = await engine.generate(ids)`."""

    def __init__(
        self,
        folder: str | Path,
        version: str = "0",
        *,
        max_running: int = 64,
        max_cached_tokens: int = 12_288,
        prefix_cache_mb: float = 64,
        context: int | None = None,
    ) -> None:
        """Read a checkpoint folder; raises CheckpointError if it has no Qwen3 model.

        At most `max_running` requests run at once; another one begins only while they have fewer tokens than
        `max_cached_tokens`. `prefix_cache_mb` is for prefixes that prompts share with earlier ones; 0 for no cache.
        `context` limits prompt and reply below the model's limit.
        """
        model = Qwen3(Path(folder))
        file = Path(folder) / "tokenizer.json"
        self.config: ModelConfig = model.config
        self.context = model.config.context if context is None else min(context, model.config.context)
        self.texts = TokenTexts(file) if file.is_file() else None  # None for no texts and no stop strings
        self._prefix_cache_mb = prefix_cache_mb
        self._batch = RequestBatch(
            self._weights(model, version),
            max_running=max_running,
            max_cached_tokens=max_cached_tokens,
            context=self.context,
        )
        self._known: dict[str, Request] = {}
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._asked: set[asyncio.Future[Any]] = set()
        self._paused = False
        self._stopped: str | None = None  # why it has stopped, or None

    @classmethod
    def load(cls, folder: str | Path, version: str = "0", **options: Any) -> Self:
        """The name of the constructor in 0.1; removed in 0.3."""
        warnings.warn("TinyEngine.load(folder) is now TinyEngine(folder)", DeprecationWarning, stacklevel=2)
        return cls(folder, version, **options)

    @property
    def version(self) -> str:
        """The version of the weights that new requests get."""
        return self._batch.weights.version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def in_flight(self) -> int:
        """How many requests are waiting or running."""
        return len(self._known)

    @property
    def stopped(self) -> str | None:
        """Why the engine takes no more requests, or None."""
        return self._stopped

    async def __aenter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="rolltape-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort requests in flight and end the thread."""
        if self._thread is not None:
            with suppress(EngineStopped):  # its thread has failed, and the callers know
                self._post(self._stop_now)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, request_id: str | None = None
    ) -> EngineReply:
        """The whole reply to a prompt. Cancelling the caller aborts the request."""
        pieces = self.stream(prompt_ids, sampling, request_id=request_id, whole=True)
        (reply,) = [piece.reply async for piece in pieces]
        assert reply is not None
        return reply

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """Yield the reply in pieces; the last piece has the complete reply. Closing the iterator aborts the request.

        With `whole` there is only one piece, at the end.
        """
        request = self._submit(prompt_ids, sampling, request_id, streams=not whole)
        given = 0
        try:
            while True:
                await self._wait_for_change(request)
                piece = request.piece(given)
                if piece.reply is not None:
                    # Before the yield, since the caller may not continue the iteration.
                    self._leave(request)
                    yield piece
                    return
                if piece.ids and not whole:
                    given += len(piece.ids)
                    yield piece
        finally:
            self._leave(request)

    def abort(self, request_id: str) -> bool:
        """End a request with the ids sampled so far. Return False if there is no request with this id."""
        request = self._known.get(request_id)
        if request is not None:
            self._post(lambda: self._abort_now([request]))
        return request is not None

    def abort_all(self) -> int:
        """End every request with the ids sampled so far. Return their number."""
        requests = list(self._known.values())
        self._post(lambda: self._abort_now(requests))
        return len(requests)

    async def load_weights(
        self, folder: str | Path, version: str, *, in_flight: InFlightPolicy = InFlightPolicy.ABORT
    ) -> int:
        """Load other weights of the same shape for all requests that begin from now on.

        Returns how many running replies were aborted, or finish under the weights with which they began.
        """
        model = await asyncio.to_thread(Qwen3, Path(folder))
        if _shape(model.config) != _shape(self.config):
            raise CheckpointError(f"{folder}: {_shape(model.config)} does not fit the engine's {_shape(self.config)}")

        def swap() -> int:
            running = list(self._batch.running)
            self._batch.weights = self._weights(model, version)
            if in_flight is InFlightPolicy.ABORT:
                self._abort_now(running)
            return len(running)

        return await self._ask(swap)

    async def announce(self, version: str) -> None:
        """Report another version of the weights in all replies that begin from now on."""

        def rename() -> None:
            self._batch.weights = self._batch.weights._replace(version=version)

        await self._ask(rename)

    async def drop_prefixes(self) -> None:
        """Clear the prefix cache; replies in flight are not affected."""
        await self._ask(lambda: self._batch.weights.prefixes.clear())

    async def pause(self, *, in_flight: InFlightPolicy = InFlightPolicy.ABORT) -> int:
        """Sample nothing until `resume`; new requests wait. Those in flight end, or are held. Return their number."""

        def pause() -> int:
            self._paused = True
            requests = [*self._batch.running, *self._batch.waiting]
            if in_flight is InFlightPolicy.ABORT:
                self._abort_now(requests)
            return len(requests)

        return await self._ask(pause)

    async def resume(self) -> None:
        """Continue after `pause`."""

        def resume() -> None:
            self._paused = False

        await self._ask(resume)

    def _weights(self, model: Qwen3, version: str) -> VersionedModel:
        return VersionedModel(model, version, Prefixes(model.config, self._prefix_cache_mb))

    def _submit(
        self, prompt_ids: Sequence[int], sampling: Sampling | None, request_id: str | None, *, streams: bool
    ) -> Request:
        sampling = Sampling() if sampling is None else sampling
        request_id = uuid.uuid4().hex if request_id is None else request_id
        prompt = self.checked(prompt_ids, sampling, request_id=request_id)
        stop_ids = self.config.eos_ids if sampling.stop_ids is None else sampling.stop_ids
        watch = StopStrings(self.texts, sampling.stop_strings) if self.texts and sampling.stop_strings else None
        request = Request(
            request_id, prompt, sampling, stop_ids=frozenset(stop_ids), stop_strings=watch, streams=streams
        )
        self._post(lambda: self._batch.waiting.append(request))
        self._known[request_id] = request
        return request

    def checked(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str | None = None) -> list[int]:
        """The prompt as a new list; raises the error with which `generate` and `stream` would refuse it."""
        if request_id in self._known:
            raise EngineError(f"request {request_id} is in flight already; give each its own id")
        if sampling.stop_strings and self.texts is None:
            raise SamplingError("stop strings need a tokenizer.json beside the weights")
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise PromptError("the prompt is empty; give at least one id")
        if len(prompt) >= self.context:
            raise PromptError(
                f"the prompt has {len(prompt)} ids, the context {self.context}; shorten it to leave room for a reply"
            )
        if min(prompt) < 0 or max(prompt) >= self.config.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self.config.vocab_size)
            raise PromptError(f"id {wrong} in the prompt, but the vocabulary has {self.config.vocab_size}")
        return prompt

    async def _wait_for_change(self, request: Request) -> None:
        await request.changed.wait()
        request.changed.clear()
        if request.finish is None and self._stopped is not None:
            raise EngineStopped(self._stopped)

    def _leave(self, request: Request) -> None:
        if request.finish is None and self._stopped is None:
            self.abort(request.id)
        self._known.pop(request.id, None)

    def _post(self, act: Callable[[], None]) -> None:
        """Run a function in the engine's thread between two steps."""
        with self._wake:
            if self._stopped is not None or self._thread is None:
                raise EngineStopped(self._stopped or "the engine has not been started; use `async with`")
            self._inbox.append(act)
            self._wake.notify()

    async def _ask(self, act: Callable[[], _T]) -> _T:
        """Run a function in the engine's thread, and wait for its result."""
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._post(lambda: _settle(answer, act()))
        self._asked.add(answer)
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    def _run(self) -> None:
        """The engine's thread."""
        why = "the engine was closed"
        try:
            with one_blas_thread() as hold_one_thread:
                while self._stopped is None:
                    for act in self._next_acts():
                        act()
                    if self._stopped is None and not self._paused and self._batch.busy:
                        hold_one_thread()
                        self._wake_callers(self._batch.step())
        except Exception as error:
            why = f"the engine's thread failed: {type(error).__name__}: {error}"
            raise
        finally:
            with self._wake:
                self._stopped = why
            for answer in list(self._asked):
                _settle(answer, EngineStopped(why))
            # Waiting callers wake up and find the engine stopped.
            self._wake_up(list(self._known.values()))

    def _next_acts(self) -> list[Callable[[], None]]:
        with self._wake:
            while not self._inbox and (self._paused or not self._batch.busy):
                self._wake.wait()
            acts, self._inbox = self._inbox, []
        return acts

    def _stop_now(self) -> None:
        self._abort_now([*self._batch.running, *self._batch.waiting])
        self._stopped = "the engine was closed"

    def _abort_now(self, requests: list[Request]) -> None:
        self._batch.abort(requests)
        self._wake_up(requests)

    def _wake_callers(self, requests: list[Request]) -> None:
        """Wake the callers that wait for a piece, or whose request has ended."""
        self._wake_up([request for request in requests if request.streams or request.finish is not None])

    def _wake_up(self, requests: list[Request]) -> None:
        loops = dict.fromkeys(request.loop for request in requests)
        for loop in loops:
            events = [request.changed for request in requests if request.loop is loop]
            try:
                loop.call_soon_threadsafe(_set_all, events)
            except RuntimeError:  # the loop was closed, so no caller waits
                self._batch.abort([request for request in requests if request.loop is loop])


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _settle(answer: "asyncio.Future[_T]", value: _T | EngineStopped) -> None:
    """Set the result of a future that another thread's event loop waits for."""

    def give() -> None:
        if answer.done():
            return
        if isinstance(value, EngineStopped):
            answer.set_exception(value)
        else:
            answer.set_result(value)

    answer.get_loop().call_soon_threadsafe(give)


def _shape(config: ModelConfig) -> ModelConfig:
    """The part of a config that new weights must share; the ids that end a turn may differ."""
    return msgspec.structs.replace(config, eos_ids=())
