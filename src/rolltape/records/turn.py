"""A turn: one reply of the model, with the ids it was conditioned on and all that the engine returned.

`implausibility` finds what no engine can have sampled: ids outside the vocabulary or after a stop id, too many ids, a
logprob above zero.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.jsonable import OpenRecord
from rolltape.records.messages import Message, MessageChain, Root

if TYPE_CHECKING:
    from rolltape.records.rollout import SessionHead

Ids = npt.NDArray[np.int32]

NO_IDS: Ids = np.empty(0, dtype=np.int32)
NO_IDS.setflags(write=False)


def common_prefix(left: Ids, right: Ids) -> int:
    """How many leading ids two arrays share."""
    limit = min(len(left), len(right))
    differs = left[:limit] != right[:limit]
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many leading items two sequences share."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


class TokenChain:
    """An immutable id sequence: `parent[:keep]` followed by `own`. Sharing a parent only saves space."""

    __slots__ = ("_jump", "depth", "jump_keep", "keep", "own", "parent")

    parent: Self | None
    keep: int
    own: Ids
    depth: int

    def __init__(self, own: Ids, parent: Self | None = None, keep: int = 0) -> None:
        # Links that contribute nothing are skipped, so that a chain is as short as its contents allow.
        while parent is not None and keep <= parent.keep:
            parent = parent.parent
        self.parent = parent
        self.keep = keep if parent is not None else 0
        self.own = own
        self.depth = 0 if parent is None else parent.depth + 1
        # Jump pointers in skew-binary steps, with the ids kept all the way: distant links meet in logarithmic time.
        # The first link has none: a pointer to itself would be freed only by the garbage collector.
        self._jump: Self | None = None
        self.jump_keep = self.keep
        if parent is not None:
            up = parent.jump
            if parent.depth - up.depth == up.depth - up.jump.depth:
                self._jump, self.jump_keep = up.jump, min(self.keep, parent.jump_keep, up.jump_keep)
            else:
                self._jump = parent

    @property
    def jump(self) -> Self:
        """An earlier link some steps away; the first link itself where there is none."""
        return self if self._jump is None else self._jump

    def __len__(self) -> int:
        return self.keep + len(self.own)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Ids]:
        """The arrays that make up `[start:stop]`, last one first."""
        limit = len(self) if stop is None else min(stop, len(self))
        link: TokenChain | None = self
        while link is not None and limit > start:
            if limit > link.keep:
                yield link.own[max(start - link.keep, 0) : limit - link.keep]
                limit = link.keep
            link = link.parent

    def slice(self, start: int = 0, stop: int | None = None) -> Ids:
        """The ids `[start:stop]` as one array; costs what it returns plus the links it crosses."""
        pieces = [piece for piece in self.pieces(start, stop) if len(piece)]
        if not pieces:
            return NO_IDS
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces[::-1])

    def to_numpy(self) -> Ids:
        """All ids as one array."""
        return self.slice()

    def common_prefix(self, other: "TokenChain") -> int:
        """How many leading ids two chains share; costs what lies beyond their common links."""
        left, left_cut = self._at_depth(other.depth)
        right, right_cut = other._at_depth(self.depth)
        while left is not right and (left_up := left.parent) is not None and (right_up := right.parent) is not None:
            # Equally deep links have equally deep jumps: jump while that does not pass the place where they meet.
            if left.jump is not right.jump:
                left_cut, right_cut = min(left_cut, left.jump_keep), min(right_cut, right.jump_keep)
                left, right = left.jump, right.jump
            else:
                left_cut, right_cut = min(left_cut, left.keep), min(right_cut, right.keep)
                left, right = left_up, right_up
        if left is not right:
            left_cut = right_cut = 0
        shared, limit = min(left_cut, right_cut), min(len(self), len(other))
        return shared + common_prefix(self.slice(shared, limit), other.slice(shared, limit))

    def _at_depth(self, depth: int) -> tuple["TokenChain", int]:
        """The link at that depth on the way to the start, if this one is deeper, and how much of it is kept here."""
        link: TokenChain = self
        cut = len(self)
        while link.depth > depth and (up := link.parent) is not None:
            if link.jump.depth >= depth:
                link, cut = link.jump, min(cut, link.jump_keep)
            else:
                link, cut = up, min(cut, link.keep)
        return link, cut


Logprobs = npt.NDArray[np.float32] | npt.NDArray[np.float64]


class Finish(enum.StrEnum):
    """How a reply ended."""

    STOP = "stop"  # on a stop token, which is its last id, or the turn is flagged
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Delivery(enum.StrEnum):
    """Whether the client got the reply in full."""

    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"
    UNKNOWN = "unknown"  # the recording process died before it knew


class LogprobKind(enum.StrEnum):
    """The distribution of the logprobs, which differs between engines."""

    RAW = "raw"
    AFTER_TEMPERATURE = "after_temperature"
    AFTER_TRUNCATION = "after_truncation"


class TurnFlag(enum.StrEnum):
    """What is odd about a turn. The turn is recorded anyway."""

    MISSING_STOP_ID = "missing_stop_id"  # ended by a stop token that is not among its ids
    REPAIRED_UNICODE = "repaired_unicode"  # text that was not valid Unicode was replaced
    SPECIAL_TOKEN_TEXT = "special_token_text"  # user or tool text spells a special token
    MALFORMED_CALL = "malformed_call"  # a tool call that could not be parsed was delivered as text
    DENIED_TOOL = "denied_tool"  # a call of a tool that the session may not use was delivered as text
    NOT_TOKEN_FAITHFUL = "not_token_faithful"  # the engine returned only text, so the ids are not its own
    NAN_LOGPROB = "nan_logprob"  # the engine gave NaN, which is recorded as no logprob
    MEDIA_LEFT_OUT = "media_left_out"  # images or documents in the prompt are placeholders: the model reads text only
    IMPLAUSIBLE = "implausible"  # what no engine can have sampled; `error` says why
    CONSTRAINED = "constrained"  # a grammar, a schema or a list of choices left the engine only some of the tokens
    UNMET_DEMAND = "unmet_demand"  # the reply lacks the call that was required, or does not follow the schema asked for


# Rounding in an engine's softmax gives logprobs above zero: 1e-4 in single precision if logits reach a thousand.
LARGEST_LOGPROB = 1e-3

_LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
_LEASTS = ("min_tokens", "min_new_tokens")
# Sampling parameters of engines that constrain decoding.
_CONSTRAINTS = frozenset(
    (
        *("response_format", "json_schema", "regex", "ebnf", "structural_tag", "grammar", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
    )
)


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A range `[start, stop)` of the sampled ids under one weight version.

    Both are equal if the version is known. They differ if it lies between the two, and are None if the engine did not
    report it.
    """

    start: int
    stop: int
    first_version: str | None = None
    last_version: str | None = None


