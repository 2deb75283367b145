"""The wire APIs that agents speak. A dialect is one module or package, registered here."""

from collections.abc import Mapping, Sequence

from rolltape.gateway.wire.chat.dialect import CHAT
from rolltape.gateway.wire.completions.dialect import COMPLETIONS
from rolltape.gateway.wire.gemini.dialect import GEMINI
from rolltape.gateway.wire.generate.dialect import GENERATE
from rolltape.gateway.wire.messages.dialect import MESSAGES
from rolltape.gateway.wire.protocol import Dialect
from rolltape.gateway.wire.responses.dialect import RESPONSES

DIALECTS: tuple[Dialect, ...] = (CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES, GEMINI)


def marked(headers: Mapping[str, str], among: Sequence[Dialect] = DIALECTS) -> Dialect:
    """The dialect whose mark a request carries, else the first: for routes that several have, and for unknown ones."""
    return next((one for one in among if one.mark is not None and one.mark in headers), among[0])


def base_urls(public_url: str, key: str) -> dict[str, str]:
    """Where an agent finds its session: by the key in the path, so that any API key does, or by a header."""
    root = f"{public_url}/s/{key}"
    return {f"{dialect.sdk}_base_url": dialect.base_url(root) for dialect in DIALECTS} | {"base_url": public_url}
