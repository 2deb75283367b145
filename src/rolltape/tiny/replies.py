"""What the tiny engine returns: pieces while a request runs, and a reply at its end."""

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.tokens import Ids
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny.sampling import TopLogprob


class EngineReply(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A whole reply: everything sampled before it ended, also where it was aborted."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, that were read for an earlier request
    ids: Ids  # a stop id that ended it is the last
    raw_logprobs: npt.NDArray[np.float32]
    tempered_logprobs: npt.NDArray[np.float32]  # after temperature, before top-k and top-p
    finish: Finish
    version: str | None  # of the weights; None: it was aborted before it began
    seed: int  # the one given, or the one drawn
    stopped_by: int | str | None = None  # the stop id or stop string; None: it ended otherwise
    stop_at: int | None = None  # at which byte of the reply the stop string begins
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()  # per id, if asked for
    prompt_logprobs: tuple[float | None, ...] = ()  # raw; None for the first id, which nothing precedes
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    error: str | None = None

    def logprobs(self, kind: LogprobKind) -> npt.NDArray[np.float32]:
        """The logprobs of the sampled ids, of that kind; ValueError for a kind that this engine has not."""
        match kind:
            case LogprobKind.RAW:
                return self.raw_logprobs
            case LogprobKind.AFTER_TEMPERATURE:
                return self.tempered_logprobs
            case _:
                raise ValueError(f"logprobs {kind.value} are not computed; ask for raw or after_temperature")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled since the last piece. The last one carries the whole reply."""

    request_id: str
    start: int  # how many ids came before
    ids: tuple[int, ...]
    raw_logprobs: tuple[float, ...]
    tempered_logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...]
    version: str | None
    cached_tokens: int
    reply: EngineReply | None = None  # None: it goes on
