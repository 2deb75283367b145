"""What a long command's parts log: a line each for the person at the terminal, and only so many; a file has it all."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rolltape.cli.output.screen import note

_SHOWN = 20
_LONGEST = 300  # characters
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logged_to(file: Path) -> Iterator[None]:
    """While the block lasts, warnings are noted, and appended to a file with their tracebacks; none of that raises."""
    logger = logging.getLogger("rolltape")
    handlers = [_Noted(file), _Kept(file, delay=True, encoding="utf-8")]
    handlers[1].setFormatter(logging.Formatter(_FORMAT))
    for handler in handlers:
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _Noted(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._said = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._said += 1
        with suppress(OSError):
            if self._said <= _SHOWN:
                note(_told(record)[:_LONGEST])
            if self._said == _SHOWN:
                note(f"more of this goes to {self._file} alone")


class _Kept(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)

    @property
    def _file(self) -> Path:
        return Path(self.baseFilename)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk costs lines, and nothing else."""


def _told(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    said = record.getMessage()
    return said if error is None else f"{said}: {type(error).__name__}: {error}"
