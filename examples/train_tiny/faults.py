"""Ways to get it wrong, as trainers do: each makes a run with `--fault` end red, or the proof proves nothing."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from transformers import AutoTokenizer

from rolltape.records.rollout import Rollout, Session
from rolltape.records.sample import Fate, Sample
from rolltape.records.turn import Delivery
from rolltape.tiny import shipped_model


class Fault(enum.StrEnum):
    """What is done to the samples of a step, or to the trainer, before the first update."""

    MASK_SHIFTED = "mask-shifted"  # by one to the right
    END_OF_TURN_DROPPED = "end-of-turn-dropped"  # replies train without their last token
    RETOKENIZED = "retokenized"  # one reply is spelled with other ids
    WRONG_TEMPERATURE = "wrong-temperature"  # the trainer computes logprobs at temperature 1
    VERSIONS_SWAPPED = "versions-swapped"  # tokens name the version before the one that sampled them, and vice versa
    ADVANTAGES_MIXED = "advantages-mixed"  # samples have the advantages of the next group's
    ADVANTAGES_NEGATED = "advantages-negated"
    WEIGHTS_ONE = "weights-one"  # each sample of a rollout that forked counts as much as a whole rollout
    SAMPLE_LEFT_OUT = "sample-left-out"
    REPLY_TWICE = "reply-twice"  # a sample trains a second time, its last reply without the stop token
    UNDELIVERED = "undelivered"  # a reply trains that the agent never got


def spoiled(samples: Sequence[Sample], fault: Fault | None, versions: Sequence[str]) -> list[Sample]:
    """Samples with a fault in them; `versions` are the last two, or the only one."""
    match fault:
        case Fault.MASK_SHIFTED:
            return [_with_shifted_mask(sample) for sample in samples]
        case Fault.END_OF_TURN_DROPPED:
            return [_without_ends(sample) for sample in samples]
        case Fault.RETOKENIZED:
            return [_retokenized(samples[0]), *samples[1:]]
        case Fault.VERSIONS_SWAPPED:
            return [_with_swapped_versions(sample, versions) for sample in samples]
        case Fault.ADVANTAGES_MIXED:
            moved = [*samples[len(samples) // 2 :], *samples[: len(samples) // 2]]
            return [replace(one, advantage=other.advantage) for one, other in zip(samples, moved, strict=True)]
        case Fault.ADVANTAGES_NEGATED:
            return [replace(sample, advantage=-(sample.advantage or 0.0)) for sample in samples]
        case Fault.WEIGHTS_ONE:
            return [replace(sample, loss_weight=1.0) for sample in samples]
        case Fault.SAMPLE_LEFT_OUT:
            return list(samples[1:])
        case Fault.REPLY_TWICE:
            return [*samples, _without_ends(samples[0])]
        case _:
            return list(samples)


def spoiled_rollouts(rollouts: Sequence[Rollout], fault: Fault | None) -> list[Rollout]:
    """Rollouts as recorded; with the fault, the last reply of each did not reach its agent."""
    if fault is not Fault.UNDELIVERED:
        return list(rollouts)
    return [Rollout(one.head, [*map(_with_lost_end, one.sessions)], one.events, one.writer_alive) for one in rollouts]


def _with_lost_end(session: Session) -> Session:
    *before, last = session.turns
    lost = last.with_facts(replace(last.facts, delivery=Delivery.UNDELIVERED))
    return Session(session.head, [*before, lost], session.folder)


def spoiled_temperature(temperature: float, fault: Fault | None) -> float:
    """The temperature at which the trainer computes."""
    return 1.0 if fault is Fault.WRONG_TEMPERATURE else temperature


def _with_shifted_mask(sample: Sample) -> Sample:
    return replace(sample, trained_mask=np.concatenate([[False], sample.trained_mask[:-1]]))


def _without_ends(sample: Sample) -> Sample:
    mask = sample.trained_mask.copy()
    for span in sample.spans:
        if span.fate is Fate.TRAINED:
            mask[span.stop - 1] = False
    return replace(sample, trained_mask=mask)


def _retokenized(sample: Sample) -> Sample:
    """The first trained reply spelled letter by letter, its logprobs laid along the new ids."""
    tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    reply = next(span for span in sample.spans if span.fate is Fate.TRAINED)
    start, stop = reply.start, reply.stop - 1  # its end of turn stays
    letters = tokenizer.decode(sample.ids[start:stop].tolist())
    ids = [token for letter in letters for token in tokenizer.encode(letter, add_special_tokens=False)]

    def spliced(values: Any, fresh: Any) -> Any:
        return np.concatenate([values[:start], np.asarray(fresh, values.dtype), values[stop:]])

    return replace(
        sample,
        ids=spliced(sample.ids, ids),
        trained_mask=spliced(sample.trained_mask, [True] * len(ids)),
        sampled_mask=spliced(sample.sampled_mask, [True] * len(ids)),
        logprobs=spliced(sample.logprobs, np.resize(sample.logprobs[start:stop], len(ids))),
        version_index=spliced(sample.version_index, np.resize(sample.version_index[start:stop], len(ids))),
    )


def _with_swapped_versions(sample: Sample, versions: Sequence[str]) -> Sample:
    swapped = dict(zip(versions, versions[::-1], strict=True))
    names = tuple((swapped.get(first, first), swapped.get(last, last)) for first, last in sample.versions)
    return replace(sample, versions=names)
