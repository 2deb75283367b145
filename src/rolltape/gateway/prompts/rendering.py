"""Turn messages into ids with a renderer: a whole prompt, or the ids that follow unchanged held ids."""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import BadRequest
from rolltape.gateway.prompts.families import DEFAULT, Chat, Renderer, Tools
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.jsonable import parse_strict
from rolltape.records.messages import Role, content_text, reasoning_text
from rolltape.records.turn import Ids, TokenChain, common_prefix

_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


class Prepared(msgspec.Struct, frozen=True):
    """Messages ready for a renderer, and how they were changed."""

    messages: Chat
    places: list[int]  # for each original message, its index among these
    special_text: int  # special tokens spelled out in user and tool text
    folded: int  # system messages that became part of another


class BridgeRefusal(enum.StrEnum):
    """Why a prompt was rendered in full although the conversation continues a held one."""

    NEVER = "never"  # the folder's own template renders, and the end of its turns is unknown
    NO_NEW_MESSAGES = "no_new_messages"
    ASSISTANT_AMONG_NEW = "assistant_among_new"  # a reply that was not sampled here
    NEW_USER_MESSAGE = "new_user_message"  # the model's template then drops earlier thinking
    TEMPLATE_DROPS_THINKING = "template_drops_thinking"  # after every reply
    UNFINISHED_THINKING = "unfinished_thinking"  # the reply stopped inside its thinking
    HELD_CHANGED = "held_changed"  # the renderer's result does not begin with the held ids
    TEXT_ONLY = "text_only"  # the endpoint takes messages, so there are no ids
    OTHER = "other"  # the renderer gives no reason


