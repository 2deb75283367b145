"""How clients change a reply when they send it back, and which changes still mean the same reply.

Claude Code (2.1.197) sends back text, thinking and calls, and each call as it ran it. It fills in missing fields
(Edit's `replace_all`), turns numbers and flags written as text into numbers and flags, and strips white space at the
ends of lines (Edit, Write). It drops a `cd` to the current folder and a backslash of `\\\\;` (Bash), and turns a
spelled-out `\\u00e9` into the letter.
When its user interrupts it, it keeps the thinking and text received so far. A new process that resumes has neither.
Codex over Responses (0.166) sends back everything unchanged: reasoning, text, calls of functions and custom tools.
When it is interrupted, it keeps complete items: the reasoning, but not an incomplete text.
Codex over Chat Completions (0.29) drops reasoning, runs the first of several calls and forgets the others, and sends
the call first, then its result, then the text. Other clients of that API drop reasoning too, for which it has no field.
opencode (1.18.33) sends back all of it, but replaces a call that it cannot make by a call of the tool `invalid`, which
names the tool that was called.
gemini-cli (0.61) sends back text and calls and drops thinking; google-genai (3.1) sends back all of it, each event of
a stream as a content of its own, which the dialect joins.
Agents on litellm (mini-swe-agent 2.4.6) send back all of it and add a field of their own.
gptme (0.35) puts the thinking into the text, in tags, and ends the text before a call with a new line.
Copilot CLI (1.0.102) over Responses sends back all of it. If a reply is thinking and calls alone, it also sends the
thinking as the reply's text.
"""

import enum
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rolltape.records.messages import Message, canonical_message
from rolltape.records.turn import Ids

if TYPE_CHECKING:
    from rolltape.gateway.prompts.splitter import ReplySplitter

_READ = frozenset({"role", "content", "reasoning_content", "tool_calls"})  # what becomes part of a prompt
_CD = re.compile(r"cd .+? && ")
_THINKING = re.compile(r"\s*<think(?:ing)?>(.*?)</think(?:ing)?>", re.DOTALL)
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")


class EchoRule(enum.StrEnum):
    """How an echo departs from the reply that it stands for."""

    FIELDS_ADDED = "fields_added"  # fields that do not become part of a prompt
    FIELDS_DROPPED = "fields_dropped"  # such fields of a hosted endpoint's reply
    TEXT_SPACED = "text_spaced"  # white space around the text was added or removed
    REASONING_IN_TEXT = "reasoning_in_text"  # the text begins with it, in tags; or repeats it where there was none
    REASONING_DROPPED = "reasoning_dropped"
    TEXT_APART = "text_apart"  # only the calls; the text follows their results as another message
    LATER_CALLS_DROPPED = "later_calls_dropped"
    ARGUMENTS_NORMALIZED = "arguments_normalized"  # the same arguments, written in another way
    CALL_INVALID = "call_invalid"  # a call of the tool `invalid` in place of a call that the client could not make
    PARTIAL = "partial"  # the part of the reply that the client had received when it hung up


def match_echo(echo: Message, reply: Message) -> tuple[EchoRule, ...] | None:
    """The rules by which a message is an echo of a reply that differs from it, or None if it is no echo."""
    sent = canonical_message(echo.to_dict(), keep_ids=True)
    meant = canonical_message(reply.to_dict(), keep_ids=True)
    rules = tuple(rule for rule, applies in _RULES.items() if applies(sent, meant))
    return rules if _without_ids(sent) == _without_ids(meant) else None


def match_part(echo: Message, reply: Message) -> tuple[EchoRule, ...] | None:
    """The rules by which a message is the beginning of a reply, or None if it is not."""
    thought, text = _seen(echo)
    if not (thought or text) or echo.to_dict().get("tool_calls"):
        return None
    if not text:
        return (EchoRule.PARTIAL,) if reply.reasoning.startswith(thought) else None
    if not reply.text.startswith(text) or thought not in ("", reply.reasoning):
        return None
    return (EchoRule.PARTIAL,) if thought == reply.reasoning else (EchoRule.REASONING_DROPPED, EchoRule.PARTIAL)


def count_shown(echo: Message, ids: Ids, splitter: "ReplySplitter") -> int | None:
    """After how many ids of a reply exactly the text of an echo was shown, or None if that was never the case.

    `splitter` must be new; it reads the ids one by one.
    """
    thought, text = _seen(echo)
    for count in range(1, len(ids) + 1):
        splitter.add(ids[count - 1 : count].tolist())
        if len(splitter.text) >= len(text) and (text or len(splitter.reasoning) >= len(thought)):
            whole = (splitter.reasoning if thought else "", splitter.text)
            return count if whole == (thought, text) else None
    return None


def _seen(echo: Message) -> tuple[str, str]:
    return echo.reasoning.strip(), echo.text.strip()


def is_text_alone(message: Message, reply: Message) -> bool:
    """Whether an assistant's message is only the text of a reply."""
    meant = canonical_message(reply.to_dict())
    return canonical_message(message.to_dict()) == {key: meant[key] for key in ("role", "content") if key in meant}


