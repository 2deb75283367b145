"""Tree → samples and ledger, under a cut policy, with credit. `compare`, `spelling` and `summary` lie beside it."""

from rolltape.samples.credit import advantages_of, counted_tries, group_advantages
from rolltape.samples.linearize import Linearized, linearize, linearize_under, samples_of_group

__all__ = [
    "Linearized",
    "advantages_of",
    "counted_tries",
    "group_advantages",
    "linearize",
    "linearize_under",
    "samples_of_group",
]
