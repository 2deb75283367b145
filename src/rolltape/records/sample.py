"""A sample, which is one training row; the ledger: where every sampled token went under a cut policy; the summary of a
rollout, which counts both."""

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import LedgerError
from rolltape.records.turn import Ids, LogprobKind, Logprobs

# Raised when a change would give the same rollout other counts in its summary.
SUMMARY_RULES = 8


class Fate(enum.StrEnum):
    """What became of a sampled token. The part before the colon shows whether it trains.

    Example:

        tokens = made.ledger.totals().get(rolltape.Fate.MASKED_ABANDONED, 0)
    """

    TRAINED = "trained"
    MASKED_ABANDONED = "masked:abandoned"  # delivered, then thrown away by the agent
    MASKED_ABORTED = "masked:aborted"  # cut short, and never continued
    MASKED_ENGINE_ERROR = "masked:engine_error"  # the engine failed, or returned what it cannot have sampled
    MASKED_UNDELIVERED = "masked:undelivered"  # the client did not get it, or this is not known
    MASKED_NO_LOGPROB = "masked:no_logprob"  # the engine gave none
    MASKED_STALE = "masked:stale"  # sampled by weights older than the limit, or of an unknown version
    MASKED_CONSTRAINED = "masked:constrained"  # sampled under a grammar, a schema or a list of choices
    MASKED_REWRITTEN_AFTER = "masked:rewritten_after"  # after the place where the next prompt departs
    MASKED_REPLACED = "masked:replaced"  # the slime policy wipes the whole reply that drifted
    MASKED_REWRITTEN = "masked:rewritten"  # the slime policy stops training a reply whose message came back changed
    MASKED_TRAINED_IN_OTHER_SAMPLE = (
        "masked:trained_in_other_sample"  # slime: another branch had the claim, used or not
    )
    DROPPED_AUXILIARY = "dropped:auxiliary"
    DROPPED_BRANCH = "dropped:branch"  # on a branch that was not chosen
    DROPPED_LENGTH = "dropped:length"  # beyond the maximum sample length
    DROPPED_ROLLOUT_FAILED = "dropped:rollout_failed"
    DROPPED_RUNNING = "dropped:running"  # its rollout has not ended
    DROPPED_PRUNED = "dropped:pruned"  # no longer on the tape
    DROPPED_FILTERED = "dropped:filtered"
    DROPPED_NOT_FAITHFUL = "dropped:not_token_faithful"
    DROPPED_EMPTY_PROMPT = "dropped:empty_prompt"

    @classmethod
    def _missing_(cls, value: object) -> "Fate | None":
        return cls(_RENAMED[value]) if isinstance(value, str) and value in _RENAMED else None

    @property
    def trains(self) -> bool:
        return self is Fate.TRAINED


# What 0.1.0 wrote → its name today.
_RENAMED = {
    "masked:given_up": "masked:rewritten_after",
    "masked:lost_claim": "masked:trained_in_other_sample",
}


class LedgerEntry(msgspec.Struct, frozen=True, gc=False):
    """The fate of the sampled tokens `[start, stop)` of one turn."""

    turn: str
    start: int
    stop: int
    fate: Fate


class Ledger(msgspec.Struct, frozen=True):
    """Where the sampled tokens of a rollout went under a cut policy. Each token is in it exactly once.

    Example:

        made = rolltape.linearize(rollout, "exact")
        for fate, tokens in made.ledger.totals().items():
            print(fate, tokens)
    """

    rollout: str
    try_index: int
    policy: str
    sampled: int
    entries: tuple[LedgerEntry, ...]

    def totals(self) -> dict[Fate, int]:
        """Tokens per fate, largest first."""
        counts: Counter[Fate] = Counter()
        for entry in self.entries:
            counts[entry.fate] += entry.stop - entry.start
        return dict(counts.most_common())

    def by_turn(self) -> dict[str, dict[Fate, int]]:
        """Tokens per fate for each turn."""
        found: dict[str, dict[Fate, int]] = {}
        for entry in self.entries:
            own = found.setdefault(entry.turn, {})
            own[entry.fate] = own.get(entry.fate, 0) + entry.stop - entry.start
        return found

    def checked(self, trained_in_samples: int, turn_lengths: Sequence[tuple[str, int]]) -> "Ledger":
        """Return itself if the fates cover each turn without gap or overlap and agree with the samples, else raise."""
        reached = dict.fromkeys((turn for turn, _ in turn_lengths), 0)
        for entry in self.entries:
            if reached[entry.turn] != entry.start or entry.stop <= entry.start:
                raise LedgerError(
                    f"turn {entry.turn}: accounted up to token {reached[entry.turn]}, next entry is "
                    f"[{entry.start}, {entry.stop}) under policy {self.policy}; please report this as a bug"
                )
            reached[entry.turn] = entry.stop
        for turn, length in turn_lengths:
            if reached[turn] != length:
                raise LedgerError(
                    f"turn {turn}: {length} sampled tokens but {reached[turn]} accounted for under policy "
                    f"{self.policy}; please report this as a bug"
                )
        trained = self.totals().get(Fate.TRAINED, 0)
        if trained != trained_in_samples:
            raise LedgerError(
                f"rollout {self.rollout}: {trained} tokens trained by the ledger but {trained_in_samples} in the "
                f"samples under policy {self.policy}; please report this as a bug"
            )
        return self


class Origin(enum.StrEnum):
    PROMPT = "prompt"
    SAMPLED = "sampled"


class Span(msgspec.Struct, frozen=True):
    """A range `[start, stop)` of a sample that came from one turn."""

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
    prompt_tokens: int  # ids before the first sampled one
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
        """The temperature of its trained tokens, or None if it was not recorded or they have several."""
        found = {span.temperature for span in self.spans if span.fate is Fate.TRAINED}
        return found.pop() if len(found) == 1 else None

    @property
    def logprob_kind(self) -> LogprobKind | None:
        """The kind of its trained tokens' logprobs, or None if it is not known or they have several."""
        found = {span.logprob_kind for span in self.spans if span.fate is Fate.TRAINED}
        return found.pop() if len(found) == 1 else None

    def _repr_html_(self) -> str:
        from rolltape.notebook import sample_html

        return sample_html(self)


class PolicySummary(msgspec.Struct, frozen=True):
    """A rollout under one policy. The ledger ignores a filter, which is looked up separately."""

    key: str  # of the policy
    samples: int
    ledger: dict[str, int]  # sampled tokens by fate


class BehaviorCounts(msgspec.Struct, frozen=True):
    """What a rollout's replies and tools did, counted from its messages. Auxiliary calls are left out."""

    cut_replies: int  # replies that a limit on tokens ended
    tool_results: int
    tool_errors: int  # tool results that are errors
    test_edits: int  # tool calls that change files of tests


class RolloutSummary(msgspec.Struct, frozen=True):
    """What lists and plots show of a rollout: its branches, its forks by cause, its ledger under each preset, and what
    its replies did."""

    rules: int  # the SUMMARY_RULES by which it was counted
    branches: int
    forks: dict[str, int]  # by cause
    policies: dict[str, PolicySummary]  # by the policy's name
    behavior: BehaviorCounts | None  # None: its turns are no longer on the tape
