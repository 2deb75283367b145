"""Debian's Chromium, driven by Playwright: what a person sees of a page on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page, Playwright

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]

_PATIENCE_MS = 120_000  # other work may keep the machine busy

_started: "list[Playwright]" = []  # at most one; Playwright refuses a second one in a thread


@contextmanager
def _playwright() -> "Iterator[Playwright]":
    """Playwright for a page. A page that is opened while another one is open shares it."""
    from playwright.sync_api import sync_playwright

    if _started:
        yield _started[0]
        return
    with sync_playwright() as playwright:
        _started.append(playwright)
        try:
            yield playwright
        finally:
            _started.clear()


@contextmanager
def browser_page(*, width: int = 1400, height: int = 1600) -> "Iterator[Page]":
    """A fresh page; whatever it asks of another machine is refused, and fails the test."""
    if not CHROMIUM.is_file():
        pytest.skip(f"{CHROMIUM} is not there; `make test` installs it")
    from playwright.sync_api import Route, expect

    outside: list[str] = []

    def only_here(route: Route) -> None:
        if route.request.url.startswith(("http://127.0.0.1:", "http://localhost:", "data:", "blob:", "file:")):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    with _playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=_ARGUMENTS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.route("**/*", only_here)
        page.set_default_timeout(_PATIENCE_MS)
        expect.set_options(timeout=_PATIENCE_MS)
        try:
            yield page
        finally:
            browser.close()
    assert outside == []
