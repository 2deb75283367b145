"""Takes over a rollout whose writer died: finds its parts, fences the last one, restores its sessions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import DamagedTapeError, RecordError
from rolltape.records.messages import Root
from rolltape.records.rollout import RolloutCounts, RolloutHead, Session
from rolltape.records.turn import weight_versions
from rolltape.tape.contents import SourceContents
from rolltape.tape.index.loading import rebuilt
from rolltape.tape.journal.entries import CodedTurn
from rolltape.tape.journal.fences import Fence, JournalPart, find_part, load_part, take_part
from rolltape.tape.journal.writing import Journal
from rolltape.tape.recording.intake import SessionIntake
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import HeldRollout, Key, StoredSession, join_sessions

_LOOKS = 5  # a journal may be sealed and removed between being found and being fenced
_DEFAULTS = ("model", "renderer", "fingerprint", "logprob_kind")
_NO_TOOLS = Root.snapshot(None, None, "a session")


class TakenRollout(NamedTuple):
    """A rollout that this process owns now, with its sessions as far as they were recorded."""

    head: RolloutHead
    sessions: list[SessionIntake]


class _SealedPart(NamedTuple):
    held: HeldRollout
    sessions: Sequence[StoredSession]


class _Parts(NamedTuple):
    """All parts of a rollout: the sealed part has everything up to an epoch, and journals have the later parts."""

    sealed: _SealedPart | None
    journals: list[JournalPart]

    @property
    def ended(self) -> bool:
        if self.journals:
            return self.journals[-1].ended
        return self.sealed is not None and self.sealed.held.status is not None

    @property
    def head(self) -> RolloutHead:
        """The head of the last part."""
        if self.journals:
            return self.journals[-1].head
        assert self.sealed is not None
        return self.sealed.held.head


def take_over(
    directory: RunDirectory, own: Journal, key: Key, shards: Callable[[], Sequence[ShardSource]], *, force: bool
) -> TakenRollout | None:
    """Take a rollout over into the journal `own`, or return None if it has ended. Call it under the run's lock.

    `shards` returns the shards that hold a try of it. Only that rollout is loaded.
    """
    for look in range(_LOOKS):
        found = _found_parts(directory, own, key)
        parts = _in_order(_Parts(_sealed_part(shards(), key), found), key)
        if parts.ended:
            return None
        fences = [part.fence.epoch for part in found if part.fence is not None]
        epoch = 1 + max([parts.head.epoch, *fences])
        try:
            sessions = _take(parts, Fence(epoch, own.writer), force)
        except DamagedTapeError:
            if look + 1 < _LOOKS and not all(part.path.exists() for part in parts.journals):
                continue
            raise
        writer = parts.journals[-1].writer if parts.journals else parts.sealed.held.writer if parts.sealed else None
        intakes = _restored(parts.head, sessions)
        head = msgspec.structs.replace(parts.head, epoch=epoch, continues=writer, earlier=_counts(intakes))
        return TakenRollout(head, intakes)
    raise AssertionError("the last look returns or raises")


def _found_parts(directory: RunDirectory, own: Journal, key: Key) -> list[JournalPart]:
    found: list[JournalPart] = []
    unreadable: dict[str, DamagedTapeError] = {}
    for path in directory.journal_paths():
        try:
            part = find_part(path, key)
        except DamagedTapeError as error:
            if path.exists():
                unreadable[path.stem] = error
            continue
        if part is not None:
            _refuse_own(part, own.path)
            found.append(part)
    # A journal that cannot be read is a reason to stop only if it may hold a part of this rollout.
    for part in found:
        for writer in (part.head.continues, part.fence.taker if part.fence else None):
            if writer in unreadable:
                raise unreadable[writer]
    return found


def _refuse_own(part: JournalPart, own: Path) -> None:
    if part.path == own and not part.ended:
        where = f"rollout {part.head.id} (try {part.head.try_index})"
        if part.fence is None:
            raise RecordError(f"{where} is open in this process already; continue with that recorder")
        raise RecordError(f"{where} was taken from this process; open the run again to take it back")


def _sealed_part(shards: Sequence[ShardSource], key: Key) -> _SealedPart | None:
    """The copy of the highest epoch."""
    found = [SourceContents(ShardSource(shard.place, shard.shard, shard.manifest)) for shard in shards]
    holders = [one for one in found if key in one.rollouts]
    if not holders:
        return None
    best = max(holders, key=lambda one: one.rollouts[key].head.epoch)
    held, sessions = best.rollouts[key], best.load(key)
    for one in found:
        one.source.close()
    if held.status is None and [one.end for one in sessions] != list(held.counts.turns):
        raise DamagedTapeError(
            f"rollout {key[0]} (try {key[1]}): its turns are damaged or were pruned; start another with new_try=True"
        )
    return _SealedPart(held, sessions)


def _in_order(parts: _Parts, key: Key) -> _Parts:
    """The parts to load, in the order of their epochs. Raises if they are not one chain."""
    where = f"rollout {key[0]} (try {key[1]})"
    sealed = parts.sealed
    if sealed is None and not parts.journals:
        raise DamagedTapeError(f"{where}: it is on the tape, and cannot be read; see `rolltape check`")
    low = -1 if sealed is None else sealed.held.head.epoch
    before = None if sealed is None else sealed.held.writer
    later: list[JournalPart] = []
    for part in sorted(parts.journals, key=lambda one: one.head.epoch):
        if part.head.epoch == low and part.writer != before:
            raise RecordError(f"{where} was recorded by {before} and by {part.writer}; start another with new_try=True")
        if part.head.epoch > low:
            if part.head.continues != before:
                raise DamagedTapeError(f"{where}: what {part.head.continues} recorded of it is missing")
            low, before = part.head.epoch, part.writer
            later.append(part)
    return _Parts(sealed, later)


def _take(parts: _Parts, fence: Fence, force: bool) -> list[StoredSession]:
    # The fence comes first: after it, the old writer adds nothing more.
    last = [take_part(parts.journals[-1], fence, force=force)] if parts.journals else []
    sealed = [] if parts.sealed is None else [parts.sealed.sessions]
    return join_sessions([*sealed, *map(load_part, parts.journals[:-1]), *last])


def _restored(head: RolloutHead, stored: list[StoredSession]) -> list[SessionIntake]:
    rollout, problems = rebuilt(head, stored, [], False, f"rollout {head.id} (try {head.try_index})")
    if not problems and [session.ordinal for session in stored] != list(range(len(stored))):
        raise DamagedTapeError(f"rollout {head.id} (try {head.try_index}): one of its sessions is missing")
    if problems:
        raise DamagedTapeError(f"{problems[0]}; it cannot be continued; start another try with new_try=True")
    return [_intake(session, one) for session, one in zip(rollout.sessions, stored, strict=True)]


def _counts(sessions: Sequence[SessionIntake]) -> RolloutCounts:
    turns = [turn for session in sessions for turn in session.turns]
    sampled = sum(len(turn.sampled_ids) for turn in turns)
    return RolloutCounts(tuple(len(session.turns) for session in sessions), sampled, tuple(weight_versions(turns)))


def _intake(session: Session, stored: StoredSession) -> SessionIntake:
    coding = {turn.sequence: turn for turn in stored.turns}
    turns = []
    for turn in session.turns:
        one = coding[turn.sequence]
        turns.append(CodedTurn(turn, one.parent, one.keep_tokens, one.keep_messages, given_whole=False))
    return SessionIntake.restored(session.head, *_defaults(session), turns)


def _defaults(session: Session) -> tuple[Root | None, dict[str, Any]]:
    """What a session was opened with. Version 0.1.0 did not store that; then the last turn's values count."""
    head = session.head
    if head.root is not None:
        roots = [_NO_TOOLS, *(turn.root for turn in session.turns)]
        return next((root for root in roots if root.raw_digest.hex() == head.root), None), head.defaults
    last = next((turn for turn in reversed(session.turns) if turn.facts.auxiliary is None), None)
    if last is None:
        return None, {}
    return last.root, {name: getattr(last.facts, name) for name in _DEFAULTS}
