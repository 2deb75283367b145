"""Edges that random sessions meet too seldom, each as the smallest session that shows it."""

import pytest

from rolltape.records.policy import cut_policy
from rolltape.records.sample import Fate
from rolltape.samples import linearize
from sessions import Recording, held, rollout_of, user


@pytest.mark.parametrize(
    ("departs_at", "fates"),
    [
        (-1, {Fate.TRAINED: 5}),  # in the glue: history is rewritten, and the old sample keeps its tokens
        (0, {Fate.MASKED_REWRITTEN_AFTER: 3, Fate.TRAINED: 2}),
        (1, {Fate.TRAINED: 3, Fate.MASKED_REWRITTEN_AFTER: 2}),
        (2, {Fate.TRAINED: 4, Fate.MASKED_REWRITTEN_AFTER: 1}),
        (3, {Fate.TRAINED: 5}),  # at the end: it extends
    ],
)
def test_keep_head_gives_up_what_follows_the_departure(departs_at: int, fates: dict[Fate, int]) -> None:
    recording = Recording()
    turn = recording.ask([user("a")], "b c")
    kept = turn.tokens.slice(0, len(turn.prompt_ids) + departs_at).tolist()
    recording.ask([*held(turn), user("d")], "e", prompt_ids=[*kept, 99, *recording.render([user("d")])])
    linearized = linearize(rollout_of(recording.session()), cut_policy("keep-head"))
    assert linearized.ledger.totals() == fates
    assert len(linearized) == (2 if departs_at < 0 else 1)
