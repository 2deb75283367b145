"""One BLAS thread while an engine runs: at these sizes a second one costs more than it does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController  # type: ignore[import-not-found, import-untyped, unused-ignore]

_lock = threading.Lock()
_users = 0
_before: list[int] = []


@contextmanager
def one_blas_thread() -> Iterator[Callable[[], None]]:
    """Holds for the whole process, as BLAS keeps it; the last user to end gives the threads back.

    Yields what makes it hold again, cheap enough for every step: others in the process may change it.
    """
    global _users, _before
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    with _lock:
        if _users == 0:
            _before = [library.get_num_threads() for library in libraries]
        _users += 1

    def hold() -> None:
        for library in libraries:
            if library.get_num_threads() != 1:
                library.set_num_threads(1)

    hold()
    try:
        yield hold
    finally:
        with _lock:
            _users -= 1
            for library, threads in zip(libraries, _before, strict=False):
                if _users == 0:
                    library.set_num_threads(threads)
                # From version 3.8 on, only the thread that set a limit first may change it until it lets go.
                getattr(library, "clear_controlling_thread", lambda: None)()
