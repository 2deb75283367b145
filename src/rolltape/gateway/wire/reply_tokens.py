"""Token ids, logprobs and usage of a reply, in the form of vLLM's OpenAI-compatible APIs.

All values are those on the tape: the ids sent to the engine and the ids that it sampled, with the stop id.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn


class ReplyToken(NamedTuple):
    """A sampled token with its logprob, or another likely token at its place."""

    text: str
    spelling: bytes | None  # its bytes, which may end inside a character; None if unknown
    id: int
    logprob: float | None  # None if the engine returned none
    top: "tuple[ReplyToken, ...]" = ()  # the most likely tokens at its place, best first, if requested

    @property
    def as_chat(self) -> dict[str, Any]:
        """In the form of Chat Completions."""
        return {"token": self.text, "logprob": self.logprob, "bytes": self.spelling and list(self.spelling)}


def prompt_ids(turn: "GatewayTurn") -> dict[str, Any]:
    """The field for the prompt's ids, if requested."""
    return {"prompt_token_ids": turn.prompt_ids.tolist()} if turn.token_details.ids else {}


def reply_ids(turn: "GatewayTurn") -> dict[str, Any]:
    """The field for the reply's ids, if requested."""
    return {"token_ids": turn.sampled[0].tolist()} if turn.token_details.ids else {}


def reply_logprobs(turn: "GatewayTurn") -> list[ReplyToken] | None:
    """The sampled tokens with their logprobs, or None if not requested, or if the engine returned none."""
    if not turn.token_details.logprobs:
        return None
    ids, logprobs = turn.sampled
    if logprobs is None:
        return None
    as_ids, spell = turn.token_details.tokens_as_ids, turn.spell

    def described(token: int, logprob: float, top: tuple[ReplyToken, ...] = ()) -> ReplyToken:
        spelling = spell(token) or None  # a hosted endpoint may return ids, but there is no tokenizer
        text = f"token_id:{token}" if as_ids or spelling is None else spelling.decode("utf-8", "replace")
        return ReplyToken(text, spelling, token, None if math.isnan(logprob) else logprob, top)

    tops = [tuple(described(*one) for one in top) for top in turn.most_likely]
    return [described(*one) for one in zip(ids.tolist(), logprobs.tolist(), tops, strict=True)]


def token_logprobs(turn: "GatewayTurn") -> list[dict[str, Any]] | None:
    """The same in the form of OpenAI's chat APIs."""
    tokens = reply_logprobs(turn)
    if tokens is None:
        return None
    return [one.as_chat | {"top_logprobs": [top.as_chat for top in one.top]} for one in tokens]


def usage(turn: "GatewayTurn") -> dict[str, Any]:
    """The tokens of a prompt and of all replies to it."""
    sampled = sum(one.sampled_tokens for one in turn.choices)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": turn.held_tokens},
    }
