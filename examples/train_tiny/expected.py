"""What must train, recomputed from raw turns and rewards alone.

This uses nothing of the code that makes samples. A reply trains once, whole, after exactly the prompt that it was
sampled on, if the agent got it and asked for it only once. Its advantage comes from the rewards of its group. Each
token counts as much as every other of its rollout, however many samples that became.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.records.rollout import Rollout
from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag

Array = npt.NDArray[Any]

_CLOSE = 1e-5


class TrainedRow(NamedTuple):
    """A row of a batch as the loss has it."""

    name: str  # for messages
    rollout: str
    ids: Array
    trained: Array
    logprobs: Array
    advantage: float
    weight: float


class Expected:
    """The replies of rollouts that must train. `see` takes each row of a batch, `problems` says what is wrong."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._advantages = _advantages(rollouts)
        self._turns = {one.id: one.turns for one in rollouts}
        self._times = {turn.id: 0 for one in rollouts for turn in one.turns}  # how often each trains
        self._must = {
            turn.id: turn
            for one in rollouts
            if self._advantages[one.id]
            for session in one.sessions
            for turn in session.turns
            if _must_train(turn, session.turns)
        }
        self._tokens = {
            one.id: sum(len(turn.sampled_ids) for turn in one.turns if turn.id in self._must) for one in rollouts
        }
        self._ranges: list[str] = []
        self._logprobs: list[str] = []
        self._credit: list[str] = []

    @property
    def tokens(self) -> int:
        """How many tokens must train."""
        return sum(self._tokens.values())

    @property
    def stopped_turns(self) -> int:
        """How many of the replies that must train ended on a stop token."""
        return sum(turn.facts.finish is Finish.STOP for turn in self._must.values())

    @property
    def stop_tokens(self) -> int:
        """How many of these stop tokens trained so far."""
        return sum(turn.facts.finish is Finish.STOP and self._times[name] > 0 for name, turn in self._must.items())

    def see(self, row: TrainedRow) -> None:
        """Find the replies that a row trains, and compare its advantage and its weight."""
        count = int(row.trained.sum())
        held, share = self._advantages[row.rollout], 1 / max(self._tokens[row.rollout], 1)
        if abs(row.advantage - held) > _CLOSE:
            self._credit.append(
                f"{row.name} has the advantage {row.advantage:.4f}, its group's rewards give {held:.4f}"
            )
        if abs(row.weight / max(count, 1) - share) > _CLOSE * share:
            weight = count * share
            self._credit.append(f"{row.name} has the weight {row.weight:.4f}, its share of the rollout is {weight:.4f}")
        for start, stop in _ranges(row.trained):
            self._see_range(row, start, stop)

    def _see_range(self, row: TrainedRow, start: int, stop: int) -> None:
        """Tick off the replies in a range of trained tokens; there are several if nothing stands between them."""
        while start < stop:
            turn = next((one for one in self._turns[row.rollout] if _stands_at(one, row.ids, start, stop)), None)
            if turn is None:
                self._ranges.append(
                    f"{row.name} trains tokens {start} to {stop}, which are no whole reply to its prompt"
                )
                return
            end = start + len(turn.sampled_ids)
            given = np.asarray(turn.logprobs, np.float32)
            if not np.array_equal(row.logprobs[start:end], given):
                self._logprobs.append(f"{row.name} has other logprobs than the engine gave for turn {turn.id}")
            self._times[turn.id] += 1
            start = end

    def problems(self) -> list[str]:
        """What is wrong, once all rows were seen: of each kind the first, and how many more there are."""
        trained = {name: times for name, times in self._times.items() if times}
        kinds = (
            self._ranges,
            [f"turn {name} trains, and must not" for name in trained if name not in self._must],
            [f"turn {name} trains {times} times" for name, times in trained.items() if times > 1],
            [f"turn {name} must train, and does not" for name in self._must if name not in trained],
            self._logprobs,
            self._credit,
        )
        return [kind[0] + (f" (and {len(kind) - 1} more)" if len(kind) > 1 else "") for kind in kinds if kind]


def _must_train(turn: Turn, session: Sequence[Turn]) -> bool:
    facts = turn.facts
    later = session[turn.sequence + 1 :]
    arrived = facts.delivery is Delivery.DELIVERED or any(_begins_with(one.prompt_ids, turn) for one in later)
    asked_again = any(np.array_equal(one.prompt_ids, turn.prompt_ids) for one in later)
    is_sound = not (facts.is_engine_fault or facts.is_constrained or TurnFlag.NOT_TOKEN_FAITHFUL in facts.flags)
    is_whole = facts.finish is not Finish.ABORT and facts.auxiliary is None and turn.logprobs is not None
    return arrived and is_sound and is_whole and not asked_again


def _begins_with(prompt: Array, turn: Turn) -> bool:
    """Whether a prompt holds a turn's prompt and reply."""
    whole = np.concatenate([turn.prompt_ids, turn.sampled_ids])
    return len(prompt) >= len(whole) and np.array_equal(prompt[: len(whole)], whole)


def _stands_at(turn: Turn, ids: Array, start: int, stop: int) -> bool:
    """Whether a reply stands at a place, after its own prompt."""
    end = start + len(turn.sampled_ids)
    return (
        start < end <= stop
        and len(turn.prompt_tokens) == start
        and np.array_equal(ids[start:end], turn.sampled_ids)
        and np.array_equal(ids[:start], turn.prompt_ids)
    )


def _ranges(flags: Array) -> Iterator[tuple[int, int]]:
    """The ranges in which flags are set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]]))).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _advantages(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Each rollout's distance from the mean reward of its group, in standard deviations."""
    groups: dict[str, list[Rollout]] = {}
    for one in rollouts:
        groups.setdefault(one.head.group, []).append(one)
    found: dict[str, float] = {}
    for members in groups.values():
        rewards = [one.reward for one in members if one.reward is not None]
        spread = statistics.pstdev(rewards) if rewards else 0.0
        for one in members:
            known = one.reward is not None and spread > 0
            found[one.id] = (one.reward - statistics.fmean(rewards)) / spread if known else 0.0  # type: ignore[operator]
    return found
