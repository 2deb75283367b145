"""Pages that need no server: the page itself, its styles and its program, and the answers that it would ask for."""

import base64
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rolltape.errors import ExportError, NoSuchRollout, ViewError
from rolltape.view.answers import encoded
from rolltape.view.catching_up import catch_up
from rolltape.view.masking import Mask
from rolltape.view.page_files import page_files
from rolltape.view.service import RunAnswers
from rolltape.view.watching import WatchedRun

_SAMPLES = 8  # whose tokens are part of a rollout's page
_LINKS = re.compile(r'\s*<link[^>]*\brel="(?:stylesheet|icon)"[^>]*>|\s*<script[^>]*\bsrc="[^"]*"[^>]*></script>')
_FONTS = re.compile(r"@font-face\s*\{[^}]*\}")

Block = tuple[str, str | bytes]  # the path that is asked for, and its answer: JSON as text, or bytes


class StaticPages:
    """A run of which pages are written."""

    def __init__(self, location: str, *, mask: bool = True) -> None:
        self._run = WatchedRun("run", location)
        self._answers = RunAnswers(self._run)
        self._mask = Mask() if mask else None

    def __enter__(self) -> Self:
        catch_up(self._run, search=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        write = self._run.to_keep()
        if write is not None:
            write()
        self._run.close()

    @property
    def masked(self) -> int:
        """How many texts were masked so far."""
        return 0 if self._mask is None else self._mask.count

    def chosen(self, named: Sequence[str]) -> list[int]:
        """The rows of the rollouts that are named by the beginning of their ids; all of them if none is."""
        rows = self._run.state.rows
        if not len(rows):
            raise ViewError(f"{self._run.location}: the run holds no rollouts yet")
        latest: dict[str, int] = {}
        for row in sorted(range(len(rows)), key=lambda row: rows.key(row)[1]):
            latest[rows.ids[row]] = row
        if not named:
            return [row for row in self._answers.listing().order.tolist() if latest[rows.ids[row]] == row]
        return [latest[self._whole(one, latest)] for one in named]

    def _whole(self, begun: str, ids: dict[str, int]) -> str:
        found = [begun] if begun in ids else [one for one in ids if one.startswith(begun)]
        if len(found) != 1:
            how = "no rollout" if not found else f"{len(found)} rollouts"
            raise NoSuchRollout(f"run {self._run.title}: {begun!r} begins {how}; `rolltape ls` lists their ids")
        return found[0]

    def write(self, folder: Path, chosen: Sequence[int]) -> Iterator[Path]:
        """Write the run's page and one for each rollout; gives each file when it is there."""
        ids = [self._run.state.rows.ids[row] for row in chosen]
        base = f"/{self._run.name}"
        files = {base: "index.html", **{f"{base}/rollout/{one}": f"rollout-{one}.html" for one in ids}}
        files |= {f"{base}/compare/{one}": f"rollout-{one}.html" for one in ids}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for row, one in zip(chosen, ids, strict=True):
                blocks = list(self._rollout_blocks(row))
                yield self._written(folder / f"rollout-{one}.html", blocks, f"{base}/rollout/{one}", files)
            yield self._written(folder / "index.html", list(self._run_blocks(chosen)), base, files)
        except OSError as error:
            raise ExportError(f"{folder}: cannot be written: {error.strerror or error}") from error

    def _run_blocks(self, chosen: Sequence[int]) -> Iterator[Block]:
        listing, base = self._answers.listing(), f"/api/{self._run.name}"
        rows = [listing.row(row) for row in chosen]
        yield from self._about()
        yield self._json(f"{base}/overview", self._answers.overview(None))
        yield self._json(f"{base}/rollouts", self._table(rows))
        for group in dict.fromkeys(row["group"] for row in rows):
            yield self._json(f"{base}/groups/{group}", self._answers.group(group)())

    def _rollout_blocks(self, row: int) -> Iterator[Block]:
        rollout = self._run.state.rows.ids[row]
        base = f"/api/{self._run.name}"
        detail = self._answers.rollout(row, None)()
        yield from self._about()
        yield self._json(f"{base}/rollouts", self._table([self._answers.listing().row(row)]))
        yield self._json(f"{base}/rollouts/{rollout}", detail)
        yield self._json(f"{base}/rollouts/{rollout}/compare", self._answers.compare(row, None, None)())
        for index in range(min(len(detail["samples"]), _SAMPLES)):
            packed = self._answers.tokens(row, index, None, masks=self._mask is not None)()
            # Ids that nothing spells here may be spelled elsewhere.
            if _has_text(packed) or not self._had_key(detail):
                yield f"{base}/rollouts/{rollout}/samples/{index}/tokens", packed

    def _had_key(self, answer: Any) -> bool:
        return self._mask is not None and self._mask.all(answer) != answer

    def _about(self) -> Iterator[Block]:
        """The run as a line; where it lies is nobody's business."""
        headline = {**self._answers.headline(), "location": "", "live": False}
        yield self._json("/api/runs", {"runs": [headline]})

    def _table(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"total": len(rows), "matched": len(rows), "rows": rows, "snapshot": 0}

    def _json(self, path: str, answer: Any) -> Block:
        plain = {**answer, "location": ""} if path.endswith("/overview") else answer
        if self._mask is not None:
            plain = self._mask.all(plain)
            for fork in (fork for session in plain.get("sessions", ()) for fork in session["forks"]):
                _mask_excerpts(fork["first_difference"], self._mask)
        return path, encoded(plain).decode()

    def _written(self, path: Path, blocks: Sequence[Block], start: str, files: dict[str, str]) -> Path:
        about = {"start": start, "files": files, "masked": self.masked, "name": self._run.title}
        whole = [*blocks, ("/static", msgspec.json.encode(about).decode())]
        path.write_text(page_of(whole), encoding="utf-8")
        return path


def _mask_excerpts(difference: dict[str, Any], mask: Mask) -> None:
    """Take out of a fork what may be the rest of a key: an excerpt begins where two texts part."""
    texts, spelled = difference["text"], difference["token_texts"]
    if texts is not None and any(mask.holds_part(text) for text in texts):
        difference["text"] = None
    if spelled is None or any(mask.holds_part("".join(side)) for side in spelled):
        difference["token_texts"] = None
        difference["tokens"] = difference["tokens"] if spelled is None and not mask.count else None


def _has_text(packed: bytes) -> bool:
    size = int.from_bytes(packed[:8], "little")
    return msgspec.json.decode(packed[8 : 8 + size])["text"] is not None


def page_of(blocks: Sequence[Block]) -> str:
    """The page in one file, with answers in blocks that it finds by their paths."""
    held = page_files()
    if "app.js" not in held:
        raise ViewError("the page is not built: run `npm run build` in viewer/")
    html, program, styles = (held[name][1].decode() for name in ("index.html", "app.js", "app.css"))
    program = program.replace("</script", "<\\/script").replace("<!--", "\\x3c!--")
    styles = _FONTS.sub("", styles).replace("</style", "<\\/style")
    policy = (
        f"default-src 'none'; script-src '{_hash(program)}'; style-src '{_hash(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{styles}</style>'
    body = "".join(_block(path, answer) for path, answer in blocks) + f"<script>{program}</script>"
    html = _LINKS.sub("", html)
    # Not by `sub`: what is put in may hold backslashes.
    html = html.replace("</head>", f"{head}</head>", 1)
    at = html.rindex("</body>")
    return html[:at] + body + html[at:]


def _block(path: str, answer: str | bytes) -> str:
    if isinstance(answer, bytes):
        return f'<script type="text/plain" data-base64 data-path="{path}">{base64.b64encode(answer).decode()}</script>'
    # No text of a rollout can end the block: there is no "<" in it.
    spelled = answer.replace("<", "\\u003c")
    return f'<script type="application/json" data-path="{path}">{spelled}</script>'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()
