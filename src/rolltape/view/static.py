"""Write pages that need no server: each file contains its answers, and all share the program beside them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec

from rolltape.errors import TapeError
from rolltape.records.rollout import Annotations
from rolltape.tape.stored import Key
from rolltape.view.answers import MOST_ROWS, encode_answer
from rolltape.view.compare.comparison import comparing
from rolltape.view.rollout.masking import Mask
from rolltape.view.rollout.rollout_answers import RolloutAnswers
from rolltape.view.served_runs import ServedRun
from rolltape.view.static_page import Block, SharedFiles, build_page

_INDEX = "index.html"
_COMPARED = ("exact", "keep-head")  # the policies that a page compares
_SAMPLES = 8  # samples whose tokens are part of a rollout's page


class StaticPages:
    """Writes pages of a run."""

    def __init__(self, location: str, *, mask: bool = True) -> None:
        self._shared = SharedFiles()
        self._run = ServedRun("run", location)
        self._answers = RolloutAnswers(self._run)
        self._mask = Mask() if mask else None
        self._masked: set[str] = set()

    def __enter__(self) -> Self:
        self._run.catch_up(words=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()

    @property
    def masked(self) -> int:
        """How many different keys were masked so far."""
        return len(self._masked)

    def chosen(self, named: Sequence[str]) -> list[int]:
        """The rows of the rollouts with these ids, or all rows without ids."""
        rows = self._run.state.rows
        if not len(rows):
            raise TapeError(f"{self._run.location}: the run holds no rollouts yet")
        if not named:
            counting = {one: self._answers.row(one, None) for one in dict.fromkeys(rows.ids)}  # the tries that count
            return [row for row in self._answers.listing().order.tolist() if counting[rows.ids[row]] == row]
        return [self._answers.row_named(self._run.index.find(one, self._run.title)) for one in named]

    def count(self, chosen: Sequence[int]) -> int:
        """The number of pages that `write` writes."""
        return len(chosen) + len({self._run.state.rows.text(row, "group") for row in chosen}) + 1

    def write(self, folder: Path, chosen: Sequence[int]) -> Iterator[Path]:
        """Write a page for each rollout, for each of their groups, and for the run. Yields each when it is written."""
        groups: dict[str, list[int]] = {}
        for row in chosen:
            groups.setdefault(self._run.state.rows.text(row, "group") or "", []).append(row)
        with self._shared.written(folder):
            self._learn(chosen)
            for group, rows in groups.items():
                # A page links only to the files of its group: links to all would make it as long as the run.
                files = self._files(rows)
                for row in rows:
                    own = self._address("rollout", self._run.state.rows.ids[row])
                    yield self._write_page(folder / files[own], self._rollout_blocks(row), own, files)
                own = self._address("group", group)
                yield self._write_page(folder / files[own], self._group_blocks(group, rows), own, files)
            yield self._write_page(folder / _INDEX, self._run_blocks(chosen), self._base, self._files(chosen))

    def _learn(self, chosen: Sequence[int]) -> None:
        """Find all keys before the first page is written, since a key may be recognizable only in the last."""
        if self._mask is not None:
            for row in chosen:
                self._mask.learn(self._answers.shown(row).texts())

    @property
    def _base(self) -> str:
        return f"/{self._run.name}"

    def _address(self, view: str, name: str) -> str:
        return f"{self._base}/{view}/{quote(name, safe='')}"

    def _files(self, rows: Sequence[int]) -> dict[str, str]:
        """The file for each address of these rollouts and their groups."""
        files = {self._base: _INDEX}
        for row in rows:
            rollout, group = self._run.state.rows.ids[row], self._run.state.rows.text(row, "group") or ""
            files[self._address("rollout", rollout)] = f"rollout-{_file_name(rollout)}.html"
            files[self._address("compare", rollout)] = f"rollout-{_file_name(rollout)}.html"
            files[self._address("group", group)] = f"group-{_file_name(group)}.html"
        return files

    def _run_blocks(self, chosen: Sequence[int]) -> Iterator[Block]:
        yield self._json("overview", self._answers.overview(None))
        yield self._json("tasks", self._answers.tasks({"limit": str(MOST_ROWS)}))
        yield self._json("notes", self._answers.notes(self._chosen_annotations(chosen)))
        yield self._rows(chosen)

    def _chosen_annotations(self, chosen: Sequence[int]) -> dict[Key, Annotations]:
        """The tags and notes of the written rollouts."""
        rows = self._run.state.rows
        keys = {rows.key(row) for row in chosen}
        return {key: one for key, one in self._answers.load_annotations().items() if key in keys}

    def _group_blocks(self, group: str, rows: Sequence[int]) -> Iterator[Block]:
        yield self._json(f"groups/{quote(group, safe='')}", self._answers.group(group, rows)())
        yield self._rows(rows)

    def _rollout_blocks(self, row: int) -> Iterator[Block]:
        own = f"rollouts/{quote(self._run.state.rows.ids[row], safe='')}"
        shown = self._answers.shown(row)
        detail = shown.detail(None)
        yield self._rows([row])
        yield self._json(own, detail)
        left, right = _COMPARED
        yield self._json(f"{own}/compare?left={left}&right={right}", shown.compare(left, right))
        for digest, index, content in shown.images():
            yield f"/api{self._base}/{own}/messages/{digest}/images/{index}", content
        has_key = self._mask is not None and self._mask.occurs_in(shown.texts())
        for index in range(min(len(detail["samples"]), _SAMPLES)):
            packed = shown.tokens(index, None, mask=self._mask)
            # Without texts, ids are not masked, and a key could be decoded from them with the tokenizer.
            if _has_text(packed) or not has_key:
                yield f"/api{self._base}/{own}/samples/{index}/tokens", packed

    def _rows(self, rows: Sequence[int]) -> Block:
        shown = [self._answers.listing().row(row) for row in rows]
        return self._json("rollouts", {"total": len(rows), "matched": len(rows), "rows": shown, "snapshot": 0})

    def _about(self) -> Block:
        """The run as a row, without its location."""
        headline = {**self._answers.headline(), "location": "", "live": False, "problem_list": []}
        return "/api/runs", encode_answer({"runs": [self._mask_answer(headline)]}).decode()

    def _json(self, path: str, answer: dict[str, Any]) -> Block:
        # Problems contain the paths of files.
        hidden = {"location": "", "problem_list": []} if path == "overview" else {}
        return f"/api{self._base}/{path}", encode_answer(self._mask_answer({**answer, **hidden})).decode()

    def _mask_answer(self, answer: dict[str, Any]) -> Any:
        if self._mask is None:
            return answer
        plain = self._mask.all(answer)
        for fork in (fork for session in plain.get("sessions", ()) for fork in session["forks"]):
            _mask_excerpts(fork["first_difference"], self._mask)
        return plain

    def _write_page(self, path: Path, blocks: Iterable[Block], start: str, files: dict[str, str]) -> Path:
        if self._mask is not None:
            self._mask.masked.clear()
        answers = [self._about(), *blocks]
        masked = set() if self._mask is None else set(self._mask.masked)
        self._masked |= masked
        about = {"start": start, "files": files, "masked": len(masked), "name": self._run.title}
        path.write_text(build_page(self._shared, answers, about), encoding="utf-8")
        return path


def write_comparison(folder: Path, a: str, b: str, *, mask: bool = True) -> tuple[Path, int]:
    """Write the comparison of two whole runs by each measure. Return the page, and how many keys were masked."""
    shared, masking, path = SharedFiles(), Mask() if mask else None, folder / "compare.html"
    answers = [
        (address, encode_answer(answer if masking is None else masking.all(answer)).decode())
        for address, answer in _compare_by_each_measure(a, b)
    ]
    masked = 0 if masking is None else len(masking.masked)
    start = "/compare?a=a&b=b"
    about = {"start": start, "home": start, "files": {"/compare": path.name}, "masked": masked, "name": "comparison"}
    with shared.written(folder):
        path.write_text(build_page(shared, answers, about), encoding="utf-8")
    return path, masked


def _compare_by_each_measure(a: str, b: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with comparing(a, b, {"limit": str(MOST_ROWS)}) as answer:
        first = answer({})
        yield "/api/runs", {"runs": [{"r": side, "name": first[side]["name"]} for side in ("a", "b")]}
        for one in first["measures"]:
            yield f"/api/compare?measure={one['measure']}", answer({"measure": one["measure"]})


def _file_name(name: str) -> str:
    """An id as part of a file name, or its digest if it has other characters."""
    return name if re.fullmatch(r"[0-9A-Za-z_-]{1,80}", name) else sha256(name.encode("utf-8", "replace")).hexdigest()


def _mask_excerpts(difference: dict[str, Any], mask: Mask) -> None:
    """Remove excerpts of a fork that may contain the rest of a key, since they begin where two texts differ."""
    texts, spelled = difference["text"], difference["token_texts"]
    if texts is not None and any(mask.holds_part(text) for text in texts):
        difference["text"] = None
    if spelled is None or any(mask.holds_part("".join(side)) for side in spelled):
        difference["token_texts"] = None
        difference["tokens"] = difference["tokens"] if spelled is None and not mask.masked else None


def _has_text(packed: bytes) -> bool:
    size = int.from_bytes(packed[:8], "little")
    return msgspec.json.decode(packed[8 : 8 + size])["text"] is not None
