"""The groups of a run as they stand: which attempts have begun, which have ended, and what is known of their size."""

import math
import time
from collections.abc import Callable

import msgspec

from rolltape.groups.collectors import Collectors, Part
from rolltape.groups.following import Found, News
from rolltape.records.rollout import Event, EventKind, Outcome, RolloutHead, Status, outcome_of
from rolltape.samples.credit import counted_tries

Key = tuple[str, int]  # rollout and try

_NEEDED = frozenset(
    {EventKind.FINISH, EventKind.SCORE, EventKind.DELIVERY, EventKind.FILTER, EventKind.TAG, EventKind.PRUNE}
)


class Try:
    """A try of a rollout, and what was said of it so far."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self._events: dict[tuple[str, int], Event] = {}

    @property
    def head(self) -> RolloutHead:
        return self.found.head

    @property
    def events(self) -> list[Event]:
        return sorted(self._events.values(), key=lambda event: event.order)

    def hear(self, event: Event) -> None:
        # Only its own writer finishes a rollout.
        if event.kind != EventKind.FINISH or event.writer == self.found.writer:
            self._events[event.writer, event.sequence] = event


class Standing(msgspec.Struct, frozen=True, eq=False):
    """A try and what its events come to."""

    one: Try
    outcome: Outcome

    @property
    def head(self) -> RolloutHead:
        return self.one.head

    @property
    def is_finished(self) -> bool:
        return self.outcome.status is Status.FINISHED

    @property
    def is_rewarded(self) -> bool:
        return self.outcome.reward is not None and math.isfinite(self.outcome.reward)


class Gathered:
    """A group of which nobody has disposed yet."""

    def __init__(self, head: RolloutHead) -> None:
        self.id = head.group
        self.step = head.step
        self.source = head.source
        self.task_id = head.task_id
        self.tries: dict[Key, Try] = {}
        self.last_sign_s = 0.0  # when it was last seen that an attempt began or ended, or got its reward
        self.last_ns = head.started_at_ns  # of all that was said of it
        self._told: tuple[list[bool], list[Standing]] | None = None  # None: something is new since

    @property
    def part(self) -> Part:
        """The collection that it is of."""
        return Part(self.step, self.source)

    def add(self, one: Try) -> None:
        """Take in a try that has begun."""
        self.tries[one.head.key] = one
        self._sign()

    def hear(self, one: Try, event: Event) -> None:
        """Take in what was said of a try."""
        one.hear(event)
        self.last_ns = max(self.last_ns, event.at_ns)
        self._told = None
        if event.turn is None and event.kind in (EventKind.FINISH, EventKind.SCORE):
            self._sign()

    def _sign(self) -> None:
        self._told = None
        self.last_sign_s = time.monotonic()

    def standings(self, is_alive: Callable[[Found], bool]) -> list[Standing]:
        """How its rollouts stand, by attempt; of each the try that counts."""
        alive = [is_alive(one.found) for one in self.tries.values()]
        if self._told is None or self._told[0] != alive:
            tries = zip(self.tries.values(), alive, strict=True)
            standings = counted_tries(Standing(one, outcome_of(one.events, lives)) for one, lives in tries)
            self._told = (alive, sorted(standings, key=lambda standing: standing.head.attempt))
        return self._told[1]


class Gathering:
    """All groups of a run that are not settled, by what is new on it."""

    def __init__(self, on_group_event: Callable[[Event], None], is_writing: Callable[[str], bool]) -> None:
        self.groups: dict[str, Gathered] = {}
        self.settled: set[str] = set()
        self.collectors = Collectors(is_writing)
        self._on_group_event = on_group_event
        self._known: dict[Key, Try | int] = {}  # a number: of a group that is settled, and when it began
        self._early: dict[Key, list[Event]] = {}  # about rollouts that were not found yet
        self._announced: dict[tuple[int, str, int], str] = {}
        self._seen: dict[str, int] = {}  # versions that replies name, and when the first such rollout began

    def add(self, news: News) -> None:
        """Take in what is new."""
        for found in news.rollouts:
            self._found(found)
        for event in news.events:
            self._heard(event)

    def settle(self, group: str) -> None:
        """Let go of a group: it is done with, or skipped."""
        self.settled.add(group)
        gathered = self.groups.pop(group, None)
        for one in gathered.tries.values() if gathered is not None else ():
            self._known[one.head.key] = one.head.started_at_ns

    def unsettled(self, step: int | None = None, source: str | None = None) -> list[Gathered]:
        """The groups of a step and a source, or of all: by step, then by when the last was said of them."""
        wanted = [one for one in self.groups.values() if step in (None, one.step) and source in (None, one.source)]
        return sorted(wanted, key=lambda group: (group.step, group.last_ns, group.id))

    def versions(self) -> tuple[str, ...]:
        """Weight versions, oldest first: as `Run.versions` has them."""
        seen = sorted(self._seen, key=self._seen.__getitem__)
        announced = [self._announced[order] for order in sorted(self._announced)]
        return tuple(reversed(dict.fromkeys(reversed([*seen, *announced]))))

    def _found(self, found: Found) -> None:
        head = found.head
        known = self._known.get(head.key)
        if isinstance(known, Try):
            if known.found.writer == found.writer:
                known.found = found  # it was sealed: it is to be loaded from there
            return
        if head.group in self.settled:
            self._known[head.key] = head.started_at_ns
        else:
            one = self._known[head.key] = Try(found)
            self.groups.setdefault(head.group, Gathered(head)).add(one)
        for event in self._early.pop(head.key, ()):
            self._heard(event)

    def _heard(self, event: Event) -> None:
        if event.rollout is None:
            self._heard_of_run(event)
        elif event.kind in _NEEDED and event.try_index is not None:
            key = (event.rollout, event.try_index)
            if key not in self._known:
                self._early.setdefault(key, []).append(event)
            else:
                self._heard_of(self._known[key], event)

    def _heard_of(self, one: Try | int, event: Event) -> None:
        if isinstance(one, Try):
            self.groups[one.head.group].hear(one, event)
        if event.kind == EventKind.FINISH:
            began_ns = one.head.started_at_ns if isinstance(one, Try) else one
            for version in event.data.get("versions", ()):
                self._seen[version] = min(began_ns, self._seen.get(version, began_ns))

    def _heard_of_run(self, event: Event) -> None:
        match event.kind:
            case EventKind.GROUP:
                self._on_group_event(event)
            case EventKind.VERSION:
                self._announced[event.order] = str(event.data["version"])
            case EventKind.COLLECT:
                self.collectors.began(event)
            case EventKind.COLLECTED:
                self.collectors.ended(event)
