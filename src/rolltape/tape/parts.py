"""A rollout that was taken over lies in parts: what each of its writers recorded, put together here.

A journal holds the part of its own writer, whose counts include the earlier ones. A shard holds a rollout whole, up
to the part of the writer that it names.
The owner of a rollout is the writer of its highest epoch: only that one finishes it.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rolltape.tape.stored import HeldRollout, Problem, Source, StoredSession, StoredTurn


class Listed(msgspec.Struct, frozen=True):
    """A rollout, and the sources to load it from: its parts, in the order of their epochs."""

    held: HeldRollout
    sources: tuple[Source, ...]

    @property
    def source(self) -> Source:
        """The source of its owner's part."""
        return self.sources[-1]

    def load(self) -> list[StoredSession]:
        """All its sessions."""
        return join_sessions(source.load(self.held.key) for source in self.sources)


def join_parts(found: Sequence[tuple[HeldRollout, Source]]) -> tuple[Listed, list[Problem]]:
    """One rollout as several sources list it, and what is wrong with that: a part is missing, or there is another.

    Of two copies of a part the first one counts.
    """
    parts: dict[str, tuple[HeldRollout, Source]] = {}
    for held, source in found:
        parts.setdefault(held.writer, (held, source))
    # If two writers recorded the same epoch by mistake: one that ended before one that did not, then the earlier one.
    ranked = sorted(parts.values(), key=lambda part: _rank(part[0]))
    chain, problems = _chain(ranked[0], parts)
    best = {held.head.epoch: held.writer for held, _ in [*reversed(ranked), *chain]}
    for held, source in ranked:
        if held.writer != (first := best[held.head.epoch]):
            what = f"try {held.key[1]} of rollout {held.key[0]} was recorded by {first} as well"
            problems.append(Problem(source.where, what, "this one of the two"))
    chain.reverse()
    return Listed(chain[-1][0], tuple(source for _, source in chain)), problems


def _rank(held: HeldRollout) -> tuple[int, bool, int, str]:
    return (-held.head.epoch, held.status is None, held.head.started_at_ns, held.writer)


def _chain(
    top: tuple[HeldRollout, Source], parts: dict[str, tuple[HeldRollout, Source]]
) -> tuple[list[tuple[HeldRollout, Source]], list[Problem]]:
    """The parts that a rollout is read from, the last one first."""
    chain = [top]
    while not chain[-1][1].sealed and (writer := chain[-1][0].head.continues) is not None:
        if writer not in parts or parts[writer] in chain:
            rollout, try_index = top[0].key
            what = f"try {try_index} of rollout {rollout} was taken over from {writer}, whose part is missing"
            return chain, [Problem(chain[-1][1].where, what, f"what {writer} recorded of it")]
        chain.append(parts[writer])
    return chain, []


def join_sessions(parts: Iterable[Sequence[StoredSession]]) -> list[StoredSession]:
    """The sessions of a rollout's parts, given in the order of their epochs: each session once, with all its turns."""
    first, *others = parts
    if not others:
        return list(first)
    heads: dict[int, bytes] = {}
    turns: dict[int, dict[int, StoredTurn]] = {}
    for session in (session for part in (first, *others) for session in part):
        heads[session.ordinal] = session.head
        turns.setdefault(session.ordinal, {}).update({turn.sequence: turn for turn in session.turns})
    return [StoredSession(heads[ordinal], ordinal, list(turns[ordinal].values())) for ordinal in sorted(heads)]


def holds_part(whole: Sequence[StoredSession], part: Sequence[StoredSession]) -> bool:
    """Whether sessions include all turns of a part, to the letter."""
    turns = {(session.ordinal, turn.sequence): turn for session in whole for turn in session.turns}
    return {session.ordinal for session in part} <= {session.ordinal for session in whole} and all(
        _is_same(turns.get((session.ordinal, turn.sequence)), turn) for session in part for turn in session.turns
    )


def _is_same(one: StoredTurn | None, other: StoredTurn) -> bool:
    return one is not None and _content(one) == _content(other)


def _content(turn: StoredTurn) -> tuple[object, ...]:
    return (turn.parent, turn.keep_tokens, turn.facts, turn.new_ids.tobytes(), turn.sampled_ids.tobytes())
