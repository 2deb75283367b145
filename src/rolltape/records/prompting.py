"""Why a prompt does not extend ids that its session holds, and how clients change replies that they send back."""

import enum


class PrefixMiss(enum.StrEnum):
    """Why no turn of the session is a prefix of a request's history."""

    FIRST_TURN = "first_turn"  # nothing was sampled in this session yet
    NO_REPLY = "no_reply"  # it holds no reply of the model: another conversation, or one that begins anew
    TOOLS_CHANGED = "tools_changed"  # under these tools and template options nothing was sampled
    REPLY_CHANGED = "reply_changed"  # the assistant message after the held part is not a reply as it was given
    HISTORY_CHANGED = "history_changed"  # a message before a reply is not what it was


class BridgeRefusal(enum.StrEnum):
    """Why a prompt was rendered whole though the conversation continues a held one."""

    NEVER = "never"  # the folder's own template renders, and nobody knows how its turns close
    NO_NEW_MESSAGES = "no_new_messages"
    ASSISTANT_AMONG_NEW = "assistant_among_new"  # a reply that was not sampled here
    NEW_USER_MESSAGE = "new_user_message"  # at which the model's template drops earlier thinking
    TEMPLATE_DROPS_THINKING = "template_drops_thinking"  # after every reply
    UNFINISHED_THINKING = "unfinished_thinking"  # the reply stopped inside its thinking
    HELD_CHANGED = "held_changed"  # what came back does not begin with the held ids
    OTHER = "other"  # the renderer does not say why


class EchoRule(enum.StrEnum):
    """How an echo departs from the reply that it stands for."""

    FIELDS_ADDED = "fields_added"  # such as no prompt has a place for
    REASONING_DROPPED = "reasoning_dropped"
    TEXT_APART = "text_apart"  # the calls alone; the text follows their results as a message of its own
    LATER_CALLS_DROPPED = "later_calls_dropped"
    ARGUMENTS_NORMALIZED = "arguments_normalized"  # they say what the model wrote, in the client's own way
    CALL_INVALID = "call_invalid"  # another call, which says that this one could not be made
