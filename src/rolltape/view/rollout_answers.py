"""The answers about single rollouts and groups of them. Each gives back the work to be done, for a thread to do."""

import sqlite3
import threading
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import DamagedTapeError, NoAnswer
from rolltape.records.policy import PRESETS, Credit, CutPolicy
from rolltape.records.rollout import Outcome, Rollout, RolloutHead, Status
from rolltape.samples import advantages_of
from rolltape.samples.compare import compare
from rolltape.samples.spelling import Spellings
from rolltape.tape.index.search import distinct_messages
from rolltape.tape.stored import Key, Problem
from rolltape.view.answers import plain
from rolltape.view.branch import branch_tokens
from rolltape.view.comparing import comparison_of
from rolltape.view.detail import detail_of, linearized
from rolltape.view.grouping import group_of
from rolltape.view.listing import Listing
from rolltape.view.masking import Mask
from rolltape.view.raw import raw_of
from rolltape.view.rows import STATUSES
from rolltape.view.service import RunAnswers, Work
from rolltape.view.tokens import sample_tokens, turn_tokens
from rolltape.view.watching import WatchedRun

_ROLLOUTS_HELD = 4
_MOST_IN_A_GROUP = 256


class _Attempt(msgspec.Struct, frozen=True):
    """A row as advantages are computed from it."""

    head: RolloutHead
    outcome: Outcome


