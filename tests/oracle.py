"""What must hold of any samples and ledger, checked against the raw turns alone; knows no tree and no policy.

A sampled token is named by its turn and its offset in the reply, and witnessed by what the engine saw and gave:
all ids up to and including it, its logprob, its weight version. A trained token is right if and only if the same
witness stands in a raw turn, so counting witnesses checks faithfulness and training-once without trusting a span.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Ledger, Origin, Sample
from rolltape.records.turn import Turn

Place = tuple[str, int]  # turn id, offset among its sampled ids


class Witness(NamedTuple):
    """What the engine was conditioned on and gave for one sampled token."""

    ids_up_to_it: bytes
    logprob: bytes  # the bits; empty: none was given
    versions: tuple[str, str] | None  # None: the engine did not say


def check(rollout: Rollout, samples: Sequence[Sample], ledger: Ledger) -> None:
    """Assert over one rollout's samples and ledger: faithful, aligned, trained at most once, conserved."""
    turns = {turn.id: turn for turn in rollout.turns}
    sampled = dict(_sampled_tokens(turns.values()))
    trained: list[Place] = []
    witnesses: Counter[Witness] = Counter()
    for sample in samples:
        _check_aligned(sample)
        _check_spans(sample, turns)
        for at, witness in enumerate(_witnesses_in(sample)):
            place = _place_of(sample, at)
            if sample.sampled_mask[at]:
                assert place is not None, f"{sample.id}[{at}] is marked sampled, its span says prompt"
                assert turns[place[0]].session == sample.session, f"{sample.id}[{at}] comes from another session"
                assert witness == sampled[place], f"{sample.id}[{at}] is not what {place} sampled there"
            else:
                assert place is None, f"{sample.id}[{at}] is not marked sampled, its span says {place}"
                assert witness[1:] == (b"", None), f"{sample.id}[{at}] has a made-up logprob or version"
            if sample.trained_mask[at]:
                assert place is not None, f"{sample.id}[{at}] trains and was not sampled"
                trained.append(place)
                witnesses[witness] += 1
        assert any(_holds(turn, sample) for turn in turns.values()), f"{sample.id}: no turn ever held these ids"
    never = witnesses - Counter(sampled.values())
    assert not never, f"{sum(never.values())} trained tokens were never sampled so, or train twice"
    twice = [place for place, times in Counter(trained).items() if times > 1]
    assert not twice, f"trained twice: {twice}"
    _check_ledger(rollout, ledger, sampled.keys(), set(trained))
    _check_shares(rollout, samples)


def accounts(ledger: Ledger) -> dict[Place, Fate]:
    """The fate of every sampled token; a token named twice is an error."""
    fates: dict[Place, Fate] = {}
    for entry in ledger.entries:
        for offset in range(entry.start, entry.stop):
            assert (entry.turn, offset) not in fates, f"{entry.turn}[{offset}] is twice in the ledger"
            fates[entry.turn, offset] = entry.fate
    return fates


def sampled_places(sample: Sample) -> list[Place]:
    """The sampled tokens that stand in a sample, trained there or not."""
    places = (_place_of(sample, at) for at in range(len(sample.ids)))
    return [place for place in places if place is not None]


def _sampled_tokens(turns: Iterable[Turn]) -> Iterator[tuple[Place, Witness]]:
    for turn in turns:
        prompt = turn.prompt_ids
        hashes = _prefix_hashes(np.concatenate([prompt, turn.sampled_ids]))[len(prompt) :]
        for offset, ids_up_to_it in enumerate(hashes):
            logprob = math.nan if turn.logprobs is None else float(turn.logprobs[offset])
            yield (turn.id, offset), Witness(ids_up_to_it, _bits(logprob), _versions_at(turn, offset))


def _witnesses_in(sample: Sample) -> Iterator[Witness]:
    for at, ids_up_to_it in enumerate(_prefix_hashes(sample.ids)):
        index = int(sample.version_index[at])
        assert -1 <= index < len(sample.versions), f"{sample.id}[{at}] has the version index {index}"
        yield Witness(ids_up_to_it, _bits(float(sample.logprobs[at])), sample.versions[index] if index >= 0 else None)


def _place_of(sample: Sample, at: int) -> Place | None:
    span = next(span for span in sample.spans if span.start <= at < span.stop)
    return (span.turn, span.turn_start + at - span.start) if span.origin is Origin.SAMPLED else None


