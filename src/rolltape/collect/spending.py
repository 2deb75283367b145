"""What a collection spends, in tokens, money and time, and the limits at which it begins no more attempts."""

import math
import time
from collections.abc import Iterable, Sequence

import msgspec

from rolltape.collect.settings import CollectSettings
from rolltape.records.turn import Turn
from rolltape.tape.run import Run

_PRICED_TOKENS = 1_000_000


class Usage(msgspec.Struct, frozen=True):
    """Tokens that went through a model, and their cost."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float | None = 0.0  # None: there are no prices, and the endpoint does not report what all of it costs

    def __add__(self, other: "Usage") -> "Usage":
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Usage(self.prompt_tokens + other.prompt_tokens, self.sampled_tokens + other.sampled_tokens, cost)


def usage_of(turns: Iterable[Turn], settings: CollectSettings) -> Usage:
    """What turns took, by the prices in the settings, else by what the endpoint reports."""
    return sum((_turn_usage(turn, settings) for turn in turns), Usage())


def _turn_usage(turn: Turn, settings: CollectSettings) -> Usage:
    # A hosted endpoint counts its tokens itself; often there are no ids.
    reported = turn.facts.extra.get("upstream", {}).get("usage", {})
    prompt_tokens = reported.get("prompt_tokens", len(turn.prompt_tokens))
    sampled_tokens = reported.get("completion_tokens", len(turn.sampled_ids))
    if settings.price_in is not None and settings.price_out is not None:
        cost = (prompt_tokens * settings.price_in + sampled_tokens * settings.price_out) / _PRICED_TOKENS
        return Usage(prompt_tokens, sampled_tokens, cost)
    return Usage(prompt_tokens, sampled_tokens, _as_cost(reported.get("cost")))


def _as_cost(reported: object) -> float | None:
    is_cost = isinstance(reported, int | float) and math.isfinite(reported) and reported >= 0
    return float(reported) if is_cost else None  # type: ignore[arg-type]


def load_usage(run: Run, source: str, settings: CollectSettings) -> Usage:
    """What a run's rollouts of a source at a step took, all tries and statuses included. Reads their turns.

    It is nothing where neither tokens nor cost are limited.
    """
    if settings.max_sampled_tokens is None and settings.max_cost is None:
        return Usage()
    with run.snapshot() as held:
        keys = [row.key for row in held.index() if (row.step, row.source) == (settings.step, source)]
        return sum((usage_of(held.rollout(*key).turns, settings) for key in keys), Usage())


def has_limit(settings: CollectSettings) -> bool:
    """Whether tokens, cost or time are limited."""
    return any(one is not None for one in (settings.max_sampled_tokens, settings.max_cost, settings.max_time_s))


class SpendingLimit:
    """Counts what a collection has spent against its limits: with earlier processes, but for the time."""

    def __init__(self, settings: CollectSettings, earlier: Usage) -> None:
        self._settings = settings
        self._spent = earlier
        self._began = time.monotonic()

    def add(self, usages: Sequence[Usage]) -> None:
        """Count what rollouts took that have ended."""
        self._spent = sum(usages, self._spent)

    def explain(self) -> str | None:
        """Why no more attempts may begin; None: they may."""
        spent, tokens, cost = self._spent, self._settings.max_sampled_tokens, self._settings.max_cost
        if tokens is not None and spent.sampled_tokens >= tokens:
            return f"{spent.sampled_tokens:,} tokens were sampled, and --max-sampled-tokens is {tokens:,}"
        limit_s = self._settings.max_time_s
        if limit_s is not None and time.monotonic() - self._began >= limit_s:
            return f"{limit_s:g} s have passed, which is --max-time"
        if cost is None:
            return None
        if spent.cost is None:
            return "--max-cost is set, and the endpoint does not report what a turn costs; give --price-in, --price-out"
        return f"the cost is {spent.cost:.6g}, and --max-cost is {cost:g}" if spent.cost >= cost else None
