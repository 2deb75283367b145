"""Two policies on the same turns: what each trains, and which tokens differ."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rolltape.cli.output.screen import SHORT_ID, count, plural, print_json, print_line, print_table, tracked
from rolltape.cli.output.spelling import excerpt
from rolltape.cli.runs import Chosen
from rolltape.records.ledger import Fate, Ledger
from rolltape.records.policy import Policy
from rolltape.records.rollout import Rollout
from rolltape.samples import linearize
from rolltape.samples.spelling import Spellings

_KINDS = ("samples", "trained", "masked", "dropped")


class Disagreement(NamedTuple):
    """Sampled tokens `[start, stop)` of a turn to which two policies give different fates."""

    turn: str
    start: int
    stop: int
    one: Fate
    other: Fate


def compare_policies(chosen: Chosen, one: Policy, other: Policy, spellings: Spellings, *, as_json: bool) -> None:
    """Print the totals of both policies and the stretches of tokens on which they differ."""
    versions = chosen.opened.run.versions()
    totals: dict[str, Counter[str]] = {one.name: Counter(), other.name: Counter()}
    differing: list[list[str]] = []
    tokens = 0
    for rollout in tracked(chosen, "comparing", len(chosen)):
        both = [linearize(rollout, policy, versions=versions) for policy in (one, other)]
        for made in both:
            total = totals[made.policy.name]
            total["samples"] += len(made)
            for fate, amount in made.ledger.totals().items():
                total[fate.partition(":")[0]] += amount
        for apart in disagreements(both[0].ledger, both[1].ledger):
            tokens += apart.stop - apart.start
            if as_json:
                print_json({"rollout": rollout.id, "try_index": rollout.head.try_index, **apart._asdict()})
            else:
                differing.append(_cells(rollout, apart, spellings))
    if as_json:
        for policy in (one, other):
            counts = {kind: totals[policy.name][kind] for kind in _KINDS}
            print_json({"policy": policy.name, "key": policy.key, **counts})
        return
    amounts = [[name, *(count(total[kind]) for kind in _KINDS)] for name, total in totals.items()]
    print_table(["policy", *_KINDS], amounts, left=["policy"])
    print_line("")
    if not differing:
        print_line("Every sampled token has the same fate under both.")
        return
    print_line(f"{plural(tokens, 'sampled token')} with different fates:")
    print_table(["turn", "tokens", *totals, "text"], differing, left=["turn", *totals, "text"], flexible=["text"])


def disagreements(one: Ledger, other: Ledger) -> Iterator[Disagreement]:
    """Where two ledgers of the same rollout differ. Both cover the same turns, in the same order, without a gap."""
    mine, theirs = iter(one.entries), iter(other.entries)
    left, right = next(mine, None), next(theirs, None)
    while left is not None and right is not None:
        start, stop = max(left.start, right.start), min(left.stop, right.stop)
        if left.fate is not right.fate:
            yield Disagreement(left.turn, start, stop, left.fate, right.fate)
        left, right = (
            next(mine, None) if left.stop == stop else left,
            next(theirs, None) if right.stop == stop else right,
        )


def _cells(rollout: Rollout, apart: Disagreement, spellings: Spellings) -> list[str]:
    session_id, _, sequence = apart.turn.rpartition(".")
    session = next(session for session in rollout.sessions if session.id == session_id)
    ids = session.turns[int(sequence)].sampled_ids[apart.start : apart.stop]
    place = f"{rollout.id[:SHORT_ID]} {session.ordinal}.{sequence}"
    return [place, f"{apart.start}-{apart.stop}", apart.one, apart.other, excerpt(ids, spellings.of(session))]
