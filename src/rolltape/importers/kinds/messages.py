"""Chat messages: OpenAI fine-tuning and TRL conversational files, ShareGPT, and Hugging Face datasets of them.

An assistant message is a turn. Its tokens are not known, so it is shown and exported, but does not train. Rows of
`rolltape export --what conversations` name their rollout and turns, which are restored.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ImportFileError
from rolltape.extras import arrow_errors, import_extra
from rolltape.importers.files import (
    first_file,
    first_row,
    json_document,
    json_lines,
    of_each_file,
    parquet_rows,
    without_nulls,
)
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    conversation_turns,
    or_broken,
    restored,
)
from rolltape.importers.text_dumps import ABSENT_FROM_TEXT, as_messages, number
from rolltape.records.jsonable import decode_numbers, non_finite

# ShareGPT's names, and those of its descendants.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
    "function_call": "assistant",
}
# Errors of `datasets` for a folder that is damaged or was not written by it.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
_FILES = (".jsonl", ".ndjson", ".json", ".parquet")
_SPLITS = "dataset_dict.json"  # beside a folder for each split
# The fields of a row that hold its conversation. The other fields are kept as `extra`.
_OWN = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools", "functions", "system"}


def recognize(path: Path) -> str | None:
    """Rows with `messages`, `conversations`, or `prompt` and `completion`."""
    if path.is_dir():
        if (path / _SPLITS).is_file():
            return "a saved Hugging Face dataset with splits"
        if (path / "dataset_info.json").exists():
            return "a saved Hugging Face dataset"
    file = first_file(path, *_FILES)
    row = (first_row(file) if file is not None else None) or {}
    for field in ("messages", "conversations", "completion", "chosen"):
        if isinstance(row.get(field), list) and all(isinstance(item, Mapping) for item in row[field]):
            return f"rows with {field!r}"
    return None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per conversation. A row with a chosen and a rejected conversation gives two."""
    if (path / _SPLITS).is_file():
        for split in _splits(path, options):
            yield from find(path / split, msgspec.structs.replace(options, split=split))
        return
    for rollout, entries in groupby(_rows(path), key=_exported_rollout):
        if rollout is not None:
            rows = [entry for entry in entries if not isinstance(entry, BrokenEntry)]
            yield or_broken(rows[0][0], partial(_restored, rows, options))
            continue
        for entry in entries:
            if isinstance(entry, BrokenEntry):
                yield entry
                continue
            where, row = entry
            made = or_broken(where, partial(_rollouts, row, where, options))
            yield from [made] if isinstance(made, BrokenEntry) else made


