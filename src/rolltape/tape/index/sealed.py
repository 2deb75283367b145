"""Which tries are sealed: a few bytes for each, however many rollouts and shards there are."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.errors import TapeError
from rolltape.records.rollout import Status
from rolltape.tape.index.standing import STATUSES, key_of
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.reading import ShardSource, shards_at

_FAR_LOOK_S = 30.0
_PLACE = np.dtype([("shard", "u4"), ("status", "u1")])


class SealedTry(NamedTuple):
    """A try, how it ended, and the shard that holds it."""

    status: Status
    source: ShardSource


class SealedTries:
    """The tries in a run's shards, by rollout; `on_shard` is called with each shard once."""

    def __init__(self, directory: RunDirectory, on_shard: Callable[[ShardSource], None]) -> None:
        self._directory = directory
        self._on_shard = on_shard
        self._places: dict[str, Place] = {}
        self._looked_at: dict[str, float] = {}
        self._known: dict[str, set[str]] = {}  # the shards at each place that were looked at
        self._sources: list[ShardSource] = []
        self._arrays: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []  # keys in their order, and their places

    def of(self, rollout: str) -> dict[int, SealedTry]:
        """The tries of a rollout in the shards that were found so far."""
        try:
            first, last = key_of(rollout, 0), key_of(rollout, 2**64 - 1)
        except ValueError:
            return {}
        found: dict[int, SealedTry] = {}
        for keys, places in self._arrays:
            start, stop = np.searchsorted(keys, first), np.searchsorted(keys, last, "right")
            for key, (shard, code) in zip(keys[start:stop], places[start:stop], strict=True):
                try_index = int.from_bytes(key[16:], "little")  # numpy gives a key without the zeros at its end
                found[try_index] = SealedTry(STATUSES[code], self._sources[shard])
        return found

    def look(self) -> None:
        """Look for new shards: here each time, at a far place now and then, since each look is a request."""
        for url in (str(self._directory.path), *self._directory.published()):
            if url not in self._places:
                self._places[url] = Place(url)
        for place in self._places.values():
            now = time.monotonic()
            if place.is_local or now - self._looked_at.get(place.url, -_FAR_LOOK_S) >= _FAR_LOOK_S:
                self._looked_at[place.url] = now
                self._look_at(place)

    def look_again(self) -> None:
        """Look at far places, too, the next time."""
        self._looked_at.clear()

    def _look_at(self, place: Place) -> None:
        known = self._known.setdefault(place.url, set())
        try:
            for source in shards_at(place, known)[0]:
                self._add(source)
                self._on_shard(source)
                source.close()
                known.add(source.shard)
        except (TapeError, OSError):
            pass  # a place out of reach must not stop the recording; readers name it

    def _add(self, source: ShardSource) -> None:
        standings = source.standings()
        places = np.empty(len(standings), _PLACE)
        places["shard"], places["status"] = len(self._sources), standings["status"]
        self._sources.append(source)
        self._arrays.append(_ordered(standings["key"], places))
        # Each is more than twice as large as the next: there are few to search, and each is copied a few times.
        while len(self._arrays) > 1 and len(self._arrays[-2][0]) <= 2 * len(self._arrays[-1][0]):
            keys, places = (np.concatenate(both) for both in zip(*self._arrays[-2:], strict=True))
            self._arrays[-2:] = [_ordered(keys, places)]


def _ordered(keys: npt.NDArray[Any], places: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    order = np.argsort(keys, kind="stable")
    return keys[order], places[order]
