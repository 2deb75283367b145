"""The protocol that each dialect (one wire API) implements."""

import enum
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rolltape.gateway.request import ChatRequest
from rolltape.records.turn import Ids
from rolltape.samples.spelling import Spell

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn

NO_HEADERS: Mapping[str, str] = {}


class Answers(enum.Enum):
    """What a route answers."""

    TURN = "a reply of the model"
    COUNT = "how many tokens a prompt has"
    TOKENS = "the ids of a prompt"
    TEXT = "the text of ids"
    MODELS = "the list of models"
    MODEL = "one model"


class Route(NamedTuple):
    """A path of an API, in aiohttp's form, and what it answers. Each also exists below `/s/{key}`.

    Several dialects may have the same route: `Dialect.is_meant` decides which of them a request is for.
    """

    path: str
    answers: Answers


class ReplyStream(Protocol):
    """Writes one reply as server-sent events, or in an array: opening, reasoning, text, closing, in this order.

    Reasoning and text come in pieces, as they become known, and completely before `closing`.
    """

    def opening(self) -> bytes:
        """The first events of a stream, sent before anything is sampled."""

    def reasoning(self, piece: str) -> bytes:
        """More reasoning."""

    def text(self, piece: str) -> bytes:
        """More text; there is no more reasoning after it."""

    def keepalive(self) -> bytes:
        """An event that the API's clients ignore, sent while the engine works."""

    def closing(self) -> bytes:
        """The calls and the end of the reply. All events together contain what `Dialect.whole` returns."""

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        """An error that ends the stream; `code` and `final` as in `Dialect.error`."""


class Dialect(Protocol):
    """One wire API: its routes, keys and base URL, and the form of its requests, replies, events and errors."""

    name: str  # as turns record it: "chat"
    sdk: str  # the SDK whose clients use it: "openai"
    variables: tuple[str, str, str]  # environment variables of its clients for base URL, key and model
    routes: tuple[Route, ...]

    def is_meant(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        """Whether a request has what only its clients send, for a route that several dialects share."""

    def find_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The key in a request, or None."""

    def base_url(self, root: str) -> str:
        """The base URL for its clients, if its routes are below `root`."""

    def read(
        self, body: bytes, headers: Mapping[str, str] = NO_HEADERS, path: Mapping[str, str] = NO_HEADERS
    ) -> ChatRequest:
        """Parse a request; raises BadRequest, naming the field, if it is malformed or cannot be honored.

        `path` has the variable parts of the route, and the parameters of the query.
        """

    def whole(self, turn: "GatewayTurn") -> bytes:
        """The body of a complete reply that is not streamed."""

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> ReplyStream:
        """The writer of a streamed reply. `request` may be a retry, and so differ from the turn's own request."""

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        """The body of an error; `code` is OpenAI's error code. `final`: a retry cannot succeed."""


class CountsTokens(Protocol):
    """What a dialect with a route for COUNT implements."""

    def read_counting(self, body: bytes, path: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        """A request for the number of tokens of its prompt."""

    def counted(self, prompt_tokens: int) -> bytes:
        """The answer to it."""


class Tokenizes(Protocol):
    """What a dialect with routes for TOKENS and TEXT implements."""

    def read_tokenizing(self, body: bytes) -> ChatRequest:
        """A request for the ids of its prompt."""

    def tokenized(self, request: ChatRequest, ids: Ids, spell: Spell, context: int | None) -> bytes:
        """The answer to it; `context` is the limit of tokens of a prompt and its reply."""

    def read_detokenizing(self, body: bytes) -> ChatRequest:
        """A request for the text of its prompt, which has ids."""

    def detokenized(self, text: str) -> bytes:
        """The answer to it."""


class ListsModels(Protocol):
    """What a dialect with routes for MODELS and MODEL implements."""

    def models(self, names: Collection[str]) -> bytes:
        """The list of models."""

    def model(self, name: str) -> bytes:
        """One model."""
