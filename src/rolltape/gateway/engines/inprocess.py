"""The tiny engine with the engine protocol: a small model in this process, with nothing to install or start."""

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.errors import (
    EngineDied,
    EngineError,
    EngineFault,
    EngineStopped,
    EngineUnreachable,
    PromptError,
    SamplingError,
)
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import top_side_arrays
from rolltape.gateway.turn.constraints import Ability
from rolltape.records.turn import Finish, Ids, LogprobKind
from rolltape.tiny import Piece, Sampling, TinyEngine, shipped_model
from rolltape.tiny.sampling import MAX_SEED, TopLogprob


def open_tiny(place: str, **options: Any) -> "InProcessEngine":
    """The tiny engine with the model in a folder; "" is the shipped model."""
    folder = Path(place) if place else shipped_model()
    return InProcessEngine(TinyEngine(folder), model=folder.name, **options)


class InProcessEngine:
    """A TinyEngine, started at its first use and ended by `close`. With `running`, its owner starts and ends it."""

    token_faithful = True
    keeps_aborted = True  # after `abort`, `generate` returns the ids sampled so far
    applies = frozenset({"temperature", "top_p", "top_k", "seed", "max_tokens", "stop", TOP_LOGPROBS})
    abilities = frozenset[Ability]()
    streams = True

    def __init__(
        self,
        engine: TinyEngine,
        *,
        model: str = "tiny",
        logprob_kind: LogprobKind = LogprobKind.AFTER_TEMPERATURE,
        running: bool = False,
    ) -> None:
        self.name = f"tiny engine ({model})"
        if logprob_kind is LogprobKind.AFTER_TRUNCATION:
            raise EngineError(f"{self.name}: it returns no logprobs after truncation; take raw or after_temperature")
        self.engine = engine
        self._model = model
        self._kind = logprob_kind
        self._is_raw = logprob_kind is LogprobKind.RAW
        self._running = running
        self._owned = not running

    async def facts(self) -> EngineFacts:
        await self._start()
        return EngineFacts(model=self._model, context=self.engine.context, version=self.engine.version)

    async def generate(self, wanted: Generation) -> Generated:
        await self._start()
        where = f"{self.name}, generation {wanted.id}"
        so_far: list[Piece] = []
        try:
            pieces = self.engine.stream(
                wanted.prompt_ids.tolist(), _sampling(wanted), request_id=wanted.id, whole=wanted.on_sampled is None
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    so_far.append(piece)
                    if wanted.on_sampled is not None:
                        wanted.on_sampled(piece.ids)
        except (PromptError, SamplingError) as error:
            raise EngineFault(f"{where}: {error}") from None
        except EngineStopped as error:
            partial = self._generated(so_far, Finish.ABORT, wanted, where) if so_far else None
            raise EngineDied(f"{where}: {error}", partial) from None
        reply = so_far[-1].reply
        assert reply is not None
        if reply.finish is not Finish.ERROR:
            return self._generated(so_far, reply.finish, wanted, where)
        if not len(reply.ids):
            raise EngineFault(f"{where}: {reply.error}")
        raise EngineDied(f"{where}: {reply.error}", self._generated(so_far, Finish.ABORT, wanted, where))

    def _generated(self, pieces: Sequence[Piece], finish: Finish, wanted: Generation, where: str) -> Generated:
        """The reply in these pieces."""
        ids = np.array([token for piece in pieces for token in piece.ids], dtype=np.int32)
        by_piece = [piece.raw_logprobs if self._is_raw else piece.tempered_logprobs for piece in pieces]
        last = pieces[-1]
        stopped_by = None if last.reply is None else last.reply.stopped_by
        return Generated(
            ids=ids,
            logprobs=np.concatenate(by_piece, dtype=np.float32),
            finish=finish,
            stop_string=stopped_by if isinstance(stopped_by, str) else None,
            # A request keeps the weights that it began with, so both are the same.
            first_version=last.version,
            last_version=last.version,
            logprob_kind=self._kind,
            cached_tokens=last.cached_tokens,
            side_arrays=self._tops([top for piece in pieces for top in piece.top_logprobs], ids, wanted, where),
        )

    def _tops(self, tops: Sequence[Sequence[TopLogprob]], ids: Ids, wanted: Generation, where: str) -> dict[str, Any]:
        if not wanted.top_logprobs:
            return {}
        listed = [[(one.id, one.raw if self._is_raw else one.tempered) for one in top] for top in tops]
        return top_side_arrays(listed, ids, wanted, where)

    async def abort(self, generation_id: str) -> None:
        if self.engine.stopped is None and self._running:
            self.engine.abort(generation_id)

    async def load_weights(self, folder: str, version: str) -> None:
        await self._start()
        await self.engine.load_weights(folder, version)

    async def close(self) -> None:
        if self._owned:
            await self.engine.close()

    async def _start(self) -> None:
        if self.engine.stopped is not None:
            raise EngineUnreachable(f"{self.name}: {self.engine.stopped}")
        if not self._running:
            self._running = True
            await self.engine.__aenter__()


def _sampling(wanted: Generation) -> Sampling:
    sampling = wanted.sampling
    assert sampling.max_tokens is not None
    return Sampling(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=None if sampling.top_k in (None, -1) else sampling.top_k,  # -1 means all, as in SGLang and vLLM
        seed=None if sampling.seed is None else sampling.seed % (MAX_SEED + 1),
        max_tokens=sampling.max_tokens,
        stop_ids=wanted.stop_ids,
        stop_strings=sampling.stop or (),
        top_logprobs=wanted.top_logprobs,
    )
