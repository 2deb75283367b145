"""Entries of JSON and JSON lines files, each with its line number."""

import json
import re
from collections.abc import Iterable, Iterator
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import Any

from rolltape.collect.sources.entries import RawSource, SourceEntry, filter_split, join_names, readable
from rolltape.errors import SourceError

_BOM = b"\xef\xbb\xbf"
_UNSPLIT = "tasks"  # the key of a list that is used for any split
_SPACE = re.compile(r"[ \t\r\n]+")
_value_at = json.JSONDecoder().raw_decode


class _KeyTwice(ValueError):
    """An object has two values for one key, of which readers would take different ones."""


def json_lines_file(label: str, split: str | None) -> RawSource:
    """A file with one object per line; blank lines are allowed."""
    path = Path(label)
    return RawSource(path.name, split, label, filter_split(_parse_lines(_read_lines(path, label)), split, label))


def json_lines_stream(lines: Iterable[bytes], split: str | None) -> RawSource:
    """JSON lines from a stream, such as standard input."""
    return RawSource("stdin", split, "stdin", filter_split(_parse_lines(lines), split, "stdin"))


def json_file(label: str, split: str | None) -> RawSource:
    """A file with a list of objects, or an object with such lists: one under "tasks", or one for each split."""
    path = Path(label)
    with readable(label):
        raw = path.read_bytes().removeprefix(_BOM)
    try:
        text = raw.decode()
        document = json.loads(text) if text.strip() else []
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SourceError(f"{label}, line {line}: {_not_utf8(error)}") from None
    except JSONDecodeError as error:
        advice = (
            "; one object per line belongs into a .jsonl file" if error.msg == "Extra data" else "; correct it there"
        )
        raise SourceError(f"{label}, line {error.lineno}, column {error.colno}: {_not_json(error)}{advice}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{label}: {_unreadable(error)}") from None
    key = _find_list(document, split, label)
    if key is None or (key == _UNSPLIT and split != _UNSPLIT):
        return RawSource(path.name, split, label, filter_split(_parse_items(text, key), split, label))
    return RawSource(path.name, key, label, _parse_items(text, key))


def _read_lines(path: Path, label: str) -> Iterator[bytes]:
    with readable(label), path.open("rb") as stream:
        yield from stream


def _parse_lines(lines: Iterable[bytes]) -> Iterator[SourceEntry]:
    for number, raw in enumerate(lines, 1):
        line = (raw.removeprefix(_BOM) if number == 1 else raw).rstrip(b"\r\n")
        if not line.strip():
            continue
        try:
            yield _parse_entry(f"line {number}", line.decode())
        except UnicodeDecodeError as error:
            yield SourceEntry(f"line {number}", problem=_not_utf8(error))


def _find_list(document: object, split: str | None, label: str) -> str | None:
    """The key of the list that holds the tasks; None if the document is the list itself."""
    if isinstance(document, list):
        return None
    members = document.items() if isinstance(document, dict) else ()
    lists: list[str] = [key for key, value in members if isinstance(value, list)]
    if not lists:
        what = "one object, without a list in it" if isinstance(document, dict) else "neither a list nor an object"
        raise SourceError(f'{label} holds {what}; write a list of objects, or {{"tasks": [...]}}')
    if split is not None and split in lists:
        return split
    if _UNSPLIT in lists:
        return _UNSPLIT
    if split is not None:
        raise SourceError(f"{label} has no split {split!r}; it has {join_names(lists)}")
    if len(lists) > 1:
        raise SourceError(f"{label} has several lists, {join_names(lists)}; say which one with --split")
    return lists[0]


def _parse_items(text: str, key: str | None) -> Iterator[SourceEntry]:
    """Parse the items of a list one by one: the list under `key` of a valid document, or the document itself."""
    if not text.strip():
        return
    at = _past_space(text, _find_start(text, key) + 1)
    line, counted, item = 1, 0, 0
    while text[at] != "]":
        _, end = _value_at(text, at)
        line, counted, item = line + text.count("\n", counted, at), at, item + 1
        yield _parse_entry(f"line {line}, item {item}", text[at:end])
        at = _past_comma(text, end)


def _find_start(text: str, key: str | None) -> int:
    """The position of the list's bracket. The last value of a repeated key counts, as for `json.loads`."""
    at = found = _past_space(text, 0)
    if key is None:
        return at
    at = _past_space(text, at + 1)
    while text[at] != "}":
        name, end = _value_at(text, at)
        start = _past_space(text, _past_space(text, end) + 1)
        found = start if name == key else found
        at = _past_comma(text, _value_at(text, start)[1])
    return found


def _past_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _past_comma(text: str, at: int) -> int:
    at = _past_space(text, at)
    return _past_space(text, at + 1) if text[at] == "," else at


def _parse_entry(where: str, text: str) -> SourceEntry:
    try:
        return SourceEntry(where, json.loads(text, object_pairs_hook=_object))
    except JSONDecodeError as error:
        return SourceEntry(f"{where}, column {error.colno}", problem=f"{_not_json(error)}; write one object per line")
    except (ValueError, RecursionError) as error:
        return SourceEntry(where, problem=_unreadable(error))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _KeyTwice(f"the key {twice!r} appears twice in one object; keep one of them")
    return fields


def _not_json(error: JSONDecodeError) -> str:
    reason = error.msg.removesuffix(" starting at")
    return f"not valid JSON ({reason[:1].lower()}{reason[1:]})"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8"


def _unreadable(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply; flatten it"
    if isinstance(error, _KeyTwice):
        return str(error)
    return "a whole number in it has more digits than Python reads; write it as text"
