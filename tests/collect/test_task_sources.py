"""Every kind of source gives its tasks; identity, order and laziness of them."""

import io
import json
import random
import socket
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape.collect import Task, TaskSource, open_source, seed_of
from rolltape.errors import SourceError
from rolltape.records.ids import rollout_id

TWO: list[dict[str, Any]] = [
    {"id": "a", "question": "1 + 1", "answer": 2},
    {"task_id": 7, "environment": "game", "question": "π?", "answer": 3.14},
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a working directory of its own, and modules imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delitem(sys.modules, "made_tasks", raising=False)
    return tmp_path


def write_lines(path: str, entries: list[dict[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "question": f"{number} + {number}"} for number in range(count)]


def ids(source: TaskSource) -> list[str | None]:
    return [task.id for task in source]


def own_rollout_id(task: Task) -> str:
    return rollout_id(
        "run", source=task.source, task_id=task.id, task=task.data, step=0, attempt=0, model=None, agent=None
    )


def test_json_lines_give_their_entries_as_they_came() -> None:
    Path("math.jsonl").write_text("\ufeff" + json.dumps(TWO[0]) + "\r\n\n  \n" + json.dumps(TWO[1]))
    first, second = open_source("math.jsonl")
    assert first == Task(id="a", data=TWO[0], source="math.jsonl", where="math.jsonl, line 1")
    assert second == Task(id="7", environment="game", data=TWO[1], source="math.jsonl", where="math.jsonl, line 4")
    assert list(first.data) == ["id", "question", "answer"]


def test_json_list_knows_lines_and_items() -> None:
    Path("math.json").write_text(' [\n {"id": "a", "x": "],}"},\n\n {"id":\n "b"}, {"id": "c"}\n]\n')
    source = open_source(Path("math.json"))
    assert ids(source) == ["a", "b", "c"]
    assert [task.where.removeprefix("math.json, ") for task in source] == [
        "line 2, item 1",
        "line 4, item 2",
        "line 5, item 3",
    ]


@pytest.mark.parametrize(
    ("document", "split", "wanted", "name"),
    [
        ({"version": 1, "tasks": TWO}, None, ["a", "7"], "x.json"),
        ({"version": 1, "tasks": TWO}, "test", ["a", "7"], "x.json#test"),
        ({"train": [TWO[0]], "note": "[", "test": [TWO[1]]}, "test", ["7"], "x.json#test"),
        ({"train": [TWO[0]]}, None, ["a"], "x.json#train"),
        ({"tasks": [TWO[0]], "test": [TWO[1]]}, "test", ["7"], "x.json#test"),
    ],
)
def test_json_object_holds_its_tasks_in_a_list(
    document: dict[str, Any], split: str | None, wanted: list[str], name: str
) -> None:
    Path("x.json").write_text(json.dumps(document, indent=1))
    source = open_source("x.json", split=split)
    assert (ids(source), source.name) == (wanted, name)


def test_standard_input_is_read_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = "".join(json.dumps(entry) + "\n" for entry in TWO).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    source = open_source("-")
    assert [task.data for task in source] == [task.data for task in source] == TWO
    assert (source.name, source[1].where) == ("stdin", "stdin, line 2")


def test_parquet_gives_a_task_for_each_row() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "messages": [{"role": "user", "content": "hi"}]},
        {"id": None, "messages": []},
    ]
    pq.write_table(pa.Table.from_pylist(rows), "math.parquet")
    source = open_source("math.parquet")
    assert [task.data for task in source] == rows
    assert ids(source) == ["a", None]
    assert source[1].where == "math.parquet, row 2"


FUNCTIONS = """
from rolltape.collect import Task

def listed():
    return [{"id": "a", "path": ("x", "y")}]

def yielded(split="train"):
    entry = {"split": split}
    for number in range(2):
        entry["number"] = number
        yield entry

def endless():
    number = 0
    while True:
        yield Task(id=str(number), environment="game", data={"number": number})
        number += 1
"""


def test_function_returns_or_yields_objects_or_tasks(here: Path) -> None:
    (here / "made_tasks.py").write_text(FUNCTIONS)
    (task,) = open_source("python:made_tasks:listed")
    assert task.data == {"id": "a", "path": ["x", "y"]}
    assert (task.source, task.where) == ("python:made_tasks:listed", "python:made_tasks:listed, item 1")
    source = open_source("python:made_tasks:yielded", split="test")
    assert [task.data for task in source] == [{"split": "test", "number": 0}, {"split": "test", "number": 1}]
    assert source.name == "python:made_tasks:yielded#test"
    endless = open_source("python:made_tasks:endless", limit=3)
    assert [(task.id, task.environment, task.data) for task in endless] == [
        (str(number), "game", {"number": number}) for number in range(3)
    ]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
