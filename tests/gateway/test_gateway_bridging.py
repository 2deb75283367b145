"""Prompts of conversations in which the user speaks again: held ids are extended, or rendered from a reply on."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import rolltape
from gateways import CALCULATOR, Rig, rig, scripted, user
from rolltape.gateway.prompts import ChatPrompts
from rolltape.records.messages import Role
from rolltape.records.turn import Turn
from rolltape.tiny import shipped_model
from scripted_engine import Json

THOUGHT = "<think>\nI see.\n</think>\n\n"
EMPTY = "<think>\n\n</think>\n\n"


async def converse(it: Rig, opened: Json, said: list[Json], **fields: Any) -> list[Turn]:
    """Ask, and say what comes next each time; the turns."""
    messages: list[Json] = [{"role": "system", "content": "Be brief."}]
    for new in said:
        messages.append(new)
        answer = (await it.ask(opened, messages, **fields)).json["choices"][0]["message"]
        messages.append(answer)
    await it.finish(opened)
    return it.turns()


def made(turns: list[Turn]) -> list[tuple[str, str | None]]:
    return [(turn.facts.extra["prompt"], turn.prefix_miss) for turn in turns]


async def test_a_new_user_message_is_bridged_where_there_is_no_thinking_to_drop(run: Path) -> None:
    engine = scripted(["One.", "Two.", "Three.", "Four."])
    async with rig(run, engine) as it:
        turns = await converse(it, await it.open(), [user(word) for word in "abcd"])
    assert made(turns) == [("rendered", "first_turn")] + [("bridged", None)] * 3
    assert engine.violations == []  # though no tokenizer would give the ids of these replies


async def test_conversations_that_take_turns_in_a_session_go_on_from_their_own_ids(run: Path) -> None:
    engine = scripted(lambda _: "Yes.")
    conversations: list[list[Json]] = [[user("a")], [user("b")]]
    async with rig(run, engine) as it:
        opened = await it.open()
        for messages in conversations * 3:
            answer = (await it.ask(opened, messages)).json["choices"][0]["message"]
            messages += [answer, user("next")]
        await it.finish(opened)
        turns = it.turns()
    assert made(turns)[2:] == [("bridged", None)] * 4
    assert [said.asked.prompt_ids for said in engine.said] == [turn.prompt_ids.tolist() for turn in turns]


async def test_a_conversation_during_which_the_clock_is_set_back_is_one_branch(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(run, ["One.", "Two.", "Three."]) as it:
        opened, messages = await it.open(), list[Json]()
        now, now_ns = time.time(), time.time_ns()
        for back_s in (0, 3600, 7200):
            monkeypatch.setattr(time, "time", lambda back_s=back_s: now - back_s)
            monkeypatch.setattr(time, "time_ns", lambda back_s=back_s: now_ns - back_s * 10**9)
            messages.append(user("next"))
            messages.append((await it.ask(opened, messages)).json["choices"][0]["message"])
        await it.finish(opened)
        (rollout,) = rolltape.read(run).rollouts()
    assert made(list(rollout.turns)) == [("rendered", "first_turn")] + [("bridged", None)] * 2
    assert rolltape.linearize(rollout).forks == []


async def test_thinking_that_is_dropped_has_the_prompt_rendered_from_that_reply_on(run: Path) -> None:
    engine = scripted(["One.", f"{THOUGHT}Two.", "Three.", "Four."])
    async with rig(run, engine) as it:
        turns = await converse(it, await it.open(), [user(word) for word in "abcd"])
    spliced = ("spliced", "new_user_message")
    assert made(turns) == [("rendered", "first_turn"), ("bridged", None), spliced, ("bridged", None)]
    before = turns[1].prompt_ids.tolist()
    assert turns[2].prompt_ids.tolist()[: len(before)] == before  # the ids of the first reply are as they were sampled
    text = engine.text_of(turns[2].prompt_ids.tolist()[len(before) :])
    assert text == "Two.<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


async def test_an_empty_thought_is_dropped_too(run: Path) -> None:
    engine = scripted([f"{EMPTY}One.", "Two."])
    async with rig(run, engine) as it:
        turns = await converse(it, await it.open(), [user("a"), user("b")])
    assert made(turns)[1] == ("spliced", "new_user_message")
    assert "think" not in engine.text_of(turns[1].prompt_ids.tolist())


async def test_what_is_rendered_does_not_grow_with_the_conversation(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    render, splice = ChatPrompts.render, ChatPrompts.splice

    def counted(self: ChatPrompts, *given: Any) -> Any:
        rendered.append(len(given[0]))
        return render(self, *given)

    def counted_splice(self: ChatPrompts, held: Any, before: Any, after: Any, thinking: Any) -> Any:
        rendered.append(len(before) + len(after))
        return splice(self, held, before, after, thinking)

    monkeypatch.setattr(ChatPrompts, "render", counted)
    monkeypatch.setattr(ChatPrompts, "splice", counted_splice)
    engine = scripted(lambda _: f"{THOUGHT}Yes.")
    async with rig(run, engine) as it:
        await converse(it, await it.open(), [user(f"{n}") for n in range(12)])
    assert rendered == [2] + [3] * 11  # a question, the reply to it, and the next question


def _starts(turn: Turn, starts: tuple[int, ...] | None) -> list[int]:
    """Where the turn's own messages begin; a reply begins with what was sampled, or with its frame."""
    assert starts is not None
    own = turn.prompt.own
    pairs = zip(own, starts[len(starts) - len(own) :], strict=True)
    return [start for message, start in pairs if message.role is not Role.ASSISTANT]


@pytest.mark.parametrize("seed", range(6))
async def test_every_prompt_is_what_the_template_gives_for_its_messages(run: Path, seed: int) -> None:
    """Replies come in the tokenizer's own ids here, so that nothing tells a held prompt from a rendered one."""
    chance = random.Random(seed)
    script: list[str] = []
    said: list[Json] = [user("begin")]
    for number in range(14):
        thought = chance.choice(["", "", THOUGHT, EMPTY])
        if chance.random() < 0.5:
            call = json.dumps({"name": "calculator", "arguments": {"expression": f"{number}"}})
            script.append(f"{thought}<tool_call>\n{call}\n</tool_call>")
            said.append({"role": "tool", "tool_call_id": "c", "content": f"{number}"})
        else:
            script.append(f"{thought}So {number}.")
            said.append(user(f"and {number}"))
    engine = scripted(script, unusual=False)
    prompts = ChatPrompts(shipped_model())
    async with rig(run, engine) as it:
        turns = await converse(it, await it.open(), said[:-1], tools=[CALCULATOR])
    for turn in turns:
        whole = prompts.render(turn.prompt_messages, [CALCULATOR], None)
        held, asked = (engine.text_of(ids.tolist()) for ids in (turn.prompt_ids, whole.ids))
        assert held.replace(EMPTY, "") == asked  # until the user speaks, an empty thought is held that no message has
        if EMPTY not in held:
            assert _starts(turn, turn.facts.message_starts) == _starts(turn, whole.message_starts)
