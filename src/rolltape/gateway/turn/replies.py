"""Build the reply message from what engines returned, and the fields that the tape records of a turn."""

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from rolltape.gateway.prompts import ChatPrompts, Parsed
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.turn.constraints import can_cut_calls, is_met
from rolltape.gateway.turn.endpoint_replies import match_ids
from rolltape.gateway.turn.generate import PartialGeneration
from rolltape.records.jsonable import encode_json
from rolltape.records.messages import content_text
from rolltape.records.turn import Delivery, Finish, Ids, Segment, TokenChain, TurnFlag

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn


class ReplyOutcome(NamedTuple):
    """How a reply ended, and its message."""

    finish: Finish
    message: dict[str, Any] | None  # in chat form, as delivered; None if there is no reply
    stop_string: str | None = None
    reasoning_tokens: int = 0
    malformed: bool = False  # a tool call could not be parsed, and is delivered as text
    denied: tuple[str, ...] = ()  # forbidden tools that were called; those calls are delivered as text too
    kept_ids: int | None = None  # if the reply is cut after its first call; None: all ids
    unmet: bool = False  # the reply does not meet the request's demands
    call_ids: Mapping[str, str] = MappingProxyType({})  # a hosted endpoint's ids of the calls, by the minted ones
    # The partial message of an aborted reply that was being streamed. Only the tape gets it, so that a later request
    # with a part of it can be matched.
    seen_coming: dict[str, Any] | None = None


def decide_finish(parts: Sequence[PartialGeneration], max_tokens: int) -> Finish:
    """How a reply ended: as its last part did, or by length if that was aborted at the limit of tokens."""
    if not parts:
        return Finish.LENGTH if max_tokens <= 0 else Finish.ABORT
    last = parts[-1].given.finish
    full = sum(len(part.given.ids) for part in parts) >= max_tokens
    return Finish.LENGTH if last is Finish.ABORT and full else last


def parse_outcome(turn: "GatewayTurn", finish: Finish, prompts: ChatPrompts) -> ReplyOutcome:
    """Parse a turn's reply. Only an aborted or failed reply has no message."""
    parts, before, request = turn.reply.parts, turn.sampled_before, turn.request
    is_seen = finish is Finish.ABORT and any(turn.shown) and request.prompt is None
    if finish in (Finish.ABORT, Finish.ERROR) and not is_seen:
        return ReplyOutcome(finish, None)
    if not parts and not len(before):
        return ReplyOutcome(finish, {"role": "assistant", "content": ""})
    last = parts[-1].given if parts else None
    stop_string = last.stop_string if last else None
    if last is not None and last.message is not None:
        return _hosted_outcome(turn, last.message, finish, stop_string)
    ids = np.concatenate([before, turn.reply.ids])
    if request.prompt is not None:
        text = prompts.decode_reply(ids, request.stop_ids, stop_string)
        return ReplyOutcome(finish, {"role": "assistant", "content": text}, stop_string)
    prompt = TokenChain(turn.prompt.ids[: turn.prompt_tokens])
    parse = partial(prompts.parse, prompt, ids, request.all_tools, turn.thinking)
    parse = partial(parse, stop_ids=request.stop_ids, stop_string=stop_string)
    parsed = parse()
    if is_seen:
        return ReplyOutcome(finish, None, seen_coming=_with_minted_ids(turn, parsed, prompts))
    denied = _denied(turn, [call.name for call in parsed.calls])
    if denied:
        parsed = parse(calls_as_text=True)
    kept_ids = _first_call_alone(request, parsed, prompts, len(before))
    if kept_ids is not None:
        parsed, finish = msgspec.structs.replace(parsed, calls=parsed.calls[:1]), Finish.STOP_STRING
    message = _with_minted_ids(turn, parsed, prompts)
    return ReplyOutcome(
        finish=finish,
        message=message,
        stop_string=stop_string,
        reasoning_tokens=parsed.reasoning_tokens,
        malformed=parsed.malformed and not denied,
        denied=denied,
        kept_ids=kept_ids,
        unmet=_is_unmet(request, finish, message),
    )


