"""Which rollouts a run has and what was said of them, asked by one that wants to start another or to say more: own
journal, other writers', shards."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from rolltape.records.rollout import EventKind, Status
from rolltape.tape.index.ahead import WordsAhead
from rolltape.tape.index.others import OtherJournals
from rolltape.tape.index.sealed import SealedTries
from rolltape.tape.journal.schema import SELECT_FINISH, SELECT_TRIES, event_crc
from rolltape.tape.journal.writing import Journal
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.stored import Key, decoded_event

_FINISH = EventKind.FINISH


class Roster:
    """Answers for one id at a time, and sees what other writers have added meanwhile."""

    def __init__(self, directory: RunDirectory, own: Journal) -> None:
        self._own = own
        self._others = OtherJournals(directory, own.path)
        self._ahead = WordsAhead(self._others)
        self._sealed = SealedTries(directory, self._ahead.hear_shard)
        self._is_still = False

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Look once for many answers in a row: what others say meanwhile is not heard. Not for several threads."""
        self.latest_ns(None)
        self._others.hold_still(True)
        self._is_still = True
        try:
            yield
        finally:
            self._is_still = False
            self._others.hold_still(False)

    def look_again(self) -> None:
        """Look at far places, too, the next time that something is asked."""
        self._sealed.look_again()

    def tries(self, rollout: str) -> list[int]:
        """The tries of a rollout anywhere in the run, in their order."""
        found = set(self._own.tries(rollout))
        # Journals before shards: what is sealed and removed meanwhile is then found in one of the two.
        for path in self._others.paths():
            found.update(row[0] for row in self._others.asked(path, SELECT_TRIES, rollout))
        if not self._is_still:
            self._sealed.look()
        return sorted(found.union(self._sealed.of(rollout)))

    def latest_ns(self, rollout: str | None) -> int:
        """When others last spoke of a rollout, or (None) of the run, if that is still to come by our clock; else 0."""
        # The tape's own events need no reading: it makes each later than the one before.
        if not self._is_still:
            self._ahead.listen()
            self._sealed.look()
        return self._ahead.latest_ns(rollout)

    def counted_try(self, rollout: str, tries: list[int]) -> int:
        """The latest finished one of these tries, else the latest. Shards are those of the last look."""
        finished = (index for index in reversed(tries) if self._status_of((rollout, index)) == Status.FINISHED)
        return tries[-1] if len(tries) == 1 else next(finished, tries[-1])

    def turns_of(self, key: Key) -> tuple[int, ...] | None:
        """How many turns each session of a try has; None: it has not ended, as far as is known here."""
        finish = self._finish_of(key)
        if finish is not None:
            return tuple(finish.get("turns", ()))
        sealed = self._sealed.of(key[0]).get(key[1])
        if sealed is None or sealed.status is Status.LOST:
            return None
        with contextlib.closing(sealed.source) as source:
            return source.turns_of(key)

    def _status_of(self, key: Key) -> str | None:
        finish = self._finish_of(key)
        if finish is not None:
            return str(finish.get("status"))
        sealed = self._sealed.of(key[0]).get(key[1])
        return None if sealed is None else sealed.status

    def _finish_of(self, key: Key) -> dict[str, Any] | None:
        """What was said when a try ended, if that is in a journal."""
        for sequence, body, crc in self._finishes(key):
            with contextlib.suppress(ValueError, KeyError, TypeError, msgspec.MsgspecError):
                event = decoded_event("", sequence, body).event
                if event_crc(sequence, body) == crc and (event.kind, event.rollout, event.try_index) == (_FINISH, *key):
                    return event.data
        return None

    def _finishes(self, key: Key) -> Iterator[Any]:
        yield from self._own.finish_of(*key)
        for path in self._others.paths():
            yield from self._others.asked(path, SELECT_FINISH, *key)