class PromptIds(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ids of a whole prompt, or the ids after a held prompt and its reply, up to where the next reply begins."""

    ids: Ids
    message_starts: tuple[int, ...] | None  # where messages begin in these ids; None if the folder's template renders
    special_text: int = 0  # special tokens spelled out in user and tool text
    folded: int = 0  # system messages that became part of another message


def render(name: str, renderer: Renderer, ready: Prepared, tools: Tools, *, opens_reply: bool) -> PromptIds:
    """Render a whole prompt. With `opens_reply` it ends with the start of a reply. Raises the renderer's errors."""
    if name == DEFAULT:  # it would render every prefix of the conversation to attribute ids
        ids = renderer.render_ids(ready.messages, tools=tools, add_generation_prompt=opens_reply)
        starts = None
    else:
        given = renderer.render(ready.messages, tools=tools, add_generation_prompt=opens_reply)
        ids, starts = given.token_ids, message_starts(given.message_indices, ready.places)
    return PromptIds(
        ids=np.asarray(ids, dtype=np.int32), message_starts=starts, special_text=ready.special_text, folded=ready.folded
    )


def bridge(
    name: str, renderer: Renderer, prompt_end: Ids, reply: Ids, new: Prepared, tools: Tools
) -> PromptIds | BridgeRefusal:
    """Continue a prompt and its reply. `prompt_end` is the part of the prompt that the renderer reads.

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
    starts: tuple[int, ...]  # in the whole prompt, where the messages after those of the earlier prompt begin


def splice(renderer: Renderer, held: TokenChain, before: Prepared, whole: Prepared, messages: int) -> SplicedIds | None:
    """Render again what follows a held prompt. `before` are its last messages, `whole` also has all that follow.

    `messages` is the number of original messages in `before`. Returns None if the held prompt does not end as `before`
    is rendered.
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
    """Why a renderer refused; the order of the checks is that of the renderers."""
    if _is_unfinished(renderer, end, sampled, tools):
        return BridgeRefusal.UNFINISHED_THINKING
    match renderer.effective_thinking_retention:
        case "template":
            return BridgeRefusal.TEMPLATE_DROPS_THINKING
        case "tool_cycle" if any(message["role"] == "user" for message in new):
            return BridgeRefusal.NEW_USER_MESSAGE
    return BridgeRefusal.OTHER


def _is_unfinished(renderer: Renderer, end: list[int], sampled: list[int], tools: Tools) -> bool:
    """Whether the model ended a reply within its thinking. A reply that was cut off there can be closed."""
    if not sampled or sampled[-1] not in renderer.get_stop_token_ids():
        return False
    try:
        return renderer.parse_response(sampled, tools=tools, prompt_ids=end).reasoning_complete is False
    except (ValueError, RecursionError):  # Python's JSON reader cannot read a call, so thinking had ended
        return False


def message_starts(message_indices: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """The first id of each message; `places` has the index of the rendered message that each one became.

    A message without ids begins where the next one does. If a template reorders messages, a start is never less than
    the one before it.
    """
    owners = np.asarray(message_indices, dtype=np.int64)
    count = max(places, default=-1) + 1
    firsts = np.full(count + 1, len(owners), dtype=np.int64)
    positions = np.flatnonzero(owners >= 0)[::-1]
    firsts[owners[positions]] = positions  # reversed, so that the first position of each owner is written last
    missing = firsts[:count] == len(owners)
    for index in np.flatnonzero(missing)[::-1]:
        firsts[index] = firsts[index + 1]
    rising = np.maximum.accumulate(firsts[:count]) if count else firsts[:0]
    return tuple(int(rising[place]) for place in places)


def prepared(messages: Sequence[dict[str, Any]], tokenizer: FolderTokenizer, *, fold: bool, opening: bool) -> Prepared:
    """Messages with plain text contents, arguments as objects, and `developer` as `system`.

    `fold`: the renderer accepts a system message only at the start. `opening`: these messages begin the conversation.
    """
    plain: Chat = []
    special_text = 0
    for index, message in enumerate(messages):
        one, count = _plain_message(message, tokenizer, f"message {index}")
        plain.append(one)
        special_text += count
    if not fold:
        return Prepared(plain, list(range(len(plain))), special_text, 0)
    merged, places, folded = _folded(plain, opening)
    return Prepared(merged, places, special_text, folded)


def _plain_message(message: dict[str, Any], tokenizer: FolderTokenizer, where: str) -> tuple[dict[str, Any], int]:
    role = message.get("role")
    text = _text(message.get("content"), where)
    match role:
        case Role.SYSTEM | Role.DEVELOPER:
            return {"role": "system", "content": text}, 0
        case Role.USER:
            text, count = tokenizer.guard(text)
            return {"role": "user", "content": text}, count
        case Role.TOOL:
            text, count = tokenizer.guard(text)
            named = {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
            return {"role": "tool", "content": text, **named}, count
        case Role.ASSISTANT:
            plain: dict[str, Any] = {"role": "assistant", "content": text}
            if reasoning := reasoning_text(message):
                plain["reasoning_content"] = reasoning
            if calls := message.get("tool_calls"):
                plain["tool_calls"] = [_plain_call(call, where) for call in calls]
            return plain, 0
    raise BadRequest(f"{where} has the role {role!r}; known are {', '.join(Role)}")


def _text(content: object, where: str) -> str:
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise BadRequest(f"{where} has a part of the type {kind!r}; only text can be rendered")
    elif content is not None and not isinstance(content, str):
        raise BadRequest(f"{where} has a {type(content).__name__} as its content; give a text or text parts")
    return content_text(content)


def _plain_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise BadRequest(f"{where} has a tool call without a function's name")
    plain: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"))},
    }
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _arguments(given: object) -> object:
    """Arguments as an object, since each family has its own spelling; other arguments stay text."""
    if not isinstance(given, str):
        return {} if given is None else given
    if not given.strip():
        return {}
    try:
        value = parse_strict(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _folded(messages: Chat, opening: bool) -> tuple[Chat, list[int], int]:
    """Join leading system messages to one. Later ones become reminders, in a neighboring user message if any."""
    out: Chat = []
    places: list[int] = []
    folded = 0
    after_reminder = False
    for message in messages:
        is_system = message["role"] == "system"
        leading = is_system and opening and (not out or (len(out) == 1 and out[0]["role"] == "system"))
        is_reminder = is_system and not leading
        if is_reminder:
            message = {"role": "user", "content": _REMINDER.format(message["content"])}
        beside_user = message["role"] == "user" and bool(out) and out[-1]["role"] == "user"
        if (leading and out) or (beside_user and (is_reminder or after_reminder)):
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
            folded += is_system
        else:
            out.append(message)
            folded += is_reminder
        places.append(len(out) - 1)
        after_reminder = is_reminder
    return out, places, folded
