"""One rollout under two policies."""

from itertools import islice
from typing import Any

from rolltape.records.sample import Sample
from rolltape.samples import Linearized
from rolltape.view.sampling import samples_in_brief

_SAMPLES_WITH_SPANS = 64  # spans are as many as the turns of a branch


def comparison_of(left: Linearized, right: Linearized, advantage: float | None) -> dict[str, Any]:
    """Both sides, and what became of the tokens of every turn on each."""
    fates = (fates_by_turn(left), fates_by_turn(right))
    return {
        "left": _side(left, advantage),
        "right": _side(right, advantage),
        "turns": [
            {
                "turn": turn.id,
                "sequence": turn.sequence,
                "session": turn.session,
                "sampled": len(turn.sampled_ids),
                "left": fates[0].get(turn.id, {}),
                "right": fates[1].get(turn.id, {}),
            }
            for turn in left.rollout.turns
        ],
    }


def _side(made: Linearized, advantage: float | None) -> dict[str, Any]:
    spans = [_spans(sample) for sample in islice(made.samples(advantage), _SAMPLES_WITH_SPANS)]
    samples = samples_in_brief(made, advantage)
    return {
        "policy": made.policy.name,
        "policy_key": made.policy.key,
        "samples": [
            {**sample, "spans": spans[index] if index < len(spans) else []} for index, sample in enumerate(samples)
        ],
        "ledger": {fate.value: tokens for fate, tokens in made.ledger.totals().items()},
    }


def _spans(sample: Sample) -> list[dict[str, Any]]:
    return [
        {
            "start": span.start,
            "stop": span.stop,
            "origin": span.origin.value,
            "turn": span.turn,
            "fate": None if span.fate is None else span.fate.value,
        }
        for span in sample.spans
    ]


def fates_by_turn(made: Linearized) -> dict[str, dict[str, int]]:
    """Tokens by fate for each turn."""
    found: dict[str, dict[str, int]] = {}
    for entry in made.ledger.entries:
        own = found.setdefault(entry.turn, {})
        own[entry.fate.value] = own.get(entry.fate.value, 0) + entry.stop - entry.start
    return found