def _fields_added(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    added = sent.keys() - meant.keys() - _READ
    for field in added:
        del sent[field]
    return bool(added - {"id"})


def _fields_dropped(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    dropped = meant.keys() - sent.keys() - _READ - {"id"}
    for field in dropped:
        del meant[field]
    return bool(dropped)


def _text_spaced(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    given, written = sent.get("content", ""), meant.get("content", "")
    if given == written or not (isinstance(given, str) and isinstance(written, str)):
        return False
    if given.strip() != written.strip():
        return False
    meant["content"] = given
    return True


def _reasoning_in_text(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    given, thought = sent.get("content"), meant.get("reasoning_content")
    if not (isinstance(given, str) and isinstance(thought, str)):
        return False
    found = _THINKING.match(given)
    if found is not None and "reasoning_content" not in sent and found[1].strip() == thought.strip():
        sent["reasoning_content"], rest = thought, given[found.end() :]
    elif "content" not in meant and given.strip() == thought.strip():
        rest = ""
    else:
        return False
    del sent["content"]
    if rest:
        sent["content"] = rest
    return True


def _reasoning_dropped(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    return "reasoning_content" not in sent and meant.pop("reasoning_content", None) is not None


def _text_apart(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    return "tool_calls" in sent and "content" not in sent and meant.pop("content", None) is not None


def _later_calls_dropped(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    there, made = sent.get("tool_calls", []), meant.get("tool_calls", [])
    kept = made[: len(there)]
    if not there or len(kept) == len(made) or [call["id"] for call in kept] != [call.get("id") for call in there]:
        return False
    meant["tool_calls"] = kept
    return True


def _arguments_normalized(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    changed = False
    for there, made in _same_calls(sent, meant):
        given = there.get("arguments")
        if given != made["arguments"] and _contains(given, made["arguments"]):
            made["arguments"] = given
            changed = True
    return changed


def _call_invalid(sent: dict[str, Any], meant: dict[str, Any]) -> bool:
    changed = False
    for there, made in _same_calls(sent, meant):
        given = there.get("arguments")
        if there.get("name") == "invalid" and isinstance(given, dict) and given.get("tool") == made["name"]:
            made |= {"name": "invalid", "arguments": given}
            changed = True
    return changed


def _same_calls(sent: dict[str, Any], meant: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the calls that came back under their own ids, each with the original."""
    for there, made in zip(sent.get("tool_calls", []), meant.get("tool_calls", []), strict=False):
        if isinstance(there, dict) and there.get("id") == made["id"]:
            yield there, made


_RULES = {
    EchoRule.FIELDS_ADDED: _fields_added,
    EchoRule.FIELDS_DROPPED: _fields_dropped,
    EchoRule.REASONING_IN_TEXT: _reasoning_in_text,
    EchoRule.TEXT_SPACED: _text_spaced,
    EchoRule.REASONING_DROPPED: _reasoning_dropped,
    EchoRule.TEXT_APART: _text_apart,
    EchoRule.LATER_CALLS_DROPPED: _later_calls_dropped,
    EchoRule.ARGUMENTS_NORMALIZED: _arguments_normalized,
    EchoRule.CALL_INVALID: _call_invalid,
}


def _contains(given: object, written: object) -> bool:
    """Whether returned arguments contain all that the model wrote; the client may have filled in more."""
    if isinstance(written, dict) and isinstance(given, dict):
        return all(key in given and _contains(given[key], value) for key, value in written.items())
    if isinstance(written, list) and isinstance(given, list):
        return len(given) == len(written) and all(map(_contains, given, written))
    if isinstance(written, str):
        return _is_same_text(given, written) if isinstance(given, str) else _is_spelled(given, written)
    if isinstance(written, int | float) and isinstance(given, int | float):
        return float(given) == float(written)  # a client that has only doubles rounds large numbers
    return given == written


def _is_same_text(given: str, written: str) -> bool:
    given, written = _plain(given), _plain(written)
    gone = len(written) - len(given)
    if gone <= 0:
        return given == written
    places = (found.span() for found in _CD.finditer(written))
    return any(end - start == gone and written[:start] + written[end:] == given for start, end in places)


def _plain(text: str) -> str:
    text = _ESCAPE.sub(_unescaped, text).replace("\\\\;", "\\;")
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _unescaped(found: re.Match[str]) -> str:
    units = bytes.fromhex(found[0].replace("\\u", ""))
    return units.decode("utf-16-be", "surrogatepass")


def _is_spelled(given: object, written: str) -> bool:
    """Whether a text spells this number or flag."""
    try:
        return isinstance(given, int | float) and bool(json.loads(written) == given)
    except (ValueError, RecursionError):
        return False


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    bare = {key: value for key, value in message.items() if key != "id"}
    if "tool_calls" in bare:
        bare["tool_calls"] = [{key: one for key, one in call.items() if key != "id"} for call in bare["tool_calls"]]
    return bare
