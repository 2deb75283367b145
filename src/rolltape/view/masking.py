"""Texts that look like keys, masked before pages are handed on."""

import re
from typing import Any

MASKED = "[masked]"
# What a key begins with, or what names one before it. Made-up words that long and mixed are rare in prose and in code.
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
    ((?:api[_-]?key|secret(?:[_-]?key)?|access[_-]?key(?:[_-]?id)?|auth[_-]?token|access[_-]?token|password|passwd|bearer)
     ["']?\s*(?:[:=]\s*|\s)["']?)
    ([^\s"'<>,;{}()\[\]]{12,})
    """
)


_PART = 8  # characters of a key by which a part of it is known


class Mask:
    """Masks texts, and knows what it masked."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    @property
    def count(self) -> int:
        """How many different keys were masked."""
        return len(self._known)

    def text(self, text: str) -> str:
        """The text with what looks like a key put out."""
        spans = keys_in(text)
        for start, stop in reversed(spans):
            self._known.add(text[start:stop])
            text = f"{text[:start]}{MASKED}{text[stop:]}"
        return text

    def holds_part(self, excerpt: str) -> bool:
        """Whether a stretch that was cut out of a text holds a key, or a part of one that was masked before."""
        return bool(keys_in(excerpt)) or any(
            key[at : at + _PART] in excerpt for key in self._known for at in range(max(len(key) - _PART + 1, 1))
        )

    def all(self, value: Any) -> Any:
        """An answer with all of its texts masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.all(item) for item in value]
        return value


def keys_in(text: str) -> list[tuple[int, int]]:
    """Where a text holds what looks like a key, in order and apart from each other."""
    found = [found.span() for found in _KEYS.finditer(text)]
    # A key has digits and letters; "password: correct" and "token = get_token" are prose and code.
    found += [
        named.span(2)
        for named in _NAMED.finditer(text)
        if re.search(r"\d", named[2]) and re.search(r"[A-Za-z]", named[2])
    ]
    apart: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if apart and start < apart[-1][1]:
            apart[-1] = (apart[-1][0], max(stop, apart[-1][1]))
        else:
            apart.append((start, stop))
    return apart
