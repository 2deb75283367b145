"""Server-sent events: how all three APIs stream."""

COMMENT = b": keepalive\n\n"  # no event at all; readers pass over it
# Readers that split lines as str.splitlines does (httpx's iter_lines) break an event at these; they stand in JSON
# only within strings, where an escape means the same.
_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def event(data: bytes, name: str | None = None) -> bytes:
    """One event; `data` is JSON (or a word such as `[DONE]`) on a single line."""
    for char, escape in _BREAKS:
        data = data.replace(char, escape)
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)
