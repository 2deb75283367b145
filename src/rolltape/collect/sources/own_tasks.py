"""The tasks that an environment of another project brings, as a source: `verifiers:NAME`."""

from collections.abc import Iterator

from rolltape.collect.environments import environment_named
from rolltape.collect.functions import describe_raised
from rolltape.collect.sources.entries import RawSource, SourceEntry
from rolltape.errors import RolltapeError, SourceError


def own_tasks(name: str, split: str | None) -> RawSource:
    """The tasks of the environment of that name."""
    environment = environment_named(name)
    tasks = getattr(environment, "tasks", None)
    if tasks is None:
        raise SourceError(f"{name} brings no tasks of its own; give a file of tasks, and --environment {name}")

    def entries() -> Iterator[SourceEntry]:
        try:
            for at, task in enumerate(tasks(split), 1):
                yield SourceEntry(f"task {at}", task)
        except RolltapeError:
            raise
        except Exception as error:
            raise SourceError(f"the tasks of {name} cannot be read: {describe_raised(error)}") from error

    return RawSource(name, split, name, entries(), is_endless=bool(getattr(environment, "is_endless", False)))
