"""The ids that one turn held, prompt and reply, and where each came from: a branch up to that turn."""

from collections.abc import Iterator

import numpy as np

from rolltape.records.sample import Fate, LedgerEntry, Origin, Span
from rolltape.records.turn import Ids
from rolltape.samples import Linearized
from rolltape.tree import PlacedTurn
from rolltape.view.rows import Array


class BranchTokens:
    """Aligned columns over the ids of a turn."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.trained: Array = np.zeros(len(ids), np.bool_)
        self.sampled: Array = np.zeros(len(ids), np.bool_)
        self.logprobs: Array = np.full(len(ids), np.nan, np.float32)
        self.version_index: Array = np.full(len(ids), -1, np.int32)
        self.versions: list[tuple[str, str]] = []
        self.spans: list[Span] = []


def branch_tokens(made: Linearized, turn_id: str) -> BranchTokens | None:
    """The ids of a turn; None: the rollout has no such turn."""
    placed = next((one for tree in made.trees for one in tree.turns if one.turn.id == turn_id), None)
    if placed is None:
        return None
    found = BranchTokens(placed.turn.tokens.to_numpy())
    entries: dict[str, list[LedgerEntry]] = {}
    for entry in made.ledger.entries:
        entries.setdefault(entry.turn, []).append(entry)
    at = 0
    for one, stop in _standing(placed):
        for span in _spans(one, at, stop, entries.get(one.turn.id, [])):
            found.spans.append(span)
            _fill(found, one, span)
        at = max(at, stop)
    return found


def _standing(placed: PlacedTurn) -> list[tuple[PlacedTurn, int]]:
    """The turns up to this one, and how many ids of each still stand in its own."""
    way: list[tuple[PlacedTurn, int]] = []
    stop = len(placed.turn.tokens)
    at: PlacedTurn | None = placed
    while at is not None:
        way.append((at, min(stop, len(at.turn.tokens))))
        stop = min(stop, at.shared_tokens)
        at = at.parent
    return way[::-1]


def _spans(placed: PlacedTurn, start: int, stop: int, entries: list[LedgerEntry]) -> Iterator[Span]:
    turn = placed.turn
    prompt = len(turn.prompt_tokens)
    first = 0 if placed.parent is None else min(len(placed.parent.turn.messages), len(turn.prompt))
    if start < min(prompt, stop):
        yield Span(start, min(prompt, stop), Origin.PROMPT, turn.id, start, (first, len(turn.prompt)), None)
    messages = (len(turn.prompt), len(turn.messages))
    for entry in entries:
        begin, end = max(prompt + entry.start, start), min(prompt + entry.stop, stop)
        if begin < end:
            yield Span(begin, end, Origin.SAMPLED, turn.id, begin - prompt, messages, entry.fate)


def _fill(found: BranchTokens, placed: PlacedTurn, span: Span) -> None:
    if span.origin is Origin.PROMPT:
        return
    turn, own = placed.turn, slice(span.turn_start, span.turn_start + span.stop - span.start)
    found.sampled[span.start : span.stop] = True
    found.trained[span.start : span.stop] = span.fate is Fate.TRAINED
    if turn.logprobs is not None:
        found.logprobs[span.start : span.stop] = turn.logprobs[own]
    for part in turn.facts.segments:
        begin, end = max(part.start, own.start), min(part.stop, own.stop)
        if part.first_version is None or part.last_version is None or begin >= end:
            continue
        name = (part.first_version, part.last_version)
        if name not in found.versions:
            found.versions.append(name)
        shift = span.start - span.turn_start
        found.version_index[begin + shift : end + shift] = found.versions.index(name)
