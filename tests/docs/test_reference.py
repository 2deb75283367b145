"""The reference is what the program does: generated pages are current; routes, bodies and metrics are as written."""

import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
from prometheus_client.parser import text_string_to_metric_families
from reference_docs.openapi import openapi, openapi_path
from reference_docs.pages import generated_pages

from gateways import rig
from rolltape.cli.exits import Exit

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
