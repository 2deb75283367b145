"""Every page runs in an empty folder: its Python and its commands, and what they print is what the page says.

ROLLTAPE_UPDATE_DOCS=1 writes what they print into the pages instead.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape.cli import run as rolltape_command
from rolltape.export.files import TABLES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages about frameworks and trainers run code that needs torch.
SLOW_PAGES = ("other-environments.md",)  # it imports whole projects
RUN_PAGES = [
    pytest.param(
        page,
        marks=[
            *([pytest.mark.torch] if "torch" in page.read_text() else []),
            *([pytest.mark.slow] if page.name in SLOW_PAGES else []),
        ],
    )
    for page in PAGES
]
BLOCKED = re.compile(r"^rolltape: the event loop of .* was blocked .*\n", re.MULTILINE)  # on a busy machine
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of_page(page: Path) -> str:
    """`how-to/view.md` for the page of that name below docs/."""
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@contextlib.contextmanager
def captured() -> Iterator[io.BytesIO]:
    """Both outputs as one, as a terminal would show them."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield raw
    stream.detach()


class Reader:
    """Reads a page block by block and does what it says."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "page"}
        self.printed = ""
        self.code = 0

    def done(self, block: re.Match[str]) -> str:
        """The block as it should be."""
        kind, body = block[1], block[2]
        if kind == "python":
            with captured() as output:
                exec(compile(body, "page", "exec"), self.names)
            self.printed = output.getvalue().decode()
        elif kind == "output":
            body = self.printed
        elif kind == "console":
            commands = [line for line in body.splitlines() if line.startswith("$ ")]
            body = "".join(f"{line}\n{self.run(line[2:])}" for line in commands)
        return f"```{kind}\n{body}```"

    def run(self, command: str) -> str:
        if command == "echo $?":
            return f"{self.code}\n"
        program, *arguments = shlex.split(command)
        assert program == "rolltape", f"a console block runs rolltape alone; write {program} in an sh block"
        with captured() as output:
            self.code = rolltape_command(arguments)
        return BLOCKED.sub("", output.getvalue().decode()).replace(str(Path.cwd()), "/home/me")


@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of_page)
def test_page_says_what_happens(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # for the help, which is wrapped in a pipe too
    # As where the environment that Rolltape is installed in is activated.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    written = page.read_text()
    true = FENCE.sub(Reader().done, written)
    if os.environ.get("ROLLTAPE_UPDATE_DOCS"):
        page.write_text(true)
    else:
        assert written == true


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


# Packages that come with the plain install, and the extra or the package that brings others.
PLAIN = {*sys.stdlib_module_names, "rolltape", "aiohttp", "msgspec", "numpy", "openai", "my_module"}
BROUGHT_BY = {"duckdb": "query", "google": "google-genai", "anthropic": "clients", "pyarrow": "parquet"}


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_a_page_says_what_its_python_needs_beyond_the_plain_install(page: Path) -> None:
    text = page.read_text()
    for block in FENCE.finditer(text):
        if block[1] == "python":
            roots = set(re.findall(r"^(?:from|import) (\w+)", block[2], re.MULTILINE))
            for name in (BROUGHT_BY.get(root, root) for root in roots - PLAIN):
                needs = rf"(?:needs?\b|extras?\b|pip install\b|rolltape\[)[^.]*?\b{name}\b"
                assert re.search(needs, text[: block.start()]), f"{name} is not named before it is used"


def test_every_exported_column_is_described() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "reference" / "export.md").read_text(), re.MULTILINE)
    described = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    missing = {name for table in TABLES.values() for name in table.schema.names} - described
    assert not missing


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_files_that_contributors_are_told_of_exist(page: str) -> None:
    named = set(re.findall(r"(?:src/rolltape|tests|docs|reference_docs)/[\w/.-]+", (ROOT / page).read_text()))
    assert [
        one for one in sorted(named) if not re.search("[A-Z]{4}", one) and not (ROOT / one.rstrip(".")).exists()
    ] == []


def test_the_readme_has_at_most_600_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600
