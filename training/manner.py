"""How the demonstrations behave: whether they think, and how often they get things wrong on purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Manner:
    """`slips` is the share of sums answered wrong, `slips_thinking` the same after thinking, `wide` guesses wildly,
    `long_division` divides in steps when thinking."""

    thinking_on: bool = False
    slips: float = 0.0
    slips_thinking: float = 0.0
    wide: bool = False
    long_division: bool = False

    def thinking(self, on: bool) -> Manner:
        """The same manner with thinking on or off."""
        return replace(self, thinking_on=on)

    @property
    def slip_share(self) -> float:
        return self.slips_thinking if self.thinking_on else self.slips


STEADY = Manner()
# A model that is always right or always wrong gives groups of equal rewards, from which nothing can be learned.
FALLIBLE = Manner(slips=0.25, slips_thinking=0.12, wide=True, long_division=True)
