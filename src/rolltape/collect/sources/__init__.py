"""Task sources: files, standard input, datasets and functions, read as a checked sequence of tasks."""

from rolltape.collect.sources.opening import CheckTask, GivenSource, open_source
from rolltape.collect.tasks import TaskSource

__all__ = ["CheckTask", "GivenSource", "TaskSource", "open_source"]
