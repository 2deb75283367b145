"""An event loop in a separate thread, for objects that are used from threads and from other event loops."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rolltape.errors import GroupsError
from rolltape.serving import loop_factory

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines until `close`."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self.loop = self._runner.get_loop()
        # A daemon, so that a trainer can end without `close`.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ending = asyncio.Event()
        self._thread.start()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._ending.wait())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine. Cancelling the future cancels it."""
        if not self._thread.is_alive():
            coroutine.close()
            raise GroupsError("the background thread is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """Cancel what still runs, and end the thread. A second call does nothing."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