class RolloutAnswers(RunAnswers):
    """What can be asked of a run and of its rollouts."""

    def __init__(self, run: WatchedRun) -> None:
        super().__init__(run)
        self._spellings = Spellings(run.location)
        self._lock = threading.Lock()  # around loading, and what was loaded last
        self._held: dict[tuple[int, int], Rollout] = {}
        self._missing: dict[Key, list[str]] = {}  # of rollouts that were loaded: what of them cannot be read

    def rollout(self, row: int, policy: str | None) -> Work:
        """All about a rollout."""
        load, chosen = self._loading(row), policy_of(policy)
        versions, advantage = self.listing().versions, self._advantage(row)
        shown, tries = self.listing().row(row), sorted(self.tries(self.run.state.rows.ids[row]))

        def work() -> dict[str, Any]:
            rollout = load()
            made = linearized(rollout, chosen, versions)
            detail = detail_of(rollout, made, advantage, self._spellings)
            return {"row": shown, **detail, "tries": tries, "problems": self._missing.get(rollout.key, [])}

        return work

    def raw(self, row: int) -> Work:
        load = self._loading(row)
        return lambda: raw_of(load())

    def said(self, row: int) -> Work:
        """All texts of a rollout: what it was given, what was said in it, and what of it."""
        load = self._loading(row)

        def work() -> list[Any]:
            rollout = load()
            messages = [message.to_dict() for message in distinct_messages(rollout)]
            return [plain(rollout.head), *messages, *map(plain, rollout.events)]

        return work

    def message(self, row: int, digest: str) -> Work:
        """A whole message by its digest."""
        load = self._loading(row)

        def work() -> dict[str, Any]:
            for message in distinct_messages(load()):
                if message.digest.hex() == digest:
                    return {"message": message.to_dict()}
            raise NoAnswer(f"the rollout has no message {digest[:64]!r}", 404)

        return work

    def tokens(
        self, row: int, index: int, policy: str | None, *, record: str | None = None, mask: Mask | None = None
    ) -> Work:
        """A sample's tokens, packed, with what the trainer's record at a place says of them, else its latest."""
        load, chosen = self._loading(row), policy_of(policy)
        versions, advantage = self.listing().versions, self._advantage(row)

        def work() -> bytes:
            rollout = load()
            made = linearized(rollout, chosen, versions)
            if index >= len(made):
                raise NoAnswer(f"the rollout has {len(made)} samples under {chosen.name}, and no sample {index}", 404)
            sample = made.sample(index, advantage)
            session = next(one for one in rollout.sessions if one.id == sample.session)
            records = self.run.records
            exported = None if records is None else records.of(sample, record)
            if exported is None and record:
                raise NoAnswer(f"no trainer's record {record[:40]!r} is of sample {index}", 404)
            return sample_tokens(sample, session, self._spellings.of(session), exported, mask)

        return work

    def turn_tokens(self, row: int, turn: str) -> Work:
        """A turn's tokens, prompt and reply, packed."""
        load, chosen, versions = self._loading(row), policy_of(None), self.listing().versions

        def work() -> bytes:
            rollout = load()
            branch = branch_tokens(linearized(rollout, chosen, versions), turn)
            if branch is None:
                raise NoAnswer(f"the rollout has no turn {turn[:64]!r}", 404)
            session = next(one for one in rollout.sessions if turn.startswith(f"{one.id}."))
            return turn_tokens(branch, session, self._spellings.of(session))

        return work

    def compare(self, row: int, left: str | None, right: str | None) -> Work:
        load, one, other = self._loading(row), policy_of(left or "exact"), policy_of(right or "keep-head")
        versions, advantage = self.listing().versions, self._advantage(row)

        def work() -> dict[str, Any]:
            rollout = load()
            running = rollout.status is Status.RUNNING
            return comparison_of(compare(rollout, one, other, versions=versions, as_if_finished=running), advantage)

        return work

    def group(self, group: str, only: Collection[int] | None = None) -> Work:
        """The attempts at one task, or those in some rows; of each rollout the try that counts."""
        rows = self.run.state.rows
        code = rows.texts["group"].known(group)
        members = np.flatnonzero(rows.columns["group"] == code).tolist() if code > 0 else []
        if not members:
            raise NoAnswer(f"run {self.run.title} holds no group {group[:64]!r}", 404)
        tries: dict[str, dict[int, int]] = {}
        for row in members if only is None else [one for one in members if one in only]:
            rollout, try_index = rows.key(row)
            tries.setdefault(rollout, {})[try_index] = row
        counted = [row for row in map(self.counted, tries.values()) if row is not None]
        chosen = sorted(counted, key=lambda row: (rows.get("attempt", row), row))[:_MOST_IN_A_GROUP]
        listing = self.listing()
        attempts = [(listing.row(row), self._loading(row)) for row in chosen]
        left_out = len(counted) - len(chosen)
        return lambda: group_of(group, [(row, load()) for row, load in attempts]) | {"left_out": left_out}

    def _loading(self, row: int) -> Callable[[], Rollout]:
        """Loads a rollout as it is known now."""
        rows = self.run.state.rows
        key, held_as = rows.key(row), (row, rows.get("changed", row))

        def load() -> Rollout:
            with self._lock:
                if held_as not in self._held:
                    rollout, problems = self._loaded(key)
                    self._missing[key] = list(map(str, problems))
                    while len(self._held) >= _ROLLOUTS_HELD:
                        del self._held[next(iter(self._held))]
                    self._held[held_as] = rollout
                return self._held[held_as]

        return load

    def _loaded(self, key: Key) -> tuple[Rollout, list[Problem]]:
        index = self.run.index
        try:
            try:
                return index.load_with_problems(key)
            except DamagedTapeError:
                index.advance()  # it may have been moved
                return index.load_with_problems(key)
        except (OSError, sqlite3.Error) as error:
            raise DamagedTapeError(f"rollout {key[0]}: {error}") from error

    def _advantage(self, row: int) -> float | None:
        """A rollout's advantage in its group; of each rollout of the group the try that counts."""
        state, listing = self.run.state, self.listing()
        rows = state.rows
        members = np.flatnonzero(rows.columns["group"] == rows.get("group", row)).tolist()
        attempts = [self._attempt(listing, member) for member in members]
        return advantages_of(attempts, Credit().advantage).get(rows.key(row))

    def _attempt(self, listing: Listing, row: int) -> _Attempt:
        rollout, try_index = self.run.state.rows.key(row)
        reward = float(listing.rewards[row]) if listing.has_reward[row] else None
        head = RolloutHead(id=rollout, try_index=try_index, group="", run="", step=0, attempt=0, started_at_ns=0)
        return _Attempt(head, Outcome(status=STATUSES[listing.statuses[row]], reward=reward))


def policy_of(name: str | None) -> CutPolicy:
    """A preset by name."""
    if (name or "exact") not in PRESETS:
        raise NoAnswer(f"policy is {str(name)[:40]!r}; give {', '.join(PRESETS)}")
    return PRESETS[name or "exact"]
