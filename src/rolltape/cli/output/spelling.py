"""The text of token ids, by the tokenizer that `--tokenizer` names or the one that the run recorded."""

from pathlib import Path

from rolltape.errors import UsageError
from rolltape.records.turn import Ids
from rolltape.samples.spelling import Spell, Spellings, speller, token_texts, tokenizer_in


def open_spellings(tokenizer: str | None, run: str) -> Spellings:
    """What turns a run's ids into text. A given tokenizer is used for all sessions."""
    if tokenizer is None:
        return Spellings(run)
    file = tokenizer_in(Path(tokenizer))
    if file is None:
        raise UsageError(f"--tokenizer {tokenizer}: not found; give a tokenizer.json or a folder with one")
    try:
        return Spellings(run, speller(file))
    except ValueError as error:
        raise UsageError(f"--tokenizer: {error}") from None


def excerpt(ids: Ids, spell: Spell | None, limit: int = 12) -> str:
    """The first few tokens as text, or as ids without a tokenizer."""
    texts = token_texts(ids[:limit].tolist(), spell)
    return " ".join(text.replace(" ", "␣") for text in texts) + (" …" if len(ids) > limit else "")
