"""Prunes a run: removes turns by step, or one side array. Heads and outcomes stay; events record what was removed."""

import os
import time
from collections.abc import Collection

import msgspec

from rolltape.errors import TapeError
from rolltape.records.rollout import EventKind, RolloutHead, pruned_of
from rolltape.tape.contents import RunContents, SourceContents, open_contents
from rolltape.tape.index.loading import without
from rolltape.tape.journal.entries import encode_event
from rolltape.tape.recording.fields import as_count, as_items
from rolltape.tape.rundir import RunDirectory, locked
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.shards.seal import seal, shard_id
from rolltape.tape.shards.writing import ShardWriter
from rolltape.tape.stored import HeldRollout, Key, StoredEvent, decoded_event

_OWN_KEYS = {"schema", "shard", "files", "rollouts", "turns", "sampled_tokens", "latest_ns", "replaces"}


class PruneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a prune did, or would do."""

    pruned: str  # "turns", or "side array NAME"
    rollouts: int
    turns: int
    sampled_tokens: int
    bytes_freed: int  # 0 on a dry run
    skipped: dict[str, str]  # rollouts or shards that were left alone, and why
    dry_run: bool


def prune(
    run_path: str | os.PathLike[str],
    *,
    before_step: int | None = None,
    steps: Collection[int] | None = None,
    side_array: str | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Delete the turns of the rollouts of some steps. With `side_array`, delete only that array of their turns.

    A side array without steps is deleted from all rollouts. Finished rollouts are sealed first.

    Example:

        report = rolltape.prune("runs/exp1", before_step=100, dry_run=True)
        print(report.rollouts, report.turns)
    """
    if before_step is None and steps is None and side_array is None:
        raise TapeError(f"run {os.fspath(run_path)}: nothing to prune; give before_step, steps, or side_array")
    before = None if before_step is None else as_count(before_step, "before_step")
    wanted_steps = None if steps is None else {as_count(one, "steps") for one in as_items(steps, "steps", "steps")}
    directory = RunDirectory.opened(run_path)
    what = "turns" if side_array is None else f"side array {side_array}"

    def chosen(head: RolloutHead) -> bool:
        return (before is None or head.step < before) and (wanted_steps is None or head.step in wanted_steps)

    if not dry_run:
        seal(run_path)
    with locked(directory.path, "seal.lock", for_long=True), open_contents(directory) as contents:
        skipped = {
            key: f"its writer {journal.source.writer} is alive"
            for journal in contents.journals
            if journal.source.alive
            for key, held in journal.rollouts.items()
            if chosen(held.head)
        }
        wanted = {
            key: entry.held
            for key, entry in contents.entries.items()
            if chosen(entry.held.head) and key not in skipped and _has(contents, key, side_array)
        }
        reasons = {f"{rollout} (try {try_index})": why for (rollout, try_index), why in skipped.items()}
        freed = 0
        if not dry_run:
            for shard in contents.shards:  # what a prune that was cut short has replaced and left there
                for one in shard.source.manifest.get("replaces", []):
                    shard.source.place.remove_shard(one)
            latest = {stored.about.key: stored.about.at_ns for stored in contents.events.values()}
            freed = sum(_rewritten(shard, wanted, what, latest, reasons) for shard in contents.shards)
        reasons = {one.where: one.what for one in contents.problems() if one.lost} | reasons  # their data may remain
    return PruneReport(
        pruned=what,
        rollouts=len(wanted),
        turns=sum(sum(held.counts.turns) for held in wanted.values()),
        sampled_tokens=sum(held.counts.sampled_tokens for held in wanted.values()),
        bytes_freed=freed,
        skipped=reasons,
        dry_run=dry_run,
    )


def _has(contents: RunContents, key: Key, side_array: str | None) -> bool:
    """Whether there is something to prune: no event records its removal, or, after a crash, it is still there."""
    if side_array is None and "turns" not in pruned_of(contents.deciding(key)):
        return True
    held = [one.load(key) for one in contents.shards if key in one.rollouts]
    if side_array is not None:
        held = held or [contents.entries[key].load()]
    turns = (turn for sessions in held for session in sessions for turn in session.turns)
    return any(side_array is None or side_array in turn.side for turn in turns)


def _rewritten(
    shard: SourceContents[ShardSource],
    wanted: dict[Key, HeldRollout],
    what: str,
    latest: dict[Key, int],
    skipped: dict[str, str],
) -> int:
    """Replace a shard by one without the pruned parts. Return how many bytes that frees.

    `latest` has the time of the last event about each rollout.
    """
    own = [held for key, held in shard.rollouts.items() if key in wanted]
    if not own:
        return 0
    source, fresh = shard.source, shard_id()
    place, manifest = source.place, source.manifest
    with ShardWriter(place, fresh) as writer:
        for key, held in shard.rollouts.items():
            sessions = shard.load(key)
            writer.add_rollout(held, [without(one, (what,)) for one in sessions] if key in wanted else sessions)
        events = [*shard.events, *_prune_events(own, what, latest, f"prune-{fresh}")]
        if shard.problems():
            # A rewrite would lose for good what cannot be read now.
            skipped[source.where] = f"it is damaged: {shard.problems()[0].what}"
            place.remove_shard(fresh)
            return 0
        writer.add_events(events)
        old = [source.shard, *manifest.get("replaces", [])]
        further = {key: value for key, value in manifest.items() if key not in _OWN_KEYS}
        written = writer.commit(**further, replaces=old)
    source.close()
    for one in old:
        place.remove_shard(one)
    return _size(manifest) - _size(written)


def _prune_events(pruned: list[HeldRollout], what: str, latest: dict[Key, int], writer: str) -> list[StoredEvent]:
    events = []
    for sequence, held in enumerate(pruned):
        counts = held.counts
        data = {"pruned": what, "turns": sum(counts.turns), "sampled_tokens": counts.sampled_tokens}
        at_ns = max(time.time_ns(), latest.get(held.key, 0) + 1)  # the clock of another writer may be ahead
        body = encode_event(EventKind.PRUNE, held.key, data).body(at_ns)
        events.append(decoded_event(writer, sequence, body))
    return events


def _size(manifest: dict[str, object]) -> int:
    files = manifest["files"]
    assert isinstance(files, dict)
    return sum(file["bytes"] for file in files.values())
