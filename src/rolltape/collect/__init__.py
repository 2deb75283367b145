"""Tasks × attempts → rollouts."""

from rolltape.collect.sources import Source, open_source
from rolltape.collect.tasks import Task, seed_of

__all__ = ["Source", "Task", "open_source", "seed_of"]
