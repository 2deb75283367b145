"""Bad sources: each is refused before anything runs, with the place, what is wrong, and what to do."""

import datetime
import math
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltape.collect import Task, open_source
from rolltape.errors import BadTasks, NoSuchFunction, SourceError, TaskError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bad_tasks", raising=False)
    return tmp_path


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(TaskError) as caught:
        open_source(source, **options)
    return str(caught.value)


BAD_LINES = {
    "list": (
        '["a"]',
        'line 2: this is a list; a task is an object, such as {"id": "a", "prompt": "..."}',
    ),
    "number": ("12", 'line 2: this is a number; a task is an object, such as {"id": "a", "prompt": "..."}'),
    "null": ("null", 'line 2: this is null; a task is an object, such as {"id": "a", "prompt": "..."}'),
    "cut": (
        '{"id": "b", "x": [1, 2',
        "line 2, column 23: not valid JSON (expecting ',' delimiter); write one object per line",
    ),
    "cut text": (
        '{"id": "b", "x": "y',
        "line 2, column 18: not valid JSON (unterminated string); write one object per line",
    ),
    "quotes": (
        "{'id': 'b'}",
        "line 2, column 2: not valid JSON (expecting property name enclosed in double quotes); "
        "write one object per line",
    ),
    "two values": (
        '{"id": "b"} {"id": "c"}',
        "line 2, column 13: not valid JSON (extra data); write one object per line",
    ),
    "latin 1": ('{"id": "\xe9"}', "line 2: not UTF-8 (byte 0xe9); save it as UTF-8"),
    "truth as id": ('{"id": true}', "line 2: its id is True; give text or a number, or leave the id out"),
    "list as id": ('{"id": [1]}', "line 2: its id is [1]; give text or a number, or leave the id out"),
    "empty id": ('{"task_id": ""}', "line 2: its id is ''; give text or a number, or leave the id out"),
    "repeated id": ('{"id": "a", "x": 1}', "line 2: its id 'a' is that of line 1 already; give each task its own id"),
    "environment": (
        '{"environment": 3}',
        "line 2: its environment is 3; give the name of one, or leave it out for the command's",
    ),
    "unknown environment": (
        '{"environment": "chess"}',
        "line 2: there is no environment 'chess'; there are game, problem",
    ),
    "nan": (
        '{"x": {"y": [0, NaN]}}',
        "line 2: x.y[1] is nan, which JSON has no number for; write null, text or a finite number",
    ),
    "overflow": (
        '{"x": 1e999}',
        "line 2: x is inf, which JSON has no number for; write null, text or a finite number",
    ),
    "surrogate": (
        '{"x": ["\\ud83d"]}',
        "line 2: x[0] is '\\ud83d', half of a character; write the whole character",
    ),
    "surrogate in key": (
        '{"\\ud83d": 1}',
        "line 2: the key '\\ud83d' has half of a character; write the whole character",
    ),
    "key twice": (
        '{"x": {"y": 1, "y": 2}}',
        "line 2: the key 'y' appears twice in one object; keep one of them",
    ),
    "deep": (
        '{"x":' + "[" * 300 + "]" * 300 + "}",
        "line 2: it cannot be JSON: it is nested more than 200 levels deep; flatten it",
    ),
    "bottomless": ('{"x":' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: it is nested too deeply; flatten it"),
    "digits": (
        '{"x": ' + "9" * 5000 + "}",
        "line 2: a whole number in it has more digits than Python reads; write it as text",
    ),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_line_is_refused_with_its_place(line: str, message: str) -> None:
    Path("math.jsonl").write_bytes(b'{"id": "a"}\n' + line.encode("latin-1") + b'\n{"id": "z"}\n')
    assert refusal("math.jsonl", environments={"problem", "game"}) == f"math.jsonl, {message}"


BAD_JSON = {
    "empty": ("", "x.json is empty: there is no task in it; give a source with tasks"),
    "blank": (" \n", "x.json is empty: there is no task in it; give a source with tasks"),
    "empty list": ("[ ]", "x.json is empty: there is no task in it; give a source with tasks"),
    "syntax": (
        '[\n{"id": 1},\n{"id" 2}]',
        "x.json, line 3, column 7: not valid JSON (expecting ':' delimiter); correct it there",
    ),
    "lines": (
        '{"id": 1}\n{"id": 2}',
        "x.json, line 2, column 1: not valid JSON (extra data); one object per line belongs into a .jsonl file",
    ),
    "item": (
        '[{"id": 1},\n "two"]',
        'x.json, line 2, item 2: this is text; a task is an object, such as {"id": "a", "prompt": "..."}',
    ),
    "key twice": (
        '[\n{"x": 1, "x": 2}]',
        "x.json, line 2, item 1: the key 'x' appears twice in one object; keep one of them",
    ),
    "no list": (
        '{"id": 1}',
        'x.json holds one object, without a list in it; write a list of objects, or {"tasks": [...]}',
    ),
    "text": ('"a"', 'x.json holds neither a list nor an object; write a list of objects, or {"tasks": [...]}'),
    "several lists": ('{"b": [], "a": []}', "x.json has several lists, a, b; say which one with --split"),
    "latin 1": ('[\n"\xe9"]', "x.json, line 2: not UTF-8 (byte 0xe9); save it as UTF-8"),
    "bottomless": ("[" * 100_000 + "]" * 100_000, "x.json: it is nested too deeply; flatten it"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_file_is_refused_with_its_place(text: str, message: str) -> None:
    Path("x.json").write_bytes(text.encode("latin-1"))
    assert refusal("x.json") == message


def test_missing_split_of_a_json_file_is_named_with_those_there_are() -> None:
    Path("x.json").write_text('{"train": [], "test": []}')
    assert refusal("x.json", split="dev") == "x.json has no split 'dev'; it has test, train"


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_missing_file_is_refused(name: str) -> None:
    assert refusal(f"no/{name}") == f"no/{name}: there is no such file; check the path"


def test_file_of_no_known_kind_is_refused() -> None:
    Path("x.csv").write_text("id\n1\n")
    assert refusal("x.csv") == ("x.csv is not a task file; there are .json, .jsonl, .parquet and dataset directories")


def test_empty_json_lines_are_refused() -> None:
    Path("x.jsonl").write_text("\n \n")
    assert refusal("x.jsonl") == "x.jsonl is empty: there is no task in it; give a source with tasks"


def test_limit_below_one_is_refused() -> None:
    assert refusal("x.jsonl", limit=0) == "a limit of 0 leaves no task; give 1 or more, or none for all"


def test_utf16_is_refused() -> None:
    Path("x.jsonl").write_bytes('{"id": 1}'.encode("utf-16"))
    assert refusal("x.jsonl") == "x.jsonl, line 1: not UTF-8 (byte 0xff); save it as UTF-8"


def test_equal_tasks_without_ids_are_refused_whatever_their_spelling() -> None:
    Path("x.jsonl").write_text('{"x": 1, "y": 5000}\n{"y": 5000.0, "x": 1}\n{"x": 1, "y": 5000, "id": "b"}\n')
    assert refusal("x.jsonl") == (
        "x.jsonl, line 2: it is the same as line 1, and neither has an id; remove one, or give each its own id"
    )


def test_number_and_text_of_one_spelling_are_one_id() -> None:
    Path("x.jsonl").write_text('{"id": 1}\n{"id": "1"}\n{"id": 1.0}\n')
    assert refusal("x.jsonl").splitlines()[1:] == [
        "  line 2: its id '1' is that of line 1 already; give each task its own id",
        "  line 3: its id '1' is that of line 1 already; give each task its own id",
    ]


def test_all_that_is_wrong_is_told_at_once_up_to_ten_entries() -> None:
    Path("x.jsonl").write_text('{"id": 0}\n' + '{"id": 0}\n' * 47)
    with pytest.raises(BadTasks) as caught:
        open_source("x.jsonl")
    told = str(caught.value).splitlines()
    assert told[0] == "x.jsonl: 47 entries cannot be used, and nothing was run"
    assert told[1] == "  line 2: its id '0' is that of line 1 already; give each task its own id"
    assert told[11:] == ["  and 37 more"]
    assert (caught.value.count, len(caught.value.problems)) == (47, 10)


def test_what_an_environment_lacks_is_told_with_the_place() -> None:
    Path("x.jsonl").write_text('{"answer": 1}\n{"question": 2}\n')

    def check(task: Task) -> None:
        if "answer" not in task.data:
            raise TaskError("problem needs an answer, and it has only question; add one")

    assert refusal("x.jsonl", check=check) == (
        "x.jsonl, line 2: problem needs an answer, and it has only question; add one"
    )


def test_entries_behind_the_limit_are_not_read_unless_shuffled() -> None:
    Path("x.jsonl").write_text('{"id": 1}\nnonsense\n')
    assert len(open_source("x.jsonl", limit=1)) == 1
    assert refusal("x.jsonl", limit=1, shuffle_seed=0).startswith("x.jsonl, line 2, column 1: not valid JSON")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (datetime.datetime(2026, 1, 1), "of type datetime"),
        (b"png", "of type bytes"),
        (math.nan, "nan, which JSON has no number for; write null, text or a finite number"),
    ],
)
def test_column_that_json_cannot_hold_is_refused_with_its_row(value: object, what: str) -> None:
    rows = [{"id": 1, "inner": {"x": None}}, {"id": 2, "inner": {"x": value}}]
    pq.write_table(pa.Table.from_pylist(rows), "x.parquet")
    tail = "" if "nan" in what else ", which is not JSON; make it text, a number or a list"
    assert refusal("x.parquet") == f"x.parquet, row 2: inner.x is {what}{tail}"


def test_bad_parquet_is_refused() -> None:
    Path("x.parquet").write_bytes(b"PAR1 this is none PAR1")
    assert refusal("x.parquet").startswith("x.parquet cannot be read as Parquet: ")
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["id", "id"]), "y.parquet")
    assert refusal("y.parquet") == "y.parquet has two columns of one name: id; rename one of each"
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), "z.parquet")
    assert refusal("z.parquet") == "z.parquet is empty: there is no task in it; give a source with tasks"


