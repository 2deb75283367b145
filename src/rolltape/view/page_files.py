"""The built page that ships with the package."""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

KINDS = {
    "css": "text/css",
    "html": "text/html",
    "ico": "image/x-icon",
    "js": "text/javascript",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "woff2": "font/woff2",
}
_NOT_BUILT = (
    "<!doctype html><html lang='en'><meta charset='utf-8'><title>Rolltape</title>"
    "<p>The page is not built: run <code>npm run build</code> in viewer/. The answers are under "
    '<a href="./api/runs">/api/runs</a>.'
)


@cache
def page_files() -> dict[str, tuple[str, bytes]]:
    """All files of the page by their path, each with its media type and content."""
    found = dict(_files(files("rolltape.view") / "page", ""))
    found.setdefault("index.html", ("text/html", _NOT_BUILT.encode()))
    return found


def index_page(base: str) -> bytes:
    """The page itself, with the addresses of its files below a base path."""
    return page_files()["index.html"][1].replace(b'="./', f'="{base}/'.encode())


def _files(folder: Traversable, before: str) -> list[tuple[str, tuple[str, bytes]]]:
    found: list[tuple[str, tuple[str, bytes]]] = []
    if not folder.is_dir():
        return found
    for one in folder.iterdir():
        if one.is_dir():
            found += _files(one, f"{before}{one.name}/")
        elif (kind := KINDS.get(one.name.rpartition(".")[2])) is not None:
            found.append((f"{before}{one.name}", (kind, one.read_bytes())))
    return found
