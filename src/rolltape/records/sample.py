"""A sample: one training row, and where each of its tokens came from."""

import enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.ledger import Fate
from rolltape.records.tokens import Ids
from rolltape.records.turn import LogprobKind, Logprobs


class Origin(enum.StrEnum):
    PROMPT = "prompt"
    SAMPLED = "sampled"


class Span(msgspec.Struct, frozen=True):
    """A stretch `[start, stop)` of a sample that came from one turn."""

    start: int
    stop: int
    origin: Origin
    turn: str  # the turn that first held these ids in this place
    turn_start: int  # SAMPLED: offset among that turn's sampled ids; PROMPT: offset in that turn's prompt
    messages: tuple[int, int]  # the messages `[first, end)` of that turn's conversation that it spells
    fate: Fate | None  # SAMPLED: what became of it in this sample; None: context that trains elsewhere, or a prompt
    temperature: float | None = None  # SAMPLED: what it was sampled at; None: not recorded, or a prompt
    logprob_kind: LogprobKind | None = None  # SAMPLED: of which distribution its logprobs are; None: not known


class SampleSide(msgspec.Struct, frozen=True, eq=False):
    """A side array joined along the sample; zeros, or no values, where it is missing."""

    values: npt.NDArray[Any]
    counts: npt.NDArray[np.int32] | None
    missing: tuple[tuple[int, int], ...]


class SampleOutline(msgspec.Struct, frozen=True, kw_only=True):
    """A sample without its arrays: what a list of samples shows."""

    id: str
    index: int  # its place among the rollout's samples
    session: str
    first_turn: str
    last_turn: str
    tokens: int
    prompt_tokens: int  # leading ids that nobody sampled
    trained_tokens: int
    reward: float | None  # None: the rollout has none
    loss_weight: float
    truncated: bool


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One training row: token ids, masks, logprobs, and credit. All per-token arrays have the length of `ids`.

    Example:

        for sample in rolltape.linearize(rollout, "exact").samples():
            print(sample.id, sample.ids[sample.trained_mask], sample.reward)
    """

    id: str  # names its tokens: the last turn, and a hash of its length and of which of them train
    rollout: str
    try_index: int
    group: str
    session: str
    policy: str  # the key of the cut policy that made it
    step: int
    index: int  # its place among the rollout's samples
    siblings: int  # how many samples the rollout has, this one included
    ids: Ids
    trained_mask: npt.NDArray[np.bool_]
    sampled_mask: npt.NDArray[np.bool_]
    logprobs: Logprobs  # NaN where none was given, as on every prompt token
    version_index: npt.NDArray[np.int32]  # into `versions`; -1 where none was given
    versions: tuple[tuple[str, str], ...]  # first and last possible weight version; equal where it is known
    spans: tuple[Span, ...]
    prompt_tokens: int  # ids before the first sampled one
    trained_tokens: int
    reward: float | None  # None: the rollout has none
    rollout_reward: float | None
    turn_rewards: dict[str, float]
    advantage: float | None  # None: none asked for, or no reward to compute it from
    loss_weight: float
    truncated: bool
    uses_tools: bool
    ill_formed: bool
    side: dict[str, SampleSide]
    tokenizers: tuple[str, ...] = ()  # where the text of its ids may be found on this machine, best first; not exported

    @property
    def temperature(self) -> float | None:
        """What its trained tokens were sampled at; None: not recorded, or not the same for all."""
        found = {span.temperature for span in self.spans if span.fate is Fate.TRAINED}
        return found.pop() if len(found) == 1 else None

    @property
    def logprob_kind(self) -> LogprobKind | None:
        """Of which distribution the logprobs of its trained tokens are; None: not known, or not the same for all."""
        found = {span.logprob_kind for span in self.spans if span.fate is Fate.TRAINED}
        return found.pop() if len(found) == 1 else None

    def _repr_html_(self) -> str:
        from rolltape.notebook import sample_html

        return sample_html(self)
