"""The site that `make docs` builds: every link and page name holds, and nothing comes from another machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs_redirects")
pytest.importorskip("material")
ROOT = Path(__file__).parents[2]
# What a browser loads without being asked.
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\s\">]+)|<link\b[^>]*\bhref=\"?([^\s\">]+)")
# The pages of 0.1, which others may link to.
OLD_PAGES = ["agents", "collect", "export", "forks", "frameworks-verl", "gateway", "policies", "tape", "tokens", "view"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_a_page_loads_nothing_from_another_machine(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = {(page.name, *found) for page in pages for found in LOADED.findall(page.read_text())}
    assert any("assets/" in one[1] for one in loaded)
    assert [one for one in sorted(loaded) if re.match(r"https?:|//", one[1] or one[2])] == []


def test_an_old_page_name_leads_to_a_page(site: Path) -> None:
    for name in OLD_PAGES:
        target = re.search(r'url=([^"]+)"', (site / f"{name}.html").read_text())
        assert target is not None
        assert (site / target[1]).is_file()


def test_the_site_can_be_searched(site: Path) -> None:
    assert "keep-head" in (site / "search" / "search_index.json").read_text()
