"""How long one has waited, and when it is time to say so."""

import time

FIRST_WORD_S = 60.0  # the next word comes after twice as long


class Patience:
    """Of one who waits."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Wait anew."""
        self._began_s = time.monotonic()
        self._next_word_s = FIRST_WORD_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def is_word_due(self) -> bool:
        """Whether it is time to say that one waits; asked again it is not, for a while."""
        if self.waited_s < self._next_word_s:
            return False
        self._next_word_s *= 2
        return True
