"""Forks: where and why a turn departs from an earlier turn, with the first difference."""

import enum

import msgspec


class ForkCause(enum.StrEnum):
    """Why a turn does not continue the one before it."""

    SUB_AGENT = "sub_agent"  # another conversation beside the first, or another model in the same one
    COMPACTION = "compaction"  # history replaced by something shorter, and the request for the summary
    RETRY = "retry"  # the same prompt sampled again
    SIBLING = "sibling"  # the same prompt sampled beside a reply to it that had not ended
    ABANDONED_REPLY = "abandoned_reply"  # the agent continued without the reply that it got
    REPLY_WHITESPACE = "reply_whitespace"  # a reply came back with other white space
    THINKING_STRIPPED = "thinking_stripped"  # a reply came back without its thinking, or the template left it out
    REPLY_REWRITTEN = "reply_rewritten"  # a reply came back changed in another way
    RETOKENIZED = "retokenized"  # equal messages, other tokens
    TOOLS_CHANGED = "tools_changed"  # the same conversation under other tools or template options
    HISTORY_EDITED = "history_edited"  # a message that the model did not write was changed, added or removed


class Difference(msgspec.Struct, frozen=True):
    """Two sequences up to and from their first difference, as excerpts."""

    at: int  # characters, or tokens, that agree
    before: str | tuple[int, ...]
    after: str | tuple[int, ...]


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that departs from an earlier one."""

    turn: str
    departs_from: str
    cause: ForkCause
    message_index: int | None  # the first message that differs; None: the messages are equal
    text: Difference | None  # in that message; None: there is none on one of the sides
    tokens: Difference  # in the ids: those of the earlier turn against those of the prompt