def test_a_folder_of_other_folders_is_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # it would search the folder
    Path("home/project").mkdir(parents=True)
    Path("home/notes.json").write_text("{}")
    assert refusal("home") == (
        "home is not a dataset: it has the folder 'project', and beside its data files a dataset has only `data` and a "
        "folder per split, unless its README.md describes it; give a .json, .jsonl or .parquet file, a dataset's "
        "folder, harbor:FOLDER or python:module:function"
    )


def test_a_table_that_cannot_be_parsed_is_refused_with_the_reason() -> None:
    pytest.importorskip("datasets")
    Path("tables").mkdir()
    Path("tables/x.csv").write_text('id,prompt\n1,"fine ""so"" far"\n2,"not closed\n')
    assert refusal("tables").startswith("tables cannot be loaded as a dataset: Error tokenizing data")


BAD_FUNCTIONS = """
from rolltape.collect import Task

NUMBER = 3

def number(): return 3
def text(): return "abc"
def mapping(): return {"id": "a"}
def needs(path): return []
def keys(): return [{"id": "a", "x": {1: 2}}]
def nodata(): return [Task(data=["a"])]
def badid(): return [Task(id=True, data={})]
def fails(): raise KeyError("mine")
def fails_later(): yield {"id": "a"}; raise KeyError("mine")
"""
FAILURES = {"fails": 'raise KeyError("mine")', "fails_later": 'yield {"id": "a"}; raise KeyError("mine")'}


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("number", SourceError, " returned something of type int; return a list of objects, or yield them"),
        ("text", SourceError, " returned something of type str; return a list of objects, or yield them"),
        ("mapping", SourceError, " returned something of type dict; return a list of objects, or yield them"),
        (
            "needs",
            SourceError,
            " cannot be called without arguments: missing a required argument: 'path'; change --split or the function",
        ),
        ("keys", BadTasks, ", item 1: the key 1 of x is of type int; JSON has only text keys"),
        (
            "nodata",
            BadTasks,
            ', item 1: this is a list; a task is an object, such as {"id": "a", "prompt": "..."}',
        ),
        ("badid", BadTasks, ", item 1: its id is True; give text or a number, or leave the id out"),
        ("nowhere", NoSuchFunction, ": nowhere of module bad_tasks is not there; name a function of it"),
        ("NUMBER", NoSuchFunction, ": NUMBER of module bad_tasks is of type int; name a function of it"),
    ],
)
def test_bad_function_is_refused(here: Path, function: str, kind: type[TaskError], message: str) -> None:
    (here / "bad_tasks.py").write_text(BAD_FUNCTIONS)
    with pytest.raises(kind, match=f"^{re.escape(f'python:bad_tasks:{function}{message}')}$"):
        open_source(f"python:bad_tasks:{function}")


