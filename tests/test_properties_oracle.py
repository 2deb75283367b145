"""The oracle itself: it passes what is right and refuses each way of being wrong."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

import oracle
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Ledger, Sample
from rolltape.samples import linearize
from sessions import Recording, held, rollout_of, user

Corrupt = Callable[[list[Sample], Ledger], tuple[list[Sample], Ledger]]


def _recorded() -> tuple[Rollout, list[Sample], Ledger]:
    """A question, a continuation, and a twin of it: two samples that share the first reply."""
    recording = Recording()
    first = recording.ask([user("a")], "b b")
    recording.go_on(first, [user("c")], "d")
    recording.ask([*held(first), user("e")], "d", weight_version=("1", "2"))
    rollout = rollout_of(recording.session())
    linearized = linearize(rollout)
    return rollout, list(linearized.samples()), linearized.ledger


def test_what_is_right_passes() -> None:
    oracle.check(*_recorded())


def _with(sample: Sample, **changes: object) -> Sample:
    return msgspec.structs.replace(sample, **changes)


def _trained_mask_one_late(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return [_with(samples[0], trained_mask=np.roll(samples[0].trained_mask, 1)), *samples[1:]], ledger


def _another_id_before_a_trained_one(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    ids = samples[0].ids.copy()
    ids[0] += 1
    return [_with(samples[0], ids=ids), *samples[1:]], ledger


def _logprob_rounded(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return [_with(samples[0], logprobs=samples[0].logprobs.astype(np.float32)), *samples[1:]], ledger


def _logprob_made_up(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return [_with(samples[0], logprobs=np.nan_to_num(samples[0].logprobs)), *samples[1:]], ledger


def _version_made_exact(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    versions = tuple((first, first) for first, _ in samples[1].versions)
    return [samples[0], _with(samples[1], versions=versions)], ledger


def _span_names_the_twin(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    *spans, last = samples[0].spans
    wrong = msgspec.structs.replace(last, turn=samples[1].spans[-1].turn)
    return [_with(samples[0], spans=(*spans, wrong)), *samples[1:]], ledger


def _shared_reply_trains_twice(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    spans = tuple(
        msgspec.structs.replace(span, fate=Fate.TRAINED) if span.origin == "sampled" else span
        for span in samples[1].spans
    )
    trained = samples[1].sampled_mask
    doubled = _with(samples[1], trained_mask=trained, spans=spans, trained_tokens=int(trained.sum()))
    return [samples[0], doubled], ledger


def _ledger_forgets_a_token(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return samples, msgspec.structs.replace(ledger, entries=ledger.entries[:-1])


def _ledger_calls_a_trained_token_masked(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    wrong = msgspec.structs.replace(ledger.entries[0], fate=Fate.MASKED_STALE)
    return samples, msgspec.structs.replace(ledger, entries=(wrong, *ledger.entries[1:]))


def _a_sample_is_lost(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return samples[:1], ledger


def _weights_of_samples_instead_of_rollouts(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return [_with(sample, loss_weight=1.0) for sample in samples], ledger


def _one_mask_is_shorter(samples: list[Sample], ledger: Ledger) -> tuple[list[Sample], Ledger]:
    return [_with(samples[0], sampled_mask=samples[0].sampled_mask[:-1]), *samples[1:]], ledger


@pytest.mark.parametrize(
    "corrupt",
    [
        _trained_mask_one_late,
        _another_id_before_a_trained_one,
        _logprob_rounded,
        _logprob_made_up,
        _version_made_exact,
        _span_names_the_twin,
        _shared_reply_trains_twice,
        _ledger_forgets_a_token,
        _ledger_calls_a_trained_token_masked,
        _a_sample_is_lost,
        _weights_of_samples_instead_of_rollouts,
        _one_mask_is_shorter,
    ],
)
def test_what_is_wrong_is_refused(corrupt: Corrupt) -> None:
    rollout, samples, ledger = _recorded()
    assert len(samples) == 2
    wrong_samples, wrong_ledger = corrupt(samples, ledger)
    with pytest.raises(AssertionError):
        oracle.check(rollout, wrong_samples, wrong_ledger)
