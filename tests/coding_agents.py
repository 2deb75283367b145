"""A made-up run of coding agents at work: what a transcript of one looks like, with all that is hard to read in it."""

import base64
import json
import struct
import time
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import rolltape
from rolltape.records.rollout import EventKind
from rolltape.records.turn import Turn
from rolltape.tape.recording.session import SessionRecorder

Message = dict[str, Any]

SYSTEM = {
    "role": "system",
    "content": "You are a coding agent.\n\n# Tone\n- Be brief.\n- Explain a command before you run it.\n\n"
    "# Tools\nUse `Read` before `Edit`. Never commit unless the user asks for it.\n\n# Environment\nLinux, a checkout",
}
EXPLORE = "Find every caller of parse_date in this repository, and report file and line of each."
PARSER = '''import re
from datetime import date

_ISO = re.compile(r"(\\d{4})-(\\d{2})-(\\d{2})")


def parse_date(text: str) -> date:
    """The date that a text holds."""
    year, month, day = _ISO.match(text).groups()
    return date(int(year), int(month), int(day))
'''
FAILED = (
    "\x1b[1m============ test session starts ============\x1b[0m\ncollected 3 items\n\n"
    "tests/test_dates.py \x1b[32m.\x1b[0m\x1b[31mF\x1b[0m\x1b[33ms\x1b[0m\n\n"
    "\x1b[31m\x1b[1mE   AttributeError: 'NoneType' object has no attribute 'groups'\x1b[0m\n"
    "\x1b[38;5;208mwarning: 256 colors\x1b[0m \x1b[38;2;90;120;240mtrue color\x1b[0m \x1b[7minverse\x1b[0m\n"
    "\x1b[31mFAILED\x1b[0m tests/test_dates.py::test_words - AttributeError\n"
    "\x1b[31m1 failed\x1b[0m, \x1b[32m1 passed\x1b[0m, \x1b[33m1 skipped\x1b[0m in 0.12s"
)
GIT_DIFF = """diff --git a/src/dates.py b/src/dates.py
index 1f3c2aa..9d0b7e1 100644
--- a/src/dates.py
+++ b/src/dates.py
@@ -7,4 +7,7 @@ _ISO = re.compile(r"(\\d{4})-(\\d{2})-(\\d{2})")
 def parse_date(text: str) -> date:
     \"\"\"The date that a text holds.\"\"\"
-    year, month, day = _ISO.match(text).groups()
+    match = _ISO.match(text)
+    if match is None:
+        raise ValueError(f"no date: {text!r}")
+    year, month, day = match.groups()
     return date(int(year), int(month), int(day))
On branch main, nothing staged
"""
DONE = """## What changed

`parse_date` raised `AttributeError` on text without a date. It now raises **`ValueError`** and names the text.

| file | change | tests |
| :--- | :---: | ---: |
| `src/dates.py` | check the match | 3 |
| `tests/test_dates.py` | *new* case | 1 |

```python
def parse_date(text: str) -> date:
    match = _ISO.match(text)
    if match is None:  # no date in it
        raise ValueError(f"no date: {text!r}")
```

1. Callers in `report.py` already catch `ValueError`.
2. The cost is $O(n)$ in the length of the text: $$T(n) = c \\cdot n$$

See [the format](https://example.com/iso8601) ![chart](https://example.com/chart.png)
"""
PATCH = """*** Begin Patch
*** Update File: src/dates.py
@@ def parse_date
-    year, month, day = _ISO.match(text).groups()
+    match = _ISO.match(text)
+    year, month, day = match.groups()
*** End Patch"""
THOUGHT = (
    "The test fails because `match` returns None when there is no date in the text. " * 8 + "So I check for it first."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "Bash",
            "description": "Run a command in a shell.\n\n- Quote paths that hold spaces.\n- Long output is cut.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "The command to run."},
                    "description": {"type": "string", "description": "What it does, in five to ten words."},
                    "timeout": {"type": "number"},
                },
                "required": ["command"],
            },
        },
    },
    *(
        {"type": "function", "function": {"name": name, "description": what, "parameters": {"type": "object"}}}
        for name, what in [
            ("Read", "Read a file."),
            ("Edit", "Replace a text in a file."),
            ("TodoWrite", "Keep a list."),
        ]
    ),
]


