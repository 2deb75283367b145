"""What of an entry is no JSON, and where in it."""

import math
from collections.abc import Mapping

from rolltape.errors import NotJsonError, TaskError
from rolltape.records.jsonable import encode_with_text_keys, shown


def check_plain(value: object) -> None:
    """Refuse what JSON cannot hold exactly: NaN, text that is no Unicode, bytes, dates, keys that are no text."""
    try:
        repaired = encode_with_text_keys(value, "it")[1]
    except NotJsonError as error:
        raise TaskError(_first_fault(value, "") or str(error)) from None
    if repaired:
        raise TaskError(_first_fault(value, "") or "text in it is no valid Unicode; correct it")


def _first_fault(value: object, path: str) -> str | None:
    match value:
        case Mapping():
            keys = (_key_fault(key, path) for key in value)
            inner = (_first_fault(item, f"{path}.{key}" if path else str(key)) for key, item in value.items())
            return next(filter(None, keys), None) or next(filter(None, inner), None)
        case list() | tuple():
            return next(filter(None, (_first_fault(item, f"{path}[{at}]") for at, item in enumerate(value))), None)
        case float() if not math.isfinite(value):
            return f"{path} is {value!r}, which JSON has no number for; write null, text or a finite number"
        case str() if not _is_unicode(value):
            return f"{path} is {shown(value)}, half of a character; write the whole character"
        case None | str() | int() | float():
            return None
        case _:
            return f"{path} is of type {type(value).__name__}, which is no JSON; make it text, a number or a list"


def _key_fault(key: object, path: str) -> str | None:
    of = f" of {path}" if path else ""
    if not isinstance(key, str):
        return f"the key {key!r}{of} is of type {type(key).__name__}; JSON has only text keys"
    return None if _is_unicode(key) else f"the key {key!r}{of} has half of a character; write the whole character"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