def _with_minted_ids(turn: "GatewayTurn", parsed: Parsed, prompts: ChatPrompts) -> dict[str, Any]:
    call_ids = [call.native_id or f"call_{secrets.token_hex(12)}" for call in parsed.calls]
    message = chat_message(parsed, call_ids)
    if not prompts.tool_ids_matter:  # if they do, comparisons include ids, so only sampled ids may be there
        message["id"] = turn.id
    return message


def chat_message(parsed: Parsed, call_ids: Sequence[str]) -> dict[str, Any]:
    """A reply in chat form, its calls with these ids."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(call_ids, parsed.calls, strict=True)
        ]
    return message


def _hosted_outcome(
    turn: "GatewayTurn", message: dict[str, Any], finish: Finish, stop_string: str | None
) -> ReplyOutcome:
    """The outcome of a reply that an engine returned as a message; its calls get new unique ids."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    denied = _denied(turn, [call["function"]["name"] for call in calls])
    if denied:
        shown = [encode_json(call["function"], "a call")[0].decode() for call in calls]
        text = "\n".join(part for part in (content_text(message.get("content")), *shown) if part)
        message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": text}
    minted = [] if denied else [f"call_{secrets.token_hex(12)}" for _ in calls]
    if minted:
        message = {**message, "tool_calls": [{**call, "id": one} for call, one in zip(calls, minted, strict=True)]}
    usage = turn.upstream.get("usage") or {}
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    thought = min(thought, usage.get("completion_tokens", thought))  # some endpoints count it separately
    unmet = _is_unmet(turn.request, finish, message)
    call_ids = match_ids(calls, minted) if minted else {}
    return ReplyOutcome(finish, message, stop_string, thought, denied=denied, unmet=unmet, call_ids=call_ids)


def _denied(turn: "GatewayTurn", called: Sequence[str]) -> tuple[str, ...]:
    """The called tools that are forbidden."""
    none_wanted = turn.request.tool_choice.mode == "none"
    return tuple(name for name in called if none_wanted or not turn.session.spec.allows(name))


def _first_call_alone(request: ChatRequest, parsed: Parsed, prompts: ChatPrompts, before: int) -> int | None:
    """How many ids to keep if one call was requested and there are several; None to keep all."""
    if request.parallel_tool_calls or len(parsed.calls) < 2 or not can_cut_calls(prompts.reply_form):
        return None
    end = parsed.first_call_end
    return end if end is not None and end > before else None


def _is_unmet(request: ChatRequest, finish: Finish, message: dict[str, Any]) -> bool:
    """Whether a reply that ended by itself does not meet the demands."""
    is_whole = finish in (Finish.STOP, Finish.STOP_STRING)
    return is_whole and bool(request.demands) and not is_met(request, message)


def turn_fields(turn: "GatewayTurn") -> dict[str, Any]:
    """The arguments of `record_turn` for a turn."""
    prompt, place, outcome, parts = turn.prompt, turn.place, turn.outcome, turn.reply.parts
    after, given = prompt.after, dict[str, Any]()
    starts: Sequence[int] | None = prompt.new.message_starts
    if after is None:
        given = {"prompt_messages": place.messages, "prompt_ids": prompt.ids}
    elif turn.resumes is not None and after.reply is not None:
        # It continues the ids of the interrupted turn, whose reply is not a message of the prompt.
        given = {"prompt_messages": after.prompt.to_list(), "prompt_ids": prompt.ids}
        starts = turn.session.history.message_starts(after)
    else:
        new = [] if turn.resumes else place.messages[len(place.messages) - place.new :]
        given = {"after": after, "new_messages": new, "new_prompt_ids": prompt.new.ids}
    reply = outcome.message or outcome.seen_coming
    return given | {
        "finish": outcome.finish,
        "segments": build_segments(parts) or None,
        "sampled_ids": None if parts else (),
        "side_arrays": join_side_arrays(parts) or None,
        "message_starts": starts,
        "reply": reply if turn.request.prompt is None else None,  # a prompt of text or ids has no messages
        "tools": place.root,
        "sampling": turn.sampling.to_dict(),
        "sampling_asked": turn.request.sampling.to_dict(),
        "logprob_kind": parts[-1].given.logprob_kind if parts else None,
        "delivery": Delivery.UNKNOWN,
        "auxiliary": turn.auxiliary,
        "flags": _flags(turn),
        "token_faithful": all(part.engine.token_faithful or part.given.prompt_ids is not None for part in parts),
        "error": turn.failure,
        "started_at": turn.received_at,
        "extra": _extra(turn),
    }


