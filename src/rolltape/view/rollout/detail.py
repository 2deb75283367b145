"""Answers about one rollout: turns, branches, forks, samples and ledger; its raw records; two policies compared."""

import math
from itertools import islice
from typing import Any

import msgspec

from rolltape.records.fork import Fork
from rolltape.records.jsonable import canonical_json
from rolltape.records.messages import Message
from rolltape.records.rollout import EventKind, Rollout, Status
from rolltape.records.sample import Fate, Span
from rolltape.records.turn import Turn
from rolltape.samples import Linearized
from rolltape.samples.claims import LinearizedSession
from rolltape.samples.compare import Comparison
from rolltape.samples.facts import seconds_of
from rolltape.samples.spelling import Spell, Spellings
from rolltape.traces import trace_of
from rolltape.tree import PlacedTurn, Tree
from rolltape.view.annotating import build_annotations
from rolltape.view.answers import to_plain
from rolltape.view.rollout.messages import MessageRenderer

_ELSEWHERE = (EventKind.TRACE, EventKind.DELIVERY)  # shown in the trace, and with the turns
_SAMPLES_WITH_SPANS = 64  # beyond this number samples have no spans, of which a branch has as many as turns


def build_detail(made: Linearized, advantage: float | None, spellings: Spellings) -> dict[str, Any]:
    """Everything that the page shows of a rollout, except its tokens."""
    rollout, messages = made.rollout, MessageRenderer()
    fates = made.ledger.by_turn()
    return {
        "head": to_plain(rollout.head),
        "outcome": to_plain(rollout.outcome),
        "took_s": seconds_of(rollout),
        "events": [to_plain(event) for event in rollout.events if event.kind not in _ELSEWHERE],
        "trace": _trace(rollout),
        "annotations": build_annotations(rollout.annotations),
        "sessions": [_session(one, fates, messages, spellings.of(one.session)) for one in made.sessions],
        **_samples(made, advantage),
        "as_if_finished": rollout.status is Status.RUNNING,
    }


def build_raw(rollout: Rollout) -> dict[str, Any]:
    """Everything on the tape about a rollout. A turn has its shared length with an earlier one, and its new part."""
    return {
        "head": to_plain(rollout.head),
        "outcome": to_plain(rollout.outcome),
        "events": [to_plain(event) for event in rollout.events],
        "sessions": [
            {"head": to_plain(session.head), "turns": [_raw_turn(turn) for turn in session.turns]}
            for session in rollout.sessions
        ],
    }


def build_comparison(compared: Comparison, advantage: float | None) -> dict[str, Any]:
    """A rollout under two policies: the samples of both, and the fates of every turn's tokens under each."""
    left, right = compared.left, compared.right
    fates = (left.ledger.by_turn(), right.ledger.by_turn())
    return {
        "left": _side(left, advantage),
        "right": _side(right, advantage),
        "turns": [
            {
                "turn": turn.id,
                "sequence": turn.sequence,
                "session": turn.session,
                "sampled": len(turn.sampled_ids),
                "left": fates[0].get(turn.id, {}),
                "right": fates[1].get(turn.id, {}),
            }
            for turn in left.rollout.turns
        ],
    }


def _samples(made: Linearized, advantage: float | None) -> dict[str, Any]:
    """The samples under a policy without their tokens, and the ledger; `advantage` is the rollout's."""
    samples = []
    for outline in made.outlines:
        fields = msgspec.structs.asdict(outline)
        samples.append({**fields, "trained": fields.pop("trained_tokens"), "advantage": advantage})
    return {
        "samples": samples,
        "policy": made.policy.name,
        "ledger": {fate.value: tokens for fate, tokens in made.ledger.totals().items()},
    }


def _side(made: Linearized, advantage: float | None) -> dict[str, Any]:
    side = _samples(made, advantage)
    for index, sample in enumerate(side["samples"]):
        drawn = index < _SAMPLES_WITH_SPANS
        sample["spans"] = [describe_span(span) for span in made.sample(index).spans] if drawn else None
    return side


def describe_span(span: Span) -> dict[str, Any]:
    """A span of a sample for the page: its tokens, their origin and their fate."""
    fate = None if span.fate is None else span.fate.value
    return {"start": span.start, "stop": span.stop, "origin": span.origin.value, "turn": span.turn, "fate": fate}


def _trace(rollout: Rollout) -> dict[str, Any]:
    """The trace without messages that are in its turns."""
    trace = trace_of(rollout).to_dict()
    for step in trace.get("steps", ()):
        if step.get("turns"):
            step.pop("prompt", None)
            step.pop("policy_response", None)
    return trace


