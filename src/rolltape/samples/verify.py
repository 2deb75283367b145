"""Checks the invariants of a rollout as it is on the tape."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import LedgerError, RolltapeError
from rolltape.records.ids import group_id, last_turn_of, rollout_id, session_id, turn_id
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.sample import Fate, Sample
from rolltape.records.turn import Turn
from rolltape.samples.linearize import linearize
from rolltape.samples.spelling import vocabulary_at

_IDENTITY = ("source", "task_id", "task", "step", "model", "agent")  # with the attempt, the inputs of a rollout's id


class Breach(msgspec.Struct, frozen=True):
    """A broken invariant, and where it was broken."""

    rule: str
    where: str
    what: str


def verify_rollout(rollout: Rollout, policies: Sequence[CutPolicy]) -> list[Breach]:
    """Every breach found in a rollout's records and in its samples under each policy."""
    breaches = [*_identity(rollout), *_outcome(rollout)]
    for turn in rollout.turns:
        breaches.extend(_aligned(turn))
    if not breaches:
        for policy in policies:
            breaches.extend(_samples(rollout, policy))
    return [*breaches, *_plausible(rollout)]


def _identity(rollout: Rollout) -> Iterator[Breach]:
    head = rollout.head
    launched: dict[str, Any] = {name: getattr(head, name) for name in _IDENTITY}
    group, own = group_id(head.run, **launched), rollout_id(head.run, **launched, attempt=head.attempt)
    if head.id != own:
        yield Breach("identity", head.id, f"its run, task, step, attempt, model and agent give the id {own}")
    if head.group != group:
        yield Breach("identity", head.id, f"its run, task, step, model and agent give the group {group}")
    for session in rollout.sessions:
        if session.id != session_id(head.id, head.try_index, session.ordinal):
            yield Breach("identity", session.id, f"is session {session.ordinal} of rollout {head.id}")
        for place, turn in enumerate(session.turns):
            if turn.id != turn_id(session.id, place):
                yield Breach("nothing lost", turn.id, f"is in the place of turn {place} of its session")


def _outcome(rollout: Rollout) -> Iterator[Breach]:
    finishes = [event for event in rollout.events if event.kind == EventKind.FINISH]
    if len(finishes) > 1:
        yield Breach("one record", rollout.id, f"ended {len(finishes)} times")
    for event in finishes:
        counted = event.data.get("turns")
        held = [len(session.turns) for session in rollout.sessions]
        pruned = any(other.kind == EventKind.PRUNE for other in rollout.events)
        if counted is not None and list(counted) != held and not pruned:
            yield Breach("nothing lost", rollout.id, f"ended with {counted} turns per session, {held} are on the tape")


def _aligned(turn: Turn) -> Iterator[Breach]:
    sampled = len(turn.sampled_ids)
    if turn.logprobs is not None and len(turn.logprobs) != sampled:
        yield Breach("aligned", turn.id, f"{sampled} sampled ids but {len(turn.logprobs)} logprobs")
    bounds = [0, *(segment.stop for segment in turn.facts.segments)]
    if bounds[-1] != sampled or any(s.start != b for s, b in zip(turn.facts.segments, bounds, strict=False)):
        yield Breach("aligned", turn.id, f"segments end at {bounds} but {sampled} ids were sampled")
    for name, side in turn.side.items():
        if side.stop > len(turn.tokens):
            yield Breach("aligned", turn.id, f"side array {name!r} ends at {side.stop} of {len(turn.tokens)} tokens")


def _plausible(rollout: Rollout) -> Iterator[Breach]:
    """Replies that no engine can have sampled and that have no flag for it, in sessions recorded before 0.2."""
    for session in rollout.sessions:
        known = session.head.flags_faults or session.head.vocabulary is not None
        vocabulary = None if known else vocabulary_at(session.tokenizers)
        for sequence, why in session.unstated_faults(vocabulary).items():
            what = f"{why}: an engine fault that the turn does not state"
            yield Breach("plausible", turn_id(session.id, sequence), what)


def _samples(rollout: Rollout, policy: CutPolicy) -> Iterator[Breach]:
    turns = {turn.id: turn for turn in rollout.turns}
    times_trained = {turn.id: np.zeros(len(turn.sampled_ids), dtype=np.int32) for turn in rollout.turns}
    try:
        linearized = linearize(rollout, policy)
        for sample in linearized.samples():
            yield from _faithful(sample, turns)
            for span in sample.spans:
                if span.fate is Fate.TRAINED:
                    times_trained[span.turn][span.turn_start : span.turn_start + span.stop - span.start] += 1
    except LedgerError as error:
        yield Breach("conserved", rollout.id, str(error))
        return
    except RolltapeError as error:
        yield Breach("samples", rollout.id, f"cannot be built under {policy.name}: {error}")
        return
    trained = {turn: int(counts.sum()) for turn, counts in times_trained.items()}
    for turn, counts in times_trained.items():
        if np.any(counts > 1):
            yield Breach("trained once", turn, f"token {int(counts.argmax())} trains {int(counts.max())} times")
    for entry in linearized.ledger.entries:
        if entry.fate is Fate.TRAINED:
            trained[entry.turn] -= entry.stop - entry.start
    for turn, difference in trained.items():
        if difference:
            yield Breach(
                "conserved", turn, f"{difference:+d} tokens train in samples against the ledger ({policy.name})"
            )


def _faithful(sample: Sample, turns: dict[str, Turn]) -> Iterator[Breach]:
    trained_until: dict[str, int] = {}
    for span in sample.spans:
        if span.fate is not Fate.TRAINED:
            continue
        trained_until[span.turn] = span.stop
        given = turns[span.turn].logprobs
        held = sample.logprobs[span.start : span.stop]
        if given is None:
            wrong = not np.isnan(held).all()
        else:
            own = given[span.turn_start : span.turn_start + len(held)]
            wrong = not np.array_equal(own.astype(np.float64), held.astype(np.float64), equal_nan=True)
        if wrong:
            yield Breach("faithful", sample.id, f"logprobs in [{span.start}, {span.stop}) are not those of {span.turn}")
    # From the end backwards: ids shared by a turn and the next one, and by that one and the sample, are in the sample.
    last = turns[last_turn_of(sample.id)]
    if not np.array_equal(sample.ids, last.tokens.slice(0, len(sample.ids))):
        yield Breach("faithful", sample.id, f"its ids are not those of {last.id}")
    following, shared = last.tokens, len(sample.ids)
    for name, stop in reversed(trained_until.items()):
        tokens = turns[name].tokens
        shared = min(shared, tokens.common_prefix(following)) if tokens is not following else shared
        following = tokens
        if shared < stop:
            yield Breach("faithful", sample.id, f"the ids before token {stop} are not those that {name} was sampled on")