def png(width: int = 96, height: int = 48) -> bytes:
    """A picture: two colors side by side."""
    row = b"\0" + b"\x1f\x78\xb4" * (width // 2) + b"\xe0\x82\x14" * (width - width // 2)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(row * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def long_log(lines: int = 900) -> str:
    """Output of which the middle is folded; one line in it is worth finding."""
    return "\n".join(
        "ERROR worker 7: needle-in-the-log, retrying" if line == 500 else f"{line:04d} compiled module_{line}.o"
        for line in range(lines)
    )


def numbered(text: str) -> str:
    """A file as an agent's tool gives it: each line after its number."""
    return "\n".join(f"{number:6d}→{line}" for number, line in enumerate(text.splitlines(), 1))


def call(name: str, number: int, **arguments: Any) -> Message:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def says(text: str, *calls: Message, thinking: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if thinking:
        message["reasoning_content"] = thinking
    return message


def result(number: int, content: Any, **fields: Any) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content, **fields}


class Conversation:
    """Records turns one after the other, each with ids of its own, and each three seconds after the one before."""

    def __init__(self, session: SessionRecorder, clock: Iterator[float], first_id: int = 100) -> None:
        self._session = session
        self._clock = clock
        self._ids = count(first_id)
        self._last: Turn | None = None

    def turn(self, messages: list[Message], reply: Message, **fields: Any) -> Turn:
        sampled = [next(self._ids) for _ in range(3)]
        began = next(self._clock)
        given = {
            "started_at": began,
            "ended_at": began + 2.5,
            "reply": reply,
            "sampled_ids": sampled,
            "logprobs": [-0.5, -0.25, -0.125],
            "finish": "stop",
            **fields,
        }
        prompt = [next(self._ids), next(self._ids)]
        if self._last is None:
            self._last = self._session.record_turn(prompt_messages=messages, prompt_ids=prompt, **given)
        else:
            self._last = self._session.record_turn(
                after=self._last, new_messages=messages, new_prompt_ids=prompt, **given
            )
        return self._last


def record_claude(rollout: Any) -> None:
    """An agent with Bash, Read, Edit, Write, TodoWrite and a sub-agent; an image, a refusal, and an end by length."""
    session = rollout.session(tools=TOOLS)
    clock = count(time.time() - 16, 3.0)  # the sixth turn begins before what is appended now, the seventh after it
    talk = Conversation(session, clock)
    shot = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _b64(png())}}
    asked = [{"type": "text", "text": "The report shows **no** dates, see the picture. Fix `parse_date`."}, shot]
    todos = [
        {"content": "Find the callers", "status": "completed", "activeForm": "Finding the callers"},
        {"content": "Fix parse_date", "status": "in_progress", "activeForm": "Fixing parse_date"},
        {"content": "Run the tests", "status": "pending", "activeForm": "Running the tests"},
    ]
    talk.turn(
        [SYSTEM, {"role": "user", "content": asked}],
        says("I'll look for the callers first.", call("Task", 0, description="Find callers", prompt=EXPLORE)),
    )
    helper = Conversation(session, clock, first_id=9000)
    helper.turn(
        [{"role": "system", "content": "You search code."}, {"role": "user", "content": EXPLORE}],
        says("", call("Grep", 90, pattern="parse_date", path="src")),
    )
    helper.turn([result(90, "src/report.py:12\nsrc/report.py:40")], says("Two callers: `src/report.py:12` and `:40`."))
    talk.turn(
        [result(0, "Two callers: `src/report.py:12` and `:40`.")],
        says(
            "",
            call("TodoWrite", 1, todos=todos),
            call("Read", 2, file_path="/repo/src/dates.py", limit=200),
            call(
                "Bash", 3, command="cd /repo && python -m pytest -q \\\n  tests/test_dates.py", description="Run tests"
            ),
        ),
        extra={"ignored_params": ["top_k: not supported by this engine", "metadata.user_id: not sent"]},
    )
    edit = {
        "old_string": "    year, month, day = _ISO.match(text).groups()\n    return date(year, month, day)",
        "new_string": "    match = _ISO.match(text)\n    if match is None:\n        raise ValueError(text)\n"
        "    year, month, day = match.groups()\n    return date(year, month, day)",
    }
    talk.turn(
        [result(1, "Todos have been modified."), result(2, numbered(PARSER)), result(3, FAILED, is_error=True)],
        says("", call("Edit", 4, file_path="/repo/src/dates.py", **edit), thinking=THOUGHT),
    )
    test = "import dates\n\n\ndef test_words():\n    with pytest.raises(ValueError):\n        dates.parse_date('no')\n"
    talk.turn(
        [result(4, "The file has been updated.")],
        says(
            "Now a test, and a build.",
            call("Write", 5, file_path="/repo/tests/test_words.py", content=test),
            call("Bash", 6, command="make -j2 && git diff"),
        ),
    )
    rollout.append_event(
        rollout.encode_event(
            EventKind.REFUSAL, {"session": session.id, "status": 429, "reason": "too many requests in flight"}
        )
    )
    talk.turn(
        [result(5, "File created."), result(6, long_log())],
        says("", call("Bash", 7, command="git diff; git status -s")),
    )
    talk.turn([result(7, GIT_DIFF)], says(DONE))
    talk.turn([{"role": "user", "content": "Explain it at length."}], says("It began when the"), finish="length")


