"""Reads other programs' files: JSON lines with their numbers, JSON documents, and rows of Parquet files."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rolltape.errors import ImportFileError
from rolltape.extras import arrow_errors, pq
from rolltape.importers.imported import BrokenEntry
from rolltape.records.jsonable import decode_json

_BOM = b"\xef\xbb\xbf"
T = TypeVar("T")


def files_of(path: Path, *suffixes: str) -> list[Path]:
    """The file itself, or the files of a folder with these suffixes, sorted by name."""
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.is_file() and one.suffix in suffixes)
        if not found:
            raise ImportFileError(f"{path}: no file in it ends in {' or '.join(suffixes)}")
        return found
    if not path.exists():
        raise ImportFileError(f"{path}: there is no such file; check the path")
    return [path]


def first_file(path: Path, *suffixes: str) -> Path | None:
    """The first file that `files_of` would return, to recognize the kind of a source, or None if there is none."""
    if path.is_dir():
        return min((one for one in path.rglob("*") if one.is_file() and one.suffix in suffixes), default=None)
    return path if path.suffix in suffixes else None


def of_each_file(path: Path, *suffixes: str, read: Callable[[Path], Iterator[T]]) -> Iterator[T | BrokenEntry]:
    """What `read` yields for the file, or each file of a folder. In a folder, unreadable files are broken entries."""
    for file in files_of(path, *suffixes):
        try:
            yield from read(file)
        except ImportFileError as error:
            if file == path:
                raise
            yield BrokenEntry(str(file), str(error).removeprefix(f"{file}: "))


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    """The objects of a file with one object per line, each with its place. Blank lines are skipped."""
    with _readable(path).open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = _decoded(line, where)
            except ImportFileError as error:
                yield BrokenEntry(where, str(error).removeprefix(f"{where}: "))
                continue
            if isinstance(value, dict):
                yield where, value
            else:
                yield BrokenEntry(where, f"a {type(value).__name__}, not an object")


def json_document(path: Path) -> Any:
    """The value of a file with one JSON document."""
    return _decoded(_readable(path).read_bytes().removeprefix(_BOM), str(path))


def first_object(path: Path) -> dict[str, Any] | None:
    """The first object of a JSON or JSON lines file, or None. It reads only one line if that is enough."""
    try:
        with path.open("rb") as stream:
            line = stream.readline(64 << 20).removeprefix(_BOM)
        value = _decoded(line, str(path))
    except (OSError, ImportFileError):
        try:
            value = json_document(path)
        except (OSError, ImportFileError):
            return None
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, each with its place."""
    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", without_nulls(row)
    except arrow_errors(OSError, ValueError) as error:
        after = f"after row {number}: " if number else ""
        raise ImportFileError(f"{file}: not a readable Parquet file: {after}{error}") from None


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a Parquet file, or the first object of a JSON file, or None if there is none."""
    if path.suffix != ".parquet":
        return first_object(path)
    try:
        return next((row for _, row in parquet_rows(path)), None)
    except ImportFileError:
        return None


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the fields that a table fills with null because other rows have them."""
    return {name: _trimmed(value) for name, value in row.items() if value is not None}


def _trimmed(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {name: _trimmed(item) for name, item in value.items() if item is not None}
        # In an assistant message that only calls tools, the content null is meant.
        return {"content": None, **kept} if "role" in kept and "content" not in kept else kept
    return [_trimmed(item) for item in value] if isinstance(value, list) else value


def _decoded(raw: bytes, where: str) -> Any:
    """The value of a JSON text. Python's writers also write NaN, infinity, and halves of surrogate pairs."""
    try:
        return decode_json(raw)
    except (ValueError, RecursionError) as error:
        raise ImportFileError(f"{where}: not valid JSON: {error}") from None


def _readable(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise ImportFileError(f"{path}: there is no such file; check the path")
    kind = "a folder" if path.is_dir() else "a pipe or a device"
    raise ImportFileError(f"{path}: {kind}, not a file; give a file")