def test_split_is_for_functions_that_take_one(here: Path) -> None:
    (here / "bad_tasks.py").write_text(BAD_FUNCTIONS)
    assert refusal("python:bad_tasks:number", split="test") == (
        "python:bad_tasks:number cannot be called with split='test': got an unexpected keyword argument 'split'; "
        "change --split or the function"
    )


def test_missing_module_is_told_from_one_that_fails(here: Path) -> None:
    assert refusal("python:no_such:f") == (
        f"python:no_such:f: there is no module no_such, in {here} or installed; run from its folder, or install it"
    )
    assert refusal("python:no_such") == "python:no_such names no function; write python:module:function"
    (here / "bad_tasks.py").write_text("import no_such_dependency\n")
    assert refusal("python:bad_tasks:f") == (
        "python:bad_tasks:f: its module raised ModuleNotFoundError: No module named 'no_such_dependency' "
        "(bad_tasks.py, line 1); correct it"
    )


@pytest.mark.parametrize("function", ["fails", "fails_later"])
def test_error_of_the_function_itself_is_named_with_its_place(function: str, here: Path) -> None:
    (here / "bad_tasks.py").write_text(BAD_FUNCTIONS)
    line = 1 + BAD_FUNCTIONS.splitlines().index(f"def {function}(): " + FAILURES[function])
    assert refusal(f"python:bad_tasks:{function}") == (
        f"python:bad_tasks:{function} raised KeyError: 'mine' (bad_tasks.py, line {line}); correct it"
    )
