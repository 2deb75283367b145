"""What must hold of every session under every policy, on random sessions, judged by the oracle."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

import oracle
from relations import Relations, had_ended
from rolltape.records.ids import last_turn_of
from rolltape.records.policy import PRESETS, Branches, Credit, CutPolicy, OnRewrite, RewardShare
from rolltape.records.rollout import Rollout, Session, Status
from rolltape.records.sample import Fate, Sample
from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag, common_prefix
from rolltape.samples import Linearized, linearize
from sessions import Recording, held, rollout_of
from strategies import (
    VERSIONS,
    branching_recordings,
    credits_of_samples,
    policies,
    rollouts,
    searching,
    searching_longer,
)

# Why a whole turn, or a token without a logprob, does not train, whatever its branch.
_REASONS_OF_A_TURN = {
    Fate.MASKED_ABANDONED,
    Fate.MASKED_ABORTED,
    Fate.MASKED_ENGINE_ERROR,
    Fate.MASKED_UNDELIVERED,
    Fate.MASKED_NO_LOGPROB,
    Fate.MASKED_CONSTRAINED,
    Fate.DROPPED_AUXILIARY,
    Fate.DROPPED_ROLLOUT_FAILED,
    Fate.DROPPED_FILTERED,
    Fate.DROPPED_NOT_FAITHFUL,
    Fate.DROPPED_EMPTY_PROMPT,
}


def _linearized(
    rollout: Rollout, chosen: CutPolicy, current_version: str | None = "4", credit: Credit | None = None
) -> tuple[Linearized, list[Sample]]:
    linearized = linearize(rollout, chosen, credit=credit, versions=VERSIONS, current_version=current_version)
    return linearized, list(linearized.samples())


@searching
@given(rollouts())
def test_every_preset_is_faithful_aligned_and_conserves_tokens(made: tuple[Rollout, list[Recording]]) -> None:
    rollout, _ = made
    for preset in PRESETS.values():
        linearized, samples = _linearized(rollout, preset)
        oracle.check(rollout, samples, linearized.ledger)
        _check_reasons(rollout, preset, linearized)
        for fate in linearized.ledger.totals():
            event(f"{preset.name}: {fate}")


@searching
@given(rollouts(), st.lists(policies(), min_size=1, max_size=3), st.sampled_from([None, "2", "4", "unannounced"]))
def test_every_mixture_of_choices_is_faithful_aligned_and_conserves_tokens(
    made: tuple[Rollout, list[Recording]], chosen_policies: list[CutPolicy], current_version: str | None
) -> None:
    rollout, _ = made
    for chosen in chosen_policies:
        linearized, samples = _linearized(rollout, chosen, current_version)
        oracle.check(rollout, samples, linearized.ledger)
        _check_reasons(rollout, chosen, linearized, current_version)
        _check_limits(chosen, samples)
        _check_little_is_given_up(chosen, linearized)
        for fate in linearized.ledger.totals():
            event(str(fate))


@searching
@given(rollouts(), policies(), credits_of_samples())
def test_credit_shares_one_reward_and_one_weight_and_changes_nothing_else(
    made: tuple[Rollout, list[Recording]], chosen: CutPolicy, credit: Credit
) -> None:
    rollout, _ = made
    _, plain = _linearized(rollout, chosen)
    linearized, samples = _linearized(rollout, chosen, credit=credit)
    shared = {"reward": None, "loss_weight": 0.0}
    assert [_bytes_of(msgspec.structs.replace(sample, **shared)) for sample in samples] == [
        _bytes_of(msgspec.structs.replace(sample, **shared)) for sample in plain
    ]
    assert [outline.id for outline in linearized.outlines] == [sample.id for sample in samples]
    if samples:
        assert math.isclose(math.fsum(sample.loss_weight for sample in samples), 1)
    if samples and rollout.reward is not None and credit.reward_share is RewardShare.SPLIT:
        shares = [sample.reward for sample in samples if sample.reward is not None]
        assert math.isclose(math.fsum(shares), rollout.reward, rel_tol=1e-9, abs_tol=1e-12)
        assert max(shares) - min(shares) < 1e-9


@searching
@given(rollouts(), policies(), policies())
def test_two_policies_give_a_sample_the_same_id_exactly_if_its_tokens_are_the_same(
    made: tuple[Rollout, list[Recording]], one: CutPolicy, other: CutPolicy
) -> None:
    rollout, _ = made
    every = [sample for chosen in (one, other) for sample in _linearized(rollout, chosen)[1]]
    named = {
        (sample.session, sample.spans[-1].turn, sample.ids.tobytes(), sample.trained_mask.tobytes()): sample.id
        for sample in every
    }
    assert len(set(named.values())) == len(named)
    assert all(
        named[sample.session, sample.spans[-1].turn, sample.ids.tobytes(), sample.trained_mask.tobytes()] == sample.id
        for sample in every
    )


@searching_longer
@given(branching_recordings(max_turns=7), st.sampled_from(list(OnRewrite)), st.integers(0, 6), st.booleans())
def test_a_reply_that_branches_share_trains_once_wherever_they_depart_from_it(
    recording: Recording, on_rewrite: OnRewrite, tokens: int, claim_before_cut: bool
) -> None:
    rollout = rollout_of(recording.session())
    for absorbs in (False, True):
        chosen = CutPolicy(
            on_rewrite=on_rewrite,
            max_given_up_tokens=tokens,
            max_reply_tokens=tokens,
            claim_before_cut=claim_before_cut,
            absorb_rewritten_messages=absorbs,
            train_abandoned=True,
        )
        linearized, samples = _linearized(rollout, chosen)
        oracle.check(rollout, samples, linearized.ledger)
        _check_reasons(rollout, chosen, linearized)
        _check_little_is_given_up(chosen, linearized)
        _check_nothing_held_is_given_up(samples, linearized)
        if on_rewrite is not OnRewrite.KEEP_HEAD:
            _check_replies_train_whole(rollout, samples)


@searching
@given(rollouts(), policies())
def test_the_same_turns_give_the_same_bytes_however_they_were_handed_over(
    made: tuple[Rollout, list[Recording]], chosen: CutPolicy
) -> None:
    rollout, recordings = made
    again = Rollout(rollout.head, [recording.given_whole() for recording in recordings], rollout.events, False)
    first, samples = _linearized(rollout, chosen)
    assert list(map(_bytes_of, samples)) == list(map(_bytes_of, first.samples()))
    for other, other_samples in (_linearized(rollout, chosen), _linearized(again, chosen)):
        assert list(map(_bytes_of, other_samples)) == list(map(_bytes_of, samples))
        assert msgspec.json.encode(other.ledger) == msgspec.json.encode(first.ledger)


@searching
@given(rollouts(), policies(), st.randoms(use_true_random=False))
def test_what_is_left_of_a_damaged_session_still_gives_faithful_samples(
    made: tuple[Rollout, list[Recording]], chosen: CutPolicy, random: Random
) -> None:
    rollout, _ = made
    left = [
        Session(session.head, [turn for turn in session.turns if random.random() < 0.7]) for session in rollout.sessions
    ]
    damaged = Rollout(rollout.head, left, rollout.events, False)
    linearized, samples = _linearized(damaged, chosen)
    oracle.check(damaged, samples, linearized.ledger)
    _check_reasons(damaged, chosen, linearized)


@searching_longer
@given(rollouts())
def test_under_exact_every_eligible_token_trains_and_each_chain_of_ids_is_one_sample(
    made: tuple[Rollout, list[Recording]],
) -> None:
    rollout, _ = made
    linearized, samples = _linearized(rollout, PRESETS["exact"])
    fates = oracle.accounts(linearized.ledger)
    of_turns = {Fate.TRAINED, *_REASONS_OF_A_TURN}
    assert set(fates.values()) <= of_turns, "a token that may train was left out"
    trained = {turn for (turn, _), fate in fates.items() if fate is Fate.TRAINED}
    doubt = {Fate.MASKED_ABORTED, Fate.MASKED_UNDELIVERED}
    cut_short = {turn for (turn, _), fate in fates.items() if fate in doubt}
    ends = Relations(rollout).ends((turn for turn in rollout.turns if turn.id in trained), cut_short)
    assert [turn.id for turn in ends] == [last_turn_of(sample.id) for sample in samples]


@searching
@given(rollouts(), policies())
def test_ids_that_extend_never_split_a_sample(made: tuple[Rollout, list[Recording]], chosen: CutPolicy) -> None:
    rollout, _ = made
    chosen = msgspec.structs.replace(chosen, branches=Branches.ALL, max_sample_tokens=None)
    linearized, samples = _linearized(rollout, chosen)
    fates = oracle.accounts(linearized.ledger)
    demoted = {turn for (turn, _), fate in fates.items() if fate is Fate.MASKED_REWRITTEN}
    continued = Relations(rollout).continued
    for sample in samples:
        held = {turn for turn, _ in oracle.sampled_places(sample)}
        for turn in {span.turn for span in sample.spans if span.fate is Fate.TRAINED}:
            before = continued[turn]
            # The policy may go on over a drift from another turn, if that one holds the same ids.
            if before is not None and before.id not in demoted and len(before.sampled_ids):
                start = len(before.prompt_ids)
                assert sample.sampled_mask[start : len(before.tokens)].all(), (turn, before.id, held)


@searching
@given(st.data(), st.sampled_from(list(PRESETS)))
def test_turns_that_only_extend_are_one_sample_that_trains_everything(data: st.DataObject, name: str) -> None:
    recording = Recording()
    turn = recording.ask([{"role": "user", "content": "a"}], "b")
    for after_whole in data.draw(st.lists(st.booleans(), max_size=6)):
        new = [{"role": "user", "content": data.draw(st.sampled_from(["a", "b"]))}]
        if after_whole:
            ids = [*turn.tokens.to_numpy().tolist(), *recording.bridge(turn, new)]
            turn = recording.ask([*held(turn), *new], "a b", prompt_ids=ids)
        else:
            turn = recording.go_on(turn, new, "a b")
    rollout = rollout_of(recording.session())
    linearized, samples = _linearized(rollout, PRESETS[name])
    oracle.check(rollout, samples, linearized.ledger)
    assert linearized.ledger.totals().keys() == {Fate.TRAINED}
    assert [sample.ids.tolist() for sample in samples] == [turn.tokens.to_numpy().tolist()]


def _check_reasons(
    rollout: Rollout, chosen: CutPolicy, linearized: Linearized, current_version: str | None = "4"
) -> None:
    """Every token that does not train has a reason that the raw turn, the events or the policy bear out."""
    turns = {turn.id: turn for turn in rollout.turns}
    relations = Relations(rollout)
    for (turn_id, offset), fate in oracle.accounts(linearized.ledger).items():
        turn = turns[turn_id]
        assert _borne_out(rollout, relations, chosen, turn, offset, fate), f"{turn_id}[{offset}] cannot be {fate}"
        if fate is Fate.TRAINED or fate is Fate.MASKED_STALE:
            assert _is_stale(turn, offset, chosen, current_version) == (fate is Fate.MASKED_STALE)


def _is_stale(turn: Turn, offset: int, chosen: CutPolicy, current_version: str | None) -> bool:
    """Whether a token may have been sampled by weights older than the limit; what is not known may."""
    if chosen.max_staleness is None:
        return False
    current = current_version or VERSIONS[-1]
    segment = next(part for part in turn.facts.segments if part.start <= offset < part.stop)
    if segment.first_version not in VERSIONS or current not in VERSIONS:
        return True
    return VERSIONS.index(current) - VERSIONS.index(segment.first_version) > chosen.max_staleness


def _check_little_is_given_up(chosen: CutPolicy, linearized: Linearized) -> None:
    if chosen.on_rewrite is OnRewrite.KEEP_HEAD:
        fates = oracle.accounts(linearized.ledger)
        given_up = Counter(turn for (turn, _), fate in fates.items() if fate is Fate.MASKED_REWRITTEN_AFTER)
        assert all(count <= chosen.max_given_up_tokens for count in given_up.values())


def _borne_out(rollout: Rollout, relations: Relations, chosen: CutPolicy, turn: Turn, offset: int, fate: Fate) -> bool:
    facts = turn.facts
    given_logprob = turn.logprobs is not None and not math.isnan(float(turn.logprobs[offset]))
    delivered = facts.delivery is Delivery.DELIVERED
    position = len(turn.prompt_ids) + offset
    later = [other for other in rollout.turns if other.session == turn.session and other.sequence > turn.sequence]
    echoed = relations.is_continued(turn) or _is_surely_echoed(relations, turn)
    shown = relations.shown_head(turn)
    came_back = relations.may_have_arrived(turn) or offset < shown
    failed = rollout.status is not Status.FINISHED
    head = next(session.head for session in rollout.sessions if session.id == turn.session)
    went_on_after_stop = not set(turn.sampled_ids[:-1].tolist()).isdisjoint(head.stop_ids or ())
    reason = {
        Fate.TRAINED: (
            (given_logprob or chosen.train_without_logprobs)
            and (delivered or came_back)
            and (facts.finish is not Finish.ABORT or came_back)
            and (chosen.train_abandoned or not relations.must_be_abandoned(turn))
            and (chosen.train_constrained or not facts.is_constrained)
            and facts.auxiliary is None
            and facts.finish is not Finish.ERROR
            and not went_on_after_stop
            and len(turn.prompt_ids) > 0
            and TurnFlag.NOT_TOKEN_FAITHFUL not in facts.flags
            and not failed
            and rollout.outcome.filtered is None
            and (chosen.max_sample_tokens is None or position < chosen.max_sample_tokens)
        ),
        Fate.MASKED_ABANDONED: not chosen.train_abandoned and relations.may_be_abandoned(turn) and not echoed,
        Fate.MASKED_ABORTED: facts.finish is Finish.ABORT and not echoed and offset >= shown,
        Fate.MASKED_ENGINE_ERROR: facts.finish is Finish.ERROR or went_on_after_stop,
        Fate.MASKED_UNDELIVERED: not delivered and not echoed and offset >= shown,
        Fate.MASKED_NO_LOGPROB: not given_logprob and not chosen.train_without_logprobs,
        Fate.MASKED_CONSTRAINED: facts.is_constrained and not chosen.train_constrained,
        Fate.MASKED_STALE: chosen.max_staleness is not None,  # how old it is, is checked apart
        Fate.MASKED_REWRITTEN_AFTER: chosen.on_rewrite is OnRewrite.KEEP_HEAD and _departed_from(turn, later),
        Fate.MASKED_REPLACED: chosen.on_rewrite is OnRewrite.REPLACE_REPLY and _departed_from(turn, later),
        Fate.MASKED_REWRITTEN: bool(later) and chosen.absorb_rewritten_messages,
        Fate.MASKED_TRAINED_IN_OTHER_SAMPLE: bool(later) and chosen.claim_before_cut,
        Fate.DROPPED_AUXILIARY: facts.auxiliary is not None,
        Fate.DROPPED_BRANCH: chosen.branches is not Branches.ALL,
        Fate.DROPPED_LENGTH: chosen.max_sample_tokens is not None and position >= chosen.max_sample_tokens,
        Fate.DROPPED_ROLLOUT_FAILED: failed,
        Fate.DROPPED_FILTERED: rollout.outcome.filtered is not None,
        Fate.DROPPED_NOT_FAITHFUL: TurnFlag.NOT_TOKEN_FAITHFUL in facts.flags,
        Fate.DROPPED_EMPTY_PROMPT: len(turn.prompt_ids) == 0,
    }
    return reason[fate]


def _check_nothing_held_is_given_up(samples: Sequence[Sample], linearized: Linearized) -> None:
    """A token that stands in a sample after the ids it was sampled on could train there: nobody gave it up."""
    fates = oracle.accounts(linearized.ledger)
    held = {place for sample in samples for place in oracle.sampled_places(sample)}
    lost = {Fate.MASKED_REWRITTEN_AFTER, Fate.DROPPED_LENGTH, Fate.DROPPED_BRANCH}
    assert not [place for place in held if fates[place] in lost]


def _check_replies_train_whole(rollout: Rollout, samples: Sequence[Sample]) -> None:
    """Where no head is kept, a reply that a later prompt departs from does not train in that prompt's sample."""
    turns = {turn.id: turn for turn in rollout.turns}
    for sample in samples:
        standing = Counter(turn for turn, _ in oracle.sampled_places(sample))
        training = {span.turn for span in sample.spans if span.fate is Fate.TRAINED}
        assert all(standing[turn] == len(turns[turn].sampled_ids) for turn in training)


