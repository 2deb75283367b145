"""Engines that give what they cannot have sampled: a fault of theirs, stated on the turn, and nothing of it trains."""

from pathlib import Path

import pytest

import rolltape
from gateways import Api, rig, scripted, text_of, user
from rolltape.cli import run as rolltape_command
from rolltape.records.turn import Finish, TurnFlag
from scripted_engine import IMPLAUSIBLE, Mishap, Step

WHY = {
    Mishap.OUTSIDE_VOCABULARY: "is 900000, outside the vocabulary of",
    Mishap.AFTER_STOP: "sampled ids after the stop id",
    Mishap.TOO_MANY: "90 sampled ids but max_tokens 40",
    Mishap.ABOVE_ZERO: "the logprob of sampled id 0 is 0.5, above zero",
}


@pytest.mark.parametrize("mishap", IMPLAUSIBLE)
async def test_an_implausible_reply_does_not_train_and_its_turn_says_why(run: Path, mishap: Mishap) -> None:
    engine = scripted(lambda _: "fine")
    engine.mishaps |= dict.fromkeys(range(3), mishap)
    async with rig(run, engine) as it:
        opened = await it.open()
        assert (await it.ask(opened, "hello", max_tokens=40)).status == 502
        done = await it.finish(opened, reward=1.0)
    (turn,) = it.turns()
    assert turn.facts.finish is Finish.ERROR
    assert TurnFlag.IMPLAUSIBLE in turn.facts.flags
    assert WHY[mishap] in (turn.facts.error or "")
    assert done["ledger"] == {"masked:engine_error": len(turn.sampled_ids)}  # the evidence is kept
    assert rolltape_command(["check", str(run)]) == 0


@pytest.mark.parametrize("mishap", IMPLAUSIBLE)
async def test_an_implausible_reply_is_asked_for_again_and_noted_on_the_turn(run: Path, mishap: Mishap) -> None:
    engine = scripted(lambda _: "fine")
    engine.mishaps[0] = mishap
    async with rig(run, engine) as it:
        opened = await it.open()
        assert text_of(Api.CHAT, await it.ask(opened, "hello", max_tokens=40)) == "fine"
        done = await it.finish(opened)
    (turn,) = it.turns()
    assert done["ledger"] == {"trained": len(engine.said[-1].ids)}
    assert turn.facts.flags == ()
    (noted,) = turn.facts.extra["engine_errors"]
    assert WHY[mishap] in noted


async def test_an_abort_at_the_stop_id_ends_the_reply(run: Path) -> None:
    engine = scripted(lambda _: "fine")
    engine.mishaps[0] = Mishap.ABORTED_AT_STOP
    async with rig(run, engine) as it:
        opened = await it.open()
        assert text_of(Api.CHAT, await it.ask(opened, "hello")) == "fine"
        assert engine.requests == 1
        await it.finish(opened)
    (turn,) = it.turns()
    assert (turn.facts.finish, turn.facts.flags) == (Finish.STOP, ())


async def test_replies_that_real_engines_give_raise_no_alarm(run: Path) -> None:
    engine = scripted(["fine", Step("one two three four five six seven", finish="length"), "a b c d e f g h"])
    engine.mishaps[2] = Mishap.ABORTED
    async with rig(run, engine) as it:
        opened = await it.open()
        await it.ask(opened, "hello")
        await it.ask(opened, [user("count")], max_tokens=3)
        await it.ask(opened, [user("spell")])
        await it.finish(opened)
    turns = it.turns()
    assert [turn.facts.finish for turn in turns] == [Finish.STOP, Finish.LENGTH, Finish.STOP]
    assert len(turns[1].sampled_ids) == 3
    assert len(turns[2].facts.segments) == 2
    assert [turn.facts.flags for turn in turns] == [(), (), ()]


async def test_a_tape_says_how_large_the_vocabulary_is(run: Path) -> None:
    async with rig(run, ["fine"]) as it:
        opened = await it.open()
        await it.ask(opened, "hello")
        await it.finish(opened)
        tokenizer = it.engine.tokenizer
    (rollout,) = rolltape.read(run).rollouts()
    head = rollout.sessions[0].head
    assert head.vocabulary == 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    assert head.flags_faults
