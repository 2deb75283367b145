"""The agents themselves, unmodified, in the versions that the rules of `gateway/turn/echo.py` were observed with."""

from pathlib import Path

import pytest

from npm_packages import npm_package

CLAUDE_CODE = "2.1.197"
CODEX = "0.166.0"
CODEX_CHAT = "0.29.0"  # the last one to be had that speaks Chat Completions
GEMINI_CLI = "0.61.0"


def claude_code() -> Path:
    """The program. Its package's script would link it under another name, and scripts are not run here."""
    found = list(npm_package("@anthropic-ai/claude-code", CLAUDE_CODE).glob("@anthropic-ai/claude-code-*/claude"))
    if not found:
        pytest.skip("Claude Code has no program for this machine")
    return found[0]


def codex(version: str = CODEX) -> Path:
    return npm_package("@openai/codex", version) / ".bin" / "codex"


def gemini_cli() -> Path:
    return npm_package("@google/gemini-cli", GEMINI_CLI) / ".bin" / "gemini"
