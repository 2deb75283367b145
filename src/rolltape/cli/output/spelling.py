"""The text of token ids for a command: by the tokenizer that `--tokenizer` names, else by those of the run."""

from pathlib import Path

from rolltape.cli.exits import UsageError
from rolltape.records.tokens import Ids
from rolltape.samples.spelling import Spell, Spellings, speller, token_texts, tokenizer_in


def chosen_spellings(given: str | None, run: str) -> Spellings:
    """What spells a run's ids; a tokenizer that is given counts for all sessions."""
    if given is None:
        return Spellings(run)
    file = tokenizer_in(Path(given))
    if file is None:
        raise UsageError(f"--tokenizer: {given} is not there; give a tokenizer.json or a folder with one")
    try:
        return Spellings(run, speller(file))
    except ValueError as error:
        raise UsageError(f"--tokenizer: {error}") from None


def excerpt(ids: Ids, spell: Spell | None, limit: int = 12) -> str:
    """A few tokens for people: their text if there is one, else the ids."""
    texts = token_texts(ids[:limit].tolist(), spell)
    return " ".join(text.replace(" ", "␣") for text in texts) + (" …" if len(ids) > limit else "")
