"""Five ways to get it wrong, as trainers do: each makes a run with `--fault` end red, or the proof proves nothing."""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from transformers import AutoTokenizer

from rolltape.records.sample import Fate, Sample
from rolltape.tiny import shipped_model


class Fault(enum.StrEnum):
    """What is done to the samples of a step, or to the trainer, before the first update."""

    MASK_SHIFTED = "mask-shifted"  # by one to the right
    END_OF_TURN_DROPPED = "end-of-turn-dropped"  # replies train without their last token
    RETOKENIZED = "retokenized"  # one reply is spelled with other ids
    WRONG_TEMPERATURE = "wrong-temperature"  # the trainer computes logprobs at temperature 1
    VERSIONS_SWAPPED = "versions-swapped"  # tokens name the version before the one that sampled them, and vice versa


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
        case _:
            return list(samples)


def spoiled_temperature(temperature: float, fault: Fault | None) -> float:
    """The temperature at which the trainer computes."""
    return 1.0 if fault is Fault.WRONG_TEMPERATURE else temperature


def _with_shifted_mask(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, trained_mask=np.concatenate([[False], sample.trained_mask[:-1]]))


def _without_ends(sample: Sample) -> Sample:
    mask = sample.trained_mask.copy()
    for span in sample.spans:
        if span.fate is Fate.TRAINED:
            mask[span.stop - 1] = False
    return msgspec.structs.replace(sample, trained_mask=mask)


def _retokenized(sample: Sample) -> Sample:
    """The first trained reply spelled letter by letter, its logprobs laid along the new ids."""
    tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    reply = next(span for span in sample.spans if span.fate is Fate.TRAINED)
    start, stop = reply.start, reply.stop - 1  # its end of turn stays
    letters = tokenizer.decode(sample.ids[start:stop].tolist())
    ids = [token for letter in letters for token in tokenizer.encode(letter, add_special_tokens=False)]

    def spliced(values: Any, fresh: Any) -> Any:
        return np.concatenate([values[:start], np.asarray(fresh, values.dtype), values[stop:]])

    return msgspec.structs.replace(
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
    return msgspec.structs.replace(sample, versions=names)
