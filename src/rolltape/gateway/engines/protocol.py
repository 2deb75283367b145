"""The engine protocol: what every engine is asked for, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.request import ChatRequest, SamplingParams
from rolltape.gateway.turn.constraints import Ability, Constraint
from rolltape.records.turn import NO_IDS, Finish, Ids, LogprobKind, Segment, TurnFlag

TOP_LOGPROBS = "top_logprobs"  # in `Engine.applies`: it gives the most likely ids that a Generation asks for


class IdsAsJson:
    """The JSON of a session's latest prompt, kept so that only new ids are encoded: 100,000 ids take milliseconds."""

    def __init__(self) -> None:
        self._ids = NO_IDS
        self._text = b""

    def encoded(self, ids: Ids) -> msgspec.Raw:
        """The ids as a JSON list."""
        known = len(self._ids)
        if known > len(ids) or not np.array_equal(self._ids, ids[:known]):
            known, self._text = 0, b""
        new = msgspec.json.encode(ids[known:].tolist())[1:-1]
        self._ids, self._text = ids, b",".join(part for part in (self._text, new) if part)
        return msgspec.Raw(b"[" + self._text + b"]")


class Generation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine is asked for: the continuation of these ids."""

    id: str  # the engine's name for it, by which it is aborted
    session: str  # requests of one session share prefixes
    prompt_ids: Ids
    sampling: SamplingParams  # to be applied; max_tokens is always given
    # What the agent, the session or the gateway's owner decided; for an engine that has defaults of its own.
    decided: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...]
    vocabulary: int | None = None  # one more than the largest id of the tokenizer; None: not known
    held_tokens: int = 0  # of the prompt: those whose routed experts are on the tape already
    request: ChatRequest  # for an engine that takes messages instead of ids
    constraint: Constraint | None = None  # to be enforced, by an engine that has what it needs
    top_logprobs: int = 0  # how many of the most likely ids to give at each place, as side arrays with their logprobs
    ids_json: IdsAsJson = msgspec.field(default_factory=IdsAsJson)  # its session's, for an engine that takes JSON
    # Called on the event loop with the ids sampled since the last call, by an engine that streams. Together they are
    # what `generate` returns, or what its EngineDied carries. What cannot have been sampled is not shown to anybody.
    on_sampled: Callable[[Sequence[int]], None] | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an engine returned: the whole continuation, or a part of it if the finish is ABORT."""

    ids: Ids
    logprobs: npt.NDArray[np.float32] | npt.NDArray[np.float64] | None  # None: it gave none
    finish: Finish
    stop_string: str | None = None
    # The weights that it ran under: equal where that is known, different where they changed in between, None
    # where the engine does not say.
    first_version: str | None = None
    last_version: str | None = None
    segments: tuple[Segment, ...] = ()  # of an engine that says at which id weights changed; (): the two above hold
    logprob_kind: LogprobKind | None = None
    cached_tokens: int | None = None  # of the prompt, by the engine's own prefix cache; None: it does not say
    side_arrays: Mapping[str, Any] = {}  # as `record_turn` takes them
    constrained: bool = False  # the ids were sampled under a constraint
    message: dict[str, Any] | None = None  # in chat form, of an engine that gives text only; None: parse the ids
    prompt_ids: Ids | None = None  # that the engine made of the messages, where it says so; None: it was given ids
    flags: tuple[TurnFlag, ...] = ()  # what is odd about its message
    upstream: Mapping[str, Any] = {}  # what a hosted endpoint says beside the message: model, usage, finish reason


class ImplausibleReply(EngineFault):
    """An engine gave what it cannot have sampled: `given`."""

    def __init__(self, message: str, given: Generated) -> None:
        super().__init__(message)
        self.given = given


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports about itself."""

    model: str | None = None
    context: int | None = None  # prompt and reply together; None: it does not say
    version: str | None = None


class Engine(Protocol):
    """What continues prompts: SGLang, vLLM, llama.cpp, the tiny engine, a replay."""

    name: str  # its kind and address, for people: "sglang http://127.0.0.1:30000"
    token_faithful: bool  # false: text in, text out
    applies: frozenset[str]  # the fields of SamplingParams that it applies, and TOP_LOGPROBS if it gives those
    abilities: frozenset[Ability]  # to constrain what it samples
    streams: bool  # whether it calls `on_sampled`; false: a reply is known when it has ended

    async def facts(self) -> EngineFacts:
        """What the engine reports about itself; a health check too. Raises EngineUnreachable without an answer."""

    async def generate(self, wanted: Generation) -> Generated:
        """The continuation, when it has ended. Cancelling the caller aborts it in the engine.

        Raises EngineUnreachable (nothing was begun), EngineFault (it answered with an error, or with nonsense),
        or EngineDied with what had been received of the reply.
        """

    async def abort(self, generation_id: str) -> None:
        """End a generation now: its `generate` returns what was sampled so far, with finish ABORT."""

    async def close(self) -> None:
        """Close its connections."""


@runtime_checkable
class TakesWeights(Protocol):
    """An engine that loads other weights while it runs: SGLang, vLLM, the tiny engine."""

    async def load_weights(self, folder: str, version: str) -> None:
        """Load the checkpoint in a folder that the engine can read, and call it by this version from now on.

        Nothing is being generated meanwhile, and nothing that was computed with the old weights is used afterwards.
        Raises EngineError if it failed; which weights there are is not known then.
        """