def _check_limits(chosen: CutPolicy, samples: Sequence[Sample]) -> None:
    for sample in samples:
        assert chosen.max_sample_tokens is None or len(sample.ids) <= chosen.max_sample_tokens
        assert chosen.train_without_logprobs or not np.isnan(sample.logprobs[sample.trained_mask]).any()


def _departed_from(turn: Turn, later: Sequence[Turn]) -> bool:
    """Whether a later prompt goes on from a turn's prompt, the glue before its reply included, and not from its end."""
    asked, ids = len(turn.prompt_ids), turn.tokens.to_numpy()
    shared = [common_prefix(ids, other.prompt_ids) for other in later]
    return any(asked <= count < len(ids) for count in shared)


def _is_surely_echoed(relations: Relations, turn: Turn) -> bool:
    """Whether later prompts hold a turn's reply, which no other turn has in that place, and no prompt did too early."""
    said = relations.spelled(turn, with_reply=True)
    beside = relations.turns_beside(turn)
    alike = [other for other in beside if relations.spelled(other, with_reply=True) == said]
    holding = [other for other in beside if relations.spelled(other)[: len(said)] == said]
    came_after = all(other.sequence > turn.sequence and had_ended(turn, other, shown=True) for other in holding)
    return turn.reply is not None and alike == [turn] and bool(holding) and came_after


def _bytes_of(sample: Sample) -> tuple[object, ...]:
    return tuple(_plain(sample))


def _plain(sample: Sample) -> Iterator[object]:
    for field in sample.__struct_fields__:
        value = getattr(sample, field)
        if isinstance(value, np.ndarray):
            yield field, value.dtype.str, value.shape, value.tobytes()
        elif field == "side":
            for name, side in value.items():
                counts = None if side.counts is None else side.counts.tobytes()
                yield name, side.values.dtype.str, side.values.shape, side.values.tobytes(), counts, side.missing
        else:
            yield field, repr(value)
