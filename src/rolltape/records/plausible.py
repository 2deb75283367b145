"""What no engine can have sampled: ids outside the vocabulary or after a stop id, too many ids, logprobs above zero."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolltape.records.rollout import Session, SessionHead
from rolltape.records.turn import Ids, Logprobs, TurnFacts, TurnFlag

# An engine's softmax overshoots zero by rounding: in single precision by 1e-4 where logits reach a thousand.
LARGEST_LOGPROB = 1e-3

_LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
_LEASTS = ("min_tokens", "min_new_tokens")


def implausibility(
    ids: Ids,
    logprobs: Logprobs | None,
    sampling: Mapping[str, Any],
    *,
    vocabulary: int | None,
    stop_ids: Sequence[int] | None,
) -> str | None:
    """Why a reply cannot have been sampled with these parameters; None: it can.

    `vocabulary` is one more than the largest id of the tokenizer, and `stop_ids` end a reply; None: not known.
    """
    count = len(ids)
    if not count:
        return None
    limit = _least(sampling, _LIMITS)
    if limit is not None and count > limit:
        return f"{count} sampled ids but max_tokens {limit}"
    if vocabulary is not None and ids[at := int(ids.argmax())] >= vocabulary:
        return f"sampled id {at} is {ids[at]}, outside the vocabulary of {vocabulary}"
    if stop_ids and count > 1 and not sampling.get("ignore_eos"):
        begin = _least(sampling, _LEASTS) or 0  # engines sample no stop id before
        body = ids[begin:-1]
        stops = [begin + int(hits.argmax()) for stop in stop_ids if np.count_nonzero(hits := body == stop)]
        if stops:
            return f"{count - min(stops) - 1} sampled ids after the stop id {ids[min(stops)]}"
    if logprobs is not None:
        at = int(logprobs.argmax())
        if not logprobs[at] <= LARGEST_LOGPROB:  # above, or the first NaN, which stands for none and hides others
            above = np.flatnonzero(logprobs > LARGEST_LOGPROB)
            if len(above):
                return f"the logprob of sampled id {above[0]} is {logprobs[above[0]]:g}, above zero"
    return None


def implausible_in(
    head: SessionHead, facts: TurnFacts, ids: Ids, logprobs: Logprobs | None, vocabulary: int | None = None
) -> str | None:
    """As `implausibility`, for a turn of a session. A turn of another model than the session's has other ids.

    `vocabulary` is for a session that does not say it.
    """
    model, fingerprint = head.defaults.get("model"), head.defaults.get("fingerprint")
    same = model in (None, facts.model) and fingerprint in (None, facts.fingerprint)
    return implausibility(
        ids,
        logprobs,
        facts.sampling,
        vocabulary=(head.vocabulary or vocabulary) if same else None,
        stop_ids=head.stop_ids if same else None,
    )


def unstated_faults(session: Session, vocabulary: int | None = None) -> dict[int, str]:
    """The turns that no engine can have sampled and that do not say so, by sequence number, and why.

    There are none in a session of a recorder that looks. `vocabulary` is for a session that does not say it.
    """
    if session.head.flags_faults:
        return {}
    found = {}
    for turn in session.turns:
        facts = turn.facts
        if facts.is_engine_fault or TurnFlag.NOT_TOKEN_FAITHFUL in facts.flags:
            continue
        why = implausible_in(session.head, facts, turn.sampled_ids, turn.logprobs, vocabulary)
        if why is not None:
            found[turn.sequence] = why
    return found


def _least(sampling: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The least number of tokens that a parameter of these names says; None: none of them sets one."""
    given = [sampling[name] for name in names if name in sampling]
    return min((one for one in given if isinstance(one, int) and one > 0), default=None) if given else None
