"""The samples of a linearized rollout: all of them without their arrays, or one with."""

from typing import Any, NamedTuple

from rolltape.records.ids import sample_id
from rolltape.records.sample import Sample
from rolltape.records.turn import Finish
from rolltape.samples import Linearized
from rolltape.samples.build import built_sample
from rolltape.samples.claims import Draft
from rolltape.samples.linearize import LinearizedSession
from rolltape.samples.shares import loss_weights, reward_shares


class _Place(NamedTuple):
    session: LinearizedSession
    draft: Draft
    reward: float | None
    loss_weight: float


def samples_in_brief(made: Linearized, advantage: float | None) -> list[dict[str, Any]]:
    """Each sample without its tokens. Making the arrays of all samples takes as long as all branches are together."""
    return [
        {
            "id": sample_id(place.draft.end.turn.id, made.policy.key),
            "index": index,
            "session": place.session.session.id,
            "last_turn": place.draft.end.turn.id,
            "tokens": place.draft.length,
            "trained": place.draft.trained_tokens,
            "reward": place.reward,
            "advantage": advantage,
            "loss_weight": place.loss_weight,
            "truncated": place.draft.end.turn.facts.finish is Finish.LENGTH
            or place.draft.length < len(place.draft.end.turn.tokens),
        }
        for index, place in enumerate(_places(made))
    ]


def sample_at(made: Linearized, index: int, advantage: float | None) -> Sample | None:
    """One sample with its arrays; None: there is none of that index."""
    places = _places(made)
    if index >= len(places):
        return None
    place = places[index]
    return built_sample(
        place.draft,
        place.session.claims,
        made.rollout,
        made.policy,
        index=index,
        siblings=len(places),
        reward=place.reward,
        advantage=advantage,
        loss_weight=place.loss_weight,
    )


def _places(made: Linearized) -> list[_Place]:
    drafts = [(session, draft) for session in made.sessions for draft in session.drafts]
    rewards = reward_shares(made.rollout.reward, len(drafts), made.policy.reward_share)
    weights = loss_weights([draft.trained_tokens for _, draft in drafts], made.policy.loss_weight)
    return [
        _Place(session, draft, reward, weight)
        for (session, draft), reward, weight in zip(drafts, rewards, weights, strict=True)
    ]
