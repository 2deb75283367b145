"""What a sealed shard tells: all of its rollouts, where each lies, and all that is said in it."""

from collections.abc import Iterator

from rolltape.records.rollout import EventKind
from rolltape.tape.index.stretches import ShardStretches
from rolltape.view.reports import Counted, Key, Place, Placed, Report, Spot
from rolltape.view.tail import matters, said, started


def shard_news(shard: ShardStretches, source: str) -> Iterator[Report]:
    """Everything in a shard."""
    rows: dict[Key, tuple[int, str]] = {}
    for found in shard.heads(0, 2**62):
        writer, counts = shard.counts(found.row)
        key = found.head.key
        rows[key] = (found.row, writer)
        yield started(found.head, writer, Place(source, found.row))
        yield Counted(key, writer, sum(counts.turns), counts.sampled_tokens, counts.versions)
    own: dict[Key, list[int]] = {key: [0, -1] for key in rows}  # its first and its last event
    finished: set[Key] = set()
    for number, stored in shard.said(0, 2**62):
        about = stored.about
        key = about.key
        # What comes long after the end would make the stretch as long as the shard.
        is_near = key in own and stored.writer == rows[key][1]
        if is_near and key in finished:
            is_near = about.kind == EventKind.SCORE and own[key][1] == number - 1
        if is_near:
            own[key] = [own[key][0] if own[key][1] >= 0 else number, number]
        if about.kind == EventKind.FINISH:
            finished.add(key)
        spot = None if is_near or about.rollout is None else Spot(stored.writer, stored.sequence, source, number)
        if spot is not None or matters(about):
            yield said(stored, spot)
    for key, (first, last) in own.items():
        row, writer = rows[key]
        yield Placed(key, writer, Place(source, row, (0, -1), (first, last)))
