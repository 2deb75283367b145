"""Sampling parameters as engines take them, and checks of what engines return."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.gateway.request import SamplingParams
from rolltape.records.plausible import implausibility
from rolltape.records.turn import NO_IDS, Finish, Ids, Turn

# What nobody decided. It is always sent: engines' own defaults are not neutral (vLLM takes the model's
# generation_config, llama.cpp has top_k 40 and min_p 0.05), and then nobody would know what was applied.
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

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}  # in SGLang's and vLLM's words


def parse_finish(reason: str | None, known: Mapping[str, Finish], where: str) -> Finish:
    """The finish that an engine's word stands for; EngineFault for any other word."""
    finish = known.get(reason or "")
    if finish is None:
        raise EngineFault(f"{where}: it ended for the reason {reason!r}; known are {', '.join(known)}")
    return finish


def sampling_fields(sampling: SamplingParams, **names: str) -> dict[str, Any]:
    """All sampling parameters for a request's body; `names`: what the engine calls them where it has its own word."""
    given = sampling.over(_NEUTRAL).to_dict()
    return {names.get(name, name): value for name, value in given.items() if value != []}


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
    odd = np.isinf(array)
    if odd.any():
        at = int(odd.argmax())
        raise EngineFault(f"{where}: the logprob of sampled id {at} is {array[at]:g}, which is none")
    array.setflags(write=False)
    return array


def top_side_arrays(
    tops: Sequence[Sequence[tuple[int, float | None]]], ids: Ids, wanted: Generation, where: str
) -> dict[str, Any]:
    """The most likely ids at each place, best first, with their logprobs. A place with fewer has -1 and NaN.

    The names have their number, since rows of a side array have one length in all turns.
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
            top_ids[at, place], logprobs[at, place] = token, np.nan if logprob is None else logprob
    start = len(wanted.prompt_ids)
    return {
        f"top_{count}_ids": {"start": start, "values": top_ids},
        f"top_{count}_logprobs": {"start": start, "values": logprobs},
    }


def sampled_tops(turn: Turn, count: int) -> list[list[tuple[int, float]]]:
    """What a turn has of those, for each of its sampled ids; nothing where it has none."""
    tops: list[list[tuple[int, float]]] = [[] for _ in turn.sampled_ids]
    ids, logprobs = turn.side.get(f"top_{count}_ids"), turn.side.get(f"top_{count}_logprobs")
    if ids is None or logprobs is None:
        return tops
    first = ids.start - (len(turn.tokens) - len(tops))
    for at, (row, values) in enumerate(zip(ids.values.tolist(), logprobs.values.tolist(), strict=True)):
        tops[first + at] = [(token, value) for token, value in zip(row, values, strict=True) if token >= 0]
    return tops


class Telling:
    """Passes sampled ids on to `on_sampled` as they come, up to the first that cannot have been sampled.

    What follows such an id is not passed on either. `check_generated` states the fault when the reply has ended.
    """

    def __init__(self, wanted: Generation) -> None:
        assert wanted.sampling.max_tokens is not None
        self._on_sampled = wanted.on_sampled
        self._stop_ids = frozenset(wanted.stop_ids)
        self._vocabulary = _MAX_ID + 1 if wanted.vocabulary is None else wanted.vocabulary
        self.limit = wanted.sampling.max_tokens
        self._left = self.limit  # that may still be passed on

    def add(self, ids: Sequence[int]) -> None:
        """Pass on what came together, in one call."""
        if self._on_sampled is None or not self._left:
            return
        ids = ids[: self._left]
        end = next((at for at, token in enumerate(ids) if not 0 <= token < self._vocabulary), None)
        stop = next((at + 1 for at, token in enumerate(ids[:end]) if token in self._stop_ids), None)
        plausible = ids[: end if stop is None else stop]
        self._left = self._left - len(ids) if end is None and stop is None else 0
        if plausible:
            self._on_sampled(sampled_ids(plausible, "passed on"))


class ImplausibleReply(EngineFault):
    """An engine gave what it cannot have sampled: `given`."""

    def __init__(self, message: str, given: Generated) -> None:
        super().__init__(message)
        self.given = given


def check_generated(engine: Engine, wanted: Generation, generated: Generated) -> None:
    """Raise EngineFault where the parts of a reply do not belong together, or cannot have been sampled."""
    count, logprobs, segments = len(generated.ids), generated.logprobs, generated.segments
    where = f"{engine.name}, generation {wanted.id}"
    if logprobs is not None and len(logprobs) != count:
        raise EngineFault(f"{where}: {count} sampled ids but {len(logprobs)} logprobs")
    if segments and segments[-1].stop != count:
        raise EngineFault(f"{where}: {count} sampled ids but segments of {segments[-1].stop}")
    sampling, stop_ids = {"max_tokens": wanted.sampling.max_tokens}, wanted.stop_ids
    why = implausibility(generated.ids, logprobs, sampling, vocabulary=wanted.vocabulary, stop_ids=stop_ids)
    if why is not None:
        hint = "it cannot have been sampled so; see that the engine serves the model whose folder was given"
        raise ImplausibleReply(f"{where}: {why}; {hint}", generated)


def describe_generated(engine: Engine, wanted: Generation, generated: Generated) -> str:
    """Which of the things that training needs an engine gave, in a line for the log."""
    if not engine.token_faithful:
        return f"{engine.name}: text only, no ids and no logprobs; nothing of it can be trained"
    ids, logprobs, version = generated.ids, generated.logprobs, generated.last_version
    parts = [f"{engine.name}: ids", "NO logprobs"]
    if logprobs is not None:
        kind = generated.logprob_kind
        parts[-1] = f"logprobs {'of unknown kind' if kind is None else kind.value.replace('_', ' ')}"
        if missing := int(np.isnan(logprobs).sum()):
            parts.append(f"MISSING for {missing}")
    if generated.finish is not Finish.STOP:
        parts.append("the stop id not seen yet")
    else:
        parts.append("the stop id kept" if len(ids) and int(ids[-1]) in wanted.stop_ids else "the stop id TRIMMED")
    parts.append("no weight version" if version is None else f"weight version {version}")
    return ", ".join([*parts, *generated.side_arrays])
