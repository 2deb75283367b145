"""Records that keep unknown fields: the keys of a newer minor version are read and written back."""

from typing import Any, TypeVar

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.jsonable import decode_numbers, encode_numbers


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that is stored as a JSON object; `unknown` holds the keys that this version does not know."""

    unknown: dict[str, Any] = {}


T = TypeVar("T", bound=OpenRecord)


def encode_record(record: OpenRecord, where: str) -> bytes:
    """The record as a JSON object, its unknown fields back in their places."""
    fields = msgspec.to_builtins(record)
    unknown = fields.pop("unknown", {})
    return encode_numbers({**fields, **unknown}, where)


def decode_record(raw: bytes, kind: type[T], where: str) -> T:
    """The record that `encode_record` wrote, by this version or a newer minor one."""
    try:
        fields = decode_numbers(raw)
        known = {key: fields.pop(key) for key in list(fields) if key in kind.__struct_fields__ and key != "unknown"}
        return msgspec.convert({**known, "unknown": fields}, kind)
    except (ValueError, AttributeError, TypeError, msgspec.ValidationError) as error:
        raise DamagedTapeError(f"{where}: not a {kind.__name__}: {error}") from None
