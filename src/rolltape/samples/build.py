"""A draft → a sample: arrays, masks, side arrays, and where each token came from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError
from rolltape.records.ids import sample_id
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Origin, Sample, SampleOutline, SampleSide, Span
from rolltape.records.turn import Logprobs, Segment, SideArray, Turn, TurnFlag
from rolltape.samples.branches import Link, path_to
from rolltape.samples.claims import NOBODY, Claims, FateRun, SampleDraft, equal_runs


def trained_ranges(
    turns: Sequence[Turn], runs: Mapping[int, Sequence[FateRun]], drafts: Sequence[SampleDraft]
) -> list[list[tuple[int, int]]]:
    """For each draft, the ranges of its tokens that train. `runs` names the draft that trains each token of a turn."""
    found: dict[int, list[tuple[int, int]]] = {draft.number: [] for draft in drafts}
    for turn in turns:
        begin = len(turn.prompt_tokens)
        for run in runs[turn.sequence]:
            if run.draft == NOBODY:
                continue
            ranges = found[run.draft]
            if ranges and ranges[-1][1] == begin + run.start:
                # A reply that was cut short and resumed is one range, as it is in the sample's mask.
                ranges[-1] = (ranges[-1][0], begin + run.stop)
            else:
                ranges.append((begin + run.start, begin + run.stop))
    return [found[draft.number] for draft in drafts]


def outlined(
    draft: SampleDraft, index: int, trained: Sequence[tuple[int, int]], reward: float | None, loss_weight: float
) -> SampleOutline:
    """The outline of a draft: what is known of its sample before the arrays are made."""
    path = path_to(draft.end)
    # In a sample that is cut short, later turns add nothing. Its id names the last turn that adds something.
    last = next(link.turn for link in reversed(path) if link.kept < draft.length)
    replies = (
        len(link.turn.prompt_tokens)
        for link, reach in zip(path, _reach(path, draft.length), strict=True)
        if len(link.turn.sampled_ids) and len(link.turn.prompt_tokens) < reach
    )
    return SampleOutline(
        id=sample_id(last.id, draft.length, trained),
        index=index,
        session=last.session,
        first_turn=path[0].turn.id,
        last_turn=last.id,
        tokens=draft.length,
        prompt_tokens=next(replies, draft.length),
        trained_tokens=draft.trained_tokens,
        reward=reward,
        loss_weight=loss_weight,
        truncated=draft.truncated,
    )


def built_sample(
    draft: SampleDraft,
    claims: Claims,
    outline: SampleOutline,
    rollout: Rollout,
    policy: CutPolicy,
    advantage: float | None,
    siblings: int,
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
    return Sample(
        id=outline.id,
        rollout=rollout.id,
        try_index=rollout.head.try_index,
        group=rollout.head.group,
        session=outline.session,
        policy=policy.key,
        step=rollout.head.step,
        index=outline.index,
        siblings=siblings,
        ids=draft.end.turn.tokens.slice(0, draft.length),
        trained_mask=trained,
        sampled_mask=sampled,
        logprobs=logprobs,
        version_index=versions.index,
        versions=tuple(versions.names),
        spans=tuple(spans),
        prompt_tokens=outline.prompt_tokens,
        trained_tokens=draft.trained_tokens,
        reward=outline.reward,
        rollout_reward=rollout.reward,
        turn_rewards={link.turn.id: link.turn.facts.reward for link in own if link.turn.facts.reward is not None},
        advantage=advantage,
        loss_weight=outline.loss_weight,
        truncated=outline.truncated,
        uses_tools=any(link.turn.reply is not None and link.turn.reply.to_dict().get("tool_calls") for link in own),
        ill_formed=any(TurnFlag.MALFORMED_CALL in link.turn.facts.flags for link in own),
        side=_joined_sides([link.turn for link in path], _reach(path, draft.length), draft.length),
        tokenizers=next((one.tokenizers for one in rollout.sessions if one.id == outline.session), ()),
    )


def _reach(path: Sequence[Link], length: int) -> list[int]:
    """For each turn of a branch, how many of its leading ids still stand in the last turn's ids."""
    reach = [length]
    for link in reversed(path[1:]):
        reach.append(min(reach[-1], link.kept))
    return reach[::-1]


def _spans(path: Sequence[Link], draft: SampleDraft, claims: Claims) -> list[Span]:
    """The sample's spans in order: each turn cuts back to what it keeps, then adds its prompt and its reply."""
    spans: list[Span] = []
    for link in path:
        first_message = _cut_back(spans, link.kept)
        spans.extend(_prompt_spans(link.turn, link.kept, first_message))
        spans.extend(_reply_spans(link.turn, draft, claims))
    _cut_back(spans, draft.length)
    return spans


def _cut_back(spans: list[Span], at: int) -> int:
    """Remove the spans from `at` on. Return the first message that was removed, or the one that comes next."""
    first_message = spans[-1].messages[1] if spans else 0
    while spans and spans[-1].stop > at:
        last = spans.pop()
        first_message = last.messages[0]
        if last.start < at:
            spans.append(msgspec.structs.replace(last, stop=at))
    return first_message


