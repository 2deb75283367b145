"""`Mask` replaces texts that look like keys, before pages are written for others."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

MASKED = "[masked]"
# Known beginnings of keys. Other words of this length and mixture are rare in prose and in code.
_KEYS = re.compile(
    r"""
    (?:sk|pk|rk)-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_-]{16,}      # OpenAI, Anthropic, Stripe and their like
    | (?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{16,}
    | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,}
    | glpat-[A-Za-z0-9_-]{16,} | xox[abeoprs]-[A-Za-z0-9-]{10,} | hf_[A-Za-z0-9]{20,} | npm_[A-Za-z0-9]{20,}
    | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[A-Za-z0-9_-]{30,} | ya29\.[A-Za-z0-9_-]{20,}
    | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}          # a JSON web token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMED = re.compile(
    r"""(?ix)
    (?:(?:api[_-]?key | secret(?:[_-]?key)? | access[_-]?key(?:[_-]?id)? | private[_-]?key | password | passwd
        | bearer | basic | (?:auth|access|refresh|session|api|bot)[_-]?token) \\*["']? \s* (?:[:=]\s*|\s)
       | token \\*["']? \s* [:=]\s*)
    \\*["']?                                                  # as it is within a text within JSON
    ([^\s"'\\<>,;{}()\[\]]{12,})
    """
)
_IN_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@\"']*:([^\s/@\"']{4,})@")
_PART = 8  # characters by which a part of a key is recognized


class Mask:
    """Masks texts. A key that is recognized in one place is masked everywhere, once it is learned."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._pattern: re.Pattern[str] | None = None
        self.masked: set[str] = set()  # the keys that were replaced so far

    def learn(self, value: Any) -> None:
        """Collect all keys in the texts of a value."""
        for text in _texts(value):
            for start, stop in find_keys(text):
                if text[start:stop] not in self._known:
                    self._known[text[start:stop]] = None
                    self._pattern = None

    def occurs_in(self, value: Any) -> bool:
        """Whether a text of a value contains a key."""
        return any(self.spans(text) for text in _texts(value))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where a text contains keys, or ends with the beginning of one: in order, without overlaps."""
        found = find_keys(text)
        if self._known:
            self._pattern = self._pattern or _any_of(self._known)
            found += [one.span() for one in self._pattern.finditer(text)]
            found += [(start, len(text)) for key in self._known if (start := _find_cut(key, text)) is not None]
        return _merge(found)

    def text(self, text: str) -> str:
        """The text with its keys replaced."""
        for start, stop in reversed(self.spans(text)):
            self.masked.add(text[start:stop])
            text = f"{text[:start]}{MASKED}{text[stop:]}"
        return text

    def holds_part(self, excerpt: str) -> bool:
        """Whether an excerpt of a text contains a key, or a part of one."""
        return bool(find_keys(excerpt)) or any(
            key[at : at + _PART] in excerpt for key in self._known for at in range(max(len(key) - _PART + 1, 1))
        )

    def all(self, value: Any) -> Any:
        """An answer with all of its texts masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key) if isinstance(key, str) else key: self.all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.all(item) for item in value]
        return value


def find_keys(text: str) -> list[tuple[int, int]]:
    """Where a text contains what looks like a key: in order, without overlaps."""
    found = [found.span() for found in _KEYS.finditer(text)]
    # A key has digits and letters; "password: correct" and "token = get_token" are prose and code.
    found += [
        named.span(1)
        for named in _NAMED.finditer(text)
        if re.search(r"\d", named[1]) and re.search(r"[A-Za-z]", named[1])
    ]
    found += [named.span(1) for named in _IN_ADDRESS.finditer(text)] if "://" in text else []
    return _merge(found)


def _any_of(keys: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of these keys, also in text whose characters stand for bytes."""
    spelled = {one for key in keys for one in (key, key.encode("utf-8", "replace").decode("latin-1"))}
    return re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))))


def _find_cut(key: str, text: str) -> int | None:
    """Where a key begins that is cut off by the end of a text, or None."""
    at = text.rfind(key[:_PART], max(len(text) - len(key), 0))
    return at if at >= 0 and key.startswith(text[at:]) else None


def _merge(found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
