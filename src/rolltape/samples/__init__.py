"""Tree → samples and ledger, under a cut policy, with credit."""

from rolltape.samples.compare import Comparison, FateDifference, compare
from rolltape.samples.credit import advantages_of, counted_tries, group_advantages
from rolltape.samples.linearize import Linearized, linearize, linearize_under, samples_of_group
from rolltape.samples.spelling import show
from rolltape.samples.summary import summarize

__all__ = [
    "Comparison",
    "FateDifference",
    "Linearized",
    "advantages_of",
    "compare",
    "counted_tries",
    "group_advantages",
    "linearize",
    "linearize_under",
    "samples_of_group",
    "show",
    "summarize",
]
