"""A rollout as JSON, all of it: each turn as what is new in it."""

from typing import Any

from rolltape.records.rollout import Rollout
from rolltape.records.turn import Turn
from rolltape.view.answers import plain


def raw_of(rollout: Rollout) -> dict[str, Any]:
    """Everything on the tape about a rollout. A turn keeps so much of an earlier one and says what follows."""
    return {
        "head": plain(rollout.head),
        "outcome": plain(rollout.outcome),
        "events": [plain(event) for event in rollout.events],
        "sessions": [
            {"head": plain(session.head), "turns": [_turn(turn) for turn in session.turns]}
            for session in rollout.sessions
        ],
    }


def _turn(turn: Turn) -> dict[str, Any]:
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
        "facts": plain(turn.facts),
        "side_arrays": {
            name: {"start": side.start, "shape": list(side.values.shape), "dtype": side.values.dtype.str}
            for name, side in turn.side.items()
        },
    }
