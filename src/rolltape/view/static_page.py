"""One page in a file: its answers in blocks, and links to the program and styles that all pages of a folder share."""

import base64
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ExportError, ViewError
from rolltape.view.page_files import page_files

_LINKS = re.compile(r'\s*<link[^>]*\brel="(?:stylesheet|icon)"[^>]*>|\s*<script[^>]*\bsrc="[^"]*"[^>]*></script>')
_FONT_FILES = re.compile(r"url\(\s*[\"']?(?:\./)?(fonts/[^)\"'?#]+)[^)]*\)")
_ALONE = (
    "This page needs the folder <code>{folder}</code> that was written beside it. Keep the two together: mail the "
    "whole folder, or an archive of it."
)
Block = tuple[str, str | bytes]  # the path of a request, and its answer: JSON as text, or bytes


class SharedFiles:
    """The program and the styles, in a folder beside the pages. Each version of the program has its own folder."""

    def __init__(self) -> None:
        held = page_files()
        if "app.js" not in held:
            raise ViewError("the page is not built: run `npm run build` in viewer/")
        self.html = held["index.html"][1].decode()
        self._files = {name: content for name, (_, content) in held.items() if name.endswith((".js", ".txt"))}
        self._files["app.css"] = _with_fonts(held["app.css"][1].decode(), held).encode()
        digest = sha256(b"".join(sha256(self._files[name]).digest() for name in sorted(self._files)))
        self.folder = f"page-{digest.hexdigest()[:8]}"

    @contextmanager
    def written(self, folder: Path) -> Iterator[None]:
        """Write the files into a folder, which is made if missing, for pages that are written within the block."""
        try:
            for name, content in self._files.items():
                path = folder / self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            yield
        except OSError as error:
            raise ExportError(f"{folder}: cannot be written: {error.strerror or error}") from error


def build_page(shared: SharedFiles, answers: Iterable[Block], about: dict[str, Any]) -> str:
    """A page with answers in blocks, which it finds by their paths; `about` has facts about the page itself."""
    blocks = [*answers, ("/static", msgspec.json.encode(about).decode())]
    # A file has no origin that a policy could name, so scripts have a random nonce, which recorded texts cannot have.
    nonce = secrets.token_urlsafe(18)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; font-src data:; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="stylesheet" nonce="{nonce}" href="{shared.folder}/app.css">'
        f'<script defer nonce="{nonce}" src="{shared.folder}/app.js"></script>'
    )
    body = f'<p class="alone">{_ALONE.format(folder=shared.folder)}</p>' + "".join(map(_block, blocks))
    html = _LINKS.sub("", shared.html)
    # Not with `sub`, since the replacement may contain backslashes.
    html = html.replace("</head>", f"{head}</head>", 1)
    at = html.rindex("</body>")
    return html[:at] + body + html[at:]


def _with_fonts(styles: str, held: dict[str, tuple[str, bytes]]) -> str:
    """Styles with inlined fonts, since browsers do not load font files for a page from a file."""

    def inlined(match: re.Match[str]) -> str:
        kind, content = held[match[1]]
        return f"url(data:{kind};base64,{base64.b64encode(content).decode()})"

    return _FONT_FILES.sub(inlined, styles)


def _block(block: Block) -> str:
    path, answer = escape(block[0]), block[1]
    if isinstance(answer, bytes):
        return f'<script type="text/plain" data-base64 data-path="{path}">{base64.b64encode(answer).decode()}</script>'
    # Without "<", no text of a rollout can end the block.
    spelled = answer.replace("<", "\\u003c")
    return f'<script type="application/json" data-path="{path}">{spelled}</script>'
