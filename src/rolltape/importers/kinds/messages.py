"""Chat messages: OpenAI fine-tuning and TRL conversational files, ShareGPT, and Hugging Face datasets of them.

An assistant message is a turn. Its tokens are not known, so it is shown and exported, and does not train.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rolltape.errors import ImportFileError
from rolltape.importers.files import (
    first_object,
    first_parquet_row,
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
)
from rolltape.importers.text_dumps import ABSENT_FROM_TEXT, as_messages

# ShareGPT's names, and those that its descendants use.
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
# The fields of a row that hold its conversation, and what the rest of the row is.
_OWN = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools", "functions", "system"}


def recognize(path: Path) -> str | None:
    """Rows with `messages`, `conversations`, or `prompt` and `completion`."""
    if path.is_dir():
        return "a saved Hugging Face dataset" if (path / "dataset_info.json").exists() else None
    row = first_object(path) if path.suffix in (".jsonl", ".json", ".ndjson") else first_parquet_row(path)
    if row is None:
        return None
    for field in ("messages", "conversations", "completion", "chosen"):
        if isinstance(row.get(field), list) and all(isinstance(item, Mapping) for item in row[field]):
            return f"rows with {field!r}"
    return None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per conversation; a row with a chosen and a rejected one gives two."""
    for entry in _rows(path):
        if isinstance(entry, BrokenEntry):
            yield entry
            continue
        where, row = entry
        made = or_broken(where, partial(_rollouts, row, where, options))
        yield from [made] if isinstance(made, BrokenEntry) else made


def _rollouts(row: Mapping[str, Any], where: str, options: ImportOptions) -> list[ImportedRollout]:
    rollouts = []
    for messages, tags in _conversations(row, where):
        turns, rest = conversation_turns(messages, where)
        prompt = turns[0]["prompt_messages"]
        extra = {name: value for name, value in row.items() if name not in _OWN}
        if rest:
            extra["messages_after_the_last_reply"] = rest
        tools = row.get("tools") or row.get("functions")
        rollouts.append(
            ImportedRollout(
                where=where,
                task={"messages": prompt},
                source=options.source,
                split=options.split,
                step=options.step or 0,
                model=options.model,
                tags=tags,
                extra=extra,
                sessions=[ImportedSession(turns=turns, tools=tools if isinstance(tools, list) else None)],
                absent=ABSENT_FROM_TEXT,
            )
        )
    return rollouts


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
    for number, item in enumerate(row["conversations"], 1):
        if not isinstance(item, Mapping):
            raise ImportFileError(f"{where}: message {number} is a {type(item).__name__}, not an object")
        speaker = item.get("from", item.get("role"))
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise ImportFileError(f"{where}: message {number} is from {speaker!r}; known are {', '.join(_SPEAKERS)}")
        messages.append({"role": role, "content": item.get("value", item.get("content"))})
    return messages


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    if path.is_dir() and (path / "dataset_info.json").exists():
        yield from _saved_dataset(path)
        return
    yield from of_each_file(path, ".jsonl", ".ndjson", ".json", ".parquet", read=_file_rows)


def _file_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]] | BrokenEntry]:
    if file.suffix == ".parquet":
        yield from parquet_rows(file)
    elif file.suffix == ".json":
        document = json_document(file)
        rows = document if isinstance(document, list) else [document]
        for number, row in enumerate(rows, 1):
            where = f"{file.name}, item {number}"
            yield (where, row) if isinstance(row, dict) else BrokenEntry(where, "not an object")
    else:
        yield from json_lines(file)


def _saved_dataset(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise ImportFileError(f"{path}: a saved dataset; install it with pip install 'rolltape[datasets]'") from None
    for number, row in enumerate(datasets.load_from_disk(str(path)), 1):
        yield f"{path.name}, row {number}", without_nulls(row)
