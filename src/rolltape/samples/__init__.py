"""Tree → samples and ledger, under a cut policy, with credit. `compare`, `spelling` and `summary` lie beside it."""

from typing import Any

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


def __getattr__(name: str) -> Any:
    if name == "show":
        from rolltape.samples.spelling import show

        return show
    raise AttributeError(f"module 'rolltape.samples' has no attribute {name!r}")
