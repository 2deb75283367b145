"""One rollout under two cut policies, as the page shows it."""

from typing import Any

from rolltape.records.sample import Sample
from rolltape.samples import Linearized
from rolltape.samples.compare import Comparison
from rolltape.view.sampling import samples_in_brief

_SAMPLES_WITH_SPANS = 64  # spans are as many as the turns of a branch


def comparison_of(compared: Comparison, advantage: float | None) -> dict[str, Any]:
    """Both sides, and what became of the tokens of every turn on each."""
    left, right = compared.left, compared.right
    fates = (left.ledger.by_turn(), right.ledger.by_turn())
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
    spans = [_spans(made.sample(index)) for index in range(min(len(made), _SAMPLES_WITH_SPANS))]
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
