"""Extend held ids by new messages: only these are rendered, and held ids stay as they are."""

import enum
from collections.abc import Sequence

import msgspec
import numpy as np

from rolltape.gateway.prompts.families import DEFAULT, Chat, Renderer, Tools
from rolltape.gateway.prompts.messages import Prepared
from rolltape.records.turn import Ids, TokenChain, common_prefix


class BridgeRefusal(enum.StrEnum):
    """Why a prompt was rendered whole though the conversation continues a held one."""

    NEVER = "never"  # the folder's own template renders, and nobody knows how its turns close
    NO_NEW_MESSAGES = "no_new_messages"
    ASSISTANT_AMONG_NEW = "assistant_among_new"  # a reply that was not sampled here
    NEW_USER_MESSAGE = "new_user_message"  # at which the model's template drops earlier thinking
    TEMPLATE_DROPS_THINKING = "template_drops_thinking"  # after every reply
    UNFINISHED_THINKING = "unfinished_thinking"  # the reply stopped inside its thinking
    HELD_CHANGED = "held_changed"  # what came back does not begin with the held ids
    TEXT_ONLY = "text_only"  # the endpoint takes messages, and there are no ids
    OTHER = "other"  # the renderer does not say why


class PromptIds(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ids of a whole prompt, or those that follow a held prompt and its reply, up to where a reply begins."""

    ids: Ids
    message_starts: tuple[int, ...] | None  # of the messages, in these ids; None: the folder's template does not say
    special_text: int = 0  # special tokens spelled out in user and tool text
    folded: int = 0  # system messages that became part of another message


def bridge(
    name: str, renderer: Renderer, prompt_end: Ids, reply: Ids, new: Prepared, tools: Tools
) -> PromptIds | BridgeRefusal:
    """Continue a prompt, of which `prompt_end` is as much as the renderer reads, and its reply.

    A refusal means that the held ids cannot be continued: render the whole conversation.
    """
    if early := _refused_unasked(name, new.messages):
        return early
    end, sampled = prompt_end.tolist(), reply.tolist()
    try:
        given = renderer.bridge_to_next_turn(end, sampled, new.messages, tools=tools)
    except Exception:  # noqa: BLE001 - it refuses with errors of many kinds; rendering the whole tells what is wrong
        return BridgeRefusal.OTHER
    if given is None:
        return _why(renderer, end, sampled, new.messages, tools)
    held = len(end) + len(sampled)
    if given.token_ids[:held] != end + sampled:
        return BridgeRefusal.HELD_CHANGED
    ids = np.asarray(given.token_ids[held:], dtype=np.int32)
    starts = message_starts(given.message_indices[held:], new.places)
    return PromptIds(ids=ids, message_starts=starts, special_text=new.special_text, folded=new.folded)


class SplicedIds(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt that keeps the first ids of an earlier one."""

    kept: int  # ids of the earlier prompt
    new: PromptIds  # what follows them
    starts: tuple[int, ...]  # of the messages after those of the earlier prompt, in the whole


def splice(renderer: Renderer, held: TokenChain, before: Prepared, whole: Prepared, messages: int) -> SplicedIds | None:
    """Render what follows a held prompt anew: `whole` is `before`, the last of its messages, and all that follows.

    `messages` are those of `before` as they came. None: the held prompt does not end as these are rendered.
    """
    try:
        known = renderer.render(before.messages, tools=None, add_generation_prompt=True)
        again = renderer.render(whole.messages, tools=None, add_generation_prompt=True)
    except Exception:  # noqa: BLE001 - it refuses with errors of many kinds; rendering the whole tells what is wrong
        return None
    first = message_starts(known.message_indices, before.places)[0]
    end = np.asarray(known.token_ids, dtype=np.int32)
    if not np.array_equal(held.slice(len(held) - len(end) + first), end[first:]):
        return None
    ids = np.asarray(again.token_ids, dtype=np.int32)
    shared = common_prefix(end, ids)
    kept = len(held) - len(end) + shared
    starts = message_starts(again.message_indices, whole.places)[messages:]
    new = PromptIds(ids=ids[shared:], message_starts=None, special_text=whole.special_text, folded=whole.folded)
    return SplicedIds(kept=kept, new=new, starts=tuple(start + kept - shared for start in starts))


def _refused_unasked(name: str, new: Chat) -> BridgeRefusal | None:
    if name == DEFAULT:
        return BridgeRefusal.NEVER
    if not new:
        return BridgeRefusal.NO_NEW_MESSAGES
    return BridgeRefusal.ASSISTANT_AMONG_NEW if any(m["role"] == "assistant" for m in new) else None


def _why(renderer: Renderer, end: list[int], sampled: list[int], new: Chat, tools: Tools) -> BridgeRefusal:
    """Why a renderer refused, in the order in which renderers look."""
    if _is_unfinished(renderer, end, sampled, tools):
        return BridgeRefusal.UNFINISHED_THINKING
    match renderer.effective_thinking_retention:
        case "template":
            return BridgeRefusal.TEMPLATE_DROPS_THINKING
        case "tool_cycle" if any(message["role"] == "user" for message in new):
            return BridgeRefusal.NEW_USER_MESSAGE
    return BridgeRefusal.OTHER


def _is_unfinished(renderer: Renderer, end: list[int], sampled: list[int], tools: Tools) -> bool:
    """Whether a reply that the model ended is still thinking. One that was cut off there can be closed."""
    if not sampled or sampled[-1] not in renderer.get_stop_token_ids():
        return False
    try:
        return renderer.parse_response(sampled, tools=tools, prompt_ids=end).reasoning_complete is False
    except (ValueError, RecursionError):  # a call beyond Python's JSON reader, so thinking was over
        return False


def message_starts(message_indices: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """The first id of each message; `places` says which of the rendered messages each one became.

    A message that left no ids begins where the next one does. Where a template reorders messages, a start is
    never less than the one before it.
    """
    owners = np.asarray(message_indices, dtype=np.int64)
    count = max(places, default=-1) + 1
    firsts = np.full(count + 1, len(owners), dtype=np.int64)
    positions = np.flatnonzero(owners >= 0)[::-1]
    firsts[owners[positions]] = positions  # of equal owners the last one written counts: the first position
    missing = firsts[:count] == len(owners)
    for index in np.flatnonzero(missing)[::-1]:
        firsts[index] = firsts[index + 1]
    rising = np.maximum.accumulate(firsts[:count]) if count else firsts[:0]
    return tuple(int(rising[place]) for place in places)