class SideArray(msgspec.Struct, frozen=True, eq=False):
    """Further values per token for `[start, start + tokens)` of the turn's prompt and reply together.

    Dense: `values` has one row per token. Ragged: `counts` has the number of values of each token.
    """

    start: int
    values: npt.NDArray[Any]
    counts: npt.NDArray[np.int32] | None = None

    @property
    def stop(self) -> int:
        return self.start + (len(self.values) if self.counts is None else len(self.counts))


class TurnFacts(OpenRecord, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of a turn besides its messages and tokens. They are stored as one JSON object."""

    finish: Finish
    segments: tuple[Segment, ...]
    sampling: dict[str, Any] = {}
    sampling_asked: dict[str, Any] | None = None  # None: the request asked for what was applied
    logprob_kind: LogprobKind | None = None  # None: the engine's kind is not known
    model: str | None = None
    renderer: str | None = None
    fingerprint: str | None = None  # of tokenizer and chat template
    message_starts: tuple[int, ...] | None = None  # where each new message begins in the new prompt ids
    delivery: Delivery = Delivery.DELIVERED
    auxiliary: str | None = None  # why the call is no part of the task (a title, a quota probe)
    flags: tuple[TurnFlag, ...] = ()
    reward: float | None = None
    error: str | None = None
    started_at: float | None = None  # seconds since the epoch
    ended_at: float | None = None
    extra: dict[str, Any] = {}

    @property
    def is_engine_fault(self) -> bool:
        """Whether the engine failed, or returned what it cannot have sampled. Such a turn does not train."""
        return self.finish is Finish.ERROR or TurnFlag.IMPLAUSIBLE in self.flags

    @property
    def is_constrained(self) -> bool:
        """Whether a flag, or a sampling parameter as applied, shows that decoding was constrained."""
        if TurnFlag.CONSTRAINED in self.flags:
            return True
        if not self.sampling:
            return False
        given = (self.sampling[name] for name in _CONSTRAINTS & self.sampling.keys())
        return any(one and not (isinstance(one, dict) and one.get("type") == "text") for one in given)


class Turn:
    """One reply with the prompt that it was sampled from: messages, token ids, logprobs, and facts.

    Example:

        for turn in rollout.turns:
            print(turn.id, len(turn.prompt_ids), turn.sampled_ids, turn.facts.finish)
    """

    def __init__(
        self,
        *,
        session: str,
        sequence: int,
        root: Root,
        prompt: MessageChain,
        prompt_tokens: TokenChain,
        reply: Message | None,
        sampled_ids: Ids,
        logprobs: Logprobs | None,
        facts: TurnFacts,
        side: Mapping[str, SideArray],
    ) -> None:
        self.id = f"{session}.{sequence}"
        self.session = session
        self.sequence = sequence
        self.root = root
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.reply = reply
        self.sampled_ids = sampled_ids
        self.logprobs = logprobs
        self.facts = facts
        self.side = side
        # Prompt and reply together: what the next prompt extends, if nothing drifts.
        self.tokens = TokenChain(sampled_ids, prompt_tokens, len(prompt_tokens))
        self.messages = prompt if reply is None else MessageChain((reply,), prompt, len(prompt))

    def with_facts(self, facts: TurnFacts) -> "Turn":
        """The same turn with other facts."""
        other = copy(self)
        other.facts = facts
        return other

    @property
    def prompt_ids(self) -> Ids:
        return self.prompt_tokens.to_numpy()

    @property
    def has_ids(self) -> bool:
        """Whether its ids are known. If the reply came as text only, its number of tokens is unknown too."""
        return len(self.tokens) > 0 or TurnFlag.NOT_TOKEN_FAITHFUL not in self.facts.flags

    @property
    def temperature(self) -> float | None:
        """The temperature that the engine applied, or None if it was not recorded."""
        given = self.facts.sampling.get("temperature")
        return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None

    @property
    def prefix_miss(self) -> str | None:
        """Why the gateway rendered the prompt in full. None: it extended held ids, or another recorder wrote this."""
        found = self.facts.extra.get("prefix_miss", self.facts.extra.get("prompt_why"))  # the name of 0.1
        return found if isinstance(found, str) else None

    @property
    def echoed_part(self) -> tuple[int, int] | None:
        """The number of an earlier turn whose reply the prompt's messages hold in part, and how many ids that part has.

        None: the gateway found none, or another recorder wrote the turn.
        """
        match self.facts.extra.get("echoed_part"):
            case {"turn": int(turn), "ids": int(ids)}:
                return turn, ids
        return None

    @property
    def ignored_params(self) -> list[str]:
        """Parameters of the request that the gateway did not apply, each with what it did instead."""
        found = self.facts.extra.get("ignored_params", self.facts.extra.get("unhonoured"))  # in 0.1
        return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []

    @property
    def prompt_messages(self) -> list[dict[str, Any]]:
        return [message.to_dict() for message in self.prompt.to_list()]

    def __repr__(self) -> str:
        return f"Turn({self.id}, prompt={len(self.prompt_tokens)}, sampled={len(self.sampled_ids)})"


def weight_versions(turns: Iterable[Turn]) -> list[str]:
    """The weight versions that sampled some turns, as they first appear."""
    segments = (segment for turn in turns for segment in turn.facts.segments)
    versions = (version for segment in segments for version in (segment.first_version, segment.last_version))
    return list(dict.fromkeys(version for version in versions if version is not None))


def implausibility(
    ids: Ids,
    logprobs: Logprobs | None,
    sampling: Mapping[str, Any],
    *,
    vocabulary: int | None,
    stop_ids: Sequence[int] | None,
) -> str | None:
    """Why a reply cannot have been sampled with these parameters, or None if it can.

    `vocabulary` is one more than the largest id of the tokenizer, and `stop_ids` end a reply. Each is None if unknown.
    """
    count = len(ids)
    if not count:
        return None
    limit = _least(sampling, _LIMITS)
    if limit is not None and count > limit:
        return f"{count} sampled ids but max_tokens {limit}"
    if vocabulary is not None and ids[at := int(ids.argmax())] >= vocabulary:
        return f"sampled id {at} is {ids[at]}, outside the vocabulary of {vocabulary}"
    if stop_ids and count > 1 and not sampling.get("ignore_eos"):
        begin = _least(sampling, _LEASTS) or 0  # engines sample no stop id before
        body = ids[begin:-1]
        stops = [begin + int(hits.argmax()) for stop in stop_ids if np.count_nonzero(hits := body == stop)]
        if stops:
            return f"{count - min(stops) - 1} sampled ids after the stop id {ids[min(stops)]}"
    if logprobs is not None:
        at = int(logprobs.argmax())
        if not logprobs[at] <= LARGEST_LOGPROB:  # above, or the first NaN, which stands for none and hides others
            above = np.flatnonzero(logprobs > LARGEST_LOGPROB)
            if len(above):
                return f"the logprob of sampled id {above[0]} is {logprobs[above[0]]:g}, above zero"
    return None


def implausible_in(
    head: "SessionHead", facts: TurnFacts, ids: Ids, logprobs: Logprobs | None, vocabulary: int | None = None
) -> str | None:
    """As `implausibility`, for a turn of a session. If the turn has another model, the session's ids do not apply.

    `vocabulary` is used if the session does not state its own.
    """
    model, fingerprint = head.defaults.get("model"), head.defaults.get("fingerprint")
    same = model in (None, facts.model) and fingerprint in (None, facts.fingerprint)
    return implausibility(
        ids,
        logprobs,
        facts.sampling,
        vocabulary=(head.vocabulary or vocabulary) if same else None,
        stop_ids=head.stop_ids if same else None,
    )


def _least(sampling: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The smallest number of tokens that a parameter with one of these names sets, or None if none does."""
    given = [sampling[name] for name in names if name in sampling]
    return min((one for one in given if isinstance(one, int) and one > 0), default=None) if given else None
