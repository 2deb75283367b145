"""Prints how two cut policies compare: what each trains, and which tokens differ."""

from collections import Counter

from rolltape.cli.output.screen import SHORT_ID, count, plural, print_json, print_line, print_table, tracked
from rolltape.cli.output.spelling import excerpt
from rolltape.cli.runs import Chosen
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.samples import FateDifference, compare
from rolltape.samples.spelling import Spellings

_KINDS = ("samples", "trained", "masked", "dropped")


def compare_policies(chosen: Chosen, one: CutPolicy, other: CutPolicy, spellings: Spellings, *, as_json: bool) -> None:
    """Print the totals of both policies and the stretches of tokens on which they differ."""
    versions = chosen.opened.run.versions()
    totals: dict[str, Counter[str]] = {one.name: Counter(), other.name: Counter()}
    differing: list[list[str]] = []
    tokens = 0
    for rollout in tracked(chosen, "comparing", len(chosen)):
        compared = compare(rollout, one, other, versions=versions)
        for made in (compared.left, compared.right):
            total = totals[made.policy.name]
            total["samples"] += len(made)
            for fate, amount in made.ledger.totals().items():
                total[fate.partition(":")[0]] += amount
        for apart in compared.differences:
            tokens += apart.stop - apart.start
            if as_json:
                place = {"turn": apart.turn, "start": apart.start, "stop": apart.stop}
                fates = {"one": apart.left, "other": apart.right}
                print_json({"rollout": rollout.id, "try_index": rollout.head.try_index, **place, **fates})
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


def _cells(rollout: Rollout, apart: FateDifference, spellings: Spellings) -> list[str]:
    session_id, _, sequence = apart.turn.rpartition(".")
    session = next(session for session in rollout.sessions if session.id == session_id)
    ids = session.turns[int(sequence)].sampled_ids[apart.start : apart.stop]
    place = f"{rollout.id[:SHORT_ID]} {session.ordinal}.{sequence}"
    return [place, f"{apart.start}-{apart.stop}", apart.left, apart.right, excerpt(ids, spellings.of(session))]