class TestDatasets:
    def test_saved_dataset_is_read_by_split(self) -> None:
        datasets = pytest.importorskip("datasets")
        train, test = (datasets.Dataset.from_list([{"id": name, "x": [1]}]) for name in ("a", "b"))
        datasets.DatasetDict(train=train, test=test).save_to_disk("math")
        source = open_source("math", split="test")
        assert [task.data for task in source] == [{"id": "b", "x": [1]}]
        assert (source.name, source[0].where) == ("math#test", "math, row 1")
        with pytest.raises(SourceError, match=r"^math has no split 'dev'; it has test, train$"):
            open_source("math", split="dev")
        with pytest.raises(SourceError, match=r"^math has several splits, test, train; say which one with --split$"):
            open_source("math")

    def test_saved_single_dataset_needs_no_split(self) -> None:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list([{"id": "a"}]).save_to_disk("unsplit")
        datasets.Dataset.from_list([{"id": "a"}], split="train").save_to_disk("split")
        assert open_source("unsplit").name == "unsplit"
        assert open_source("unsplit", split="test").name == "unsplit#test"
        assert open_source("split").name == open_source("split", split="train").name == "split#train"
        with pytest.raises(SourceError, match=r"^split has no split 'test'; it has train$"):
            open_source("split", split="test")

    def test_directory_of_data_files_is_a_dataset(self) -> None:
        pytest.importorskip("datasets")
        Path("files").mkdir()
        write_lines("files/train.jsonl", [{"id": "a"}])
        write_lines("files/test.jsonl", [{"id": "b"}])
        assert ids(open_source("files", split="train")) == ["a"]
        assert open_source("./files/", split="train").name == "files#train"
        Path("nothing").mkdir()
        with pytest.raises(SourceError, match=r"^nothing cannot be loaded as a dataset: .* doesn't contain any data"):
            open_source("nothing")

    def test_directory_with_a_folder_per_split_or_a_card_is_a_dataset(self) -> None:
        pytest.importorskip("datasets")
        for folder in ("splits/train", "splits/test", "card/main"):
            Path(folder).mkdir(parents=True)
        write_lines("splits/train/x.jsonl", [{"id": "a"}])
        write_lines("splits/test/x.jsonl", [{"id": "b"}])
        assert ids(open_source("splits", split="test")) == ["b"]
        write_lines("card/main/x.jsonl", [{"id": "c"}])
        Path("card/README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: main/x.jsonl\n---\n")
        assert ids(open_source("card", split="train")) == ["c"]

    def test_mistyped_path_does_not_reach_the_hub(self, here: Path) -> None:
        (here / "tasks").mkdir()
        for text in ("tasks/math", "./math", "a/b/c", "/math"):
            with pytest.raises(SourceError, match=f"^{text}: there is no such file or directory; check the path$"):
                open_source(text, split="train")
        with pytest.raises(SourceError, match=r"^owner/math: there is no such .* name its split too with --split$"):
            open_source("owner/math")


def test_hub_dataset_is_loaded_by_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[object] = []

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"question": "1 + 1", "split": "of another kind"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("openai/gsm8k:main", split="train[:1]")
    assert asked == [("openai/gsm8k", "main", "train[:1]")]
    assert (source.name, len(source)) == ("openai/gsm8k:main#train[:1]", 1)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        SourceError,
        match=r"^owner/math: datasets are read with the package `datasets`, which is not installed; "
        r"pip install 'rolltape\[datasets\]'$",
    ):
        open_source("owner/math", split="train")


def test_source_is_the_same_from_every_working_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "tasks").mkdir()
    path = here / write_lines("tasks/math.jsonl", TWO)
    by_name = [list(map(own_rollout_id, open_source(name))) for name in ("tasks/math.jsonl", path)]
    monkeypatch.chdir(here / "tasks")
    assert [*by_name, list(map(own_rollout_id, open_source("./math.jsonl")))] == [by_name[0]] * 3


