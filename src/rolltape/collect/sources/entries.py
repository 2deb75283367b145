"""`RawSource`: a source before its tasks are checked. It has a name, a split, and entries."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from rolltape.errors import SourceError
from rolltape.records.ids import join_source

_SHOWN_PROBLEMS = 10


class SourceEntry(msgspec.Struct, frozen=True):
    """One unchecked entry. `problem` is the reason if there is no value."""

    where: str  # within the source: "line 12"
    value: object = None
    problem: str | None = None


class RawSource(msgspec.Struct, frozen=True):
    """A source whose entries can be read once."""

    name: str  # the same on every machine and in every working directory
    split: str | None
    label: str  # as the user wrote it
    entries: Iterable[SourceEntry]
    is_endless: bool = False  # it needs a limit to end

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


class EntryProblems:
    """The problems of a source's entries: all are counted, and the first ones kept."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, entry: SourceEntry, error: Exception) -> None:
        self.count += 1
        if self.count <= _SHOWN_PROBLEMS:
            self.first.append(f"{entry.where}: {error}")

    def describe(self, label: str, consequence: str) -> str:
        """One message about all of them."""
        if self.count == 1:
            return f"{label}, {self.first[0]}"
        more = [f"and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        return "\n  ".join([f"{label}: {self.count} entries cannot be used, and {consequence}", *self.first, *more])


@contextmanager
def readable(label: str) -> Iterator[None]:
    """Turn an error of the operating system about a file into a SourceError."""
    try:
        yield
    except FileNotFoundError:
        raise SourceError(f"{label}: there is no such file; check the path") from None
    except OSError as error:
        raise SourceError(f"{label} cannot be read: {error.strerror or error}") from None
