"""Background threads that do jobs in the order in which they come."""

import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class Workers:
    """Some threads with one queue. `died` is told of a thread that an exception ended, which jobs should not raise."""

    def __init__(self, name: str, count: int, died: Callable[[str], None]) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._died = died
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self, deadline: float) -> bool:
        """Let them do what is queued, until so long on the monotonic clock. Whether they got done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not self.alive

    def _work(self) -> None:
        try:
            while True:
                job = self._jobs.get()
                if job is None:
                    return
                job()
                del job  # and what it holds, which would else live until the next one comes
        except BaseException as error:
            self._died(repr(error))
            raise
