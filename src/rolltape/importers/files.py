"""Reading other programs' files: JSON lines with their numbers, and single JSON documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ImportFileError
from rolltape.importers.imported import BrokenEntry

_BOM = b"\xef\xbb\xbf"


def files_of(path: Path, *suffixes: str) -> list[Path]:
    """The file itself, or the files of a folder that end so, by name."""
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.is_file() and one.suffix in suffixes)
        if not found:
            raise ImportFileError(f"{path}: no file in it ends in {' or '.join(suffixes)}")
        return found
    if not path.exists():
        raise ImportFileError(f"{path}: there is no such file; check the path")
    return [path]


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    """The objects of a file with one per line, each with its place. Blank lines are left out."""
    with _readable(path).open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                value = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                yield BrokenEntry(where, f"not valid JSON: {error}")
                continue
            if isinstance(value, dict):
                yield where, value
            else:
                yield BrokenEntry(where, f"a {type(value).__name__}, not an object")


def json_document(path: Path) -> Any:
    """The value of a file with one JSON document."""
    try:
        return msgspec.json.decode(_readable(path).read_bytes().removeprefix(_BOM))
    except msgspec.DecodeError as error:
        raise ImportFileError(f"{path}: not valid JSON: {error}") from None


def first_object(path: Path) -> dict[str, Any] | None:
    """The first object of a JSON or JSON lines file; None: it is something else. Reads one line where it can."""
    try:
        with path.open("rb") as stream:
            line = stream.readline(64 << 20).removeprefix(_BOM)
        value = msgspec.json.decode(line)
    except (OSError, msgspec.DecodeError):
        try:
            value = msgspec.json.decode(path.read_bytes().removeprefix(_BOM))
        except (OSError, msgspec.DecodeError):
            return None
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise ImportFileError(f"{path}: {'a folder, not a file' if path.is_dir() else 'there is no such file'}")
    return path
