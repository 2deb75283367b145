"""The engine protocol: the calls that every engine implements, and their arguments and results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.request import ChatRequest, SamplingParams
from rolltape.gateway.turn.constraints import Ability, Constraint
from rolltape.records.turn import NO_IDS, Finish, Ids, LogprobKind, Segment, TurnFlag

TOP_LOGPROBS = "top_logprobs"  # in `Engine.applies`: the engine returns the most likely ids if requested


class IdsAsJson:
    """The JSON of a session's latest prompt, cached so that only new ids are encoded: 100,000 ids take milliseconds."""

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
    """A request to an engine: continue these ids."""

    id: str  # the name by which the engine aborts it
    session: str  # requests of one session share prefixes
    prompt_ids: Ids
    sampling: SamplingParams  # to apply; max_tokens is always set
    # Only the parameters that the agent, the session or the gateway set; for an engine with its own defaults.
    decided: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...]
    vocabulary: int | None = None  # one more than the largest id of the tokenizer; None if unknown
    held_tokens: int = 0  # tokens of the prompt whose routed experts are on the tape
    request: ChatRequest  # for an engine that takes messages instead of ids
    constraint: Constraint | None = None  # to enforce, if the engine has the abilities
    top_logprobs: int = 0  # how many of the most likely ids to return per token, as side arrays with logprobs
    ids_json: IdsAsJson = msgspec.field(default_factory=IdsAsJson)  # of its session, for an engine that takes JSON
    # An engine that streams calls it on the event loop with the ids sampled since the last call. Together they are
    # what `generate` returns, or what its EngineDied has. Ids that cannot have been sampled never reach clients.
    on_sampled: Callable[[Sequence[int]], None] | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An engine's result: the whole continuation, or a part of it if the finish is ABORT."""

    ids: Ids
    logprobs: npt.NDArray[np.float32] | npt.NDArray[np.float64] | None  # None if it returned none
    finish: Finish
    stop_string: str | None = None
    # The weight versions at the beginning and the end; None if the engine does not report them.
    first_version: str | None = None
    last_version: str | None = None
    segments: tuple[Segment, ...] = ()  # if the engine reports at which id weights changed; () if the two above apply
    logprob_kind: LogprobKind | None = None
    cached_tokens: int | None = None  # of the prompt, in the engine's prefix cache; None if unknown
    side_arrays: Mapping[str, Any] = {}  # in the form of `record_turn`
    constrained: bool = False  # the ids were sampled under a constraint
    message: dict[str, Any] | None = None  # in chat form, if the engine returns text; None: parse the ids
    prompt_ids: Ids | None = None  # by the engine from messages, if it reports them
    flags: tuple[TurnFlag, ...] = ()  # about defects of its message
    upstream: Mapping[str, Any] = {}  # what a hosted endpoint reports: model, usage, finish reason


class ImplausibleReply(EngineFault):
    """An engine returned a reply, `given`, that it cannot have sampled."""

    def __init__(self, message: str, given: Generated) -> None:
        super().__init__(message)
        self.given = given


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports about itself."""

    model: str | None = None
    context: int | None = None  # limit of prompt and reply together; None if not reported
    version: str | None = None


class Engine(Protocol):
    """A program that continues prompts: SGLang, vLLM, llama.cpp, the tiny engine, a replay."""

    name: str  # kind and address, for messages: "sglang http://127.0.0.1:30000"
    token_faithful: bool  # False if it takes and returns text
    applies: frozenset[str]  # the fields of SamplingParams that it applies, and TOP_LOGPROBS if it returns those
    abilities: frozenset[Ability]  # for constraints
    streams: bool  # whether it calls `on_sampled`

    async def facts(self) -> EngineFacts:
        """What the engine reports about itself; also a health check. Raises EngineUnreachable if it does not answer."""

    async def generate(self, wanted: Generation) -> Generated:
        """Return the continuation when it has ended. Cancelling the caller aborts it in the engine.

        Raises EngineUnreachable (nothing was begun), EngineFault (it answered with an error, or with invalid data),
        or EngineDied with the part of the reply that was received.
        """

    async def abort(self, generation_id: str) -> None:
        """End a generation now: its `generate` returns the ids sampled so far, with finish ABORT."""

    async def close(self) -> None:
        """Close its connections."""


@runtime_checkable
class TakesWeights(Protocol):
    """An engine that loads other weights while it runs: SGLang, vLLM, the tiny engine."""

    async def load_weights(self, folder: str, version: str) -> None:
        """Load the checkpoint in a folder that the engine can read, and report this version from now on.

        Nothing is generated meanwhile, and nothing that was computed with the old weights is used afterwards. Raises
        EngineError if it failed; the engine's weights are then unknown.
        """
