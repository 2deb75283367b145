"""Which messages stand for a reply that they do not equal, and which do not."""

from typing import Any

import pytest

from rolltape.gateway.turn.echo import EchoRule, is_text_alone, match_echo
from rolltape.records.messages import Message


def message(content: str | None = None, *calls: tuple[str, str, str], **fields: str) -> Message:
    """An assistant's, with calls of (id, name, arguments)."""
    value: dict[str, Any] = {"role": "assistant", "content": content, **fields}
    if calls:
        value["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ]
    return Message.snapshot(value, "a message")


LS, PWD = ("call_1", "Bash", '{"command": "ls"}'), ("call_2", "Bash", '{"command": "pwd"}')
REPLY = message("I look.", LS, PWD, reasoning_content="Hm.")


@pytest.mark.parametrize(
    ("echo", "rules"),
    [
        (message("I look.", LS, PWD), {EchoRule.REASONING_DROPPED}),
        (message(None, LS, PWD, reasoning_content="Hm."), {EchoRule.TEXT_APART}),
        (message("I look.", LS, reasoning_content="Hm."), {EchoRule.LATER_CALLS_DROPPED}),
        (message("I look.\n", LS, PWD, reasoning_content="Hm."), {EchoRule.TEXT_SPACED}),
        (message(" I look.", LS), {EchoRule.TEXT_SPACED, EchoRule.REASONING_DROPPED, EchoRule.LATER_CALLS_DROPPED}),
        (message(None, LS), {EchoRule.REASONING_DROPPED, EchoRule.TEXT_APART, EchoRule.LATER_CALLS_DROPPED}),
    ],
)
def test_what_a_client_leaves_out_does_not_make_it_another_reply(echo: Message, rules: set[EchoRule]) -> None:
    assert set(match_echo(echo, REPLY) or ()) == rules


def test_a_blank_text_before_calls_is_none() -> None:
    assert match_echo(message(" \n", LS), message(None, LS)) == (EchoRule.TEXT_SPACED,)


THOUGHT = message(None, LS, reasoning_content="Hm.")


@pytest.mark.parametrize(
    ("echo", "reply", "rules"),
    [
        (
            message("<think>\nHm.\n</think>\n\nI look.", LS, PWD),
            REPLY,
            {EchoRule.REASONING_IN_TEXT, EchoRule.TEXT_SPACED},
        ),
        (message("<think>Hm.</think>I look.", LS, PWD), REPLY, {EchoRule.REASONING_IN_TEXT}),
        (message("<thinking>Hm.</thinking>", LS), THOUGHT, {EchoRule.REASONING_IN_TEXT}),
        (message("<think>\nHm.\n</think>\n\n\n", LS), THOUGHT, {EchoRule.REASONING_IN_TEXT, EchoRule.TEXT_SPACED}),
        (message("Hm.", LS, reasoning_content="Hm."), THOUGHT, {EchoRule.REASONING_IN_TEXT}),
        (message("Hm.", LS), THOUGHT, {EchoRule.REASONING_IN_TEXT, EchoRule.REASONING_DROPPED}),
    ],
)
def test_thinking_that_comes_back_as_text_is_the_replys_thinking(
    echo: Message, reply: Message, rules: set[EchoRule]
) -> None:
    assert set(match_echo(echo, reply) or ()) == rules


@pytest.mark.parametrize(
    ("echo", "reply"),
    [
        (message("<think>\nHa.\n</think>\n\nI look.", LS, PWD), REPLY),
        (message("<think>\nHm.\n</think>\n\nI looked.", LS, PWD), REPLY),
        (message("<think>Hm.", LS), THOUGHT),
        (message("I look. <think>Hm.</think>", LS, PWD), REPLY),
        (message("<think>Hm.</think>I look.", LS, PWD, reasoning_content="Ha."), REPLY),
        (message("Hm.", LS, PWD), REPLY),
        (message("Ha.", LS, reasoning_content="Hm."), THOUGHT),
    ],
)
def test_text_that_says_something_else_than_the_thinking_is_a_rewritten_reply(echo: Message, reply: Message) -> None:
    assert match_echo(echo, reply) is None


@pytest.mark.parametrize(
    "other",
    [
        message("I looked.", LS, PWD),
        message("I  look.", LS, PWD),
        message("I look.", LS, PWD, reasoning_content="Ha."),
        message("I look."),
        message("I look.", PWD),
        message("I look.", ("call_9", "Bash", '{"command": "ls"}')),
        message("I look.", PWD, LS),
        message("I look.", LS, ("call_2", "Bash", '{"command": "rm"}')),
        message("I look.", LS, ("call_2", "Read", '{"command": "pwd"}')),
    ],
)
def test_what_a_client_changes_is_another_message(other: Message) -> None:
    assert match_echo(other, REPLY) is None


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"old": "a"}', '{"replace_all": false, "old": "a"}'),
        ('{"timeout": "5000"}', '{"timeout": 5000}'),
        ('{"all": "true"}', '{"all": true}'),
        ('{"content": "a  \\n\\tb \\n"}', '{"content": "a\\n\\tb\\n"}'),
        ('{"command": "cd /a b && ls"}', '{"command": "ls"}'),
        ('{"command": "cd /x && cd /a && ls"}', '{"command": "cd /x && ls"}'),
        (r'{"command": "find -exec x \\\\;"}', r'{"command": "find -exec x \\;"}'),
        (r'{"command": "echo \\u00e9 \\ud83d\\ude00"}', '{"command": "echo é 😀"}'),
        ('{"n": 12345678901234567890}', '{"n": 12345678901234567000}'),
        ('{"edits": [{"at": "1", "to": "x "}]}', '{"edits": [{"at": 1, "to": "x", "all": false}]}'),
    ],
)
def test_arguments_as_claude_code_ran_them_are_the_models_own(written: str, sent: str) -> None:
    reply, echo = message("", ("call_1", "Edit", written)), message("", ("call_1", "Edit", sent))
    assert match_echo(echo, reply) == (EchoRule.ARGUMENTS_NORMALIZED,)
    assert match_echo(message("", ("call_2", "Edit", sent)), reply) is None  # under another id it is another call


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"command": "ls"}', '{"command": "ls -l"}'),
        ('{"command": "ls", "timeout": 5}', '{"command": "ls"}'),
        ('{"timeout": "5"}', '{"timeout": 6}'),
        ('{"timeout": 5}', '{"timeout": "5"}'),
        ('{"content": "  a"}', '{"content": "a"}'),
        ('{"command": "cd /a && ls"}', '{"command": "pwd"}'),
        ('{"command": "cd /a; ls"}', '{"command": "ls"}'),
        ('{"list": [1, 2]}', '{"list": [1]}'),
        ('{"all": "maybe"}', '{"all": true}'),
        ('{"broken": ', '{"broken": 1}'),
    ],
)
def test_arguments_that_say_something_else_are_a_rewritten_reply(written: str, sent: str) -> None:
    assert match_echo(message("", ("call_1", "Edit", sent)), message("", ("call_1", "Edit", written))) is None


def test_fields_that_no_prompt_has_a_place_for_do_not_count() -> None:
    value = {**REPLY.to_dict(), "provider_specific_fields": {"refusal": None}}
    assert match_echo(Message.snapshot(value, "a message"), REPLY) == (EchoRule.FIELDS_ADDED,)


def test_a_call_that_opencode_could_not_make_comes_back_as_one_that_says_so() -> None:
    reply = message("", LS, ("call_2", "nothing", '{"x": 1}'))
    invalid = ("call_2", "invalid", '{"tool": "nothing", "error": "No such tool."}')
    assert match_echo(message("", LS, invalid), reply) == (EchoRule.CALL_INVALID,)
    other = ("call_2", "invalid", '{"tool": "something", "error": "No such tool."}')
    assert match_echo(message("", LS, other), reply) is None


def test_text_that_comes_apart_is_the_replys_text_and_nothing_else() -> None:
    assert is_text_alone(message("I look."), REPLY)
    assert not is_text_alone(message("I look.", LS), REPLY)
    assert not is_text_alone(message("I looked."), REPLY)
