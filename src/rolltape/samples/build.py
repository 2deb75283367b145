"""A draft → a sample: arrays, masks, and where each token came from."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.ids import sample_id
from rolltape.records.ledger import Fate
from rolltape.records.policy import Policy
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Origin, Sample, Span
from rolltape.records.turn import Finish, Logprobs, Segment, Turn, TurnFlag
from rolltape.samples.branches import Link, path_to
from rolltape.samples.claims import NOBODY, Claims, Draft
from rolltape.samples.fates import CODES
from rolltape.samples.sides import joined_sides


def built_sample(
    draft: Draft,
    claims: Claims,
    rollout: Rollout,
    policy: Policy,
    *,
    index: int,
    siblings: int,
    reward: float | None,
    advantage: float | None,
    loss_weight: float,
) -> Sample:
    """The training row of a draft."""
    path = path_to(draft.end)
    spans = _spans(path, draft, claims)
    by_id = {link.turn.id: link for link in path}
    trained = np.zeros(draft.length, dtype=np.bool_)
    sampled = np.zeros(draft.length, dtype=np.bool_)
    wide = any(link.turn.logprobs is not None and link.turn.logprobs.dtype == np.float64 for link in path)
    logprobs: Logprobs = (
        np.full(draft.length, np.nan, np.float64) if wide else np.full(draft.length, np.nan, np.float32)
    )
    versions = _VersionColumn(draft.length)
    for span in spans:
        if span.origin is Origin.PROMPT:
            continue
        turn = by_id[span.turn].turn
        turn_stop = span.turn_start + span.stop - span.start
        sampled[span.start : span.stop] = True
        trained[span.start : span.stop] = span.fate is Fate.TRAINED
        if turn.logprobs is not None:
            logprobs[span.start : span.stop] = turn.logprobs[span.turn_start : turn_stop]
        versions.fill(turn.facts.segments, span)
    own = [by_id[turn] for turn in dict.fromkeys(span.turn for span in spans if span.fate is Fate.TRAINED)]
    kinds = {link.turn.facts.logprob_kind for link in own}
    first_sampled = int(sampled.argmax()) if sampled.any() else draft.length
    return Sample(
        id=sample_id(draft.end.turn.id, policy.key),
        rollout=rollout.id,
        try_index=rollout.head.try_index,
        group=rollout.head.group,
        session=draft.end.turn.session,
        policy=policy.key,
        step=rollout.head.step,
        index=index,
        siblings=siblings,
        ids=draft.end.turn.tokens.slice(0, draft.length),
        trained_mask=trained,
        sampled_mask=sampled,
        logprobs=logprobs,
        version_index=versions.index,
        versions=tuple(versions.names),
        spans=tuple(spans),
        prompt_tokens=first_sampled,
        trained_tokens=draft.trained_tokens,
        reward=reward,
        rollout_reward=rollout.reward,
        turn_rewards={link.turn.id: link.turn.facts.reward for link in own if link.turn.facts.reward is not None},
        advantage=advantage,
        loss_weight=loss_weight,
        logprob_kind=kinds.pop() if len(kinds) == 1 else None,
        truncated=draft.end.turn.facts.finish is Finish.LENGTH or draft.length < len(draft.end.turn.tokens),
        uses_tools=any(link.turn.reply is not None and link.turn.reply.to_dict().get("tool_calls") for link in own),
        ill_formed=any(TurnFlag.MALFORMED_CALL in link.turn.facts.flags for link in own),
        side=joined_sides([link.turn for link in path], _reach(path, draft.length), draft.length),
        tokenizers=next((one.tokenizers for one in rollout.sessions if one.id == draft.end.turn.session), ()),
    )


def _reach(path: Sequence[Link], length: int) -> list[int]:
    """For each turn of a branch, how many of its leading ids still stand in the last turn's ids."""
    reach = [length]
    for link in reversed(path[1:]):
        reach.append(min(reach[-1], link.step.kept if link.step else 0))
    return reach[::-1]


def _spans(path: Sequence[Link], draft: Draft, claims: Claims) -> list[Span]:
    """The sample's stretches in order: each turn cuts back to what it keeps, then adds its prompt and its reply."""
    spans: list[Span] = []
    for link in path:
        kept = link.step.kept if link.step else 0
        first_message = _cut_back(spans, kept)
        spans.extend(_prompt_spans(link.turn, kept, first_message))
        spans.extend(_reply_spans(link.turn, draft, claims))
    _cut_back(spans, draft.length)
    return spans


def _cut_back(spans: list[Span], at: int) -> int:
    """Remove what stands at or after a place; gives the first message that was removed, or comes next."""
    first_message = spans[-1].messages[1] if spans else 0
    while spans and spans[-1].stop > at:
        last = spans.pop()
        first_message = last.messages[0]
        if last.start < at:
            spans.append(msgspec.structs.replace(last, stop=at))
    return first_message


def _prompt_spans(turn: Turn, start: int, first_message: int) -> Iterator[Span]:
    stop, starts = len(turn.prompt_tokens), turn.facts.message_starts
    cuts: list[tuple[int, int]] = [(start, first_message)]  # where a span begins, and its first message
    if starts is not None:
        first_own = len(turn.prompt) - len(starts)
        cuts += [(at, first_own + own) for own, at in enumerate(starts) if start <= at < stop]
    for number, (begin, message) in enumerate(cuts):
        end, next_message = cuts[number + 1] if number + 1 < len(cuts) else (stop, len(turn.prompt))
        if end > begin:
            yield Span(begin, end, Origin.PROMPT, turn.id, begin, (message, max(next_message, message)), None)


def _reply_spans(turn: Turn, draft: Draft, claims: Claims) -> Iterator[Span]:
    begin, count = len(turn.prompt_tokens), len(turn.sampled_ids)
    if not count:
        return
    codes, owner = claims.fates[turn.sequence], claims.owner[turn.sequence]
    changes = (np.diff(codes) != 0) | (np.diff(owner) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), count]
    message = (len(turn.prompt), len(turn.messages))
    for first, last in pairwise(bounds):
        trains_elsewhere = owner[first] not in (NOBODY, draft.number)
        fate = None if trains_elsewhere else CODES[codes[first]]
        yield Span(begin + first, begin + last, Origin.SAMPLED, turn.id, first, message, fate)


class _VersionColumn:
    """Per token the weight version that sampled it, as an index into the names met so far."""

    def __init__(self, length: int) -> None:
        self.index: npt.NDArray[np.int32] = np.full(length, -1, dtype=np.int32)
        self.names: list[tuple[str, str]] = []

    def fill(self, segments: Sequence[Segment], span: Span) -> None:
        shift = span.start - span.turn_start
        for segment in segments:
            if segment.first_version is None or segment.last_version is None:
                continue
            start, stop = max(segment.start + shift, span.start), min(segment.stop + shift, span.stop)
            if start >= stop:
                continue
            name = (segment.first_version, segment.last_version)
            if name not in self.names:
                self.names.append(name)
            self.index[start:stop] = self.names.index(name)