def _flags(turn: "GatewayTurn") -> list[TurnFlag]:
    outcome, request = turn.outcome, turn.request
    flags = {
        TurnFlag.CONSTRAINED: any(part.given.constrained for part in turn.reply.parts),
        TurnFlag.UNMET_DEMAND: outcome.unmet,
        TurnFlag.MALFORMED_CALL: outcome.malformed,
        TurnFlag.DENIED_TOOL: bool(outcome.denied),
        TurnFlag.SPECIAL_TOKEN_TEXT: turn.prompt.new.special_text > 0,
        TurnFlag.REPAIRED_UNICODE: request.repaired,
        TurnFlag.MEDIA_LEFT_OUT: bool(request.media),
    }
    odd = {flag for part in turn.reply.parts for flag in part.given.flags}
    return [flag for flag, is_set in flags.items() if is_set or flag in odd]


def _extra(turn: "GatewayTurn") -> dict[str, Any]:
    """Further facts of a turn; empty ones are left out."""
    request, prompt, outcome = turn.request, turn.prompt, turn.outcome
    last = turn.reply.parts[-1] if turn.reply.parts else None
    facts = {
        "request": turn.request.digest.hex(),  # by which a later gateway finds the turn for a retry
        "choice": turn.choice,
        "reply_id": turn.id,
        "held_tokens": turn.held_tokens,
        "resumes": None if turn.resumes is None else turn.resumes.recorded.id,
        "reasoning_tokens": outcome.reasoning_tokens,
        "api": request.api,
        "instructed": request.instructed,
        "stop_ids": list(request.stop_ids),
        "model_asked": request.model,
        "metadata": request.metadata,
        "prompt": prompt.how,
        "prefix_miss": prompt.prefix_miss,
        "echoed_part": {"turn": prompt.part[0].sequence, "ids": prompt.part[1]} if prompt.part else None,
        "echoes": [rule.value for rule in dict.fromkeys(turn.place.echoes)],
        "ignored_params": list(turn.ignored_params),
        "denied": list(outcome.denied),
        "cut_after_call": outcome.kept_ids is not None,
        "engine": last.engine.name if last else None,
        "cached_tokens": last.given.cached_tokens if last else None,
        "upstream": dict(last.given.upstream) if last else None,
        "call_ids": dict(outcome.call_ids),
        "engine_errors": turn.reply.engine_errors,  # before the reply ended or failed
        "stop_string": outcome.stop_string,
        "folded": bool(prompt.new.folded),
        "special_text": prompt.new.special_text,
        "over_budget": turn.over_budget,
    }
    return {name: fact for name, fact in facts.items() if fact}


def build_segments(parts: Sequence[PartialGeneration]) -> list[dict[str, Any]]:
    """Parts as a turn's segments. The weight versions are those that the engine reports, else the announced ones."""
    segments = []
    for part in parts:
        given = part.given
        first, last = given.first_version, given.last_version
        if first is None or last is None:
            first, last = part.first_announced, part.last_announced
        for span in given.segments or (Segment(0, len(given.ids), first, last),):
            versions = (span.first_version, span.last_version)
            segments.append(
                {
                    "sampled_ids": given.ids[span.start : span.stop],
                    "logprobs": None if given.logprobs is None else given.logprobs[span.start : span.stop],
                    "weight_version": None if None in versions else versions,
                }
            )
    return segments


