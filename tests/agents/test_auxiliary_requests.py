"""Which requests are no part of the task."""

from typing import Any

import pytest

from rolltape.gateway.request import ChatRequest, SamplingParams, auxiliary_reason

TITLE = {"role": "system", "content": "Write a short title for this coding session."}
TASK = {"role": "user", "content": "Fix the parser."}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {}}}


def ask(
    *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, max_tokens: int | None = None
) -> ChatRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return ChatRequest(api="messages", model="m", messages=list(messages), tools=tools, sampling=sampling)


def test_a_title_and_a_probe_are_recognized() -> None:
    assert auxiliary_reason(ask(TITLE, TASK), "Fix it.") == "session title"
    # As Claude Code and opencode put it, in other words.
    for said in (
        "A short title (5 words) that says what the goal of this coding session is.",
        "Give a thread title only.",
        "Generate concise conversation titles.",
    ):
        assert auxiliary_reason(ask({"role": "system", "content": said}, TASK), "Fix it.") == "session title"
    assert auxiliary_reason(ask({"role": "user", "content": "quota"}, max_tokens=1), "Fix it.") == "probe"


MEMORY = {"role": "system", "content": "You act as the memory extraction agent of a coding assistant. Be brief."}
AGO = [TASK, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "What is worth keeping?"}]


def test_an_agent_that_keeps_memories_is_aside_unless_that_is_the_task() -> None:
    kept = ask(MEMORY, *AGO, tools=[TOOL])
    assert auxiliary_reason(kept, "Fix it.") == "memory extraction"
    assert auxiliary_reason(kept, None) is None
    assert auxiliary_reason(kept, str(MEMORY["content"])) is None
    late = {"role": "system", "content": "You are a coder. " * 30 + "Do not extract memories."}
    assert auxiliary_reason(ask(late, TASK, tools=[TOOL]), "Fix it.") is None


@pytest.mark.parametrize(
    "part_of_the_task",
    [
        ask(TASK),
        ask(TITLE, TASK, tools=[TOOL]),
        ask(TITLE, TASK, {"role": "assistant", "content": "A title."}, {"role": "user", "content": "Shorter."}),
        ask({"role": "system", "content": "Write a title for the article."}, TASK),
        ask({"role": "system", "content": "You are a chat assistant. You write titles of books."}, TASK),
        ask({"role": "system", "content": "Give the film's title. The user may end the conversation."}, TASK),
        ask({"role": "system", "content": TITLE["content"] + " And so on." * 1000}, TASK),
        ask({"role": "user", "content": "quota"}),
        ask({"role": "user", "content": "Is it true?"}, max_tokens=1),
    ],
)
def test_what_only_resembles_one_trains(part_of_the_task: ChatRequest) -> None:
    assert auxiliary_reason(part_of_the_task, "Fix it.") is None
