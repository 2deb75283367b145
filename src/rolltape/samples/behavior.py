"""What a rollout's replies and tools did, counted from its messages: replies cut off, tool errors, edits of tests.

A tool result is an error if its API marks it as one (`is_error`), or if its text begins with "error:". A command that
exits with another code than 0 is no error by itself: tests that fail, and a search without a match, do so too.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from rolltape.records.messages import Message, Role, call_parts, content_text, message_calls
from rolltape.records.rollout import Rollout, Session
from rolltape.records.sample import BehaviorCounts
from rolltape.records.turn import Finish

# Raw messages are searched before they are decoded: most have nothing to count.
_MAY_BE_ERROR = re.compile(rb'"is_error"|"(?:content|text)"\s*:\s*"\s*error\b', re.IGNORECASE)
_IS_ERROR = re.compile(r"\s*error\s*:", re.IGNORECASE)
_MAY_NAME_TEST = re.compile(rb"test|_spec|\.spec\.", re.IGNORECASE)

# Texts are searched up to this length: a policy may write anything, and patterns must stay quick.
_LONGEST_TEXT, _LONGEST_PATH = 20_000, 1_000

# A path whose folder or file is named as those of tests are.
_TEST = (
    r"(?:[\w.~@+-]{0,80}/){0,30}"
    r"(?:(?:tests?|__tests__)/[\w./@+-]+|conftest\.py|test_[\w-]+\.\w+|[\w-]+_(?:test|spec)\.\w+"
    r"|[\w-]+\.(?:test|spec)\.\w+|[A-Z]\w*Tests?\.(?:java|kt|cs|scala|swift))"
)
_QUOTED = rf"[\"']?(?:{_TEST})(?![\w/-])"
_TEST_PATH = re.compile(rf"(?:.*/)?{_TEST}", re.DOTALL)
_PATCHED = re.compile(
    rf"^(?:\*\*\* (?:Add|Update|Delete) File: |\*\*\* Move to: |\+\+\+ (?:b/)?|--- (?:a/)?)/?{_TEST}", re.MULTILINE
)
_REST = r"(?:[^\n;|&]{0,400}[\s=/])?"  # of one command
_COMMANDS = re.compile(
    rf">\s*/?{_QUOTED}"
    rf"|\btee\b{_REST}{_QUOTED}"
    rf"|\b(?:sed|perl)\b[^\n;|&]{{0,40}}\s-\w{{0,8}}i{_REST}{_QUOTED}"
    rf"|\b(?:rm|mv|touch|truncate|git\s+(?:checkout|restore|rm|mv))\s{_REST}{_QUOTED}"
    rf"|\b(?:cp|install)\s{_REST}{_QUOTED}[\"']?\s*(?:$|[\n;|&])"
    rf"|\bopen\(\s*{_QUOTED}[\"']\s*,\s*[\"'][wax]"
    rf"|\bPath\(\s*{_QUOTED}[\"']\s*\)\.(?:write_|unlink|rename)"
)
_EDITS = re.compile(
    r"edit|write|create|patch|replace|insert|update|modify|delete|remove|move|rename|append|save", re.IGNORECASE
)
_PATHS = frozenset(
    (
        *("path", "file_path", "filepath", "file", "filename", "file_name", "target_file", "notebook_path"),
        *("absolute_path", "relative_path", "paths", "files", "uri", "source", "destination"),
    )
)
_SHELL = frozenset(("command", "cmd", "commands", "script", "code", "input", "keystrokes"))


def count_behavior(rollout: Rollout) -> BehaviorCounts:
    """Count what a rollout's replies and tools did."""
    turns = [turn for turn in rollout.turns if turn.facts.auxiliary is None]
    results = [is_error for session in rollout.sessions for is_error in _tool_results(session)]
    return BehaviorCounts(
        cut_replies=sum(turn.facts.finish is Finish.LENGTH for turn in turns),
        tool_results=len(results),
        tool_errors=sum(results),
        test_edits=sum(
            _edits_test(name, arguments)
            for turn in turns
            if turn.reply is not None and _MAY_NAME_TEST.search(turn.reply.raw)
            for name, arguments in _calls(turn.reply)
        ),
    )


def _tool_results(session: Session) -> Iterator[bool]:
    """Whether each tool result of a session is an error. A result that prompts repeat counts once."""
    seen: set[object] = set()
    for turn in session.turns:
        if turn.facts.auxiliary is not None:
            continue
        for place, message in enumerate(turn.prompt.own, turn.prompt.keep):
            if message.role not in (Role.TOOL, Role.USER):
                continue
            # Two calls may have equal results. Without the id of the call, their places distinguish them.
            named = b'"tool_call_id"' in message.raw or b'"tool_use_id"' in message.raw
            key = message.digest if named else (place, message.digest)
            if key not in seen:
                seen.add(key)
                yield from _results_in(message)


def _results_in(message: Message) -> Iterator[bool]:
    if message.role is Role.TOOL:
        yield bool(_MAY_BE_ERROR.search(message.raw)) and _is_error(message.to_dict())
    elif b'"tool_result"' in message.raw:  # as Anthropic's messages have them
        content = message.to_dict().get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "tool_result":
                yield _is_error(part)


def _is_error(result: dict[str, Any]) -> bool:
    return result.get("is_error") is True or bool(_IS_ERROR.match(content_text(result.get("content"))))


def _calls(reply: Message) -> Iterator[tuple[str, object]]:
    """The name and the arguments of each tool call, parsed where they are JSON."""
    value = reply.to_dict()
    for call in message_calls(value):
        name, arguments = call_parts(call)
        yield str(name or ""), _parsed(arguments)
    content = value.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") == "tool_use":
            yield str(part.get("name") or ""), part.get("input")


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments  # a patch as plain text, or a malformed call


def _edits_test(name: str, arguments: object) -> bool:
    """Whether a tool call changes a test's file, judged by its arguments."""
    given = arguments if isinstance(arguments, dict) else {"input": arguments}
    if given.get("command") == "view":  # an editor's tool that was asked to show a file
        return False
    for key, value in given.items():
        for text in _texts(value):
            if key in _PATHS and _EDITS.search(name) and _TEST_PATH.fullmatch(text[:_LONGEST_PATH]):
                return True
            text = text[:_LONGEST_TEXT]
            if _PATCHED.search(text) or (key in _SHELL and _COMMANDS.search(text)):
                return True
    return False


def _texts(value: object) -> Iterator[str]:
    """A text, or the words of a command that is a list of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        words = [one for one in value if isinstance(one, str)]
        yield from words
        yield " ".join(words)