def record_codex(rollout: Any) -> None:
    """An agent with `shell` and `apply_patch`, a plan, JSON output and arguments that are no JSON."""
    talk = Conversation(rollout.session(), count(time.time(), 3.0))
    plan = [{"step": "Patch the parser", "status": "in_progress"}, {"step": "Test it", "status": "pending"}]
    talk.turn(
        [{"role": "developer", "content": "You are a coding agent in a terminal."}, _user("Fix parse_date.")],
        says("", call("shell", 0, command=["bash", "-lc", "sed -n 1,20p src/dates.py | cat -A"], workdir="/repo")),
    )
    talk.turn(
        [result(0, '{"output": "import re$\\n", "metadata": {"exit_code": 0, "duration_seconds": 0.1}}')],
        says("", call("update_plan", 1, plan=plan, explanation="One change,\nthen its test.")),
    )
    talk.turn([result(1, "Plan updated")], says("", call("apply_patch", 2, input=PATCH)))
    broken = {"id": "call_3", "type": "function", "function": {"name": "shell", "arguments": '{"command": ["bash"'}}
    talk.turn([result(2, "Success")], says("Testing.", broken))
    talk.turn([result(3, "arguments could not be parsed")], says("**Done.** The tests pass."))


def record_long(rollout: Any, turns: int = 72) -> None:
    """Many turns of uneven height."""
    talk = Conversation(rollout.session(), count(time.time(), 3.0))
    talk.turn([_user("Count.")], says("step 0"))
    for index in range(1, turns):
        listing = "\n".join(f"file_{index}_{line}.txt" for line in range(index * 7 % 40))
        talk.turn(
            [result(index, f"result {index}\n{listing}")],
            says(f"step {index}\n\n" + "- a point\n" * (index % 5), thinking=f"thought {index}. " * (index % 3 * 40)),
        )


def record_coding_agents(path: Path) -> dict[str, str]:
    """The run; the ids of its rollouts by name."""
    ids = {}
    with rolltape.open(path, name="coding") as tape:
        for name, record in (("claude", record_claude), ("codex", record_codex), ("long", record_long)):
            with tape.rollout(task_id=f"fix-dates/{name}", step=3, agent=name) as rollout:
                record(rollout)
                rollout.finish(reward=0.0 if name == "long" else 1.0)
                ids[name] = rollout.id
    return ids


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()
