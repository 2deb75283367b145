"""Seals a run: moves ended rollouts from journals into Parquet shards, and removes journals that are no longer needed.

The run is complete after every step. A shard counts from the moment its manifest is there. Until then, its rollouts are
read from the journal. Afterwards each rollout counts once, even if the journal is still there.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import TapeError
from rolltape.records.rollout import Event, Status, outcome_of, pruned_of
from rolltape.tape.contents import Listed, RunContents, SourceContents, open_contents
from rolltape.tape.index.loading import rebuilt
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.rundir import RUN_FILE, Place, RunDirectory, checked_about, locked
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.shards.writing import MANIFEST, ShardWriter
from rolltape.tape.stored import HeldRollout, Key, StoredEvent, holds_part, join_sessions

_SHARD_BYTES = 1 << 30  # of content before compression
_LEFT_OVER_S = 3600

Progress = Callable[[int, int], None]  # rollouts done, rollouts to do


class SealReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a seal did."""

    location: str
    shards: tuple[str, ...]
    rollouts: int
    turns: int
    sampled_tokens: int
    bytes: int  # of the files written
    running: int  # rollouts that were skipped because they have not ended
    removed: tuple[str, ...]  # journals that were no longer needed
    kept: dict[str, str]  # journals that stay, and why


def seal(
    run_path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> SealReport:
    """Move every rollout that has ended from the journals into Parquet shards, in the run or at `to`.

    Example:

        report = rolltape.seal("runs/exp1", to="s3://bucket/exp1")
    """
    directory = RunDirectory.opened(run_path)
    place = Place(directory.path if to is None else to)
    if _is_own(place, directory):
        place, to = Place(directory.path), None
    with locked(directory.path, "seal.lock", for_long=True):
        if to is not None:
            make_run(place, directory)
            directory.add_published(place.url)
        _clean(directory)
        with open_contents(directory) as contents:
            pending, running = _pending(contents, None if to is None else place)
            manifests = list(written(place, pending, _unsealed_events(contents, place, to is None, running), progress))
        with open_contents(directory) as contents:
            removed, kept = _spent(contents)
        for path in removed:
            remove_journal(path)
    return SealReport(
        location=place.url,
        shards=tuple(manifest["shard"] for manifest in manifests),
        rollouts=sum(manifest["rollouts"] for manifest in manifests),
        turns=sum(manifest["turns"] for manifest in manifests),
        sampled_tokens=sum(manifest["sampled_tokens"] for manifest in manifests),
        bytes=sum(file["bytes"] for manifest in manifests for file in manifest["files"].values()),
        running=len(running),
        removed=tuple(path.stem for path in removed),
        kept=kept,
    )


def _is_own(place: Place, directory: RunDirectory) -> bool:
    return place.is_local and Path(place.root).resolve() == directory.path.resolve()


def make_run(place: Place, directory: RunDirectory) -> None:
    """Prepare a place for shards of this run. Raises TapeError if it holds another run."""
    raw = place.about()
    if raw is None:
        place.write(json.dumps(directory.about).encode(), RUN_FILE)
    elif (name := checked_about(raw, place.url)["name"]) != directory.name:
        raise TapeError(f"{place.url} holds the run {name!r}, not {directory.name!r}; seal to another place")


def _clean(directory: RunDirectory) -> None:
    """Remove what an interrupted seal left: shards without a manifest, and sidecars without a journal."""
    place = Place(directory.path)
    for shard in place.shard_ids():
        # On a cluster, other machines may be writing here. The shard's name contains the time of its start.
        if place.read("shards", shard, MANIFEST) is None and _age_s(shard) > _LEFT_OVER_S:
            place.remove_shard(shard)
    for pattern, suffix in (("*.sqlite-wal", "-wal"), ("*.sqlite-shm", "-shm")):
        for path in directory.journals.glob(pattern):
            if not Path(str(path).removesuffix(suffix)).exists():
                path.unlink(missing_ok=True)
    for path in (*directory.journals.glob("*.owner"), *directory.journals.glob("*.making")):
        # A new journal has its owner file first, so only old files count as left over.
        if not path.with_suffix(".sqlite").exists() and path.stat().st_mtime < time.time() - _LEFT_OVER_S:
            path.unlink(missing_ok=True)


def _age_s(shard: str) -> float:
    began_ns, _, _ = shard.partition("-")
    return time.time() - int(began_ns) / 1e9 if began_ns.isdecimal() else _LEFT_OVER_S + 1


def _pending(contents: RunContents, target: Place | None) -> tuple[dict[Key, Listed], set[Key]]:
    """The rollouts to seal, and those that still run. A target gets all that it does not hold itself."""
    sealed = {
        (key, held.head.epoch)
        for shard in contents.shards
        if target is None or shard.source.place.url == target.url
        for key, held in shard.rollouts.items()
    }
    pending: dict[Key, Listed] = {}
    running: set[Key] = set()
    for key, entry in contents.entries.items():
        outcome = outcome_of(contents.deciding(key), entry.alive)
        if outcome.status is Status.RUNNING:
            running.add(key)
        elif (key, entry.held.head.epoch) not in sealed:
            pending[key] = entry
    return pending, running


def _unsealed_events(contents: RunContents, place: Place, anywhere: bool, running: set[Key]) -> list[StoredEvent]:
    """Events that no shard holds yet, without those about running rollouts, unless their writer is dead."""
    sealed = {
        stored.key
        for shard in contents.shards
        if anywhere or shard.source.place.url == place.url
        for stored in shard.events
    }
    dead = {journal.source.writer for journal in contents.journals if not journal.source.alive}
    return [
        stored
        for stored in contents.events.values()
        if stored.key not in sealed and (stored.writer in dead or stored.about.key not in running)
    ]


def written(
    place: Place, pending: dict[Key, Listed], events: list[StoredEvent], progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Write rollouts and events as shards. Yield the manifest of each as it becomes part of the run."""
    if not pending and not events:
        return
    waiting = iter(pending.items())
    done = 0
    more = True
    while more:
        with ShardWriter(place, shard_id()) as writer:
            sealed: set[Key] = set()
            more = False
            for key, entry in waiting:
                writer.add_rollout(entry.held, entry.load())
                sealed.add(key)
                done += 1
                if progress is not None:
                    progress(done, len(pending))
                if writer.content_bytes > _SHARD_BYTES and done < len(pending):
                    more = True
                    break
            about = [one.about.key in sealed or not more for one in events]
            writer.add_events(one for one, own in zip(events, about, strict=True) if own)
            events = [one for one, own in zip(events, about, strict=True) if not own]
            yield writer.commit()


def shard_id() -> str:
    """A new name for a shard. Names sort by the time at which they were made."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def _spent(contents: RunContents) -> tuple[list[Path], dict[str, str]]:
    """Journals of dead writers whose every row is in a shard, and why the others stay."""
    published = {stored.key for shard in contents.shards for stored in shard.events}
    holders: dict[Key, list[SourceContents[ShardSource]]] = {}
    for shard in contents.shards:
        for key in shard.rollouts:
            holders.setdefault(key, []).append(shard)
    removed: list[Path] = []
    kept: dict[str, str] = {}
    for journal in contents.journals:
        why = _why_kept(journal, contents, holders, published)
        if why is None:
            removed.append(journal.source.path)
        else:
            kept[journal.source.writer] = why
    return removed, kept


def _why_kept(
    journal: SourceContents[JournalSource],
    contents: RunContents,
    holders: dict[Key, list[SourceContents[ShardSource]]],
    published: set[tuple[str, int]],
) -> str | None:
    if journal.source.alive:
        return "its writer is alive"
    sealed = {key: _sealed(held, journal, holders.get(key, []), contents) for key, held in journal.rollouts.items()}
    unsealed = sum(shard is None for shard in sealed.values())
    if unsealed:
        return f"{unsealed} of its rollouts are not sealed"
    if any(stored.key not in published for stored in journal.events):
        return "some of its events are not sealed"
    journal.source.check_whole()
    events_of: dict[Key, list[Event]] = {}
    for stored in journal.events:
        events_of.setdefault(stored.about.key, []).append(stored.event)
    for key, held in journal.rollouts.items():
        # Read once more in full: a journal with unreadable rows is never removed.
        sessions, shard = journal.load(key), sealed[key]
        if shard is not None and shard.rollouts[key].head.epoch:  # a part can be rebuilt only with the others
            sessions = join_sessions([shard.load(key), sessions])
            if "turns" in pruned_of(contents.deciding(key)):
                continue
        if rebuilt(held.head, sessions, events_of.get(key, []), False, journal.source.where)[1]:
            return "it is damaged"
    return "it is damaged" if journal.problems() else None


def _sealed(
    held: HeldRollout,
    journal: SourceContents[JournalSource],
    shards: list[SourceContents[ShardSource]],
    contents: RunContents,
) -> SourceContents[ShardSource] | None:
    """The shard that holds all that a journal has of a rollout, with or without parts of later writers, or None."""
    for shard in shards:
        there = shard.rollouts[held.key]
        if (there.head.epoch, there.writer) == (held.head.epoch, held.writer):
            return shard
        if there.head.epoch > held.head.epoch:
            is_pruned = "turns" in pruned_of(contents.deciding(held.key))
            if is_pruned or holds_part(shard.load(held.key), journal.load(held.key)):
                return shard
    return None


def remove_journal(path: Path) -> None:
    """Remove a journal of which everything is in shards."""
    # The journal itself first: if this is interrupted, readers ignore the files that are left.
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm"), path.with_suffix(".owner")):
        name.unlink(missing_ok=True)
