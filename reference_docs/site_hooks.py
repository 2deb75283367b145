"""Hooks of mkdocs: CONTRIBUTING.md and SECURITY.md of the repository's root are pages of the site too."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
_LINK = re.compile(rf"\]\(((?:\.\./)+)({'|'.join(map(re.escape, _PAGES))})")


def on_files(files: Any, config: Any) -> Any:
    """Add the files of the root, with links as from within docs/."""
    from mkdocs.structure.files import File

    for name, page in _PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for other, there in _PAGES.items():
            text = text.replace(f"]({other}", f"]({there}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to files of the root to their pages."""
    return _LINK.sub(lambda link: f"]({link[1].removeprefix('../')}{_PAGES[link[2]]}", markdown)