def _session(
    made: LinearizedSession, fates: dict[str, dict[Fate, int]], messages: MessageRenderer, spell: Spell | None
) -> dict[str, Any]:
    tools = _tool_definitions(made.tree)
    return {
        "id": made.session.id,
        "head": to_plain(made.session.head),
        "tools": list(dict.fromkeys(tool["name"] for tool in tools)),
        "tool_definitions": tools,
        "turns": [_turn(placed, fates.get(placed.turn.id, {}), messages) for placed in made.tree.turns],
        "branches": _branches(made.tree),
        "forks": [_fork(fork, spell) for fork in made.forks],
    }


def _branches(tree: Tree) -> list[dict[str, Any]]:
    """The last turn of each branch; the main branch continues the last turn that is not auxiliary."""
    main = next((one for one in reversed(tree.turns) if one.is_task), None)
    while main is not None and main.children:
        main = main.children[-1]
    leaves = [placed for placed in tree.turns if not placed.children]
    return [{"leaf": leaf.turn.id, "main": leaf is main} for leaf in leaves]


def _tool_definitions(tree: Tree) -> list[dict[str, Any]]:
    """All different tools of the session's turns; a changed tool is there in each version."""
    roots = {placed.turn.root.raw_digest: placed.turn.root for placed in tree.turns}
    found: dict[bytes, dict[str, Any]] = {}
    for root in roots.values():
        for tool in root.tools or ():
            function = tool.get("function")
            source = function if isinstance(function, dict) else tool
            name, description = source.get("name"), source.get("description")
            if isinstance(name, str):
                shown = {
                    "name": name,
                    "description": description if isinstance(description, str) else None,
                    "parameters": source.get("parameters", source.get("input_schema")),
                }
                found.setdefault(canonical_json(shown), shown)
    return list(found.values())


def _turn(placed: PlacedTurn, fates: dict[Fate, int], messages: MessageRenderer) -> dict[str, Any]:
    turn, facts, parent = placed.turn, placed.turn.facts, placed.parent
    versions = dict.fromkeys(one for part in facts.segments for one in (part.first_version, part.last_version) if one)
    kept = 0 if parent is None else placed.prompt_node.shared_depth(parent.tip)
    return {
        "id": turn.id,
        "sequence": turn.sequence,
        "parent": None if parent is None else parent.turn.id,
        "started_ns": _to_ns(facts.started_at),
        "ended_ns": _to_ns(facts.ended_at),
        "finish": facts.finish.value,
        "error": facts.error,
        "kept_messages": kept,
        "prompt_tokens": len(turn.prompt_tokens),
        "new_prompt_tokens": len(turn.prompt_tokens) - placed.shared_tokens,
        "sampled_tokens": len(turn.sampled_ids),
        "new_messages": [messages.render(message) for message in _messages_after(placed, kept)],
        "reply": None if turn.reply is None else messages.render(turn.reply),
        "versions": list(versions),
        "delivery": facts.delivery.value,
        "flags": [flag.value for flag in facts.flags],
        "ignored_params": turn.ignored_params,
        "auxiliary": facts.auxiliary,
        "reward": facts.reward,
        "sampling": facts.sampling,
        "fates": fates,
    }


def _messages_after(placed: PlacedTurn, kept: int) -> list[Message]:
    fresh = list(islice(placed.turn.prompt.backwards(), len(placed.turn.prompt) - kept))
    return fresh[::-1]


def _fork(fork: Fork, spell: Spell | None) -> dict[str, Any]:
    """A fork with its evidence."""
    sides = [[int(token) for token in side] for side in (fork.tokens.before, fork.tokens.after)]
    return {
        "turn": fork.turn,
        "parent": fork.departs_from,
        "cause": fork.cause.value,
        "first_difference": {
            "at_text": None if fork.text is None else fork.text.at,
            "text": None if fork.text is None else [fork.text.before, fork.text.after],
            "at_tokens": fork.tokens.at,
            "tokens": sides,
            "token_texts": None
            if spell is None
            else [[spell(token).decode("utf-8", "replace") for token in side] for side in sides],
        },
    }


def _raw_turn(turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.id,
        "sequence": turn.sequence,
        "tools": turn.root.tools,
        "template_options": turn.root.template_options,
        "kept_messages": turn.prompt.keep,
        "messages": [message.to_dict() for message in turn.prompt.own],
        "reply": None if turn.reply is None else turn.reply.to_dict(),
        "kept_tokens": turn.prompt_tokens.keep,
        "prompt_ids": turn.prompt_tokens.own.tolist(),
        "sampled_ids": turn.sampled_ids.tolist(),
        "logprobs": None if turn.logprobs is None else turn.logprobs.tolist(),
        "facts": to_plain(turn.facts),
        "side_arrays": {
            name: {"start": side.start, "shape": list(side.values.shape), "dtype": side.values.dtype.str}
            for name, side in turn.side.items()
        },
    }


def _to_ns(seconds: float | None) -> int | None:
    return int(seconds * 1e9) if seconds is not None and math.isfinite(seconds * 1e9) else None
