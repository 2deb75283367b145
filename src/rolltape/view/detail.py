"""One rollout: its turns as they are drawn and read, why it forks, its samples and its ledger."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from rolltape.records.fork import Fork
from rolltape.records.messages import Message
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import EventKind, Rollout, Status
from rolltape.records.sample import Fate
from rolltape.samples import Linearized, linearize
from rolltape.samples.linearize import LinearizedSession
from rolltape.samples.spelling import Spell, Spellings
from rolltape.traces import trace_of
from rolltape.tree import PlacedTurn, Tree
from rolltape.view.answers import plain
from rolltape.view.messages import ShownMessages
from rolltape.view.sampling import samples_in_brief

_ELSEWHERE = (EventKind.TRACE, EventKind.DELIVERY)  # among the trace, and with the turns


def linearized(rollout: Rollout, policy: CutPolicy, versions: Sequence[str]) -> Linearized:
    """A rollout under a policy; one that still runs as if it had ended now."""
    running = rollout.status is Status.RUNNING
    return linearize(rollout, policy, versions=versions, as_if_finished=running)


def detail_of(
    rollout: Rollout, made: Linearized, advantage: float | None, spellings: Spellings | None = None
) -> dict[str, Any]:
    """All that the page shows of a rollout, but for its tokens."""
    messages = ShownMessages()
    fates = made.ledger.by_turn()
    return {
        "head": plain(rollout.head),
        "outcome": plain(rollout.outcome),
        "events": [plain(event) for event in rollout.events if event.kind not in _ELSEWHERE],
        "trace": _trace(rollout),
        "sessions": [
            _session(one, fates, messages, None if spellings is None else spellings.of(one.session))
            for one in made.sessions
        ],
        "samples": samples_in_brief(made, advantage),
        "policy": made.policy.name,
        "policy_key": made.policy.key,
        "as_if_finished": rollout.status is Status.RUNNING,
        "ledger": {fate.value: tokens for fate, tokens in made.ledger.totals().items()},
    }


def _trace(rollout: Rollout) -> dict[str, Any]:
    """The trace; what its turns say is with the turns."""
    trace = trace_of(rollout).to_dict()
    for step in trace.get("steps", ()):
        if step.get("turns"):
            step.pop("prompt", None)
            step.pop("policy_response", None)
    return trace


def _session(
    made: LinearizedSession, fates: dict[str, dict[Fate, int]], messages: ShownMessages, spell: Spell | None
) -> dict[str, Any]:
    return {
        "id": made.session.id,
        "head": plain(made.session.head),
        "tools": _tools(made.tree),
        "turns": [_turn(placed, fates.get(placed.turn.id, {}), messages) for placed in made.tree.turns],
        "branches": _branches(made.tree),
        "forks": [_fork(fork, spell) for fork in made.forks],
    }


def _branches(tree: Tree) -> list[dict[str, Any]]:
    """The last turn of each branch; the main one leads on from the last turn that is no auxiliary call."""
    main = next((one for one in reversed(tree.turns) if one.is_task), None)
    while main is not None and main.children:
        main = main.children[-1]
    ends = [placed for placed in tree.turns if not placed.children]
    return [{"leaf": end.turn.id, "main": end is main} for end in ends]


def _tools(tree: Tree) -> list[str]:
    """The names of all tools that the session's turns had."""
    roots = {placed.turn.root.raw_digest: placed.turn.root for placed in tree.turns}
    names: dict[str, None] = {}
    for root in roots.values():
        for tool in root.tools or ():
            function = tool.get("function")
            name = (function if isinstance(function, dict) else tool).get("name")
            names |= {name: None} if isinstance(name, str) else {}
    return list(names)


def _turn(placed: PlacedTurn, fates: dict[Fate, int], messages: ShownMessages) -> dict[str, Any]:
    turn, facts, parent = placed.turn, placed.turn.facts, placed.parent
    versions = dict.fromkeys(one for part in facts.segments for one in (part.first_version, part.last_version) if one)
    kept = 0 if parent is None else placed.prompt_node.shared_depth(parent.tip)
    return {
        "id": turn.id,
        "sequence": turn.sequence,
        "node": placed.prompt_node.id.hex(),
        "parent": None if parent is None else parent.turn.id,
        "started_ns": _ns(facts.started_at),
        "ended_ns": _ns(facts.ended_at),
        "finish": facts.finish.value,
        "error": facts.error,
        "prompt_messages": len(turn.prompt),
        "kept_messages": kept,
        "prompt_tokens": len(turn.prompt_tokens),
        "new_prompt_tokens": len(turn.prompt_tokens) - placed.shared_tokens,
        "sampled_tokens": len(turn.sampled_ids),
        "new_messages": [messages.of(message) for message in _messages_after(placed, kept)],
        "reply": None if turn.reply is None else messages.of(turn.reply),
        "versions": list(versions),
        "delivery": facts.delivery.value,
        "flags": [flag.value for flag in facts.flags],
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
        "message_index": fork.message_index,
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


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
