"""`PairedTest`: whether the tasks of two sides differ by more than chance, by the paired t-test and the sign test."""

import math

import msgspec
import numpy as np

from rolltape.records.wording import number, plural
from rolltape.view.run.rows import Array

METHOD = (
    "Paired t-test over tasks: of each task, its mean in B less its mean in A. It asks whether other tasks of this "
    "kind would differ the same way. The sign test counts tasks alone, and leaves out those that are the same."
)
_ALPHA = 0.05
_SAME = 1e-9  # means with a smaller difference count as the same
_FEW = 10  # tasks; with fewer, an interval is rough


class PairedTest(msgspec.Struct, frozen=True):
    """B minus A over tasks that both sides have. Fields are None if there are too few tasks, or all differ equally."""

    tasks: int
    a: float | None  # mean over tasks
    b: float | None
    difference: float | None
    low: float | None  # the 95% confidence interval of the difference
    high: float | None
    p: float | None
    higher: int  # tasks
    lower: int
    same: int
    sign_p: float | None
    verdict: str  # higher, lower, same, unclear, or unknown (too few tasks)

    def statement(self, what: str) -> str:
        """The result as a sentence; `what` is the measure, such as "mean reward"."""
        if not self.tasks:
            return f"No task has {_article(what)} on both sides, so nothing can be compared."
        if self.verdict == "same":
            which = "the one task" if self.tasks == 1 else f"each of the {plural(self.tasks, 'task')}"
            return f"No difference: the {what} of {which} is the same on both sides."
        found = {
            "higher": f"B has the higher {what}",
            "lower": f"B has the lower {what}",
            "unclear": f"No significant difference in {what}",
            "unknown": f"Too little to tell whether the {what} differs",
        }[self.verdict]
        assert self.difference is not None
        figures = f"{_signed(self.difference)} over {plural(self.tasks, 'task')}"
        if self.low is not None and self.high is not None and self.p is not None:
            figures += f", 95% interval {_signed(self.low)} to {_signed(self.high)}, p {_p_words(self.p)}"
        rough = " With so few tasks the interval is rough." if self.p is not None and self.tasks < _FEW else ""
        return f"{found}: {figures}.{rough}"


def is_same(differences: Array) -> Array:
    """Which differences count as zero."""
    return np.abs(differences) <= _SAME


def paired_test(a: Array, b: Array) -> PairedTest:
    """Compare the means of tasks, which are finite and in the same order."""
    tasks, differences = len(a), b - a
    same = is_same(differences)
    higher, lower = int((differences[~same] > 0).sum()), int((differences[~same] < 0).sum())
    mean = float(differences.mean()) if tasks else 0.0
    low = high = p = None
    if tasks > 1 and not is_same(differences - mean).all():
        error = float(differences.std(ddof=1)) / math.sqrt(tasks)
        p = _two_sided(mean / error, tasks - 1)
        reach = _critical(tasks - 1) * error
        low, high = mean - reach, mean + reach
    sign_p = _sign_test(higher, lower) if higher + lower else None
    return PairedTest(
        tasks=tasks,
        a=float(a.mean()) if tasks else None,
        b=float(b.mean()) if tasks else None,
        difference=mean if tasks else None,
        low=low,
        high=high,
        p=p,
        higher=higher,
        lower=lower,
        same=int(same.sum()),
        sign_p=sign_p,
        verdict=_verdict(tasks, higher + lower, sign_p if p is None else p, mean),
    )


def _verdict(tasks: int, differing: int, p: float | None, mean: float) -> str:
    if not differing:
        return "same" if tasks else "unknown"
    if p is None or tasks == 1:
        return "unknown"
    return "unclear" if p >= _ALPHA else "higher" if mean > 0 else "lower"


def _sign_test(higher: int, lower: int) -> float:
    """The probability of a result at least this uneven for a fair coin: exact, in logarithms for large counts."""
    tosses, fewer = higher + lower, min(higher, lower)
    steps = np.arange(1, fewer + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((tosses - steps + 1) / steps))]) - tosses * math.log(2)
    return min(1.0, 2 * float(np.exp(logs).sum()))


def _critical(freedom: int) -> float:
    """The t beyond which both tails together have the share _ALPHA, by bisection."""
    low, high = 0.0, 1.0
    while _two_sided(high, freedom) > _ALPHA:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, freedom) > _ALPHA else (low, middle)
    return high


def _two_sided(t: float, freedom: int) -> float:
    """The probability of a t at least this far from 0 under Student's distribution."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by its continued fraction."""
    if x <= 0 or x >= 1:
        return max(0.0, min(1.0, x))
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side
        return 1 - _incomplete_beta(1 - x, b, a)
    scale = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    tiny = 1e-300
    upper, lower = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    total = lower
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower = 1 / ((1 + term * lower) or tiny)
            upper = (1 + term / upper) or tiny
            total *= lower * upper
        if abs(lower * upper - 1) < 1e-14:
            break
    return scale * total


def _signed(difference: float) -> str:
    return f"{'+' if difference > 0 else ''}{number(difference)}"


def _p_words(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"


def _article(what: str) -> str:
    return f"an {what}" if what[:1] in "aeiou" else f"a {what}"
