"""`RolloutAnswers`: finds and loads the rollouts that answers are about, and answers about groups of them."""

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from rolltape.errors import DamagedTapeError, NoAnswer
from rolltape.records.policy import Credit
from rolltape.samples import group_advantages
from rolltape.samples.spelling import Spellings
from rolltape.tape.stored import Key
from rolltape.view.rollout.grouping import build_group, read_conversation, render_conversation
from rolltape.view.rollout.shown_rollout import LoadedRollout, ShownRollout
from rolltape.view.run.overview import describe_rewards
from rolltape.view.run.run_answers import RunAnswers, Work
from rolltape.view.served_runs import ServedRun

_ROLLOUTS_HELD = 4
_MOST_IN_A_GROUP = 256


class RolloutAnswers(RunAnswers):
    """Answers about a run and its rollouts."""

    def __init__(self, run: ServedRun) -> None:
        super().__init__(run)
        self._spellings = Spellings()
        self._lock = threading.Lock()  # for loading, and for the cached rollouts
        self._held: dict[tuple[int, int], LoadedRollout] = {}

    def shown(self, row: int) -> ShownRollout:
        """The rollout in a row of the table as it was last read."""
        listing, rows = self.held_listing(), self.run.state.rows
        return ShownRollout(
            run=self.run,
            row=listing.row(row),
            tries=sorted(rows.tries(rows.ids[row])),
            advantage=self._advantage(row),
            versions=listing.versions,
            spellings=self._spellings,
            load=self._loader(row),
        )

    def group(self, group: str, only: Collection[int] | None = None) -> Work:
        """The attempts at one task, or only those in some rows; for each rollout the try that counts.

        The number of attempts and their rewards are those of the whole group.
        """
        listing, rows = self.listing(), self.run.state.rows
        group = self._group_named(group)
        members = np.flatnonzero(rows.columns["group"] == rows.texts["group"].known(group)).tolist()
        counted = self._counted_tries(members)
        shown = counted if only is None else self._counted_tries(one for one in members if one in only)
        shown = sorted(shown, key=lambda row: (rows.get("attempt", row), row))[:_MOST_IN_A_GROUP]
        attempts = [(listing.row(row), self._loader(row)) for row in shown]
        whole = {"attempts": len(counted), "reward": describe_rewards(listing.rewards[counted])}
        return lambda: build_group(group, [(row, load().rollout) for row, load in attempts]) | whole

    def conversation(self, row: int) -> Work:
        """A rollout's row with its messages, and the rows of all attempts at its task; from the table as last read."""
        listing, rows, load = self.held_listing(), self.run.state.rows, self._loader(row)
        columns = rows.columns
        same = columns["group"] == columns["group"][row]
        if columns["task"][row]:
            same |= (columns["task"] == columns["task"][row]) & (columns["source"] == columns["source"][row])
        members = sorted(self._counted_tries(np.flatnonzero(same).tolist()), key=lambda one: rows.get("attempt", one))
        members.sort(key=lambda one: (rows.get("step", one) != rows.get("step", row), rows.get("step", one)))
        attempts = [listing.row(one) for one in members[:_MOST_IN_A_GROUP]]
        shown = {"r": self.run.name, "run": self.run.title, **listing.row(row)}

        def work() -> dict[str, Any]:
            messages = render_conversation(read_conversation(load().rollout))
            return {**shown, "messages": messages, "attempts": attempts, "left_out": len(members) - len(attempts)}

        return work

    def _group_named(self, name: str) -> str:
        """The group with this id or prefix of an id."""
        texts = self.run.state.rows.texts["group"]
        if texts.known(name) > 0:
            return name
        found = [one for one in texts.values if one is not None and one.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NoAnswer(f"{name[:64]!r} begins the ids of {len(found)} groups; give more of it", 404)
        raise NoAnswer(f"run {self.run.title} holds no group {name[:64]!r}", 404)

    def _loader(self, row: int) -> Callable[[], LoadedRollout]:
        """A function that loads a rollout in the state of the index now."""
        rows = self.run.state.rows
        key, held_as = rows.key(row), (row, rows.get("changed", row))

        def load() -> LoadedRollout:
            with self._lock:
                if held_as not in self._held:
                    loaded = self._load(key)
                    while len(self._held) >= _ROLLOUTS_HELD:
                        del self._held[next(iter(self._held))]
                    self._held[held_as] = loaded
                return self._held[held_as]

        return load

    def _load(self, key: Key) -> LoadedRollout:
        index = self.run.index
        try:
            try:
                return LoadedRollout(*index.load_with_problems(key))
            except DamagedTapeError:
                index.advance()  # the rollout may have been moved
                return LoadedRollout(*index.load_with_problems(key))
        except (OSError, sqlite3.Error) as error:
            raise DamagedTapeError(f"rollout {key[0]}: {error}") from error

    def _advantage(self, row: int) -> float | None:
        """A rollout's advantage in its group; for each rollout of the group the try that counts."""
        listing, rows = self.held_listing(), self.run.state.rows
        members = np.flatnonzero(rows.columns["group"] == rows.get("group", row)).tolist()
        counted = self._counted_tries(members)
        if row not in counted:
            return None
        rewards = [float(listing.rewards[one]) if listing.has_reward[one] else None for one in counted]
        return group_advantages(rewards, Credit().advantage)[counted.index(row)]

    def _counted_tries(self, members: Iterable[int]) -> list[int]:
        """Of these rows, for each rollout the row of the try that counts."""
        rows = self.run.state.rows
        tries: dict[str, dict[int, int]] = {}
        for row in members:
            rollout, try_index = rows.key(row)
            tries.setdefault(rollout, {})[try_index] = row
        return [row for row in map(self.counted, tries.values()) if row is not None]
