"""Every kind of source when it is cut short, empty, or written to do harm: a named problem, and never a crash."""

import json
import os
import shutil
import sqlite3
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolltape
from import_sources import capture_database, write_source
from importing import ANSWER, QUESTION, imported, write_lines
from rolltape.cli import run as rolltape_command
from rolltape.errors import ImportFileError
from rolltape.importers import KINDS, guess

SOURCES = [*KINDS, "inspect json", "messages table", "slime lines", "tinker summaries"]
JSON_SOURCES = [one for one in SOURCES if one not in ("inspect", "messages table", "slime", "tinker", "trl")]


def kind_of(source: str) -> str:
    return source.split(" ")[0]


@pytest.mark.parametrize("source", SOURCES)
def test_a_whole_source_is_imported_and_recognized(tmp_path: Path, source: str) -> None:
    path = write_source(source, tmp_path)
    assert kind_of(source) in guess(path)
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    shutil.copy(path, tmp_path / "outer" / "inner")
    assert kind_of(source) in guess(tmp_path / "outer"), "a folder is read with all that is below it"
    assert imported(kind_of(source), path, tmp_path / "run").imported == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_cut_short_anywhere_is_named_and_records_nothing_of_it(tmp_path: Path, source: str) -> None:
    path = write_source(source, tmp_path)
    whole = path.read_bytes()
    for share in (0.3, 0.6, 0.97):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ImportFileError, match=path.name):
            imported(kind_of(source), path, tmp_path / "run")
        guess(path)
    assert not rolltape.read(tmp_path / "run").index()


@pytest.mark.parametrize("source", SOURCES)
def test_an_empty_source_is_named(tmp_path: Path, source: str) -> None:
    path = write_source(source, tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ImportFileError, match=path.name):
        imported(kind_of(source), path, tmp_path / "run")
    assert guess(path) == {} or kind_of(source) == "inspect"


def hostile_values() -> Iterator[Any]:
    """Values that do not belong where they are put. DEEP is replaced by ten thousand lists in each other."""
    yield from (None, True, -1, 2**70, float("nan"), float("inf"), "", "\x1b[2J\x00", "../../../etc/passwd", [], [None])
    yield from ({}, {"": {}}, [[[]]], "DEEP")


def replaced_everywhere(value: Any, hostile: Any) -> Iterator[Any]:
    """The document with a hostile value in the place of each of its values in turn."""
    yield hostile
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, item in items:
        for changed in replaced_everywhere(item, hostile):
            copy: Any = dict(value) if isinstance(value, dict) else list(value)
            copy[place] = changed
            yield copy


@pytest.mark.parametrize("source", JSON_SOURCES)
def test_any_value_in_any_place_of_a_source_is_read_or_named(tmp_path: Path, source: str) -> None:
    path = write_source(source, tmp_path)
    whole = json.loads(path.read_text())
    entries = [changed for hostile in hostile_values() for changed in replaced_everywhere(whole, hostile)]
    texts = [json.dumps(entry).replace('"DEEP"', "[" * 10_000 + "]" * 10_000) for entry in entries]
    if path.suffix == ".json":
        texts = texts[:: max(1, len(texts) // 40)]  # each is a file, and an import, of its own
    for text in [*texts] if path.suffix == ".json" else ["\n".join(texts)]:
        path.write_text(text)
        guess(path)
        try:
            report = imported(kind_of(source), path, tmp_path / "run", skip_broken=True)
        except ImportFileError as error:
            problems = [str(error)] if path.suffix == ".json" else []
        else:
            problems = [entry.where for entry in report.broken]
            assert report.imported + report.known + len(problems) > 0
        assert all(str(path) in problem for problem in problems)
    for rollout in rolltape.read(tmp_path / "run").rollouts():
        rolltape.linearize(rollout, "exact")


@pytest.mark.parametrize("source", ["trl", "messages table"])
def test_a_table_of_other_columns_is_named(tmp_path: Path, source: str) -> None:
    path = write_source(source, tmp_path)
    pq.write_table(pa.table({"prompt": [1, 2], "completion": [b"\xff", None], "messages": [[1], None]}), path)
    with pytest.raises(ImportFileError, match=path.name):
        imported(kind_of(source), path, tmp_path / "run")


@pytest.mark.parametrize("text", ["not json", "[" * 10_000, '{"a": 1}', "[null]", '["\\u0000"]'])
def test_a_capture_database_with_other_values_is_named(tmp_path: Path, text: str) -> None:
    path = capture_database(tmp_path / "capture.db")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE wire_rows SET sampled_tokens = ?", (text,))
    connection.commit()
    connection.close()
    with pytest.raises(ImportFileError, match=r"capture\.db"):
        imported("tinker", path, tmp_path / "run")


def test_a_log_that_unpacks_to_far_more_than_it_is_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = write_source("inspect", tmp_path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as log, log.open("samples/bomb_epoch_1.json", "w") as entry:
        for _ in range(300):
            entry.write(b" " * (1 << 20))
    with pytest.raises(ImportFileError, match=r"log\.eval: it unpacks to 314,572,800 bytes in samples/bomb"):
        imported("inspect", path, tmp_path / "run")


def test_a_pipe_is_named_as_one_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ImportFileError, match=r"pipe\.jsonl: a pipe or a device, not a file"):
        imported("messages", tmp_path / "pipe.jsonl", tmp_path / "run")


def test_names_with_control_characters_are_shown_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a\x1b[2Jb.jsonl", [{"messages": [QUESTION, ANSWER]}, {"\x1b[31m": "\x07"}])
    assert rolltape_command(["import", "messages", str(path), str(tmp_path / "run")]) != 0
    assert rolltape_command(["import", "messages", str(path), str(tmp_path / "run"), "--skip-broken"]) == 0
    assert rolltape_command(["ls", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "line 2" in shown.err
    assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}


def test_an_id_that_is_a_path_names_no_file(tmp_path: Path) -> None:
    row = {"id": "../../../outside", "messages": [QUESTION, ANSWER], "task_id": "/etc/passwd"}
    imported("messages", write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "deep" / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "deep"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"run"}
