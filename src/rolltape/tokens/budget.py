"""How much may wait to be written."""

import threading


class Budget:
    """Bytes that wait, never more than `limit` by what is taken in; safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Whether there was room, and if so it is taken. Something larger than all the room fits when nothing waits."""
        with self._lock:
            if self._used and self._used + size > self.limit:
                return False
            self._used += size
            return True

    def exchange(self, size: int, by: int) -> None:
        """What took `size` now takes `by`."""
        with self._lock:
            self._used += by - size
