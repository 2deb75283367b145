"""Split a reply into thinking, text and calls while it is being sampled.

A reply is thinking, then text, then calls, and each may be missing. The splitter reads ids as they are sampled, and
finds how much of the thinking and of the text can be shown. The shown part is a beginning of the final message,
however the reply continues. So the splitter withholds what is undecided: white space at the end, incomplete characters,
a possible beginning of a mark or a stop string, and everything from the first call on, which becomes text if a call is
malformed.

The same splitter makes the message of a complete reply. So a streamed and an unstreamed reply are equal.
"""

import codecs
import enum
from collections.abc import Sequence

import msgspec

from rolltape.gateway.prompts.families import REPLY_MARKS, CallInThinking, Response
from rolltape.gateway.prompts.reply import Parsed, delivered, first_call_end
from rolltape.gateway.prompts.tokenizer import FolderTokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Mark(enum.Enum):
    """The meaning of a mark."""

    THINK_START = "think_start"
    THINK_END = "think_end"
    CALL = "call"
    STOP = "stop"


class ReplyPart(enum.Enum):
    """The part of a reply that is being read."""

    OPENING = "opening"  # only white space so far
    THINKING = "thinking"
    DRAFT = "draft"  # a call while thinking is open: part of the thinking if that is closed later, else a call
    TEXT = "text"
    CALLS = "calls"


class SplitRules(msgspec.Struct, frozen=True):
    """How the replies of one model are split."""

    tokenizer: FolderTokenizer
    in_thinking: CallInThinking
    tokens: dict[int, Mark]  # the ids that are marks
    spelled: dict[str, Mark]  # the marks that any ids may spell
    openings: tuple[str, ...]  # the spelled marks with which a reply may begin
    inside: dict[ReplyPart, tuple[str, ...]]  # the spelled marks that count inside a part
    id_by_id: frozenset[ReplyPart]  # parts that are read id by id, since a spelled mark may end the thinking at any id
    json_call: bool  # a reply that begins with `{` may be a call; otherwise it is text


def find_split_rules(family: str, tokenizer: FolderTokenizer, stop_ids: Sequence[int]) -> SplitRules | None:
    """The rules for a family and its tokenizer, or None if its replies are parsed only when they have ended."""
    marks = REPLY_MARKS.get(family)
    if marks is None or not tokenizer.is_byte_level:
        return None
    calls = [tokenizer.convert_tokens_to_ids(mark) for mark in marks.calls]
    if None in calls:
        return None
    tokens = {token: Mark.CALL for token in calls if token is not None}
    spelled = dict.fromkeys((*marks.spelled_calls, *marks.spelled_in_thinking), Mark.CALL)
    openings: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    thinking = marks.spelled_in_thinking
    start, end = (tokenizer.convert_tokens_to_ids(mark) for mark in (marks.think_start, marks.think_end))
    if marks.json_call:
        openings, spelled = ("{",), {"{": Mark.CALL}
    elif start is not None and end is not None:
        tokens |= {start: Mark.THINK_START, end: Mark.THINK_END}
    else:
        openings, draft = (marks.think_start,), (marks.think_end,)
        thinking += openings + draft
        spelled |= {marks.think_start: Mark.THINK_START, marks.think_end: Mark.THINK_END}
    return SplitRules(
        tokenizer=tokenizer,
        in_thinking=marks.in_thinking,
        tokens=tokens | dict.fromkeys(stop_ids, Mark.STOP),
        spelled=spelled,
        openings=openings,
        inside={
            ReplyPart.OPENING: marks.spelled_calls,
            ReplyPart.THINKING: thinking,
            ReplyPart.DRAFT: draft,
            ReplyPart.TEXT: marks.spelled_calls,
            ReplyPart.CALLS: (),
        },
        id_by_id=frozenset((ReplyPart.OPENING, ReplyPart.THINKING, ReplyPart.DRAFT) if thinking else ()),
        json_call=marks.json_call,
    )


