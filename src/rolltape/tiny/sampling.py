"""Sampling parameters of a request, and the choice of a token from its logits."""

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import SamplingError
from rolltape.tiny.checkpoint import Floats

MAX_SEED = 2**64 - 1


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request; checked when made."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int | None = None  # None for all
    seed: int | None = None  # None for a random one
    max_tokens: int = 128
    stop_ids: tuple[int, ...] | None = None  # None for those of the checkpoint; () for none
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int = 0  # how many of the most likely ids are reported at each place
    prompt_logprobs_from: int | None = None  # report the prompt's logprobs from this place on
    kept_ids: bool = False  # report the ids that top-k and top-p kept at each place

    def __post_init__(self) -> None:
        wrong = {
            f"temperature {self.temperature}: 0 or more": not (0 <= self.temperature < math.inf),
            f"top_p {self.top_p}: above 0, at most 1": not 0 < self.top_p <= 1,
            f"top_k {self.top_k}: 1 or more, or none": self.top_k is not None and self.top_k < 1,
            f"seed {self.seed}: 0 to 2**64 - 1": self.seed is not None and not 0 <= self.seed <= MAX_SEED,
            f"max_tokens {self.max_tokens}: 0 or more": self.max_tokens < 0,
            f"top_logprobs {self.top_logprobs}: 0 or more": self.top_logprobs < 0,
            f"prompt_logprobs_from {self.prompt_logprobs_from}: 0 or more": (self.prompt_logprobs_from or 0) < 0,
            "stop_strings: an empty one would match everywhere": "" in self.stop_strings,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise SamplingError(what)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def divisor(self) -> float:
        """The divisor of logits; a greedy request's logprobs are those at temperature 1."""
        return 1.0 if self.greedy else self.temperature


class Draws:
    """One uniform number per position, which depends only on seed and position.

    Positions count from the beginning of the prompt, so an interrupted reply that continues from prompt plus partial
    output uses the same numbers.
    """

    def __init__(self, seed: int, position: int) -> None:
        # A counter of Philox yields four numbers.
        self._generator = np.random.Generator(np.random.Philox(key=seed, counter=position // 4))
        self._generator.random(position % 4)
        self._ready: list[float] = []

    def next(self) -> float:
        if not self._ready:
            self._ready = self._generator.random(32)[::-1].tolist()
        return self._ready.pop()


class TopLogprob(NamedTuple):
    """One of the most likely ids at a place."""

    id: int
    raw: float
    tempered: float


class KeptIds(NamedTuple):
    """The ids that top-k and top-p kept at a place, of which one was sampled."""

    ids: tuple[int, ...]
    log_share: float  # of their joint probability, after temperature; 0 for greedy sampling


class SampledToken(NamedTuple):
    """A sampled id with its logprob before and after the temperature, and the most likely ids if requested."""

    id: int
    raw: float
    tempered: float
    top: tuple[TopLogprob, ...]
    kept: KeptIds | None = None  # None if not requested, or if no id was excluded


class Softmax:
    """Logits as probabilities, row by row; a row's bits do not depend on other rows."""

    def __init__(self, logits: Floats) -> None:
        self._logits = logits
        self._top: Floats = logits.max(axis=-1, keepdims=True)
        self.weights: Floats = logits - self._top  # proportional to the probabilities
        np.exp(self.weights, out=self.weights)
        self._log_total: Floats = np.log(self.weights.sum(axis=-1, keepdims=True))

    def is_finite(self, row: int) -> bool:
        return math.isfinite(self._log_total[row, 0])

    def logprob(self, row: int, token: int) -> float:
        return float(self._logits[row, token] - self._top[row, 0] - self._log_total[row, 0])

    def logprobs(self, row: int) -> Floats:
        """The logprobs of all ids."""
        logprobs: Floats = self._logits[row] - self._top[row] - self._log_total[row]
        return logprobs

    def kept_ids(self, row: int, ids: npt.NDArray[np.intp]) -> KeptIds:
        """These ids, with their joint probability."""
        log_share = math.log(self.weights[row, ids].sum(dtype=np.float64)) - float(self._log_total[row, 0])
        return KeptIds(tuple(ids.tolist()), log_share)


def choose(logits: Floats, samplings: list[Sampling], draws: list[Draws]) -> list[SampledToken | None]:
    """Sample one id per row, each with its own parameters; None for rows with logits that are not finite."""
    divisors = [sampling.divisor for sampling in samplings]
    with np.errstate(invalid="ignore"):
        raw = tempered = Softmax(logits)
        if any(divisor != 1 for divisor in divisors):
            tempered = Softmax(logits / np.array(divisors, dtype=np.float32)[:, None])
    choices: list[SampledToken | None] = []
    for row, sampling in enumerate(samplings):
        if not raw.is_finite(row):
            choices.append(None)
            continue
        left: KeptIds | None
        if sampling.greedy:
            token = int(logits[row].argmax())
            left = KeptIds((token,), 0.0)
        else:
            ids = kept(tempered.weights[row], sampling)
            token = pick(tempered.weights[row], ids, draws[row].next())
            left = None if ids is None or not sampling.kept_ids else tempered.kept_ids(row, ids)
        count = sampling.top_logprobs
        top = most_likely(raw.logprobs(row), tempered.logprobs(row), count) if count else ()
        reported = left if sampling.kept_ids else None
        choices.append(SampledToken(token, raw.logprob(row, token), tempered.logprob(row, token), top, reported))
    return choices


def pick(weights: npt.NDArray[np.floating[Any]], ids: npt.NDArray[np.intp] | None, uniform: float) -> int:
    """The id for a uniform number, by the weights of the ids that may be sampled; None for all ids."""
    heights = np.cumsum(weights if ids is None else weights[ids], dtype=np.float64)
    # Rounding may put the product on the last height; then it means the last id with a weight.
    place = int(heights.searchsorted(uniform * heights[-1], side="right"))
    if place == len(heights):
        place = int(heights.searchsorted(heights[-1], side="left"))
    return place if ids is None else int(ids[place])


def kept(weights: npt.NDArray[np.floating[Any]], sampling: Sampling) -> npt.NDArray[np.intp] | None:
    """The ids that may be sampled, ascending, or None for all.

    First top-k, with all ties of the k-th id; then, of these, the fewest ids whose share reaches top-p.
    """
    ids: npt.NDArray[np.intp] | None = None
    if sampling.top_k is not None and sampling.top_k < len(weights):
        smallest = np.partition(weights, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(weights >= smallest)
    if sampling.top_p < 1:
        weights = weights if ids is None else weights[ids]
        total = weights.sum(dtype=np.float64)
        # Ids with less weight are not needed, even all together; most of the time is saved by not sorting them.
        heavy = np.flatnonzero(weights > (1 - sampling.top_p) * total / len(weights) * 0.999)
        order = heavy[np.argsort(-weights[heavy], kind="stable")]
        count = int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), sampling.top_p * total)) + 1
        nucleus = np.sort(order[:count])
        ids = nucleus if ids is None else ids[nucleus]
    return ids


def most_likely(raw: Floats, tempered: Floats, count: int) -> tuple[TopLogprob, ...]:
    """The most likely ids, best first."""
    count = min(count, len(raw))
    ids = np.argpartition(-raw, count - 1)[:count]
    ids = ids[np.lexsort((ids, -raw[ids]))]
    return tuple(TopLogprob(int(token), float(raw[token]), float(tempered[token])) for token in ids)