def _prompt_spans(turn: Turn, start: int, first_message: int) -> Iterator[Span]:
    stop, starts = len(turn.prompt_tokens), turn.facts.message_starts
    # Where a span begins, and its first message; a turn that continues by ids alone may have fewer messages.
    cuts: list[tuple[int, int]] = [(start, min(first_message, len(turn.prompt)))]
    if starts is not None:
        first_own = len(turn.prompt) - len(starts)
        cuts += [(at, first_own + own) for own, at in enumerate(starts) if start <= at < stop]
    for number, (begin, message) in enumerate(cuts):
        end, next_message = cuts[number + 1] if number + 1 < len(cuts) else (stop, len(turn.prompt))
        if end > begin:
            yield Span(begin, end, Origin.PROMPT, turn.id, begin, (message, max(next_message, message)), None)


def _reply_spans(turn: Turn, draft: SampleDraft, claims: Claims) -> Iterator[Span]:
    begin = len(turn.prompt_tokens)
    message = (len(turn.prompt), len(turn.messages))
    temperature, kind = turn.temperature, turn.facts.logprob_kind
    for run in claims.runs[turn.sequence]:
        fate = run.fate if run.draft in (NOBODY, draft.number) else None  # None: it trains elsewhere
        start, stop = begin + run.start, begin + run.stop
        yield Span(start, stop, Origin.SAMPLED, turn.id, run.start, message, fate, temperature, kind)


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


def _joined_sides(turns: Sequence[Turn], reach: Sequence[int], length: int) -> dict[str, SampleSide]:
    """Each side array over the sample's tokens. A token's values come from the turn that first held it.

    `reach` says for each turn of the branch how many of its leading ids still stand in the sample.
    """
    parts: dict[str, list[tuple[Turn, SideArray, int]]] = {}
    for turn, limit in zip(turns, reach, strict=True):
        for name, side in turn.side.items():
            parts.setdefault(name, []).append((turn, side, limit))
    return {name: _joined(name, named, length) for name, named in parts.items()}


def _joined(name: str, parts: Sequence[tuple[Turn, SideArray, int]], length: int) -> SampleSide:
    # The kind of a part that covers no token, such as that of an empty reply, does not count.
    parts = [part for part in parts if part[1].start < min(part[1].stop, part[2])] or parts[:1]
    first_turn, first, _ = parts[0]
    dtype = np.result_type(*(side.values.dtype for _, side, _ in parts))
    for turn, side, _ in parts:
        if not (_may_be_joined(side, first) and _may_be_joined(first, side)):
            raise MisalignedError(
                f"side array {name!r} is {_kind(first)} in turn {first_turn.id} but {_kind(side)} in turn {turn.id}; "
                "give it one kind throughout a session"
            )
    # For each token, the part with its values. Later turns come first, so that earlier ones overwrite them.
    speaker = np.full(length, -1, dtype=np.int32)
    for number, (_, side, reach) in reversed(list(enumerate(parts))):
        speaker[side.start : min(side.stop, reach)] = number
    missing = tuple((start, stop) for start, stop in equal_runs(speaker) if speaker[start] == -1)
    if first.counts is None:
        values = np.zeros((length, *first.values.shape[1:]), dtype=dtype)
        for start, stop in equal_runs(speaker):
            if speaker[start] >= 0:
                side = parts[speaker[start]][1]
                values[start:stop] = side.values[start - side.start : stop - side.start]
        return SampleSide(values, None, missing)
    return _joined_ragged([side for _, side, _ in parts], dtype, speaker, missing)


def _joined_ragged(
    sides: Sequence[SideArray],
    dtype: np.dtype[Any],
    speaker: npt.NDArray[np.int32],
    missing: tuple[tuple[int, int], ...],
) -> SampleSide:
    counts = np.zeros(len(speaker), dtype=np.int32)
    pieces: list[npt.NDArray[Any]] = []
    offsets = [np.concatenate([[0], np.cumsum(_counts(side))]) for side in sides]
    for start, stop in equal_runs(speaker):
        number = int(speaker[start])
        if number < 0:
            continue
        side, offset = sides[number], offsets[number]
        own = slice(start - side.start, stop - side.start)
        counts[start:stop] = _counts(side)[own]
        pieces.append(side.values[offset[own.start] : offset[own.stop]])
    return SampleSide(np.concatenate([sides[0].values[:0], *pieces]).astype(dtype, copy=False), counts, missing)


def _kind(side: SideArray) -> str:
    return f"{side.values.dtype}{list(side.values.shape[1:])}{'' if side.counts is None else ' ragged'}"


def _may_be_joined(side: SideArray, other: SideArray) -> bool:
    """Whether two side arrays have rows of one shape, and numbers of one sort in perhaps different widths."""
    mine, theirs = side.values, other.values
    sorts = {kind.replace("u", "i") for kind in (mine.dtype.kind, np.promote_types(mine.dtype, theirs.dtype).kind)}
    return len(sorts) == 1 and mine.shape[1:] == theirs.shape[1:] and (side.counts is None) == (other.counts is None)


def _counts(side: SideArray) -> npt.NDArray[np.int32]:
    """How many values each covered token has."""
    return np.ones(len(side.values), dtype=np.int32) if side.counts is None else side.counts
