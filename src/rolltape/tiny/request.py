"""One request in progress, and its results: pieces while it runs, and a reply at its end."""

import asyncio
import secrets
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.turn import Finish, Ids, LogprobKind
from rolltape.tiny.attention import Cache, TokenSpan
from rolltape.tiny.model import Qwen3
from rolltape.tiny.prefixes import PROMPT_PIECE, Prefixes
from rolltape.tiny.sampling import Draws, KeptIds, SampledToken, Sampling, TopLogprob
from rolltape.tiny.text import StopMatch, StopStrings


class EngineReply(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A complete reply: everything sampled before its end or its abort."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt from the prefix cache
    ids: Ids  # including a stop id that ended the reply
    raw_logprobs: npt.NDArray[np.float32]
    tempered_logprobs: npt.NDArray[np.float32]  # after temperature, before top-k and top-p
    finish: Finish
    version: str | None  # of the weights; None if it was aborted before it began
    seed: int  # the requested or the random one
    stopped_by: int | str | None = None  # the stop id or stop string, or None
    stop_at: int | None = None  # the byte of the reply at which the stop string begins
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()  # per id, if requested
    prompt_logprobs: tuple[float | None, ...] = ()  # raw; None for the first id
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    error: str | None = None

    def logprobs(self, kind: LogprobKind) -> npt.NDArray[np.float32]:
        """The logprobs of the sampled ids of this kind; raises ValueError for a kind that this engine lacks."""
        match kind:
            case LogprobKind.RAW:
                return self.raw_logprobs
            case LogprobKind.AFTER_TEMPERATURE:
                return self.tempered_logprobs
            case _:
                raise ValueError(f"logprobs {kind.value} are not computed; ask for raw or after_temperature")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The ids sampled since the last piece. The last piece has the complete reply."""

    request_id: str
    start: int  # how many ids came before
    ids: tuple[int, ...]
    raw_logprobs: tuple[float, ...]
    tempered_logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...]
    kept_ids: tuple[KeptIds | None, ...]  # per id, if asked for
    version: str | None
    cached_tokens: int
    reply: EngineReply | None = None  # None while it continues


class VersionedModel(NamedTuple):
    """A model with its announced version, and its prefix cache."""

    model: Qwen3
    version: str
    prefixes: Prefixes


class Request:
    """A request. Only the engine's thread writes it; others read. Lists only grow, and `finish` is set last."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        stop_strings: StopStrings | None,
        streams: bool,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.draws = Draws(self.seed, len(prompt))
        self.streams = streams  # False if only the end is needed
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()

        self.weights: VersionedModel | None = None
        self.cache: Cache | None = None
        self.fed = 0  # tokens of prompt and reply that are in the cache
        self.cached = 0  # tokens of the prompt that were copied instead of read
        self._keys: list[bytes] = []  # of the prompt's complete pieces
        self.sampled: list[SampledToken] = []
        self.prompt_logprobs: list[float | None] = []
        self.prompt_tops: list[tuple[TopLogprob, ...]] = []
        self.finish: Finish | None = None
        self.error: str | None = None
        self._stop_ids = stop_ids
        self._stop_strings = stop_strings
        self._stopped_by: int | str | None = None
        self._stop_at: int | None = None

    @property
    def reads_prompt(self) -> bool:
        return self.fed < len(self.prompt)

    def begin(self, weights: VersionedModel, context: int) -> None:
        self.weights = weights
        self.cache = Cache(weights.model.config, min(len(self.prompt) + self.sampling.max_tokens, context))
        self._keys = weights.prefixes.keys(self.prompt)

    def take_over(self) -> bytes | None:
        """Copy cached pieces instead of reading them. Return the key of the piece to read next, if it can be cached."""
        assert self.weights is not None
        assert self.cache is not None
        first = self.sampling.prompt_logprobs_from
        unscored = len(self.prompt) - 1 if first is None else min(len(self.prompt), first) - 1
        keys, at = self._keys[: max(unscored, 0) // PROMPT_PIECE], self.fed // PROMPT_PIECE
        taken = self.weights.prefixes.take(keys, at, self.cache)
        self.fed += taken * PROMPT_PIECE
        self.cached += taken * PROMPT_PIECE
        return keys[at + taken] if at + taken < len(keys) else None

    def keep(self) -> None:
        """Cache the piece of the prompt that was read last, if it is complete."""
        assert self.weights is not None
        assert self.cache is not None
        if self._keys and self.fed % PROMPT_PIECE == 0:
            self.weights.prefixes.keep(self._keys[: self.fed // PROMPT_PIECE], self.cache)

    def next_span(self) -> TokenSpan:
        """The tokens to feed next: a piece of the prompt, or the id sampled last."""
        assert self.cache is not None
        if not self.reads_prompt:
            return TokenSpan(self.cache, [self.sampled[-1].id], self.fed, 1)
        stop = min(self.fed + PROMPT_PIECE, len(self.prompt))
        return TokenSpan(self.cache, self.prompt[self.fed : stop], self.fed, self._wanted(stop))

    def _wanted(self, stop: int) -> int:
        """For how many of the last tokens before `stop` logits are needed."""
        first = self.sampling.prompt_logprobs_from
        if first is not None:
            # The logits for a token are those of the token before it.
            wanted = stop - max(self.fed, first - 1, 0)
            return max(wanted, int(stop == len(self.prompt)))
        return int(stop == len(self.prompt))

    def accept(self, choice: SampledToken, context: int) -> None:
        """Add the sampled id and check whether it ends the reply."""
        self.sampled.append(choice)
        match: StopMatch | None = None
        if choice.id in self._stop_ids:
            self._stopped_by = choice.id
            self.end(Finish.STOP)
        elif self._stop_strings is not None and (match := self._stop_strings.add(choice.id)) is not None:
            self._stopped_by, self._stop_at = match
            self.end(Finish.STOP_STRING)
        elif len(self.sampled) >= self.sampling.max_tokens or len(self.prompt) + len(self.sampled) >= context:
            self.end(Finish.LENGTH)

    def end(self, finish: Finish, error: str | None = None) -> None:
        self.cache = None
        self.error = error
        self.finish = finish

    def piece(self, start: int) -> Piece:
        """The piece after the first `start` ids, with the reply if it has ended."""
        ended = self.finish is not None
        new = self.sampled[start:]
        return Piece(
            request_id=self.id,
            start=start,
            ids=tuple(one.id for one in new),
            raw_logprobs=tuple(one.raw for one in new),
            tempered_logprobs=tuple(one.tempered for one in new),
            top_logprobs=tuple(one.top for one in new) if self.sampling.top_logprobs else (),
            kept_ids=tuple(one.kept for one in new) if self.sampling.kept_ids else (),
            version=None if self.weights is None else self.weights.version,
            cached_tokens=self.cached,
            reply=self.reply() if ended else None,
        )

    def reply(self) -> EngineReply:
        assert self.finish is not None
        return EngineReply(
            request_id=self.id,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            ids=np.array([one.id for one in self.sampled], dtype=np.int32),
            raw_logprobs=np.array([one.raw for one in self.sampled], dtype=np.float32),
            tempered_logprobs=np.array([one.tempered for one in self.sampled], dtype=np.float32),
            finish=self.finish,
            version=None if self.weights is None else self.weights.version,
            seed=self.seed,
            stopped_by=self._stopped_by,
            stop_at=self._stop_at,
            top_logprobs=tuple(one.top for one in self.sampled) if self.sampling.top_logprobs else (),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top_logprobs=tuple(self.prompt_tops),
            error=self.error,
        )
