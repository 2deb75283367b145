"""The reference is what the program does: generated pages are current; routes, bodies and metrics are as written."""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families
from reference_docs.json_schemas import RECORDS, schema_of
from reference_docs.openapi import openapi, openapi_path
from reference_docs.pages import generated_pages

from gateways import rig
from rolltape.cli import run as rolltape_command
from rolltape.cli.exits import Exit
from rolltape.demo import record_scripted

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
# Signatures are spelled in other ways by other versions of Python.
IS_WRITTEN_BY_THIS_PYTHON = sys.version_info[:2] == (3, 11)

if IS_WRITTEN_BY_THIS_PYTHON:

    def test_generated_pages_are_current() -> None:
        stale = [
            name
            for name, text in generated_pages().items()
            if not (REFERENCE / name).is_file() or (REFERENCE / name).read_text() != text
        ]
        assert not stale, "write them: python -m reference_docs"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "scripted"
    record_scripted(path)
    return path


def printed(*words: object) -> list[dict[str, Any]]:
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), write_through=True)) as output:
        rolltape_command([str(word) for word in words])
    raw = output.buffer
    assert isinstance(raw, io.BytesIO)
    return [json.loads(line) for line in raw.getvalue().decode().splitlines()]


# What a command prints, and which schema each of its lines has, from the last one back.
PRINTED: dict[str, tuple[list[str], list[str]]] = {
    "ls": (["ls", "RUN"], ["ls"]),
    "tree": (["tree", "RUN", "857bc8a1"], ["tree"]),
    "show": (["show", "RUN", "857bc8a1", "--part", "tokens"], ["show"]),
    "samples": (["samples", "RUN"], ["samples"]),
    "compare": (
        ["samples", "RUN", "--compare", "keep-head"],
        ["compare-policy", "compare-policy", "compare-difference"],
    ),
    "compare-runs": (["compare", "RUN", "RUN"], ["compare", "compare-task"]),
    "ledger": (["ledger", "RUN"], ["ledger"]),
    "check": (["check", "RUN"], ["check"]),
    "filter": (["filter", "RUN", "--dry-run"], ["filter"]),
    "score": (["score", "RUN", "857bc8a1", "0.5", "--dry-run"], ["score", "score-rollout"]),
    "push": (["push", "RUN", "--to", "OUT"], ["push"]),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_command_prints_what_its_schema_says(name: str, scripted: Path, tmp_path: Path) -> None:
    words, schemas = PRINTED[name]
    places = {"RUN": scripted, "OUT": tmp_path / "steps.jsonl"}
    lines = printed(*(places.get(word, word) for word in words), "--json")
    assert len(lines) >= len(schemas)
    for back, line in enumerate(reversed(lines)):
        schema = schema_of(schemas[min(back, len(schemas) - 1)])
        jsonschema.validate(line, schema)
        assert set(line) == set(schema["properties"])


def test_a_schema_refuses_a_value_of_another_type(scripted: Path) -> None:
    line = printed("ls", scripted, "--json")[0]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line | {"attempt": "first"}, schema_of("ls"))


def test_every_schema_is_on_the_page() -> None:
    assert set(re.findall(r"schemas/([\w-]+)\.json", (REFERENCE / "json.md").read_text())) == set(RECORDS)


async def test_the_gateway_has_the_routes_that_openapi_names_and_no_others(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", []) as it:
        runner = it.gateway._runner
        assert runner is not None
        served = {
            (route.method, openapi_path(route.resource.canonical))
            for route in runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    # Below /s and /with are the same routes with the session in the path; /forwarded is between workers.
    own = {(method, path) for method, path in served if not path.startswith(("/s/", "/with/", "/forwarded"))}
    written = {(method.upper(), path) for path, methods in openapi()["paths"].items() for method in methods}
    assert own == written
    assert {(method, path.removeprefix("/s/{key}")) for method, path in served if path.startswith("/s/{key}/v1")} <= own


async def test_admin_routes_answer_with_the_fields_that_openapi_names(tmp_path: Path) -> None:
    paths = openapi()["paths"]

    def check(method: str, path: str, body: dict[str, Any]) -> None:
        told = paths[path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, told)

    async with rig(tmp_path / "run", ["one"]) as it:
        opened = (await it.call("POST", "/sessions", {"task_id": "another"})).json
        check("post", "/sessions", opened)
        check("get", "/sessions", (await it.call("GET", "/sessions")).json)
        check("get", "/sessions/{id}", (await it.call("GET", f"/sessions/{opened['session']}")).json)
        check("post", "/weights", (await it.call("POST", "/weights", {"version": "2"})).json)
        check("post", "/weights/pause", (await it.call("POST", "/weights/pause", {})).json)
        check("post", "/weights/resume", (await it.call("POST", "/weights/resume", {"version": "3"})).json)
        check("get", "/status", (await it.call("GET", "/status")).json)
        finished = await it.call("POST", f"/sessions/{opened['session']}/finish", {"reward": 1.0})
        check("post", "/sessions/{id}/finish", finished.json)


async def test_the_metrics_page_lists_what_the_gateway_exposes(tmp_path: Path) -> None:
    async with rig(tmp_path / "run", []) as it:
        raw = (await it.call("GET", "/metrics")).raw.decode()
    exposed = {(family.name, family.type) for family in text_string_to_metric_families(raw)}
    exposed = {(name, kind) for name, kind in exposed if not name.endswith("_created")}  # when each was made
    page = (REFERENCE / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `(rolltape_\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert listed == {(f"{name}_total" if kind == "counter" else name, kind) for name, kind in exposed}


def test_every_exit_code_is_on_the_page() -> None:
    page = (REFERENCE / "command-line.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == {int(code) for code in Exit}
