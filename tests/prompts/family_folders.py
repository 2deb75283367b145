"""Prompts of every renderer family, on the shipped vocabulary with the tokens that the family needs."""

import json
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from prompts.conversing import TINY
from rolltape.errors import CheckpointError
from rolltape.gateway.prompts import ChatPrompts, families
from rolltape.gateway.prompts.tokenizer import FolderTokenizer


def prompts_of(family: str, scratch: Path, without: tuple[str, ...] = ()) -> ChatPrompts:
    """The prompts of a family; `without` these tokens, which are spelled then."""
    return _loaded(family, scratch, without)


@cache
def _loaded(family: str, scratch: Path, without: tuple[str, ...]) -> ChatPrompts:
    folder = scratch / "-".join([family, *(str(len(token)) for token in without)])
    folder.mkdir()
    written = json.loads((TINY / "tokenizer.json").read_text())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] not in without]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    while wanted := _missing_token(family, folder):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(wanted, special=True, normalized=False)])
        tokenizer.save(str(folder / "tokenizer.json"))
    return ChatPrompts(folder, renderer=family)


def _missing_token(family: str, folder: Path) -> str | None:
    try:
        families.make(family, FolderTokenizer(folder))
    except CheckpointError as error:
        named = re.search(r"[Tt]oken '([^']+)'|for '([^']+)'", str(error))
        if named is None:
            raise
        return named.group(1) or named.group(2)
    return None
