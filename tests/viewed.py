"""The web page in a browser: a server over runs, the page's source as npm installs it, and axe's findings."""

import asyncio
import hashlib
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npm_packages import installing
from rolltape.view.serve import ServedAddress, served

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[1]
VIEWER = ROOT / "viewer"
BUILT = ROOT / "src" / "rolltape" / "view" / "page"


@contextmanager
def page_over(*runs: Path, port: int = 0, base_path: str = "") -> Iterator[str]:
    """The address of a server over runs, which has read them."""
    with serving(*runs, port=port, base_path=base_path) as there:
        yield there.address.rstrip("/")


@contextmanager
def serving(*runs: Path, key: str | None = None, **given: Any) -> Iterator[ServedAddress]:
    """A server over runs, which has read them; it runs in a thread, since Playwright's calls block."""
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[ServedAddress] = loop.create_future()
    over = asyncio.Event()

    async def serve() -> None:
        async with served([str(run) for run in runs], key=key, **given) as there:
            ready.set_result(there)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not ready.done() and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        there = ready.result()
        address = there.address.rstrip("/")
        for run in ask(address, "/api/runs", key)["runs"]:
            while not _read(ask(address, f"/api/{run['r']}/overview", key)) and time.monotonic() < deadline:
                time.sleep(0.1)
        yield there
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def _read(overview: Any) -> bool:
    return bool(overview["read_through"]) and not overview["pending"]


def ask(address: str, path: str, key: str | None = None) -> Any:
    return json.loads(ask_bytes(address, path, key))


def ask_bytes(address: str, path: str, key: str | None = None) -> bytes:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as answer:
        content: bytes = answer.read()
        return content


@cache
def installed_viewer() -> Path:
    """The page's source with what its lock file names, under `.cache/`; skips the test where npm cannot bring it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which builds the page, is not installed")
    lock = hashlib.sha256((VIEWER / "package-lock.json").read_bytes()).hexdigest()[:12]
    with installing() as folder:
        place = folder / f"viewer-{lock}"
        if not (place / "node_modules" / ".installed").exists():
            place.mkdir(exist_ok=True)
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(VIEWER / name, place / name)
            done = subprocess.run([npm, "ci"], cwd=place, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"npm ci could not install the page's packages: {done.stderr[-300:]}")
            (place / "node_modules" / ".installed").touch()
    return place


def serious_findings(page: "Page") -> list[str]:
    """What axe finds wrong with a page and calls serious or critical, each with the first place where."""
    axe = installed_viewer() / "node_modules" / "axe-core" / "axe.min.js"
    page.evaluate(axe.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [
        f"{one['id']}: {one['help']} ({len(one['nodes'])} times, first at {one['nodes'][0]['html'][:160]})"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
