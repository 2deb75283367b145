"""A page of a browser that is as wide as a laptop's screen."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browser import browser_page

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def page() -> "Iterator[Page]":
    with browser_page(width=1400, height=900) as page:
        yield page
