"""What every kind of source is read as before its tasks are checked: a name, a split, and entries."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from rolltape.errors import SourceError
from rolltape.records.ids import join_source

SHOWN_PROBLEMS = 10


class SourceEntry(msgspec.Struct, frozen=True):
    """One entry as it was found. `problem` says why there is no value."""

    where: str  # within the source: "line 12"
    value: object = None
    problem: str | None = None


class RawSource(msgspec.Struct, frozen=True):
    """A source whose entries can be read once."""

    name: str  # the same on every machine and in every working directory
    split: str | None
    label: str  # as the user wrote it
    entries: Iterable[SourceEntry]

    @property
    def joined_name(self) -> str:
        """Name and split as one text. A `#` of the name is escaped, so no other name and split give the same text."""
        name = self.name.replace("%", "%25").replace("#", "%23")
        return join_source(name, self.split) or ""


def filter_split(entries: Iterable[SourceEntry], split: str | None, label: str) -> Iterator[SourceEntry]:
    """Leave out entries whose field "split" names another split. An entry without the field belongs to every split."""
    others: set[str] = set()
    found = False
    for entry in entries:
        own = entry.value.get("split") if isinstance(entry.value, dict) else None
        if split is not None and isinstance(own, str) and own != split:
            others.add(own)
        else:
            found = True
            yield entry
    if others and not found:
        raise SourceError(f"{label}: no entry is of the split {split!r}; they are of {join_names(others)}")


def join_names(names: Iterable[str]) -> str:
    """Names in a message, sorted."""
    return ", ".join(sorted(names)) or "none"


def describe_problems(label: str, problems: Sequence[str], count: int, consequence: str) -> str:
    """One message about all entries that cannot be used: the first `problems` of `count`, and the consequence."""
    if count == 1:
        return f"{label}, {problems[0]}"
    more = [f"and {count - len(problems)} more"] if count > len(problems) else []
    return "\n  ".join([f"{label}: {count} entries cannot be used, and {consequence}", *problems, *more])


@contextmanager
def readable(label: str) -> Iterator[None]:
    """Turn an error of the operating system about a file into a SourceError."""
    try:
        yield
    except FileNotFoundError:
        raise SourceError(f"{label}: there is no such file; check the path") from None
    except OSError as error:
        raise SourceError(f"{label} cannot be read: {error.strerror or error}") from None
