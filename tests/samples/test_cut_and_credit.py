"""A cut policy makes samples and their ids; credit assigns numbers to them; two policies can be compared."""

import sys
from typing import Any

import numpy as np
import pytest

import rolltape
from exported import comparable
from rolltape.errors import PolicyError
from rolltape.records.ids import is_sample_id_of_0_1, names_sample, sample_id
from rolltape.records.policy import Advantage, Credit, CutPolicy, cut_and_credit
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Sample
from rolltape.records.turn import LogprobKind
from rolltape.samples import Linearized
from rolltape.samples.build import built_sample
from sessions import Recording, held, rollout_of, user


def drifting() -> Rollout:
    """Two turns; the second prompt spells the end of the first reply differently."""
    recording = Recording()
    first = recording.ask([user("u")], "a b c d")
    ids = first.tokens.to_numpy().tolist()
    recording.ask([*held(first), user("v")], "e f", prompt_ids=[*ids[:-2], 77, *recording.render([user("v")])])
    return rollout_of(recording.session(), reward=1.0)


def test_credit_changes_numbers_and_no_id() -> None:
    rollout = drifting()
    plain = list(rolltape.linearize(rollout, "exact").samples())
    credit = Credit(reward_share="split", loss_weight="even")  # type: ignore[arg-type]
    shared = list(rolltape.linearize(rollout, "exact", credit=credit).samples())
    assert [sample.id for sample in shared] == [sample.id for sample in plain]
    assert [(sample.reward, sample.loss_weight) for sample in shared] == [(0.5, 0.5), (0.5, 0.5)]
    assert {sample.policy for sample in plain} == {sample.policy for sample in shared}


def test_an_id_is_that_of_the_last_turn_the_length_and_what_trains() -> None:
    for policy in ("exact", "keep-head", "slime"):
        for sample in rolltape.linearize(drifting(), policy).samples():
            edges = np.flatnonzero(np.diff([0, *sample.trained_mask.astype(int).tolist(), 0])).tolist()
            ranges = list(zip(edges[::2], edges[1::2], strict=True))
            assert sample.id == sample_id(sample.spans[-1].turn, len(sample.ids), ranges)


def test_the_name_of_a_policy_is_no_part_of_an_id() -> None:
    first, second = (
        rolltape.linearize(drifting(), policy) for policy in (CutPolicy(), CutPolicy(name="mine", max_staleness=None))
    )
    assert [one.id for one in first.outlines] == [one.id for one in second.outlines]


def test_other_trained_tokens_of_the_same_ids_are_another_sample() -> None:
    assert sample_id("t.0", 4, [(1, 2)]) != sample_id("t.0", 4, [(1, 3)])
    assert sample_id("t.0", 4, [(1, 2)]) != sample_id("t.0", 5, [(1, 2)])
    assert sample_id("t.0", 4, [(1, 2)]) != sample_id("t.1", 4, [(1, 2)])


def test_an_id_of_0_1_0_names_every_sample_that_ends_with_its_turn() -> None:
    new = sample_id("r.0.0.1", 4, [(1, 2)])
    assert not is_sample_id_of_0_1(new)
    assert is_sample_id_of_0_1("r.0.0.1@keep-head-f9828dc1")
    assert names_sample("r.0.0.1@exact-f85863f1", new)
    assert not names_sample("r.0.0.2@exact-f85863f1", new)
    assert names_sample(new, new)
    assert not names_sample(sample_id("r.0.0.1", 4, [(1, 3)]), new)


def test_one_sample_is_built_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rolltape.linearize(drifting(), "exact")
    every = list(made.samples(advantage=0.5))
    built: list[int] = []

    def counted(*given: Any) -> Sample:
        built.append(1)
        return built_sample(*given)

    monkeypatch.setattr(sys.modules[Linearized.__module__], "built_sample", counted)
    assert comparable(made.sample(1, advantage=0.5)) == comparable(every[1])
    assert len(built) == 1
    assert made.index_of(every[1].id) == 1
    assert made.index_of("r.0.0.9@0badf00d0bad") is None
    with pytest.raises(IndexError, match="has 2 samples under exact, none 2"):
        made.sample(2)


