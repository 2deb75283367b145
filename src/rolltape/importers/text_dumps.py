"""Rollout dumps that hold a prompt and a reply as text, with a reward: what verl, AReaL and TRL write."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ImportFileError
from rolltape.importers.files import json_lines, of_each_file, parquet_rows
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


class TextDump(msgspec.Struct, frozen=True):
    """Which fields of a row are what. The rest of the row is kept as it is."""

    prompt: str
    reply: str
    step: str
    reward: Callable[[Mapping[str, Any]], float | None]
    task: tuple[str, ...] = ()  # fields that belong to the task, besides the prompt


def dump_rollouts(path: Path, suffix: str, dump: TextDump, options: ImportOptions) -> Found:
    """One rollout per row; rows with the same prompt at the same step are attempts at one task."""
    return each_rollout(of_each_file(path, suffix, read=_rows), partial(_rollout, dump=dump, options=options))


def _rollout(row: Mapping[str, Any], where: str, dump: TextDump, options: ImportOptions) -> ImportedRollout:
    if lacking := [name for name in (dump.prompt, dump.reply) if row.get(name) is None]:
        raise ImportFileError(f"{where}: it lacks {' and '.join(lacking)}; it has {', '.join(sorted(row))}")
    prompt, reply = row[dump.prompt], row[dump.reply]
    turns, rest = conversation_turns([*as_messages(prompt, "user"), *as_messages(reply, "assistant")], where)
    own = {dump.prompt, dump.reply, dump.step, *dump.task}
    extra = {name: value for name, value in row.items() if name not in own}
    if rest:
        extra["messages_after_the_last_reply"] = rest
    step = options.step if options.step is not None else row.get(dump.step)
    return ImportedRollout(
        where=where,
        task={"prompt": prompt, **{name: row.get(name) for name in dump.task}},
        source=options.source,
        split=options.split,
        step=int(step or 0),
        model=options.model,
        extra=extra,
        sessions=[ImportedSession(turns=turns)],
        reward=dump.reward(row),
        absent=ABSENT_FROM_TEXT,
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