def _check_aligned(sample: Sample) -> None:
    arrays = (sample.trained_mask, sample.sampled_mask, sample.logprobs, sample.version_index)
    assert {len(array) for array in arrays} == {len(sample.ids)}, f"{sample.id}: arrays of different lengths"
    for name, side in sample.side.items():
        rows = side.values if side.counts is None else side.counts
        assert len(rows) == len(sample.ids), f"{sample.id}: side array {name} has {len(rows)} rows"
        assert side.counts is None or int(side.counts.sum()) == len(side.values), f"{sample.id}: {name} is torn"
    where_sampled = np.flatnonzero(sample.sampled_mask)
    first_sampled = int(where_sampled[0]) if len(where_sampled) else len(sample.ids)
    assert sample.prompt_tokens == first_sampled, f"{sample.id}: prompt_tokens is {sample.prompt_tokens}"
    assert sample.trained_tokens == int(sample.trained_mask.sum()) > 0, f"{sample.id}: {sample.trained_tokens} trained"


def _check_spans(sample: Sample, turns: dict[str, Turn]) -> None:
    reached = 0
    for span in sample.spans:
        assert span.start == reached < span.stop, f"{sample.id}: a gap or overlap between spans at {reached}"
        reached = span.stop
        turn = turns[span.turn]
        source = turn.sampled_ids if span.origin is Origin.SAMPLED else turn.prompt_ids
        held = source[span.turn_start : span.turn_start + span.stop - span.start]
        assert np.array_equal(held, sample.ids[span.start : span.stop]), f"{sample.id}: {span} has other ids"
        offset = len(turn.prompt_ids) if span.origin is Origin.SAMPLED else 0
        assert span.start == offset + span.turn_start, f"{sample.id}: {span} is at another place in its turn"
        assert 0 <= span.messages[0] <= span.messages[1] <= len(turn.messages), f"{sample.id}: {span.messages}"
        trains = sample.trained_mask[span.start : span.stop]
        assert bool(trains.all() if span.fate is Fate.TRAINED else not trains.any()), f"{sample.id}: {span} lies"
    assert reached == len(sample.ids), f"{sample.id}: spans end at {reached} of {len(sample.ids)}"


def _check_ledger(rollout: Rollout, ledger: Ledger, sampled: Iterable[Place], trained: set[Place]) -> None:
    fates = accounts(ledger)
    assert fates.keys() == set(sampled), f"ledger and turns differ on {fates.keys() ^ set(sampled)}"
    assert {place for place, fate in fates.items() if fate is Fate.TRAINED} == trained
    assert ledger.sampled == len(fates) == sum(ledger.totals().values())
    assert (ledger.rollout, ledger.try_index) == rollout.key


def _check_shares(rollout: Rollout, samples: Sequence[Sample]) -> None:
    assert [sample.index for sample in samples] == list(range(len(samples)))
    assert len({sample.id for sample in samples}) == len(samples), "two samples have one id"
    assert all(sample.siblings == len(samples) and sample.rollout == rollout.id for sample in samples)
    assert all(_same(sample.rollout_reward, rollout.reward) for sample in samples)
    assert not samples or math.isclose(math.fsum(sample.loss_weight for sample in samples), 1.0, rel_tol=1e-9)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rollout.reward is None:
        assert not rewards, "a reward was made up"
    elif samples:
        assert len(rewards) == len(samples)
        full = all(_same(reward, rollout.reward) for reward in rewards)
        assert full or math.isclose(math.fsum(rewards), rollout.reward, rel_tol=1e-9, abs_tol=1e-12)


def _holds(turn: Turn, sample: Sample) -> bool:
    held = np.concatenate([turn.prompt_ids, turn.sampled_ids])[: len(sample.ids)]
    return turn.session == sample.session and np.array_equal(held, sample.ids)


def _versions_at(turn: Turn, offset: int) -> tuple[str, str] | None:
    segment = next(segment for segment in turn.facts.segments if segment.start <= offset < segment.stop)
    if segment.first_version is None or segment.last_version is None:
        return None
    return segment.first_version, segment.last_version


def _prefix_hashes(ids: Iterable[int]) -> list[bytes]:
    running, hashes = blake2b(digest_size=16), []
    for token in ids:
        running.update(struct.pack("<q", token))
        hashes.append(running.digest())
    return hashes


def _same(left: float | None, right: float | None) -> bool:
    return left == right or (left is not None and right is not None and math.isnan(left) and math.isnan(right))


def _bits(logprob: float) -> bytes:
    return b"" if math.isnan(logprob) else struct.pack("<d", logprob)
