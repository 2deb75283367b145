"""Record a scripted session of a coding agent.

It has the events of real sessions: a sub-agent, a reply interrupted by a weight update, a retry, a reply that the
agent changes before it sends it back, and a compaction.
"""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import rolltape
from rolltape.records.turn import Turn

Message = dict[str, Any]

SPECIAL = ["<unk>", "<system>", "<user>", "<assistant>", "<tool>", "<call>", "<end>"]
TOOLS = [{"name": "run_tests"}, {"name": "edit_file"}, {"name": "ask_helper"}]


def message_of(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def call(text: str, name: str, /, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return message_of("assistant", text) | {"tool_calls": [{"type": "function", "function": function}]}


SYSTEM = message_of("system", "You are a coding agent.")
TASK = message_of("user", "Fix the failing test in parser.py")
LOOK = call("I will run the tests.", "run_tests")
FAILED = message_of("tool", "1 failed: test_empty")
GARBLED = message_of("assistant", "I will ask the helper: ask_helper(")
DELEGATE = call("I will ask the helper.", "ask_helper", question="Where is the first character read?")

HELPER = message_of("system", "You answer questions about code.")
QUESTION = message_of("user", "Where is the first character read?")
ANSWER = message_of("assistant", "Line 12 reads text[0] even if text is empty.")

ANSWERED = message_of("tool", "Line 12 reads text[0] even if text is empty.")
EDIT = call("I will guard the empty text.", "edit_file", line="12", text="if not text: return None")
EDITED = message_of("tool", "edited")
RERUN = call("Now the tests again. ", "run_tests")
RERUN_TRIMMED = call("Now the tests again.", "run_tests")
PASSED = message_of("tool", "2 passed")
DONE = message_of("assistant", "All tests pass.")

SUMMARY = message_of("user", "So far: parser.py fixed, tests pass. Now write the change note.")
NOTE = message_of("assistant", "parse() returns None for an empty text.")
GAVE_UP = message_of("assistant", "I cannot find the test.")

SCRIPT = [
    *(SYSTEM, TASK, LOOK, FAILED, DELEGATE, HELPER, QUESTION, ANSWER, ANSWERED, EDIT, EDITED, GARBLED, RERUN),
    *(RERUN_TRIMMED, PASSED, DONE, SUMMARY, NOTE, GAVE_UP),
]


def spoken(message: Message) -> list[str]:
    """The texts of a message: its content, then each of its calls."""
    functions = [made["function"] for made in message.get("tool_calls", ())]
    return [message["content"], *(f"{function['name']} {function['arguments']}" for function in functions)]


class ScriptedEngine:
    """Replaces tokenizer, chat template and inference engine: renders prompts, and "samples" the script's replies."""

    def __init__(self, folder: Path) -> None:
        split = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]+|\s"), "isolated")
        texts = [text for message in SCRIPT for text in spoken(message)]
        pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
        vocabulary = {token: number for number, token in enumerate([*SPECIAL, *sorted(pieces)])}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        self.tokenizer.pre_tokenizer = split
        self.tokenizer.add_special_tokens(SPECIAL)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self._chance = random.Random(17)

    @property
    def end(self) -> int:
        return SPECIAL.index("<end>")

    def prompt(self, *messages: Message) -> list[int]:
        """The ids of messages, ready for a reply."""
        ids: list[int] = []
        for message in messages:
            ids += [SPECIAL.index(f"<{message['role']}>"), *self.body(message), self.end]
        return [*ids, SPECIAL.index("<assistant>")]

    def body(self, message: Message) -> list[int]:
        text, *calls = (self.tokenizer.encode(text).ids for text in spoken(message))
        return [*text, *(token for call in calls for token in [SPECIAL.index("<call>"), *call])]

    def reply(self, message: Message, weights: str, updated_to: str | None = None) -> dict[str, Any]:
        """An engine's result for a reply; a weight update in the middle cuts it into two segments."""
        ids = [*self.body(message), self.end]
        logprobs = [round(-self._chance.expovariate(4), 4) for _ in ids]
        cut = len(ids) if updated_to is None else len(ids) // 2
        parts = [(slice(0, cut), weights), (slice(cut, None), updated_to)]
        segments = [
            {"sampled_ids": ids[part], "logprobs": logprobs[part], "weight_version": version}
            for part, version in parts
            if ids[part]
        ]
        return {"reply": message, "finish": "stop", "segments": segments}


def record(path: Path) -> None:
    """Record two attempts at one task: one that solves it, and one that gives up."""
    with rolltape.open(path, name="demo") as tape:
        engine = ScriptedEngine(path)
        tape.announce_version("7")
        with tape.rollout(task_id="fix-parser", step=12, attempt=0, source="demo:train", model="words") as rollout:
            _work_it_out(rollout.session(tools=TOOLS, stop_ids=[engine.end], tokenizer="tokenizer.json"), engine)
            rollout.finish(reward=1.0, reward_terms={"tests": 1.0, "length": -0.02})
        with tape.rollout(task_id="fix-parser", step=12, attempt=1, source="demo:train", model="words") as rollout:
            session = rollout.session(tools=TOOLS, stop_ids=[engine.end], tokenizer="tokenizer.json")
            _ask(session, engine, [SYSTEM, TASK], engine.reply(GAVE_UP, "8"))
            rollout.finish(reward=0.0)
        tape.announce_version("8")


def _work_it_out(session: Any, engine: ScriptedEngine) -> None:
    first = _ask(session, engine, [SYSTEM, TASK], engine.reply(LOOK, "7"))
    _record_after(session, engine, first, FAILED, engine.reply(GARBLED, "7"))
    retried = _record_after(session, engine, first, FAILED, engine.reply(DELEGATE, "7"))
    _ask(session, engine, [HELPER, QUESTION], engine.reply(ANSWER, "7"))
    edited = _record_after(session, engine, retried, ANSWERED, engine.reply(EDIT, "7", updated_to="8"))
    rerun = _record_after(session, engine, edited, EDITED, engine.reply(RERUN, "8"))
    # The agent trims its own reply before it sends it back.
    history = [*rerun.prompt_messages, RERUN_TRIMMED, PASSED]
    ids = [*rerun.prompt_ids.tolist(), *engine.body(RERUN_TRIMMED), engine.end, *engine.prompt(PASSED)]
    session.record_turn(prompt_messages=history, prompt_ids=ids, **engine.reply(DONE, "8"))
    _ask(session, engine, [SYSTEM, SUMMARY], engine.reply(NOTE, "8"))


def _ask(session: Any, engine: ScriptedEngine, messages: list[Message], reply: dict[str, Any]) -> Turn:
    """Record a turn with its whole prompt."""
    turn: Turn = session.record_turn(prompt_messages=messages, prompt_ids=engine.prompt(*messages), **reply)
    return turn


def _record_after(session: Any, engine: ScriptedEngine, after: Turn, message: Message, reply: dict[str, Any]) -> Turn:
    """Record a turn by its new messages after an earlier turn."""
    turn: Turn = session.record_turn(
        after=after, new_messages=[message], new_prompt_ids=engine.prompt(message), **reply
    )
    return turn
