"""A summary counts what linearizing under each preset gives, without building samples."""

from collections import Counter

import msgspec
from hypothesis import given

from rolltape.records.policy import PRESETS, cut_policy
from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.sample import SUMMARY_RULES, RolloutSummary
from rolltape.samples import linearize
from rolltape.samples.summary import summarize
from sessions import Recording, event, rollout_of, user
from strategies import rollouts, searching


@searching
@given(rollouts())
def test_a_summary_is_what_linearizing_under_each_preset_counts(made: tuple[Rollout, list[Recording]]) -> None:
    rollout, _ = made
    unfiltered = [said for said in rollout.events if said.kind != EventKind.FILTER]
    plain = Rollout(rollout.head, rollout.sessions, unfiltered, rollout.writer_alive)
    summary = summarize(rollout)
    assert summary.rules == SUMMARY_RULES
    assert summary.policies.keys() == PRESETS.keys()
    for name, counted in summary.policies.items():
        linearized = linearize(plain, name)
        assert (counted.key, counted.samples) == (cut_policy(name).key, len(linearized))
        assert counted.ledger == {fate.value: tokens for fate, tokens in linearized.ledger.totals().items()}
        assert summary.forks == Counter(fork.cause.value for fork in linearized.forks)


def test_a_summary_counts_branches_and_forks_and_ignores_a_filter() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    recording.go_on(first, [user("v")], "b")
    recording.go_on(first, [user("w")], "c")
    recording.ask([user("u")], "A title", auxiliary="title")
    filtered = event(9, EventKind.FILTER, {"reason": "a near duplicate"})
    summary = summarize(rollout_of(recording.session(), events=[filtered]))
    assert (summary.branches, summary.forks) == (2, {"history_edited": 1})
    assert summary.policies["exact"].ledger == {"trained": 6, "dropped:auxiliary": 3}
    assert msgspec.json.decode(msgspec.json.encode(summary), type=RolloutSummary) == summary


def test_pruned_tokens_stay_in_a_summary() -> None:
    said = event(5, EventKind.PRUNE, {"pruned": "turns", "turns": 3, "sampled_tokens": 9})
    summary = summarize(rollout_of(events=[said]))
    assert (summary.branches, summary.policies["slime"].ledger) == (0, {"dropped:pruned": 9})
