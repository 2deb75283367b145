"""Tree → samples and ledger, under a policy."""

from rolltape.samples.groups import advantages_of, counted_tries, samples_of_group
from rolltape.samples.linearize import Linearized, linearize
from rolltape.samples.shares import group_advantages
from rolltape.samples.show import show
from rolltape.samples.summary import summarize

__all__ = [
    "Linearized",
    "advantages_of",
    "counted_tries",
    "group_advantages",
    "linearize",
    "samples_of_group",
    "show",
    "summarize",
]
