"""The 400-turn session on a tape, sealed: bytes per unique token besides its text, against one JSON row per turn."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import rolltape
from benchmarks.figures import Figure, main
from benchmarks.linear import long_session
from benchmarks.workload import Workload


def figures() -> Iterator[Figure]:
    """Sizes after sealing."""
    work = long_session()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        _record(run, work)
        journal = _bytes_under(run)
        rolltape.seal(run)
        sealed = _bytes_under(run)
        text = sum(_text_bytes(file) for file in run.rglob("contents.parquet"))
    rows = sum(_json_bytes(given) for given in work.as_whole())
    a_token = (sealed - text) / work.tokens
    note = f"{sealed - text:,} bytes and {text:,} of text for {work.tokens:,} tokens"
    yield Figure("sealed, besides text", a_token, "bytes a token", 8, note=note)
    note = f"{rows / 1e6:,.0f} MB against {sealed / 1e6:.2f} MB"
    yield Figure("one JSON row a turn / sealed", rows / sealed, "×", 50, at_most=False, note=note)
    yield Figure("journal / sealed", journal / sealed, "×")


def _record(run: Path, work: Workload) -> None:
    with rolltape.open(run) as tape, tape.rollout(task_id="disk") as rollout:
        session = rollout.session()
        turn = None
        for given in work.as_new():
            if turn is None:
                given["prompt_messages"], given["prompt_ids"] = given.pop("new_messages"), given.pop("new_prompt_ids")
            turn = session.record_turn(after=turn, **given)
        rollout.finish(reward=1.0)


def _json_bytes(given: dict[str, Any]) -> int:
    """The size of a turn as one row without a space in it."""
    row = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items()}
    return len(json.dumps(row, separators=(",", ":"))) + 1


def _text_bytes(contents: Path) -> int:
    """What the messages' own bytes take in a shard."""
    metadata = pq.ParquetFile(contents).metadata
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    columns = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(column.total_compressed_size for column in columns if column.path_in_schema == "raw")


def _bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main({"disk": figures})
