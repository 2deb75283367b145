"""Build the ids of a prompt: extend held ids by the new messages, or render the whole conversation."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from rolltape.errors import BadRequest
from rolltape.gateway.prompts import BridgeRefusal, ChatPrompts, PromptIds
from rolltape.gateway.request import GivenPrompt
from rolltape.gateway.turn.echo import count_shown
from rolltape.gateway.turn.history import History, HistoryMatch, PrefixMiss
from rolltape.records.messages import Message, Role, content_text
from rolltape.records.turn import NO_IDS, Ids, TokenChain, Turn

if TYPE_CHECKING:
    from rolltape.gateway.sessions import SessionWork

# Rendering less than this takes about a millisecond, less than a thread costs. More runs off the event loop.
_INLINE_CHARS = 4096
_INLINE_IDS = 1000  # splitting fewer takes about as long
_REASONING = b'"reasoning'  # in a message's JSON: it may have thinking; a false match costs only time


class Prompt(NamedTuple):
    """The ids that the engine continues, and how they were made."""

    ids: Ids
    after: Turn | None  # the turn whose ids it extends; None: rendered, in full or from a reply on
    new: PromptIds  # the ids after the held ones; without `after`, its starts are those of all messages
    prefix_miss: str | None  # why it does not extend held ids; None if it does
    base: Turn | None = None  # if spliced, the turn with the start of whose prompt it begins
    given: bool = False  # the client sent a text or ids
    part: tuple[Turn, int] | None = None  # a turn and how many ids of its reply the prompt has, if it has only a part

    @property
    def held_tokens(self) -> int:
        return len(self.ids) - len(self.new.ids)

    @property
    def covered_tokens(self) -> int:
        """How many tokens have their routed experts on the tape already; the engine need not send those again."""
        experts = None if self.after is None else self.after.side.get("routed_experts")
        return 0 if experts is None else experts.stop

    @property
    def how(self) -> str:
        """How it was made: `bridged`, `rendered` in full, `spliced` with the start of an earlier prompt, or `given`."""
        if self.given:
            return "given"
        return "bridged" if self.after is not None else "spliced" if self.base is not None else "rendered"


async def build_prompt(
    place: HistoryMatch,
    history: History,
    prompts: ChatPrompts,
    tools: list[dict[str, Any]] | None,
    thinking: bool | None,
    work: "SessionWork",
) -> Prompt:
    """The prompt for a history; raises BadRequest for messages that cannot be rendered.

    Held ids are extended by the new messages. If the template drops thinking of held replies, the prompt is rendered
    again from the first such reply on. If neither works, it is rendered in full.
    """
    miss: str | None = place.prefix_miss
    held = None if place.turn is None else await _held(place, place.turn, prompts, thinking, work)
    if held is not None:
        extended = await _extended(place, held, history, prompts, tools, thinking, work)
        if isinstance(extended, Prompt):
            return extended
        miss = extended
    elif place.turn is not None:
        miss = PrefixMiss.REPLY_CHANGED
    render = partial(_render, prompts, place.messages, tools, thinking)
    rendered = await work.run(render, inline=_is_short(place.messages))
    return Prompt(rendered.ids, None, rendered, miss, part=held.part if held else None)


async def _extended(
    place: HistoryMatch,
    held: "_Held",
    history: History,
    prompts: ChatPrompts,
    tools: list[dict[str, Any]] | None,
    thinking: bool | None,
    work: "SessionWork",
) -> Prompt | BridgeRefusal:
    """A prompt that begins with held ids, or the reason why there is none."""
    bridged = await _bridged(place, held, prompts, tools, thinking, work)
    if not isinstance(bridged, BridgeRefusal):
        if place.cut_from is not None:
            return _after_part(history, place.cut_from, held, bridged)
        return Prompt(np.concatenate([*history.held_ids(held.turn), bridged.ids]), held.turn, bridged, None)
    spliced = None
    if bridged is BridgeRefusal.NEW_USER_MESSAGE:
        spliced = await _spliced(place, history, prompts, thinking, work)
    return bridged if spliced is None else spliced._replace(part=held.part)


async def take_prompt(given: GivenPrompt, history: History, prompts: ChatPrompts, work: "SessionWork") -> Prompt:
    """The prompt that a client sent as text or ids; raises BadRequest.

    It extends the turn whose ids are its longest prefix.
    """

    def take() -> Prompt:
        ids = given_ids(given, prompts)
        held = history.longest_held(ids)
        new = PromptIds(ids=ids if held is None else ids[len(held.tokens) :], message_starts=())
        return Prompt(ids, held, new, None, given=True)

    return await work.run(take, inline=len(given.text or given.ids or ()) < _INLINE_CHARS)


def given_ids(given: GivenPrompt, prompts: ChatPrompts) -> Ids:
    """The ids of a prompt that a client sent as text or ids; raises BadRequest for an id outside the vocabulary."""
    most = prompts.vocabulary
    if most is None:
        raise BadRequest("the engine accepts only messages; send them to /v1/chat/completions")
    if given.ids is None:
        ids = prompts.encode(given.text or "", add_special_tokens=given.add_special_tokens)
    else:
        wrong = next((at for at, one in enumerate(given.ids) if not 0 <= one < most), None)
        if wrong is not None:
            known = f"give ids from 0 to {most - 1}"
            raise BadRequest(f"the prompt's id {wrong} is {given.ids[wrong]}, which the model does not have; {known}")
        ids = np.array(given.ids, dtype=np.int32)
    if not len(ids):
        raise BadRequest("the prompt has no tokens; give at least one")
    return ids


def _render(
    prompts: ChatPrompts, messages: Sequence[Message], tools: list[dict[str, Any]] | None, thinking: bool | None
) -> PromptIds:
    return prompts.render(_dicts(messages), tools, thinking)


class _Held(NamedTuple):
    """The ids of an earlier prompt, and of the part of its reply that came back."""

    turn: Turn  # in which the reply ended
    prompt: TokenChain
    reply: Ids
    part: tuple[Turn, int] | None = None  # if a part of it came back, the turn and how many ids of it


async def _held(
    place: HistoryMatch, turn: Turn, prompts: ChatPrompts, thinking: bool | None, work: "SessionWork"
) -> _Held | None:
    """The ids that a history extends, or None if it has a part of a reply that does not end where an id ends."""
    if place.cut_from is None:
        return _Held(turn, turn.prompt_tokens, turn.sampled_ids)
    prompt, stops = place.cut_from.prompt_tokens, turn.facts.sampling.get("stop") or ()
    splitter = prompts.splitter(prompt, thinking, stops)
    if splitter is None:
        return None
    sampled = turn.tokens.slice(len(prompt))
    echo = place.messages[len(place.messages) - place.new - 1]
    count = await work.run(count_shown, echo, sampled, splitter, inline=len(sampled) < _INLINE_IDS)
    if count is None:
        return None
    own = count - (len(sampled) - len(turn.sampled_ids))  # the ids before these are of an earlier turn
    return _Held(turn, prompt, sampled[:count], (turn, own) if own > 0 else None)


def _after_part(history: History, cut_from: Turn, held: _Held, bridged: PromptIds) -> Prompt:
    """The prompt that continues a part of a reply. `cut_from` is the turn in which that reply began."""
    ids = np.concatenate([held.prompt.to_numpy(), held.reply, bridged.ids])
    starts, own, begun = history.message_starts(cut_from), bridged.message_starts, len(held.prompt)
    known = None
    if starts is not None and own is not None:
        known = (*starts, begun, *(begun + len(held.reply) + start for start in own))
    new = msgspec.structs.replace(bridged, message_starts=known)
    return Prompt(ids, None, new, None, cut_from, part=held.part)


async def _bridged(
    place: HistoryMatch,
    held: _Held,
    prompts: ChatPrompts,
    tools: list[dict[str, Any]] | None,
    thinking: bool | None,
    work: "SessionWork",
) -> PromptIds | BridgeRefusal:
    given = place.messages[len(place.messages) - place.new :]
    new = _dicts(given)
    replies: list[int] = []
    if prompts.drops_thinking(new, thinking):
        replies = _replies_since_user(place)
        given = place.messages[replies[0] :]

    def bridge() -> PromptIds | BridgeRefusal:
        nothing = bool(replies) and not any(_has_thinking(place, at, prompts) for at in reversed(replies))
        return prompts.bridge(held.prompt, held.reply, new, tools, thinking, nothing_to_drop=nothing)

    return await work.run(bridge, inline=_is_short(given))


async def _spliced(
    place: HistoryMatch, history: History, prompts: ChatPrompts, thinking: bool | None, work: "SessionWork"
) -> Prompt | None:
    """The prompt of the first reply since the last user message, followed by newly rendered messages."""
    first = _replies_since_user(place)[0]
    turn = place.replies.get(first)
    if turn is None:
        return None
    messages = place.messages
    begin = next((at + 1 for at in range(first - 1, -1, -1) if messages[at].role is Role.ASSISTANT), 0)
    while begin < first and messages[begin].role in (Role.SYSTEM, Role.DEVELOPER):
        begin += 1  # templates render these together with the tools
    if begin == first:
        return None
    before, after = _dicts(messages[begin:first]), _dicts(messages[first:])
    short = _is_short(messages[begin:])
    made = await work.run(prompts.splice, turn.prompt_tokens, before, after, thinking, inline=short)
    if made is None:
        return None
    starts = history.message_starts(turn)
    ids = np.concatenate([turn.prompt_tokens.slice(0, made.kept), made.new.ids])
    known = None if starts is None or len(starts) != first else (*starts, *made.starts)
    new = msgspec.structs.replace(made.new, message_starts=known)
    return Prompt(ids, None, new, BridgeRefusal.NEW_USER_MESSAGE, turn)


def _replies_since_user(place: HistoryMatch) -> list[int]:
    """The indexes of the replies after the last user message, without those in the new messages."""
    found: list[int] = []
    for at in range(len(place.messages) - place.new - 1, -1, -1):
        message = place.messages[at]
        if message.role is Role.USER and not _is_tool_response(message):
            break
        if message.role is Role.ASSISTANT:
            found.append(at)
    return found[::-1]


def _is_tool_response(message: Message) -> bool:
    """Whether a user message holds a tool's result, as some agents write it. Qwen's templates keep thinking there."""
    text = content_text(message.to_dict().get("content")).strip()
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")


def _has_thinking(place: HistoryMatch, at: int, prompts: ChatPrompts) -> bool:
    turn = place.replies.get(at)
    return _REASONING in place.messages[at].raw or (turn is not None and prompts.has_thinking(turn.sampled_ids))


def resume_prompt(interrupted: Turn) -> Prompt:
    """The prompt for a retry of an interrupted turn: its prompt and the ids sampled so far."""
    nothing = PromptIds(ids=NO_IDS, message_starts=())
    return Prompt(interrupted.tokens.to_numpy(), interrupted, nothing, None)


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]


def _is_short(messages: Sequence[Message]) -> bool:
    return sum(len(message.raw) for message in messages) < _INLINE_CHARS