class ReplySplitter:
    """Splits one reply. Its cost is linear in the number of ids."""

    def __init__(self, rules: SplitRules, thinking_begun: bool, stop_strings: Sequence[str]) -> None:
        """`thinking_begun`: the prompt has opened the thinking. `stop_strings` may end the reply."""
        self._rules = rules
        self._part = ReplyPart.THINKING if thinking_begun else ReplyPart.OPENING
        self._utf8 = _Utf8(errors="replace")
        self._undecided = ""  # text that may begin a spelled mark
        self._reasoning, self._text = (_Shown(stop_strings, strips=True) for _ in range(2))
        self._calls: list[str] = []  # all text from the first mark of a call on
        self._ended = False  # by a stop id
        self._ids = 0
        self._ids_before_calls = 0
        self.reasoning_ids = 0  # number of ids of the thinking with its marks; known when it has ended

    @property
    def reasoning(self) -> str:
        """The thinking that can be shown so far. It only grows."""
        return self._reasoning.shown

    @property
    def text(self) -> str:
        """The text that can be shown so far. It only grows."""
        return self._text.shown

    def add(self, ids: Sequence[int]) -> None:
        """Read the ids sampled since the last call."""
        tokens, token_bytes = self._rules.tokens, self._rules.tokenizer.token_bytes
        run: list[bytes] = []  # of ids that are not marks
        for token in ids:
            if self._ended:
                return
            mark = tokens.get(token)
            if mark is None:
                run.append(token_bytes(token))
                self._ids += 1
                if self._part not in self._rules.id_by_id:
                    continue
            self._read(self._utf8.decode(b"".join(run)))
            run.clear()
            if mark is Mark.STOP:
                self._ended = True
            elif mark is not None:
                self._settle()
                self._ids += 1
                self._take(mark, token_bytes(token).decode(errors="replace"))
        self._read(self._utf8.decode(b"".join(run)))

    def end(self) -> None:
        """Decide the undecided parts, since no more ids will come."""
        self._settle()
        if self._part is ReplyPart.THINKING:
            self.reasoning_ids = self._ids
        elif self._part is ReplyPart.DRAFT:
            self._end_thinking(self._ids_before_calls, ReplyPart.CALLS)

    def parse(self, reply: Sequence[int], response: Response | None, *, calls_as_text: bool) -> Parsed:
        """Parse a complete reply with a new splitter, and take the calls from the renderer's response."""
        self.add(reply)
        self.end()
        has_calls = self._part is ReplyPart.CALLS
        attempts = [] if response is None or not has_calls else response.tool_calls
        # A renderer may find calls where the splitter has thinking.
        attempts = [call for call in attempts if not call.token_span or call.token_span[0] >= self.reasoning_ids]
        good = [call for call in map(delivered, attempts) if call is not None]
        unread = has_calls and not attempts and not self._rules.json_call  # the mark of a call, but no call
        denied = bool(attempts) and calls_as_text
        malformed = response is None or unread or denied or len(good) < len(attempts)
        if malformed or not good:
            self._text.add("".join(self._calls))
        reasoning, content = self._reasoning.whole(), self._text.whole()
        return Parsed(
            content=content,
            reasoning=reasoning or None,
            calls=() if malformed else tuple(good),
            malformed=malformed,
            reasoning_tokens=self.reasoning_ids if reasoning else 0,
            first_call_end=first_call_end(attempts) if good and not malformed else None,
        )

    def _read(self, text: str) -> None:
        """Add text to its part; marks may be spelled in it."""
        if not text:
            return
        text, self._undecided = self._undecided + text, ""
        while text:
            at, spelled = self._next_spelled(text)
            self._put(text[:at])
            if spelled is None:
                self._undecided = text[at:]
                return
            self._take(self._rules.spelled[spelled], spelled)
            text = text[at + len(spelled) :]

    def _next_spelled(self, text: str) -> tuple[int, str | None]:
        if self._part is ReplyPart.OPENING and self._rules.openings:
            at, spelled = _first(text, self._rules.openings)
            if not text[:at].strip():
                return at, spelled
        return _first(text, self._rules.inside[self._part])

    def _settle(self) -> None:
        """Add the undecided text to its part, since nothing follows that could complete a character or a mark."""
        self._read(self._utf8.decode(b"", True))
        self._put(self._undecided)
        self._undecided = ""

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._part is ReplyPart.THINKING:
            self._reasoning.add(text)
        elif self._part in (ReplyPart.DRAFT, ReplyPart.CALLS):
            self._calls.append(text)
        else:
            self._text.add(text)
            if self._part is ReplyPart.OPENING and text.strip():
                self._part = ReplyPart.TEXT

    def _take(self, mark: Mark, written: str) -> None:
        """Enter the part that a mark begins. A mark without a meaning there is ordinary text."""
        part, in_thinking = self._part, self._rules.in_thinking
        if mark is Mark.THINK_START and part is ReplyPart.OPENING:
            self._text.clear()
            self._part = ReplyPart.THINKING
        elif mark is Mark.THINK_START and part is ReplyPart.THINKING:
            pass  # the model has opened thinking again
        elif mark is Mark.THINK_END and part in (ReplyPart.THINKING, ReplyPart.DRAFT):
            self._reasoning.add("".join(self._calls))
            self._calls.clear()
            self._end_thinking(self._ids, ReplyPart.TEXT)
        elif mark is Mark.CALL and part in (ReplyPart.OPENING, ReplyPart.TEXT):
            self._calls.append(written)
            self._part = ReplyPart.CALLS
        elif mark is Mark.CALL and part is ReplyPart.THINKING and in_thinking is not CallInThinking.PART_OF_THINKING:
            self._calls.append(written)
            self._ids_before_calls = self._ids - 1
            if in_thinking is CallInThinking.DRAFT:
                self._part = ReplyPart.DRAFT
            else:
                self._end_thinking(self._ids_before_calls, ReplyPart.CALLS)
        else:
            self._put(written)

    def _end_thinking(self, ids: int, part: ReplyPart) -> None:
        self._reasoning.close()
        self.reasoning_ids = ids
        self._part = part