def _rollouts(row: Mapping[str, Any], where: str, options: ImportOptions) -> list[ImportedRollout]:
    rollouts = []
    tools = _tools(row)
    for messages, tags in _conversations(row, where):
        turns, rest = conversation_turns(messages, where)
        for turn in turns:
            turn |= _weighed(turn["reply"])
        rollouts.append(
            ImportedRollout(
                where=where,
                task={"messages": turns[0]["prompt_messages"]},
                **options.origin(),
                tags=tags,
                extra={name: value for name, value in row.items() if name not in _OWN} | rest,
                sessions=[ImportedSession(turns=turns, tools=tools)],
                reward=None if tags else number(row.get("reward")),  # a pair has none
                absent=ABSENT_FROM_TEXT,
            )
        )
    return rollouts


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a row. In a table they are JSON text, because tools of two rows need not have one type."""
    tools = row.get("tools") or row.get("functions")
    if isinstance(tools, str):
        tools = json.loads(tools)
    return tools if isinstance(tools, list) else None


def _weighed(reply: Mapping[str, Any]) -> dict[str, Any]:
    """A reply without its weight. The weight decides whether it trains, and is stored with its turn."""
    plain = {name: value for name, value in reply.items() if name != "weight"}
    return {"reply": plain, "extra": {"weight": reply["weight"]}} if reply.get("weight") in (0, 1) else {"reply": plain}


def _exported_rollout(entry: tuple[str, dict[str, Any]] | BrokenEntry) -> tuple[str, int] | None:
    """The rollout and try of a row, or None if Rolltape did not write it."""
    match entry:
        case (_, {"rollout": str(rollout), "try_index": int(number), "session": str(_), "replies": list(_)}):
            return rollout, number
    return None


def _restored(rows: list[tuple[str, dict[str, Any]]], options: ImportOptions) -> ImportedRollout:
    """The rollout of rows that Rolltape wrote. Each row is a conversation of it."""
    is_table = "schema" not in rows[0][1]  # in a table, values of any type are JSON text
    if not is_table:
        rows = [(where, decode_numbers(json.dumps(row).encode())) for where, row in rows]
    where, first = rows[0]
    sessions: dict[str, dict[int, dict[str, Any]]] = {}
    for _, row in rows:
        turns, tools = sessions.setdefault(row["session"], {}), _tools(row) or []
        messages = [{name: value for name, value in one.items() if name != "weight"} for one in row["messages"]]
        for reply in row["replies"]:
            at, sequence = reply["message"], int(reply["turn"].rpartition(".")[2])
            # A reply that trains does so in the first conversation that holds it.
            turns.setdefault(
                sequence,
                {
                    "prompt_messages": messages[:at],
                    **_weighed(row["messages"][at]),
                    "tools": tools,
                    "finish": "stop",
                    "token_faithful": False,
                },
            )
    task, terms = first.get("task"), first.get("reward_terms") or {}
    if isinstance(terms, list):  # a table's map, or a dataset's list of names and values
        terms = {one["name"]: one.get("value") for one in terms} if "name" in terms[0] else dict(terms)
    made = ImportedRollout(
        where=where,
        sessions=[ImportedSession(turns=[turns[at] for at in sorted(turns)]) for turns in sessions.values()],
        key=f"{first['rollout']}.{first['try_index']}",
        absent=ABSENT_FROM_TEXT,
    )
    own = {
        "task": decode_numbers(task.encode()) if is_table and task is not None else task,
        "tags": first.get("launch_tags"),
        "reward": _number(first.get("reward")),
        "reward_terms": {name: term for name, value in terms.items() if (term := _number(value)) is not None},
    }
    return restored(made, {**first, **own}, options)


def _number(value: Any) -> float | None:
    """A number; one that is not finite is spelled out in JSON."""
    return None if value is None else float(non_finite(value) if isinstance(value, dict) else value)


def _conversations(row: Mapping[str, Any], where: str) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
    if isinstance(row.get("messages"), list):
        yield row["messages"], ()
    elif isinstance(row.get("conversations"), list):
        yield _sharegpt(row, where), ()
    elif {"chosen", "rejected"} & row.keys():
        for side in ("chosen", "rejected"):
            if side in row:
                yield [*as_messages(row.get("prompt", []), "user"), *as_messages(row[side], "assistant")], (side,)
    elif "prompt" in row and "completion" in row:
        yield [*as_messages(row["prompt"], "user"), *as_messages(row["completion"], "assistant")], ()
    else:
        raise ImportFileError(
            f"{where}: it has {', '.join(sorted(row)) or 'no fields'}; a conversation is in messages, "
            "conversations, prompt and completion, or chosen and rejected"
        )


def _sharegpt(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) else []
    for position, item in enumerate(row["conversations"], 1):
        if not isinstance(item, Mapping):
            raise ImportFileError(f"{where}: message {position} is a {type(item).__name__}, not an object")
        speaker = item.get("from", item.get("role"))
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise ImportFileError(f"{where}: message {position} is from {speaker!r}; known are {', '.join(_SPEAKERS)}")
        messages.append({"role": role, "content": item.get("value", item.get("content"))})
    return messages


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    if path.is_dir() and (path / "dataset_info.json").exists():
        yield from _saved_dataset(path)
        return
    yield from of_each_file(path, *_FILES, read=_file_rows)


def _file_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    if file.suffix == ".parquet":
        yield from parquet_rows(file)
    elif file.suffix == ".json":
        document = json_document(file)
        rows = document if isinstance(document, list) else [document]
        for number, row in enumerate(rows, 1):
            where = f"{file}, item {number}"
            yield (where, row) if isinstance(row, dict) else BrokenEntry(where, "not an object")
    else:
        yield from json_lines(file)


def _splits(path: Path, options: ImportOptions) -> list[str]:
    """The splits of a saved dataset: all, or the one that the options name."""
    document = json_document(path / _SPLITS)
    splits = document.get("splits") if isinstance(document, Mapping) else None
    if not isinstance(splits, list) or not all(isinstance(one, str) and one == Path(one).name for one in splits):
        raise ImportFileError(f"{path / _SPLITS}: it has no list of splits")
    if options.split is not None and options.split not in splits:
        raise ImportFileError(f"{path}: it has no split {options.split!r}; it has {', '.join(splits)}")
    return splits if options.split is None else [options.split]


def _saved_dataset(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    datasets = import_extra("datasets", "datasets")
    number = 0
    try:
        for number, row in enumerate(datasets.load_from_disk(str(path)), 1):
            yield f"{path}, row {number}", without_nulls(row)
    except arrow_errors(*_UNREADABLE) as error:
        after = f" after row {number}" if number else ""
        raise ImportFileError(f"{path}: not a readable saved dataset{after}: {error}") from None
