"""Check an engine's answer: valid ids, valid logprobs, one logprob per id."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.exchange import SamplingParams
from rolltape.records.tokens import NO_IDS, Ids

# What nobody decided. It is always sent: engines' own defaults are not neutral (vLLM takes the model's
# generation_config, llama.cpp has top_k 40 and min_p 0.05), and then nobody would know what was applied.
NEUTRAL = SamplingParams(
    temperature=1.0,
    top_p=1.0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)

_MAX_ID = 2**31 - 1
# The softmax of an engine in half precision may overshoot a little.
_LARGEST_LOGPROB = 0.01


def sampled_ids(ids: Sequence[int], where: str) -> Ids:
    """Ids as an array; EngineFault for what no vocabulary has."""
    if not ids:
        return NO_IDS
    if min(ids) < 0 or max(ids) > _MAX_ID:
        at = next(at for at, token in enumerate(ids) if not 0 <= token <= _MAX_ID)
        raise EngineFault(f"{where}: sampled id {at} is {ids[at]}, which no vocabulary has")
    array: Ids = np.array(ids, dtype=np.int32)
    array.setflags(write=False)
    return array


def sampled_logprobs(logprobs: Sequence[float | None], ids: Ids, where: str) -> npt.NDArray[np.float64]:
    """One logprob per id, NaN where the engine gave none; EngineFault where they do not belong together."""
    if len(logprobs) != len(ids):
        raise EngineFault(f"{where}: {len(ids)} sampled ids but {len(logprobs)} logprobs")
    array = np.array(logprobs, dtype=np.float64)  # None becomes NaN
    odd = (array > _LARGEST_LOGPROB) | np.isinf(array)
    if odd.any():
        at = int(odd.argmax())
        raise EngineFault(f"{where}: the logprob of sampled id {at} is {array[at]:g}, which is none")
    array.setflags(write=False)
    return array
