"""Entries of Parquet files and Hugging Face datasets, row by row."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rolltape.collect.sources.entries import RawSource, SourceEntry, filter_split, join_names, readable
from rolltape.errors import SourceError
from rolltape.extras import arrow_errors, pq

_BATCH_ROWS = 1000
# The sub-folders of a folder with data files: one with all of them, or one per split, as `datasets` names splits.
_SPLITS = ("train", "training", "validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation")
_DATA_FOLDERS = frozenset(("data", *_SPLITS))


def parquet_file(label: str, split: str | None) -> RawSource:
    """A Parquet file with a task in each row."""
    return RawSource(Path(label).name, split, label, filter_split(_parquet_rows(label), split, label))


def dataset_directory(label: str, split: str | None) -> RawSource:
    """A directory that `save_to_disk` wrote, or one with data files. It needs no network."""
    path = Path(label)
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    if not saved and not _has_card(path) and (other := _other_folder(path)) is not None:
        # `datasets` would take all files below for data, and search the whole folder for them.
        raise SourceError(
            f"{label} is not a dataset: it has the folder {other!r}, and beside its data files a dataset has only "
            "`data` and a folder per split, unless its README.md describes it; give a .json, .jsonl or .parquet file, "
            "a dataset's folder, harbor:FOLDER or python:module:function"
        )
    datasets = _datasets(label)
    with _loading(label, datasets):
        loaded = datasets.load_from_disk(label) if saved else datasets.load_dataset(str(path.resolve()))
    if isinstance(loaded, datasets.Dataset):
        own = None if loaded.split is None else str(loaded.split)
        loaded, split = {own or split: loaded}, split or own
    return _dataset(loaded, path.resolve().name, split, label)


def _has_card(folder: Path) -> bool:
    """Whether a folder has a dataset card, as on the hub: a README that begins with metadata."""
    card = folder / "README.md"
    if not card.is_file():
        return False
    with readable(str(card)), card.open("rb") as stream:
        return stream.read(3) == b"---"


def _other_folder(folder: Path) -> str | None:
    """A sub-folder that no folder of data files has, or None. Hidden ones do not count."""
    with readable(str(folder)):
        return next(
            (
                one.name
                for one in folder.iterdir()
                if not one.name.startswith(".") and one.name.lower() not in _DATA_FOLDERS and one.is_dir()
            ),
            None,
        )


def hub_dataset(label: str, split: str | None) -> RawSource:
    """A dataset on the Hugging Face hub: "owner/name", or "owner/name:configuration"."""
    datasets = _datasets(label)
    name, _, configuration = label.partition(":")
    with _loading(label, datasets):
        loaded = datasets.load_dataset(name, configuration or None, split=split)
    return _dataset({split: loaded}, label, split, label)


def _dataset(loaded: dict[str | None, Any], name: str, split: str | None, label: str) -> RawSource:
    names = [str(own) for own in loaded]
    if split is None and len(loaded) == 1:
        split = next(iter(loaded))
    elif split is None:
        raise SourceError(f"{label} has several splits, {join_names(names)}; say which one with --split")
    if split not in loaded:
        raise SourceError(f"{label} has no split {split!r}; it has {join_names(names)}")
    # As Arrow, since images and the like would otherwise be decoded.
    tables = loaded[split].with_format("arrow").iter(batch_size=_BATCH_ROWS)
    return RawSource(name, split, label, _rows(tables, label))


def _parquet_rows(label: str) -> Iterator[SourceEntry]:
    with readable(label), Path(label).open("rb") as stream:
        try:
            # Without Arrow's threads: one that still holds the stream when the interpreter ends aborts the process.
            file = pq.ParquetFile(stream, pre_buffer=False)
            yield from _rows(file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False), label)
        except arrow_errors() as error:
            raise SourceError(f"{label} cannot be read as Parquet: {_first_line(error)}") from None


def _rows(tables: Iterable[Any], label: str) -> Iterator[SourceEntry]:
    number = 0
    for table in tables:
        names = table.schema.names
        if twice := {name for name in names if names.count(name) > 1}:
            raise SourceError(f"{label} has two columns of one name: {join_names(twice)}; rename one of each")
        for row in table.to_pylist():
            number += 1
            yield SourceEntry(f"row {number}", row)


def _datasets(label: str) -> Any:
    # Imported by name, since the package is an extra and has no types.
    try:
        return import_module("datasets")
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise SourceError(
            f"{label}: datasets are read with the package `datasets`, which is not installed; "
            "pip install 'rolltape[datasets]'"
        ) from None


@contextmanager
def _loading(label: str, datasets: Any) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # This error has no details; its cause has them.
        is_wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = error.__cause__ if is_wrapped and isinstance(error.__cause__, Exception) else error
        raise SourceError(f"{label} cannot be loaded as a dataset: {_first_line(reason)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
