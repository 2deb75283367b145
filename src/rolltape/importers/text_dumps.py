"""Dumps of rollouts that hold a prompt and a reply as text, with a reward: what verl, AReaL and TRL write."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ImportFileError
from rolltape.importers.files import first_file, first_row, json_lines, of_each_file, parquet_rows
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    conversation_turns,
    each_rollout,
)

ABSENT_FROM_TEXT = ("token ids", "logprobs", "weight versions")


class TextDump(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of dump: the names of its fields. Other fields of a row are kept as they are."""

    suffix: str  # of its files
    prompt: str
    reply: str
    mark: str  # a further field that every row has, to recognize the kind by
    step: str
    reward: Callable[[Mapping[str, Any]], float | None]
    task: tuple[str, ...] = ()  # fields that belong to the task, besides the prompt

    def recognize(self, path: Path) -> str | None:
        """Why a path looks like a dump of this kind, or None if it does not."""
        file = first_file(path, self.suffix)
        row = first_row(file) if file is not None else None
        fields = {self.prompt, self.reply, self.mark}
        is_dump = row is not None and fields <= row.keys()
        return f"rows with {self.prompt}, {self.reply}, and {self.mark}" if is_dump else None

    def find(self, path: Path, options: ImportOptions) -> Found:
        """One rollout per row. Rows with the same prompt at the same step are attempts at one task."""
        return each_rollout(of_each_file(path, self.suffix, read=_rows), partial(self._rollout, options=options))

    def _rollout(self, row: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedRollout:
        if lacking := [name for name in (self.prompt, self.reply) if row.get(name) is None]:
            raise ImportFileError(f"{where}: it lacks {' and '.join(lacking)}; it has {', '.join(sorted(row))}")
        prompt, reply, step = row[self.prompt], row[self.reply], row.get(self.step)
        turns, rest = conversation_turns([*as_messages(prompt, "user"), *as_messages(reply, "assistant")], where)
        own = {self.prompt, self.reply, self.step, *self.task}
        has_step = step is not None or options.step is not None
        return ImportedRollout(
            where=where,
            sessions=[ImportedSession(turns=turns)],
            task={"prompt": prompt, **{name: row.get(name) for name in self.task}},
            **options.origin(step=None if step is None else int(step)),
            extra={name: value for name, value in row.items() if name not in own} | rest,
            reward=self.reward(row),
            absent=ABSENT_FROM_TEXT if has_step else ("steps", *ABSENT_FROM_TEXT),
        )


def as_messages(value: object, role: str) -> list[Any]:
    """Messages as they are, and a text as one message."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return list(value) if isinstance(value, list | tuple) else []


def number(value: object) -> float | None:
    """A number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    return parquet_rows(file) if file.suffix == ".parquet" else json_lines(file)
