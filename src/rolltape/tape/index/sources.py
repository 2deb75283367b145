"""Where the journals and shards of a run lie, and readers of them by the names that the index gives them."""

import contextlib
import time
from pathlib import Path

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.rundir import RUN_FILE, RunDirectory
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.reading import ShardSource, shards_at
from rolltape.tape.stored import Problem

_REMOTE_LOOK_S = 2.0  # between looks at a place that is not local, since each is a request

Reader = JournalSource | ShardSource


class RunSources:
    """The sources of one run. For one thread at a time."""

    def __init__(self, directory: RunDirectory | None, place: Place) -> None:
        self.directory = directory
        self._own = place
        self._published: dict[str, Place] = {}
        self._looked_at_s: dict[str, float] = {}
        self._listed: dict[str, list[ShardSource]] = {}
        self._problems: dict[str, list[Problem]] = {}

    def journal_paths(self) -> list[Path]:
        """The journals that there are now."""
        return [] if self.directory is None else self.directory.journal_paths()

    def shards(self, known: set[str]) -> list[ShardSource]:
        """The complete shards that there are now, at all places; the manifests of known ones are not read again."""
        return [shard for place in self._places() for shard in self._shards_at(place, known)]

    def problems(self) -> list[Problem]:
        """What is wrong with the run's directory and with the places that hold its shards."""
        found = [one for several in self._problems.values() for one in several]
        if self.directory is None:
            return found
        if not (self.directory.path / RUN_FILE).exists():
            what = "the run is no longer there; what is known of it is from before"
            found.append(Problem(str(self.directory.path), what, ""))
        try:
            self.directory.published()
        except DamagedTapeError as error:
            found.append(Problem(str(self.directory.path), str(error), "the rollouts that were published elsewhere"))
        return found

    def look_again(self) -> None:
        """Look at remote places, too, the next time."""
        self._looked_at_s.clear()

    def open(self, name: str) -> Reader:
        """The source of a name; raises DamagedTapeError if it is not there."""
        kind, _, rest = name.partition("/")
        if kind == "journal" and self.directory is not None:
            return JournalSource(self.directory.journals / f"{rest}.sqlite")
        shard, _, url = rest.partition("@")
        for place in self._places():
            if kind == "shard" and url == place.url:
                for found in shards_at(place)[0]:
                    if found.shard == shard:
                        return found
        raise DamagedTapeError(f"{name}: is no longer there")

    def _places(self) -> list[Place]:
        published: list[str] = []
        if self.directory is not None:
            with contextlib.suppress(DamagedTapeError):  # which `problems` names
                published = self.directory.published()
        for url in published:
            if url not in self._published:
                with contextlib.suppress(TapeError):
                    self._published[url] = Place(url)
        return [self._own, *(self._published[url] for url in published if url in self._published)]

    def _shards_at(self, place: Place, known: set[str]) -> list[ShardSource]:
        """The shards of one place; those of a place out of reach are what they were."""
        now_s = time.monotonic()
        if not place.is_local and now_s - self._looked_at_s.get(place.url, -_REMOTE_LOOK_S) < _REMOTE_LOOK_S:
            return self._listed.get(place.url, [])
        self._looked_at_s[place.url] = now_s
        try:
            held = {one.shard: one for one in self._listed.get(place.url, ()) if one.name in known}
            found, problems = shards_at(place, held)
            there = set(place.shard_ids()) if held else set()
            if place.about() is None:
                what = "shards of this run were published there, it holds no run now"
                problems.append(Problem(place.url, what, ""))
        except (TapeError, OSError) as error:
            if isinstance(error, TapeError) and not isinstance(error.__cause__, OSError):
                raise
            lost = "the rollouts that were published there"
            self._problems[place.url] = [Problem(place.url, f"cannot be reached: {error}", lost)]
            return self._listed.get(place.url, [])
        replaced = {shard for one in found for shard in one.manifest.get("replaces", [])}
        kept = [one for shard, one in held.items() if shard in there and shard not in replaced]
        self._problems[place.url] = problems
        self._listed[place.url] = [*kept, *found]
        return self._listed[place.url]
