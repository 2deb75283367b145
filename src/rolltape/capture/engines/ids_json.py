"""Prompt ids as JSON: of a prompt that extends its session's last one only what is new is written anew."""

import msgspec
import numpy as np

from rolltape.records.tokens import Ids

_MOST_BYTES = 64 * 2**20


class IdsAsJson:
    """The latest prompts of sessions as text. A hundred thousand ids take milliseconds to write, and none to copy."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._latest: dict[str, tuple[Ids, bytes]] = {}
        self._bytes = 0
        self._most_bytes = most_bytes

    def encoded(self, session: str, ids: Ids) -> msgspec.Raw:
        """The ids as a JSON list."""
        known, text = self._latest.pop(session, (ids[:0], b""))
        self._bytes -= len(text)
        if len(known) > len(ids) or not np.array_equal(known, ids[: len(known)]):
            known, text = ids[:0], b""
        new = msgspec.json.encode(ids[len(known) :].tolist())[1:-1]
        text = b",".join(part for part in (text, new) if part)
        self._latest[session] = (ids, text)
        self._bytes += len(text)
        while self._bytes > self._most_bytes:
            _, oldest = self._latest.pop(next(iter(self._latest)))
            self._bytes -= len(oldest)
        return msgspec.Raw(b"[" + text + b"]")