class PlainText:
    """The text that can be shown of a reply to a prompt of text or ids, which is not split into parts.

    It ends before a stop id or a stop string. A possible beginning of a stop string is withheld, and so are incomplete
    characters.
    """

    reasoning = ""

    def __init__(self, tokenizer: FolderTokenizer, stop_ids: Sequence[int], stop_strings: Sequence[str]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._utf8 = _Utf8(errors="replace")
        self._text = _Shown(stop_strings, strips=False)
        self._ended = False  # by a stop id

    @property
    def text(self) -> str:
        """The text that can be shown so far. It only grows."""
        return self._text.shown

    def add(self, ids: Sequence[int]) -> None:
        """Read the ids sampled since the last call."""
        if self._ended:
            return
        end = next((at for at, token in enumerate(ids) if token in self._stop_ids), None)
        self._text.add(self._utf8.decode(b"".join(map(self._token_bytes, ids[:end]))))
        self._ended = end is not None


class _Shown:
    """A growing text, and the part of it that can be shown.

    A stop string and what follows it is never shown, nor a possible beginning of one, nor, with `strips`, white space
    at either end.
    """

    def __init__(self, stop_strings: Sequence[str], *, strips: bool) -> None:
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._strips = strips
        self._held = ""  # the withheld text after the shown text
        self._is_blank = True  # the withheld text is only white space
        self._stopped = False
        self.shown = ""

    def add(self, text: str) -> None:
        known = max(len(self._held) - self._longest, 0)  # no stop string begins before this position
        self._held += text
        if self._stopped:
            return
        at, stop = _first(self._held, self._stops, known)
        self._stopped = stop is not None
        if stop is None and self._strips and self._is_blank and text.isspace():
            return  # nothing can be shown yet
        self._show(at)
        self._is_blank = not self._held.strip()

    def close(self) -> None:
        """Show all of it: the reply continues after this text, so a stop string in it did not end the reply."""
        self._show(len(self._held))
        self.clear()

    def clear(self) -> None:
        """Drop the text that has not been shown."""
        self._held, self._stopped, self._is_blank = "", False, True

    def whole(self) -> str:
        """The complete text of an ended reply, up to a stop string if there is one."""
        return self.shown if self._stopped else f"{self.shown}{self._held}".strip()

    def _show(self, end: int) -> None:
        text = self._held[:end].rstrip() if self._strips else self._held[:end]
        if not text:
            return
        self._held = self._held[len(text) :]
        # Python extends a string in place if nothing else refers to it, so this costs time only for the new part.
        shown, self.shown = self.shown, ""
        shown += text if shown or not self._strips else text.lstrip()
        self.shown = shown


def _first(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str | None]:
    """Find the first of some marks, from `start` on. Return its position and the mark.

    The mark is None if only a possible beginning of one is there, or the end of the text.
    """
    found: str | None = None
    first = len(text)
    for mark in marks:
        whole = text.find(mark, start)
        at = len(text) - _begun(text, mark) if whole < 0 else whole
        if at < first:
            first, found = at, None if whole < 0 else mark
    return first, found


def _begun(text: str, mark: str) -> int:
    """How many characters of the beginning of a mark a text ends with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
