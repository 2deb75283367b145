"""Sampling parameters in engines' HTTP requests, and their results as arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.request import SamplingParams
from rolltape.records.turn import NO_IDS, Finish, Ids, Turn

# For parameters that are not set. All are always sent, so that the applied values are known: engines' own defaults are
# not neutral (vLLM takes the model's generation_config, llama.cpp has top_k 40 and min_p 0.05).
_NEUTRAL = SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)

_MAX_ID = 2**31 - 1

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}  # finish reasons of SGLang and vLLM


def parse_finish(reason: str | None, known: Mapping[str, Finish], where: str) -> Finish:
    """The finish for an engine's finish reason; raises EngineFault for an unknown one."""
    finish = known.get(reason or "")
    if finish is None:
        raise EngineFault(f"{where}: it ended for the reason {reason!r}; known are {', '.join(known)}")
    return finish


def sampling_fields(sampling: SamplingParams, **names: str) -> dict[str, Any]:
    """All sampling parameters for a request's body; `names` has the engine's own names of parameters."""
    given = sampling.over(_NEUTRAL).to_dict()
    return {names.get(name, name): value for name, value in given.items() if value != []}


def truncates(sampling: SamplingParams) -> bool:
    """Whether top-p, top-k or min-p exclude ids from sampling."""
    applied = sampling.over(_NEUTRAL)
    return applied.top_p != 1 or (applied.top_k or -1) > 0 or bool(applied.min_p)


def sampled_ids(ids: Sequence[int], where: str) -> Ids:
    """Ids as an array; raises EngineFault for an id that no vocabulary has."""
    if not ids:
        return NO_IDS
    if min(ids) < 0 or max(ids) > _MAX_ID:
        at = next(at for at, token in enumerate(ids) if not 0 <= token <= _MAX_ID)
        raise EngineFault(f"{where}: sampled id {at} is {ids[at]}, which is outside every vocabulary")
    array: Ids = np.array(ids, dtype=np.int32)
    array.setflags(write=False)
    return array


def sampled_logprobs(logprobs: Sequence[float | None], ids: Ids, where: str) -> npt.NDArray[np.float64]:
    """One logprob per id, NaN where the engine returned none; raises EngineFault if the counts differ."""
    if len(logprobs) != len(ids):
        raise EngineFault(f"{where}: {len(ids)} sampled ids but {len(logprobs)} logprobs")
    array = np.array(logprobs, dtype=np.float64)  # None becomes NaN
    odd = np.isinf(array)
    if odd.any():
        at = int(odd.argmax())
        raise EngineFault(f"{where}: the logprob of sampled id {at} is {array[at]:g}, but a logprob is a finite number")
    array.setflags(write=False)
    return array


def top_side_arrays(
    tops: Sequence[Sequence[tuple[int, float | None]]], ids: Ids, wanted: Generation, where: str
) -> dict[str, Any]:
    """The most likely ids at each place, best first, with their logprobs. Missing entries are -1 and NaN.

    Raises EngineFault for an id that no vocabulary has. The names contain the count, since the rows of a side array
    have the same length in all turns.
    """
    count = wanted.top_logprobs
    if not count:
        return {}
    if len(tops) != len(ids):
        raise EngineFault(f"{where}: {len(ids)} sampled ids but {len(tops)} lists of the most likely ones")
    top_ids = np.full((len(ids), count), -1, np.int32)
    logprobs = np.full((len(ids), count), np.nan)
    for at, top in enumerate(tops):
        for place, (token, logprob) in enumerate(top[:count]):
            if not 0 <= token <= _MAX_ID:
                raise EngineFault(f"{where}: {token} is listed as likely at sampled id {at}, but is not an id")
            top_ids[at, place], logprobs[at, place] = token, np.nan if logprob is None else logprob
    start = len(wanted.prompt_ids)
    return {
        f"top_{count}_ids": {"start": start, "values": top_ids},
        f"top_{count}_logprobs": {"start": start, "values": logprobs},
    }


def sampled_tops(turn: Turn, count: int) -> list[list[tuple[int, float]]]:
    """The most likely ids that a turn recorded for each sampled one; empty lists if it has none."""
    tops: list[list[tuple[int, float]]] = [[] for _ in turn.sampled_ids]
    ids, logprobs = turn.side.get(f"top_{count}_ids"), turn.side.get(f"top_{count}_logprobs")
    if ids is None or logprobs is None:
        return tops
    first = ids.start - (len(turn.tokens) - len(tops))
    for at, (row, values) in enumerate(zip(ids.values.tolist(), logprobs.values.tolist(), strict=True)):
        tops[first + at] = [(token, value) for token, value in zip(row, values, strict=True) if token >= 0]
    return tops
