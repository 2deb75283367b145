"""Exported tables as Hugging Face datasets: saved to a folder, or pushed to the hub where a repository is named."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolltape.errors import ExportError, MissingFormat
from rolltape.export.files import local_path
from rolltape.extras import import_extra, pa, pq


def _pairs_type() -> Any:
    return pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))


HUB = "hf://datasets/"


def write_dataset(write_parquet: Callable[[Path], int], out: str) -> int:
    """Make a dataset from what `write_parquet` writes into the file that it gets. Return how many rows it has.

    `out` is a folder, for `datasets.load_from_disk`, or `hf://datasets/OWNER/NAME`. A new repository is
    private.

    Example:

        rollouts = run.rollouts()
        write_dataset(lambda file: conversations_to_parquet(rollouts, file), "datasets/sft")
    """
    datasets = import_extra("datasets", "datasets", what="--format datasets", missing=MissingFormat)
    datasets.disable_progress_bars()
    folder = None if _is_on_hub(out) else _new_folder(out)
    # Beside its destination, so that the finished folder can be renamed into place.
    with tempfile.TemporaryDirectory(dir=folder.parent if folder else None, prefix=".rolltape-export-") as place:
        table = Path(place, "rows.parquet")
        written = write_parquet(table)
        if not written:
            raise ExportError(f"{out}: there is nothing to write, and a dataset has at least one row")
        plain = _without_maps(table, Path(place, "plain.parquet"))
        dataset = datasets.Dataset.from_parquet(str(plain), cache_dir=str(Path(place, "cache")))
        if folder is None:
            _push(dataset, out)
        else:
            saved = Path(place, "saved")
            dataset.save_to_disk(str(saved))
            saved.rename(folder)  # also onto a folder that is empty
    return written


def _without_maps(table: Path, plain: Path) -> Path:
    """The same table with lists of names and values in place of maps, which datasets do not support."""
    with pq.ParquetFile(table) as file:
        schema = pa.schema(
            [(field.name, _pairs_type() if pa.types.is_map(field.type) else field.type) for field in file.schema_arrow]
        )
        with pq.ParquetWriter(plain, schema) as writer:
            for batch in file.iter_batches(batch_size=256):
                columns = [_pairs(column) if pa.types.is_map(column.type) else column for column in batch.columns]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return plain


def _pairs(column: Any) -> Any:
    rows = column.to_pylist()
    pairs = [None if row is None else [{"name": name, "value": value} for name, value in row] for row in rows]
    return pa.array(pairs, _pairs_type())


def _new_folder(out: str) -> Path:
    folder = local_path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{out} is there already; a dataset is saved into a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{out} cannot be written: {error.strerror or error}") from None
    return folder


def _is_on_hub(out: str) -> bool:
    if out.startswith("hf:") and (not out.startswith(HUB) or len(_repository(out).split("/")) != 2):
        raise ExportError(f"{out} names no repository; write {HUB}OWNER/NAME")
    return out.startswith(HUB)


def _repository(out: str) -> str:
    return out.removeprefix(HUB).strip("/")


def _push(dataset: Any, out: str) -> None:
    try:
        dataset.push_to_hub(_repository(out), private=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"{out} cannot be pushed: {next(iter(str(error).splitlines()), repr(error))}") from None
