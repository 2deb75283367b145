"""The tiny engine behind the engine protocol: a small model in this process, with nothing to install or start."""

from rolltape.errors import EngineDied, EngineFault, EngineStopped, EngineUnreachable, PromptError, SamplingError
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.turn.constraints import Ability
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import Sampling, TinyEngine


class InProcessEngine:
    """An TinyEngine, started at its first use and ended by `close`; with `running`, its owner does both."""

    token_faithful = True
    keeps_aborted = True  # `abort` gives what was sampled so far
    applies = frozenset({"temperature", "top_p", "top_k", "seed", "max_tokens", "stop"})
    abilities = frozenset[Ability]()
    streams = False

    def __init__(
        self,
        engine: TinyEngine,
        *,
        model: str = "tiny",
        logprob_kind: LogprobKind = LogprobKind.AFTER_TEMPERATURE,
        running: bool = False,
    ) -> None:
        self.name = f"tiny engine ({model})"
        self.engine = engine
        self._model = model
        self._kind = logprob_kind
        self._running = running
        self._owned = not running

    async def facts(self) -> EngineFacts:
        await self._start()
        return EngineFacts(model=self._model, context=self.engine.context, version=self.engine.version)

    async def generate(self, wanted: Generation) -> Generated:
        await self._start()
        try:
            reply = await self.engine.generate(wanted.prompt_ids.tolist(), _sampling(wanted), request_id=wanted.id)
        except (PromptError, SamplingError) as error:
            raise EngineFault(f"{self.name}, generation {wanted.id}: {error}") from None
        except EngineStopped as error:
            raise EngineDied(f"{self.name}, generation {wanted.id}: {error}") from None
        if reply.finish is Finish.ERROR:
            raise EngineFault(f"{self.name}, generation {wanted.id}: {reply.error}")
        return Generated(
            ids=reply.ids,
            logprobs=reply.logprobs(self._kind),
            finish=reply.finish,
            stop_string=reply.stopped_by if isinstance(reply.stopped_by, str) else None,
            # A request keeps the weights that it began with, so this is known exactly.
            first_version=reply.version,
            last_version=reply.version,
            logprob_kind=self._kind,
            cached_tokens=reply.cached_tokens,
        )

    async def abort(self, generation_id: str) -> None:
        if self.engine.stopped is None and self._running:
            self.engine.abort(generation_id)

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
    asked = wanted.sampling
    assert asked.max_tokens is not None
    return Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        max_tokens=asked.max_tokens,
        stop_ids=wanted.stop_ids,
        stop_strings=asked.stop or (),
    )
