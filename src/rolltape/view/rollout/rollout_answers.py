"""`RolloutAnswers`: answers about single rollouts and groups. Each method returns a function for a thread to run."""

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from rolltape.errors import DamagedTapeError, NoAnswer
from rolltape.records.messages import Message
from rolltape.records.policy import Credit
from rolltape.records.rollout import Rollout, Status
from rolltape.samples import group_advantages
from rolltape.samples.compare import compare
from rolltape.samples.spelling import Spellings
from rolltape.tape.index.search import distinct_messages
from rolltape.tape.stored import Key, Problem
from rolltape.view.annotating import build_annotations
from rolltape.view.answers import parse_policy, to_plain
from rolltape.view.rollout.detail import build_comparison, build_detail, build_raw, linearize_now
from rolltape.view.rollout.grouping import build_group, read_conversation, render_conversation
from rolltape.view.rollout.images import Image, find_images
from rolltape.view.rollout.masking import Mask
from rolltape.view.rollout.tokens import pack_sample, pack_turn, read_turn
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
        self._held: dict[tuple[int, int], Rollout] = {}
        self._missing: dict[Key, list[str]] = {}  # of loaded rollouts: their unreadable parts

    def rollout(self, row: int, policy: str | None) -> Work:
        """Everything about a rollout."""
        load, chosen = self._loader(row), parse_policy(policy)
        versions, advantage = self.listing().versions, self._advantage(row)
        shown, tries = self.listing().row(row), sorted(self.run.state.rows.tries(self.run.state.rows.ids[row]))

        def work() -> dict[str, Any]:
            rollout = load()
            made = linearize_now(rollout, chosen, versions)
            detail = build_detail(rollout, made, advantage, self._spellings)
            return {"row": shown, **detail, "tries": tries, "problems": self._missing.get(rollout.key, [])}

        return work

    def annotate(self, row: int, write: Callable[[Rollout], None]) -> Work:
        """Call `write` with a rollout. Return its tags and notes afterwards."""
        load = self._loader(row)

        def work() -> dict[str, Any]:
            rollout = load()
            write(rollout)
            self.run.index.advance()
            return build_annotations(self.run.index.annotations(rollout.key))

        return work

    def raw(self, row: int) -> Work:
        load = self._loader(row)
        return lambda: build_raw(load())

    def texts(self, row: int) -> Work:
        """All texts of a rollout: those of its head, its messages and its events."""
        load = self._loader(row)

        def work() -> list[Any]:
            rollout = load()
            messages = [message.to_dict() for message in distinct_messages(rollout)]
            return [to_plain(rollout.head), *messages, *map(to_plain, rollout.events)]

        return work

    def message(self, row: int, digest: str) -> Work:
        """A complete message by its digest."""
        find = self._message(row, digest)
        return lambda: {"message": find().to_dict()}

    def image(self, row: int, digest: str, index: int) -> Callable[[], Image]:
        """An image of a message, by its index."""
        find = self._message(row, digest)

        def work() -> Image:
            images = find_images(find().to_dict())
            if index >= len(images) or images[index].type is None:
                raise NoAnswer(f"message {digest[:64]!r} has no image {index} that can be shown", 404)
            return images[index]

        return work

    def images(self, row: int) -> Callable[[], list[tuple[str, int, bytes]]]:
        """All images of a rollout that can be shown: the digest of the message, the index in it, the bytes."""
        load = self._loader(row)
        return lambda: [
            (message.digest.hex(), index, image.content)
            for message in distinct_messages(load())
            for index, image in enumerate(find_images(message.to_dict()))
            if image.type is not None
        ]

    def _message(self, row: int, digest: str) -> Callable[[], Message]:
        load = self._loader(row)

        def work() -> Message:
            for message in distinct_messages(load()):
                if message.digest.hex() == digest:
                    return message
            raise NoAnswer(f"the rollout has no message {digest[:64]!r}", 404)

        return work

    def tokens(
        self, row: int, index: int, policy: str | None, *, record: str | None = None, mask: Mask | None = None
    ) -> Work:
        """A sample's tokens, packed, with the columns of the trainer's record at `record`, or of the latest."""
        load, chosen = self._loader(row), parse_policy(policy)
        versions, advantage = self.listing().versions, self._advantage(row)

        def work() -> bytes:
            rollout = load()
            made = linearize_now(rollout, chosen, versions)
            if index >= len(made):
                raise NoAnswer(f"the rollout has {len(made)} samples under {chosen.name}, and no sample {index}", 404)
            sample = made.sample(index, advantage)
            session = next(one for one in rollout.sessions if one.id == sample.session)
            records = self.run.records
            exported = None if records is None else records.find(sample, record)
            if exported is None and record:
                raise NoAnswer(f"the trainer wrote no record {record[:40]!r} of sample {index}", 404)
            return pack_sample(sample, session, self._spellings.of(session), exported, mask)

        return work

    def turn_tokens(self, row: int, turn: str) -> Work:
        """A turn's tokens, prompt and reply, packed."""
        load, chosen, versions = self._loader(row), parse_policy(None), self.listing().versions

        def work() -> bytes:
            rollout = load()
            tokens = read_turn(linearize_now(rollout, chosen, versions), turn)
            if tokens is None:
                raise NoAnswer(f"the rollout has no turn {turn[:64]!r}", 404)
            session = next(one for one in rollout.sessions if turn.startswith(f"{one.id}."))
            return pack_turn(tokens, session, self._spellings.of(session))

        return work

    def compare(self, row: int, left: str | None, right: str | None) -> Work:
        load, one, other = self._loader(row), parse_policy(left or "exact"), parse_policy(right or "keep-head")
        versions, advantage = self.listing().versions, self._advantage(row)

        def work() -> dict[str, Any]:
            rollout = load()
            running = rollout.status is Status.RUNNING
            return build_comparison(compare(rollout, one, other, versions=versions, as_if_finished=running), advantage)

        return work

    def group(self, group: str, only: Collection[int] | None = None) -> Work:
        """The attempts at one task, or only those in some rows; for each rollout the try that counts.

        The number of attempts and their rewards are those of the whole group.
        """
        rows, listing = self.run.state.rows, self.listing()
        group = self._group_named(group)
        members = np.flatnonzero(rows.columns["group"] == rows.texts["group"].known(group)).tolist()
        counted = self._counted_tries(members)
        shown = counted if only is None else self._counted_tries(one for one in members if one in only)
        shown = sorted(shown, key=lambda row: (rows.get("attempt", row), row))[:_MOST_IN_A_GROUP]
        attempts = [(listing.row(row), self._loader(row)) for row in shown]
        whole = {"attempts": len(counted), "reward": describe_rewards(listing.rewards[counted])}
        return lambda: build_group(group, [(row, load()) for row, load in attempts]) | whole

    def conversation(self, row: int) -> Work:
        """A rollout's row with its messages, and the rows of all attempts at its task."""
        listing, rows, load = self.listing(), self.run.state.rows, self._loader(row)
        columns = rows.columns
        same = columns["group"] == columns["group"][row]
        if columns["task"][row]:
            same |= (columns["task"] == columns["task"][row]) & (columns["source"] == columns["source"][row])
        members = sorted(self._counted_tries(np.flatnonzero(same).tolist()), key=lambda one: rows.get("attempt", one))
        members.sort(key=lambda one: (rows.get("step", one) != rows.get("step", row), rows.get("step", one)))
        attempts = [listing.row(one) for one in members[:_MOST_IN_A_GROUP]]
        shown = {"r": self.run.name, "run": self.run.title, **listing.row(row)}

        def work() -> dict[str, Any]:
            messages = render_conversation(read_conversation(load()))
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

    def _loader(self, row: int) -> Callable[[], Rollout]:
        """A function that loads a rollout in the state of the index now."""
        rows = self.run.state.rows
        key, held_as = rows.key(row), (row, rows.get("changed", row))

        def load() -> Rollout:
            with self._lock:
                if held_as not in self._held:
                    rollout, problems = self._load(key)
                    self._missing[key] = list(map(str, problems))
                    while len(self._held) >= _ROLLOUTS_HELD:
                        del self._held[next(iter(self._held))]
                    self._held[held_as] = rollout
                return self._held[held_as]

        return load

    def _load(self, key: Key) -> tuple[Rollout, list[Problem]]:
        index = self.run.index
        try:
            try:
                return index.load_with_problems(key)
            except DamagedTapeError:
                index.advance()  # the rollout may have been moved
                return index.load_with_problems(key)
        except (OSError, sqlite3.Error) as error:
            raise DamagedTapeError(f"rollout {key[0]}: {error}") from error

    def _advantage(self, row: int) -> float | None:
        """A rollout's advantage in its group; for each rollout of the group the try that counts."""
        rows, listing = self.run.state.rows, self.listing()
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
