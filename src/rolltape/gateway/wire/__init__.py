"""The wire APIs that agents speak. A dialect is one module or package, registered here."""

import itertools
import re
from collections.abc import Mapping, Sequence

from rolltape.gateway.wire.chat.dialect import CHAT
from rolltape.gateway.wire.completions.dialect import COMPLETIONS
from rolltape.gateway.wire.gemini.dialect import GEMINI
from rolltape.gateway.wire.generate.dialect import GENERATE
from rolltape.gateway.wire.messages.dialect import MESSAGES
from rolltape.gateway.wire.protocol import Dialect
from rolltape.gateway.wire.responses.dialect import RESPONSES

DIALECTS: tuple[Dialect, ...] = (CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES, GEMINI)


def meant(headers: Mapping[str, str], query: Mapping[str, str], among: Sequence[Dialect] = DIALECTS) -> Dialect:
    """The dialect whose client sent a request, by what only that client sends, else the first of them."""
    return next((one for one in among if one.is_meant(headers, query)), among[0])


def dialect_of(path: str, headers: Mapping[str, str], query: Mapping[str, str]) -> Dialect:
    """The dialect of a request that has no route: that of its client, or else the one whose paths begin most alike."""
    own = re.sub(r"^/+(s|with)/+[^/]*", "", path)
    begun = {one: max(_shared_words(route.path, own) for route in one.routes) for one in DIALECTS}
    likely = max(DIALECTS, key=begun.__getitem__)
    return meant(headers, query, [likely, *DIALECTS])


def _shared_words(route: str, path: str) -> int:
    """With how many words of a route a path begins."""
    pattern = re.sub(r"\{\w+:([^{}]*)\}", r"(?:\1)", route).split("/")[1:]
    words = itertools.takewhile(lambda pair: re.fullmatch(*pair), zip(pattern, path.split("/")[1:], strict=False))
    return sum(1 for _ in words)


def base_urls(public_url: str, key: str) -> dict[str, str]:
    """Where an agent finds its session: by the key in the path, so that any API key does, or by a header."""
    root = f"{public_url}/s/{key}"
    return {f"{dialect.sdk}_base_url": dialect.base_url(root) for dialect in DIALECTS} | {"base_url": public_url}