def join_side_arrays(parts: Sequence[PartialGeneration]) -> dict[str, Any]:
    """The side arrays of all parts, joined if they have no gap between them."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, array in part.given.side_arrays.items():
            joined[name] = _joined(joined.get(name), array)
    return {name: array for name, array in joined.items() if array is not None}


def _joined(first: dict[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    """Two arrays joined; if there is a gap between them, only the later one is kept."""
    if first is None or first["start"] + len(first.get("counts", first["values"])) < then["start"]:
        return then
    kept = _first_rows(first, then["start"] - first["start"])
    arrays = {name: np.concatenate([rows, then[name]]) for name, rows in kept.items() if name != "start"}
    return {"start": first["start"], **arrays}


def _first_rows(array: dict[str, Any], rows: int) -> dict[str, Any]:
    """The first `rows` tokens of a side array."""
    if "counts" not in array:
        return {**array, "values": array["values"][:rows]}
    counts = array["counts"][:rows]
    return {**array, "values": array["values"][: int(counts.sum())], "counts": counts}


def cut_at_stop(
    parts: list[PartialGeneration], prompt: Ids, before: int, stops: Sequence[str], decode: Callable[[Ids], str]
) -> list[PartialGeneration]:
    """The parts up to the token that completes a stop string, if an interruption split that string.

    No engine sees such a stop string complete. The last `before` ids of the prompt are of the reply too.
    """
    uncut = not before and len(parts) < 2
    if not stops or uncut or any(part.given.message is not None for part in parts):
        return parts
    window = max(len(stop.encode()) for stop in stops)  # each id has at least one byte
    ids = np.concatenate([prompt, *(part.given.ids for part in parts)])
    begun = boundary = len(prompt)
    for at, part in enumerate(parts):
        seen = ids[max(boundary - window, begun - before) : boundary]
        kept = part.given.ids[:window]

        def found(count: int, seen: Ids = seen, kept: Ids = kept) -> str | None:
            text = decode(np.concatenate([seen, kept[:count]]))
            return next((stop for stop in stops if stop in text), None)

        if len(seen) and (stop := found(len(kept))):
            count = 1 + bisect_left(range(1, len(kept)), True, key=lambda count: found(count) is not None)
            return [*parts[:at], _cut_part(part, count, boundary + count, found(count) or stop)]
        boundary += len(part.given.ids)
    return parts


def keep_ids(parts: Sequence[PartialGeneration], prompt: int, count: int) -> list[PartialGeneration]:
    """The first `count` ids of all parts, after a prompt of `prompt` ids."""
    kept: list[PartialGeneration] = []
    for part in parts:
        size = len(part.given.ids)
        if count <= size:
            return [*kept, _cut_part(part, count, prompt + count, None)]
        kept.append(part)
        prompt, count = prompt + size, count - size
    return kept


def _cut_part(part: PartialGeneration, count: int, end: int, stop: str | None) -> PartialGeneration:
    """The first `count` ids of a part, which ends by `stop`, if any; `end` counts from the prompt's start."""
    given = part.given
    segments = [Segment(one.start, min(one.stop, count), one.first_version, one.last_version) for one in given.segments]
    side: dict[str, Any] = {
        name: _first_rows(array, max(end - array["start"], 0)) for name, array in given.side_arrays.items()
    }
    cut = msgspec.structs.replace(
        given,
        ids=given.ids[:count],
        logprobs=None if given.logprobs is None else given.logprobs[:count],
        finish=Finish.STOP_STRING,
        stop_string=stop,
        segments=tuple(one for one in segments if one.start < one.stop),
        side_arrays={name: array for name, array in side.items() if len(array["values"])},
    )
    return part._replace(given=cut)
