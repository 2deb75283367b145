"""What is known of all rollouts of a run, as columns: identity, outcome, counts, summary, and where each lies."""

from functools import cached_property

from rolltape.records.fork import ForkCause
from rolltape.records.ledger import Fate
from rolltape.records.rollout import Status
from rolltape.view.table import Array, Coded, Columns

FATES = tuple(Fate)
CAUSES = tuple(ForkCause)
STATUSES = tuple(Status)
STATUS_CODE = {status: code for code, status in enumerate(STATUSES)}
FATE_CODE = {fate.value: code for code, fate in enumerate(FATES)}
CAUSE_CODE = {cause.value: code for code, cause in enumerate(CAUSES)}

UNENDED = -1
NOT_DERIVED, DERIVED, NOT_DERIVABLE = 0, 1, 2
NOT_ASKED, ASKED, OUTDATED = 0, 1, 2  # what was asked for a rollout; OUTDATED: it has changed since
NOT_INDEXED, NOT_INDEXABLE = -1, -2

TEXTS = ("group", "source", "task", "environment", "agent", "model", "writer", "stop_reason", "reason", "filter")
LISTS = ("head_tags", "tags", "versions")  # texts in their order; None: nothing was said
NUMBERS: dict[str, tuple[str, float, int]] = {
    "try_index": ("i8", 0, 1),
    "step": ("i8", 0, 1),
    "attempt": ("i8", 0, 1),
    "started_ns": ("i8", 0, 1),
    "finish": ("i1", UNENDED, 1),  # a status as its finish says it
    "finish_ns": ("i8", 0, 1),
    "reward": ("f8", float("nan"), 1),
    "rewarded": ("?", False, 1),
    "score_ns": ("i8", 0, 1),
    "filter_ns": ("i8", 0, 1),
    "tag_ns": ("i8", 0, 1),
    "turns": ("i8", 0, 1),
    "sampled_tokens": ("i8", 0, 1),
    "placed": ("?", False, 1),  # it has ended, or its writer has, and where it lies is known in full
    "place_source": ("i4", -1, 1),
    "place_row": ("i8", 0, 1),
    "session_low": ("i8", 0, 1),
    "session_high": ("i8", -1, 1),
    "event_low": ("i8", 0, 1),
    "event_high": ("i8", -1, 1),
    "derived": ("i1", NOT_DERIVED, 1),
    "branches": ("i4", 0, 1),
    "samples": ("i4", 0, 1),
    "forks": ("i4", 0, len(CAUSES)),
    "ledger": ("i8", 0, len(FATES)),
    "search_number": ("i8", NOT_INDEXED, 1),  # in the search index
}
# Of this process alone: when a row last changed, and what was asked for it.
OWN_NUMBERS: dict[str, tuple[str, float, int]] = {"changed": ("i8", 0, 1), "asked": ("i1", NOT_ASKED, 1)}

Texts = dict[str, Coded[str | None]]
Lists = dict[str, Coded[tuple[str, ...] | None]]


class Rows:
    """The columns of a run, and what their codes stand for."""

    def __init__(self) -> None:
        coded: dict[str, tuple[str, float, int]] = dict.fromkeys((*TEXTS, *LISTS), ("i4", 0, 1))
        self.columns = Columns({**NUMBERS, **coded, **OWN_NUMBERS})
        # Code 0 is "none", so that a fresh row says nothing.
        self.texts: Texts = {name: Coded([None]) for name in TEXTS}
        self.lists: Lists = {name: Coded([None]) for name in LISTS}
        self.sources: Coded[str] = Coded()
        self.ids: list[str] = []

    @cached_property
    def row_of(self) -> dict[tuple[str, int], int]:
        """The rows by rollout and try. Made when it is first asked for: the first page of a large run does without."""
        keys = zip(self.ids, self.columns["try_index"].tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}

    def __len__(self) -> int:
        return self.columns.rows

    def add(self, rollout: str, try_index: int) -> int:
        row_of = self.row_of
        row = row_of[rollout, try_index] = self.columns.add()
        self.ids.append(rollout)
        self.columns.set(row, try_index=try_index)
        return row

    def set_text(self, row: int, name: str, value: str | None) -> None:
        self.columns.set(row, **{name: self.texts[name].code(value)})

    def set_list(self, row: int, name: str, value: tuple[str, ...] | None) -> None:
        self.columns.set(row, **{name: self.lists[name].code(value)})

    def text(self, row: int, name: str) -> str | None:
        code: int = self.columns.get(name, row)
        return self.texts[name].values[code]

    def listed(self, row: int, name: str) -> tuple[str, ...] | None:
        code: int = self.columns.get(name, row)
        return self.lists[name].values[code]

    def key(self, row: int) -> tuple[str, int]:
        return self.ids[row], self.columns.get("try_index", row)

    def take_over(
        self, ids: list[str], columns: dict[str, Array], texts: Texts, lists: Lists, sources: list[str]
    ) -> None:
        """Take all rows from elsewhere in place of those that are there."""
        self.columns.fill(columns)
        self.texts, self.lists, self.sources, self.ids = texts, lists, Coded(sources), ids
        self.__dict__.pop("row_of", None)