def test_split_and_given_name_are_in_the_source_and_so_in_the_ids() -> None:
    write_lines("math.jsonl", TWO)
    opened = [
        open_source("math.jsonl"),
        open_source("math.jsonl", split="train"),
        open_source("math.jsonl", split="test"),
        open_source("math.jsonl", name="algebra"),
        open_source("math.jsonl", name="algebra", split="test"),
        open_source("math.jsonl", name="algebra#test"),
    ]
    assert [source.name for source in opened] == [
        "math.jsonl",
        "math.jsonl#train",
        "math.jsonl#test",
        "algebra",
        "algebra#test",
        "algebra%23test",
    ]
    assert len({own_rollout_id(task) for source in opened for task in source}) == 2 * len(opened)


def test_entries_that_name_another_split_are_left_out() -> None:
    write_lines("mixed.jsonl", [{"id": 1, "split": "train"}, {"id": 2, "split": "test"}, {"id": 3}])
    assert ids(open_source("mixed.jsonl", split="test")) == ["2", "3"]
    assert ids(open_source("mixed.jsonl")) == ["1", "2", "3"]
    write_lines("split.jsonl", [{"id": 1, "split": "train"}, {"id": 2, "split": "test"}])
    with pytest.raises(SourceError, match=r"^split.jsonl: no entry is of the split 'dev'; they are of test, train$"):
        open_source("split.jsonl", split="dev")


def test_shuffle_is_decided_by_the_seed_and_not_by_the_limit() -> None:
    write_lines("math.jsonl", numbered(200))
    one, two = (ids(open_source("math.jsonl", shuffle_seed=seed)) for seed in (1, 2))
    assert sorted(one, key=str) == sorted(two, key=str)
    assert one != two
    assert one[:5] == ["96", "33", "116", "79", "24"]
    assert ids(open_source("math.jsonl", shuffle_seed=1, limit=20)) == one[:20]
    assert ids(open_source("math.jsonl", limit=20)) == [str(number) for number in range(20)]
    assert len(open_source("math.jsonl", limit=1000)) == 200


def test_order_of_a_shuffle_does_not_depend_on_that_of_the_file() -> None:
    write_lines("math.jsonl", numbered(50))
    before = ids(open_source("math.jsonl", shuffle_seed=3))
    more = numbered(80)
    random.Random(0).shuffle(more)
    write_lines("math.jsonl", more)
    after = ids(open_source("math.jsonl", shuffle_seed=3))
    assert [own_id for own_id in after if own_id in before] == before


def test_source_stays_as_it_was_opened_and_gives_each_task_afresh() -> None:
    write_lines("math.jsonl", TWO)
    with open_source("math.jsonl") as source:
        write_lines("math.jsonl", numbered(9))
        source[0].data["question"] = "spoiled"
        assert [task.data for task in source] == TWO
        assert source[-1].id == "7"
    with pytest.raises(ValueError, match="closed"):
        source[0]


def test_memory_does_not_grow_with_what_is_in_the_tasks() -> None:
    write_lines("large.jsonl", [{"id": number, "text": "x" * 5000} for number in range(3000)])
    tracemalloc.start()
    source = open_source("large.jsonl", shuffle_seed=0)
    used = tracemalloc.get_traced_memory()
    assert sum(len(task.data["text"]) for task in source) == 15_000_000
    tracemalloc.stop()
    assert used[0] < 200_000
    assert used[1] < 2_000_000


def test_seed_of_an_attempt_is_fixed_and_has_63_bits() -> None:
    assert seed_of("0" * 32) == 1442301069028374522
    seeds = {seed_of(f"{number:032x}") for number in range(1000)}
    assert len(seeds) == 1000
    assert 2**62 < max(seeds) < 2**63


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
reserved = {"id", "task_id", "environment", "split"}
objects = st.dictionaries(st.text().filter(lambda key: key not in reserved), json_values, max_size=4)
layouts: st.SearchStrategy[Callable[[Any], str]] = st.sampled_from(
    [
        json.dumps,
        lambda value: json.dumps(value, indent=2),
        lambda value: json.dumps(value, ensure_ascii=False, separators=(" ,\n ", "\t:\r\n")),
        lambda value: json.dumps({"first": "[", "tasks": value, "last": [{}]}),
    ]
)


@given(st.lists(objects, min_size=1, max_size=6), layouts)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_and_json_lines_give_back_every_value(entries: list[dict[str, Any]], layout: Callable[[Any], str]) -> None:
    tasks = [{"id": number, **entry} for number, entry in enumerate(entries)]
    Path("any.json").write_bytes(layout(tasks).encode())
    write_lines("any.jsonl", tasks)
    for name in ("any.json", "any.jsonl"):
        found = [task.data for task in open_source(name)]
        assert repr(found) == repr(tasks)
