"""The text of a token id, where a tokenizer is at hand."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from rolltape.cli.exits import UsageError
from rolltape.records.rollout import Session
from rolltape.records.tokens import Ids

TextOf = Callable[[int], str]


class Texts:
    """Finds the tokenizer of a session: the one given, else the one that its head names, if that is a file here."""

    def __init__(self, given: str | None, run: str) -> None:
        self.given = None if given is None else _loaded(_file_in(Path(given), "--tokenizer"))
        self._run = Path(run)
        self._known: dict[str | None, TextOf | None] = {}

    def of(self, session: Session) -> TextOf | None:
        """What turns an id of this session into text; None: there is no tokenizer."""
        if self.given is not None:
            return self.given
        name = session.head.tokenizer
        if name not in self._known:
            self._known[name] = None if name is None else self._named(name)
        return self._known[name]

    def _named(self, name: str) -> TextOf | None:
        for path in (self._run / name, Path(name)):
            if path.is_file() or (path / "tokenizer.json").is_file():
                return _loaded(_file_in(path, f"the session's tokenizer {name}"))
        return None


def _file_in(path: Path, where: str) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{where}: {file} is not there; give a tokenizer.json or a folder with one")
    return file


def _loaded(file: Path) -> TextOf:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with the file
        raise UsageError(f"--tokenizer: {file} is no tokenizer: {error}") from None

    @cache
    def text(token: int) -> str:
        if tokenizer.id_to_token(token) is None:
            return f"#{token}"
        decoded: str = tokenizer.decode([token], skip_special_tokens=False)
        return decoded

    return text


def excerpt(ids: Ids, text: TextOf | None, limit: int = 12) -> str:
    """A few tokens for people: their text if there is one, else the ids."""
    shown = ids[:limit].tolist()
    rest = " …" if len(ids) > limit else ""
    if text is None:
        return " ".join(map(str, shown)) + rest
    return " ".join(text(token).replace(" ", "␣") for token in shown) + rest
