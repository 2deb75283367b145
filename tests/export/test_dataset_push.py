"""Pushing a dataset to a hub that answers over a socket as the real one does, as far as a push asks it."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolltape.cli.exits import Exit
from taped import record_run

TOKEN = "hf_test"
COMMIT = "c0" * 20


class Hub(BaseHTTPRequestHandler):
    """Takes texts in the commit itself, and tables as large files."""

    asked: list[str]
    made: list[dict[str, Any]]
    files: dict[str, bytes]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append(f"POST {self.path.partition('?')[0]}")
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "no token"}, 401)
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path.startswith("/api/repos/create"):
            self.made.append(json.loads(body))
            return self._answer(
                {"url": f"http://{self.headers['host']}/datasets/me/sft", "name": "me/sft"}, self.status
            )
        if "/preupload/" in self.path:
            modes = {one["path"]: one["path"].endswith(".parquet") for one in json.loads(body)["files"]}
            files = [
                {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                for path, large in modes.items()
            ]
            return self._answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"http://{self.headers['host']}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "lfsFile":
                    self.files[part["value"]["path"]] = self.files.pop(part["value"]["oid"])
                if part["key"] == "file":
                    self.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            return self._answer(
                {"commitOid": COMMIT, "commitUrl": f"http://{self.headers['host']}/datasets/me/sft/commit/{COMMIT}"}
            )
        return self._answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.files[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["content-length"]))
        self._answer({})

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path.partition('?')[0]}")
        if not self.made:
            return self._answer({"error": "Repository not found"}, 404, {"x-error-code": "RepoNotFound"})
        if self.path.partition("?")[0].endswith(f"/tree/{COMMIT}"):
            return self._answer([{"type": "file", "path": ".gitattributes", "oid": "f0", "size": 9}])
        if self.path.startswith("/api/datasets/me/sft") and "/tree/" not in self.path:
            return self._answer({"id": "me/sft", "sha": COMMIT, "siblings": [], "private": True, "tags": []})
        return self._answer({"error": "Entry not found"}, 404, {"x-error-code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type("OneHub", (Hub,), {"asked": [], "made": [], "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def push(folder: Path, endpoint: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    record_run(folder / "run", rollouts=2, turns=2)
    # The library reads where the hub is when it is imported.
    command = [sys.executable, "-m", "rolltape.cli", "export", str(folder / "run"), "--format", "datasets"]
    return subprocess.run(
        [*command, "-o", "hf://datasets/me/sft"],
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": token,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_push_makes_a_private_repository_with_the_rows(tmp_path: Path, hub: tuple[type[Hub], str]) -> None:
    handler, endpoint = hub
    done = push(tmp_path, endpoint)
    assert done.returncode == 0, done.stderr + str(handler.asked)
    assert "2 conversations written to hf://datasets/me/sft" in done.stderr
    (made,) = handler.made
    assert (made["name"], made["organization"], made["type"]) == ("sft", "me", "dataset")
    assert made.get("visibility") == "private" or made.get("private") is True  # by the version of the client
    (name,) = [one for one in handler.files if one.endswith(".parquet")]
    (tmp_path / "pushed.parquet").write_bytes(handler.files[name])
    rows = pq.read_table(tmp_path / "pushed.parquet").to_pylist()
    assert [[one["content"] for one in row["messages"]] for row in rows] == [["hello", "hi", "go on 1", "reply 1"]] * 2


def test_a_push_that_the_hub_refuses_says_so(tmp_path: Path, hub: tuple[type[Hub], str]) -> None:
    done = push(tmp_path, hub[1], token="hf_wrong")
    assert done.returncode == Exit.OUTPUT
    assert "hf://datasets/me/sft cannot be pushed: " in done.stderr
    assert "401" in done.stderr
    assert "Traceback" not in done.stderr
