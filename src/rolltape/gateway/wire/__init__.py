"""The wire APIs that agents use. A dialect is one module or package, registered here."""

import itertools
import re
from collections.abc import Mapping, Sequence

from rolltape.gateway.wire.chat.dialect import CHAT
from rolltape.gateway.wire.completions import COMPLETIONS
from rolltape.gateway.wire.gemini.dialect import GEMINI
from rolltape.gateway.wire.generate import GENERATE
from rolltape.gateway.wire.messages.dialect import MESSAGES
from rolltape.gateway.wire.protocol import Answers, Dialect
from rolltape.gateway.wire.responses.dialect import RESPONSES

_PREFIX = r"^/+(s|with)/+[^/]*"  # before a route: a session's key, or its name

DIALECTS: tuple[Dialect, ...] = (CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES, GEMINI)


def meant(headers: Mapping[str, str], query: Mapping[str, str], among: Sequence[Dialect]) -> Dialect:
    """The dialect whose client sent a request, recognized by what only its clients send; else the first."""
    return next((one for one in among if one.is_meant(headers, query)), among[0])


def dialect_of(path: str, headers: Mapping[str, str], query: Mapping[str, str]) -> Dialect:
    """The dialect in which a request without a route is refused: its client's, else that of the most similar path."""
    own = re.sub(_PREFIX, "", path)
    begun = {one: max(_shared_words(route.path, own) for route in one.routes) for one in DIALECTS}
    likely = max(DIALECTS, key=begun.__getitem__)
    return meant(headers, query, [likely, *DIALECTS])


def likely_path(path: str) -> str | None:
    """The route that is meant by a path whose base URL has its version too often, or not at all; None: not known."""
    own = re.sub(r"/+", "/", re.sub(_PREFIX, "", path)).rstrip("/")
    bare = re.sub(r"^(/v1(beta)?)+(?=/)", "", own)
    routes = [route for dialect in DIALECTS for route in dialect.routes]
    known = {route.path.removeprefix("/v1"): route.path for route in routes}
    if bare in known:
        return known[bare]
    named = f"/v1beta{bare}"  # in the Gemini API a path has the model's name and a method
    called = [route.path for route in routes if route.answers in (Answers.TURN, Answers.COUNT)]
    return named if any(re.fullmatch(_pattern(path), named) for path in called) else None


def describe_routes() -> str:
    """Where each API asks for a reply of the model."""
    first = (next(route.path for route in one.routes if route.answers is Answers.TURN) for one in DIALECTS)
    return ", ".join(re.sub(r"\{(\w+):[^{}]*\}", r"{\1}", path) for path in first)


def _pattern(route: str) -> str:
    """A route's path as a regular expression."""
    return re.sub(r"\{\w+:([^{}]*)\}", r"(?:\1)", route)


def _shared_words(route: str, path: str) -> int:
    """How many leading words of a path match a route."""
    pattern = _pattern(route).split("/")[1:]
    words = itertools.takewhile(lambda pair: re.fullmatch(*pair), zip(pattern, path.split("/")[1:], strict=False))
    return sum(1 for _ in words)


def base_urls(public_url: str, key: str) -> dict[str, str]:
    """The base URL of a session for each SDK. The session's key is in the path, so clients may send any API key."""
    return {dialect.sdk: dialect.base_url(f"{public_url}/s/{key}") for dialect in DIALECTS}


def named_urls(urls: Mapping[str, str]) -> dict[str, str]:
    """Base URLs under their names in JSON: `openai_base_url` for that of "openai"."""
    return {f"{sdk}_base_url": url for sdk, url in urls.items()}


def client_variables(urls: Mapping[str, str], key: str, model: str) -> dict[str, str]:
    """The environment variables in which clients of each SDK look for the base URL, the API key and the model."""
    given = (zip(one.variables, (urls[one.sdk], key, model), strict=True) for one in DIALECTS)
    return dict(itertools.chain.from_iterable(given))


class FoundByUrl:
    """Has a base URL for each SDK, and properties for the best known ones."""

    __slots__ = ()

    base_urls: Mapping[str, str]

    @property
    def openai_base_url(self) -> str:
        """For clients of OpenAI's APIs. It contains the session's key, so clients may send any API key."""
        return self.base_urls["openai"]

    @property
    def anthropic_base_url(self) -> str:
        """For clients of Anthropic's API. It contains the key too."""
        return self.base_urls["anthropic"]

    @property
    def google_base_url(self) -> str:
        """For clients of the Gemini API. It contains the key too."""
        return self.base_urls["google"]