def test_outlines_say_what_the_samples_do() -> None:
    made = rolltape.linearize(drifting(), "exact")
    assert [
        (one.id, one.index, one.session, one.tokens, one.trained_tokens, one.reward, one.loss_weight, one.truncated)
        for one in made.outlines
    ] == [
        (
            sample.id,
            sample.index,
            sample.session,
            len(sample.ids),
            sample.trained_tokens,
            sample.reward,
            sample.loss_weight,
            sample.truncated,
        )
        for sample in made.samples()
    ]


def test_a_comparison_says_which_tokens_train_under_which_policy() -> None:
    compared = rolltape.compare(drifting(), "exact", "keep-head")
    assert (len(compared.left), len(compared.right)) == (2, 1)
    (apart,) = compared.differences
    assert (apart.left, apart.right.value.partition(":")[0]) == (Fate.TRAINED, "masked")
    assert (compared.trained_only_left, compared.trained_only_right) == (apart.stop - apart.start, 0)
    assert compared.shared_samples == ()
    assert compared.left.policy.name == "exact"


def test_samples_that_both_policies_make_are_known_by_their_ids() -> None:
    recording = Recording()
    recording.ask([user("u")], "a b")
    compared = rolltape.compare(rollout_of(recording.session()), "exact", "slime")
    assert compared.differences == ()
    assert compared.shared_samples == tuple(one.id for one in compared.left.outlines)


def test_spans_keep_the_temperature_and_the_logprob_kind_of_their_turns() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a b", sampling={"temperature": 0.5}, logprob_kind="raw")
    recording.go_on(first, [user("v")], "c", sampling={"temperature": 1}, logprob_kind="after_temperature")
    (sample,) = rolltape.linearize(rollout_of(recording.session())).samples()
    assert [(span.temperature, span.logprob_kind) for span in sample.spans if span.fate is Fate.TRAINED] == [
        (0.5, LogprobKind.RAW),
        (1.0, LogprobKind.AFTER_TEMPERATURE),
    ]
    assert all(span.temperature is None for span in sample.spans if span.fate is None)
    assert (sample.temperature, sample.logprob_kind) == (None, None)


def test_choices_may_be_given_as_text_and_what_is_unknown_is_refused() -> None:
    assert Credit(advantage="normalized").advantage is Advantage.NORMALIZED  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="advantage is 'best'; known are none, centered, normalized"):
        Credit(advantage="best")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="advantage is credit; give credit=Credit"):
        rolltape.cut_policy("exact", advantage="none")
    with pytest.raises(PolicyError, match="the policy is None, a NoneType; give a preset's name or a CutPolicy"):
        rolltape.linearize(drifting(), None)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"a str; give rolltape\.Credit"):
        rolltape.linearize(drifting(), credit="normalized")  # type: ignore[arg-type]


def test_the_old_spelling_of_centered_is_read() -> None:
    assert Advantage("centred") is Advantage.CENTERED
    assert Credit(advantage="centred") == Credit()  # type: ignore[arg-type]
    assert Advantage["CENTRED"] is Advantage.CENTERED


def test_a_policy_in_one_piece_still_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"rolltape\.policy is deprecated"):
        old = rolltape.policy("exact", reward_share="split", branches="main")
    with pytest.warns(DeprecationWarning, match=r"rolltape\.Policy is deprecated"):
        assert isinstance(old, rolltape.Policy)
    cutting, credit = cut_and_credit(old)
    assert cutting == rolltape.cut_policy("exact", branches="main")
    assert credit == Credit(reward_share="split")  # type: ignore[arg-type]
    assert cut_and_credit(old, Credit())[1] == Credit()
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        split = rolltape.policy("exact", reward_share="split")
    assert [sample.reward for sample in rolltape.linearize(drifting(), split).samples()] == [0.5, 0.5]
    assert old.key == cutting.key
