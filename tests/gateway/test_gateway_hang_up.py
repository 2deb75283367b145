"""Clients that hang up in the middle of a stream and later send back the part that they have seen."""

from pathlib import Path
from typing import Any

import pytest

import rolltape
from gateways import Api, Rig, eventually, rig, scripted, user
from live_streams import Live, allow, allowing, hold_recording, streaming, thinking, tools, used_up
from rolltape.records.sample import Fate
from rolltape.records.turn import Delivery, Finish, Turn
from scripted_engine import tool_call

LONG = "one two three four five six seven"
APIS = [Api.CHAT, Api.MESSAGES, Api.RESPONSES]
INTERRUPTED = user("[Request interrupted by user]")


async def hung_up(it: Rig, opened: Any, api: Api, ids: int, messages: Any = "count", **fields: Any) -> Live:
    """A stream that was left when so many ids had been sampled and something was seen, once the turn is on the tape."""
    known = len(it.turns())
    async with streaming(it, opened, api, messages, **fields) as live:
        allow(it.engine, ids)
        await used_up(it.engine)
        await eventually(lambda: any(live.said[:2]))
    await eventually(lambda: len(it.turns()) > known)
    assert it.turns()[-1].facts.finish is Finish.ABORT
    return live


def assistant(api: Api, text: str, reasoning: str = "") -> Any:
    """What was seen of a reply, as a client of that API sends it back."""
    if not reasoning or api is Api.CHAT:
        return [{"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})]
    if api is Api.MESSAGES:
        blocks = [{"type": "thinking", "thinking": reasoning, "signature": ""}]
        return [{"role": "assistant", "content": [*blocks, *([{"type": "text", "text": text}] if text else [])]}]
    summary = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]}
    return [summary, *([{"role": "assistant", "content": text}] if text else [])]


def made(it: Rig) -> rolltape.Linearized:
    (rollout,) = rolltape.read(it.run).rollouts()
    return rolltape.linearize(rollout)


def head(cut: Turn, later: Turn) -> int:
    """How many ids of a reply a later prompt begins with."""
    return cut.tokens.common_prefix(later.prompt_tokens) - len(cut.prompt_tokens)


@pytest.mark.parametrize("api", APIS)
async def test_what_was_seen_of_a_reply_and_comes_back_is_the_ids_that_were_sampled_and_trains(
    run: Path, api: Api
) -> None:
    engine = allowing([LONG, "eight"])
    async with rig(run, engine) as it:
        opened = await it.open()
        live = await hung_up(it, opened, api, 6)
        allow(engine)
        said = [user("count"), *assistant(api, live.said.text), INTERRUPTED, user("go on")]
        answer = await it.ask(opened, said, api)
        assert answer.status == 200
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert (cut.facts.finish, cut.facts.delivery) == (Finish.ABORT, Delivery.UNDELIVERED)
    assert later.facts.extra["prompt"] in ("bridged", "spliced")
    kept = head(cut, later)
    assert 0 < kept <= len(cut.sampled_ids)
    assert engine.text_of(cut.sampled_ids[:kept].tolist()) == live.said.text
    linearized = made(it)
    (sample,) = linearized.samples()
    masked = len(cut.sampled_ids) - kept
    trained = kept + len(later.sampled_ids)
    totals = {Fate.TRAINED: trained, **({Fate.MASKED_ABORTED: masked} if masked else {})}
    assert linearized.ledger.totals() == totals
    assert engine.text_of(sample.ids[sample.trained_mask].tolist()) == live.said.text + "eight<|im_end|>"


@pytest.mark.parametrize("api", APIS)
async def test_a_client_that_got_less_than_was_sampled_trains_what_it_got(run: Path, api: Api) -> None:
    engine = allowing([LONG, "eight", "nine"])
    async with rig(run, engine) as it:
        opened = await it.open()
        await hung_up(it, opened, api, 12)
        allow(engine)
        said = [user("count"), *assistant(api, "one two"), INTERRUPTED, user("go on")]
        first = await it.ask(opened, said, api)
        assert first.status == 200
        await it.ask(opened, [*said, *assistant(api, "eight"), user("and on")], api)
        await it.finish(opened, reward=1.0)
    cut, later, last = it.turns()
    assert engine.text_of(cut.sampled_ids[: head(cut, later)].tolist()) == "one two"
    assert later.facts.extra["echoes"] == ["partial"]
    assert (later.facts.extra["prompt"], last.facts.extra["prompt"]) == ("spliced", "bridged")
    (sample,) = made(it).samples()
    trained = engine.text_of(sample.ids[sample.trained_mask].tolist())
    assert trained == "one twoeight<|im_end|>nine<|im_end|>"
    assert sample.ids.tolist() == last.tokens.to_numpy().tolist()


@pytest.mark.parametrize("api", APIS)
async def test_thinking_that_the_template_drops_trains_with_the_part_that_came_back(run: Path, api: Api) -> None:
    """As Claude Code (2.1.197) sends it after an interruption, thinking and text as far as they were seen."""
    engine = allowing([f"<think>\nLet me see.\n</think>\n\n{LONG}", "eight"])
    async with rig(run, engine) as it:
        opened = await it.open()
        await hung_up(it, opened, api, 25, **thinking(api))
        allow(engine)
        said = [user("count"), *assistant(api, "one", "Let me see."), INTERRUPTED, user("go on")]
        assert (await it.ask(opened, said, api, **thinking(api))).status == 200
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert later.facts.extra["prefix_miss"] == "new_user_message"
    seen = engine.text_of(cut.sampled_ids[: later.facts.extra["echoed_part"]["ids"]].tolist())
    assert seen == "<think>\nLet me see.\n</think>\n\none"
    linearized = made(it)
    first, second = linearized.samples()
    assert engine.text_of(first.ids[first.trained_mask].tolist()) == seen
    assert engine.text_of(second.ids[second.trained_mask].tolist()) == "eight<|im_end|>"


async def test_thinking_that_was_seen_in_part_trains_up_to_there(run: Path) -> None:
    engine = allowing(["<think>\none two three four five six", "eight"])
    async with rig(run, engine, thinking_retention="all") as it:
        opened = await it.open()
        live = await hung_up(it, opened, Api.CHAT, 10, **thinking(Api.CHAT))
        allow(engine)
        said = [user("count"), *assistant(Api.CHAT, "", live.said.reasoning), user("go on")]
        assert (await it.ask(opened, said, **thinking(Api.CHAT))).status == 200
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert later.facts.extra["prompt"] in ("bridged", "spliced")
    assert engine.text_of(cut.sampled_ids[: head(cut, later)].tolist()) == f"<think>\n{live.said.reasoning}"


async def test_a_client_that_drops_thinking_has_the_text_that_it_saw_matched(run: Path) -> None:
    engine = allowing([f"<think>\nHm.\n</think>\n\n{LONG}", "eight"])
    async with rig(run, engine, thinking_retention="all") as it:
        opened = await it.open()
        await hung_up(it, opened, Api.CHAT, 18, **thinking(Api.CHAT))
        allow(engine)
        said = [user("count"), *assistant(Api.CHAT, "one"), user("go on")]
        await it.ask(opened, said, **thinking(Api.CHAT))
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert later.facts.extra["echoes"] == ["reasoning_dropped", "partial"]
    assert engine.text_of(cut.sampled_ids[: head(cut, later)].tolist()) == "<think>\nHm.\n</think>\n\none"


async def test_a_call_that_was_being_sampled_is_no_part_of_what_came_back(run: Path) -> None:
    engine = allowing(["I compute. " + tool_call("calculator", {"expression": "1 + 1"}), "eight"])
    async with rig(run, engine) as it:
        opened = await it.open()
        fields: Any = {"tools": tools(Api.CHAT)}
        await hung_up(it, opened, Api.CHAT, 25, **fields)
        allow(engine)
        said = [user("count"), *assistant(Api.CHAT, "I compute."), user("go on")]
        await it.ask(opened, said, **fields)
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert cut.reply is not None
    assert "<tool_call>" in engine.text_of(cut.sampled_ids.tolist())
    assert engine.text_of(cut.sampled_ids[: head(cut, later)].tolist()) == "I compute."
    (sample,) = made(it).samples()
    assert engine.text_of(sample.ids[sample.trained_mask].tolist()) == "I compute.eight<|im_end|>"


async def test_a_reply_that_was_resumed_and_left_again_is_one_reply(run: Path) -> None:
    engine = allowing(lambda asked: LONG if "go on" not in asked.prompt else "eight")
    async with rig(run, engine) as it:
        opened = await it.open()
        first = await hung_up(it, opened, Api.CHAT, 5)
        second = await hung_up(it, opened, Api.CHAT, 4)
        assert second.said.text.startswith(first.said.text)
        assert len(second.said.text) > len(first.said.text)
        allow(engine)
        await it.ask(opened, [user("count"), *assistant(Api.CHAT, second.said.text), user("go on")])
        await it.finish(opened, reward=1.0)
    one, two, later = it.turns()
    assert two.prompt_messages == one.prompt_messages
    assert two.prompt_ids.tolist() == one.tokens.to_numpy().tolist()
    (sample,) = made(it).samples()
    assert engine.text_of(sample.ids[sample.trained_mask].tolist()) == f"{second.said.text}eight<|im_end|>"
    assert sample.ids.tolist() == later.tokens.to_numpy().tolist()


async def test_a_part_that_ends_within_an_id_is_rendered_and_trains_as_far_as_ids_show_it(run: Path) -> None:
    engine = allowing([LONG, "eight"], unusual=False)
    async with rig(run, engine) as it:
        opened = await it.open()
        await hung_up(it, opened, Api.CHAT, 12)
        allow(engine)
        await it.ask(opened, [user("count"), *assistant(Api.CHAT, "one two thre"), user("go on")])
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert (later.facts.extra["prompt"], later.facts.extra["prefix_miss"]) == ("rendered", "reply_changed")
    assert "one two thre<|im_end|>" in engine.text_of(later.prompt_ids.tolist())
    assert made(it).ledger.by_turn()[cut.id][Fate.TRAINED] == head(cut, later)


async def test_a_client_that_does_not_wait_for_the_end_of_what_it_left_is_matched_too(run: Path) -> None:
    engine = allowing([LONG, "eight"])
    async with rig(run, engine) as it:
        opened = await it.open()
        async with streaming(it, opened, Api.CHAT, "count") as live:
            allow(engine, 8)
            await eventually(lambda: live.said.text != "")
            seen = live.said.text
        asking = it.asking(opened, [user("count"), *assistant(Api.CHAT, seen), user("go on")])
        await eventually(lambda: len(it.turns()) > 0)
        allow(engine)
        assert (await asking).status == 200
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert engine.text_of(cut.sampled_ids[: head(cut, later)].tolist()).startswith(seen)
    assert later.facts.extra["prompt"] in ("bridged", "spliced")


async def test_a_reply_that_ended_while_its_client_hung_up_trains_up_to_what_came_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, may_record = hold_recording(monkeypatch)
    async with rig(run, scripted([LONG, "eight"], incremental=True)) as it:
        opened = await it.open()
        async with streaming(it, opened, Api.CHAT, "count"):
            await recording.wait()
        may_record.set()
        await eventually(lambda: [turn.facts.delivery for turn in it.turns()] == [Delivery.UNDELIVERED])
        await it.ask(opened, [user("count"), *assistant(Api.CHAT, "one two"), user("go on")])
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert cut.facts.finish is Finish.STOP
    kept = head(cut, later)
    assert it.engine.text_of(cut.sampled_ids[:kept].tolist()) == "one two"
    fates = {Fate.TRAINED: kept, Fate.MASKED_UNDELIVERED: len(cut.sampled_ids) - kept}
    assert made(it).ledger.by_turn()[cut.id] == fates


async def test_a_part_that_comes_back_before_its_turn_is_recorded_trains(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is all that was sampled, white space aside. The next turn waits for this one, and so begins after its end."""
    recording, may_record = hold_recording(monkeypatch)
    engine = allowing(["one\n\ntwo", "eight"], unusual=False)
    async with rig(run, engine, thinking_retention="all") as it:
        opened = await it.open()
        async with streaming(it, opened, Api.CHAT, "count") as live:
            allow(engine, 1)
            await eventually(lambda: live.said.text == "one")
        await recording.wait()
        asking = it.asking(opened, [user("count"), *assistant(Api.CHAT, "one"), user("go on")])
        (session,) = it.gateway.service.sessions
        await eventually(lambda: session.in_flight == 2)
        allow(engine)
        may_record.set()
        assert (await asking).status == 200
        await it.finish(opened, reward=1.0)
    cut, later = it.turns()
    assert (cut.facts.finish, later.facts.extra["prompt"]) == (Finish.ABORT, "bridged")
    assert made(it).forks == []
    assert made(it).ledger.totals() == {Fate.TRAINED: len(cut.sampled_ids) + len(later.sampled_ids)}


async def test_what_claude_code_sends_after_an_interruption_trains_no_more_than_it_saw(run: Path) -> None:
    """As 2.1.197 does: blocks as far as they came, a signature with the turn's id, and a mark before the message."""
    engine = allowing([f"<think>\nLet me see.\n</think>\n\n{LONG}", "eight"])
    async with rig(run, engine) as it:
        opened, fields = await it.open(), thinking(Api.MESSAGES)
        live = await hung_up(it, opened, Api.MESSAGES, 25, **fields)
        allow(engine)
        deltas = [event["delta"] for event in live.events if event["type"] == "content_block_delta"]
        (signature,) = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
        thought = {"type": "thinking", "thinking": "Let me see.", "signature": signature}
        seen = {"role": "assistant", "content": [thought, {"type": "text", "text": "one two"}]}
        texts = [{"type": "text", "text": text} for text in ("[Request interrupted by user]\n", "go on")]
        said = [user("count"), seen, {"role": "user", "content": texts}]
        assert (await it.ask(opened, said, Api.MESSAGES, **fields)).status == 200
        await it.finish(opened, reward=1.0)
    first, _ = made(it).samples()
    assert engine.text_of(first.ids[first.trained_mask].tolist()) == "<think>\nLet me see.\n</think>\n\none two"


async def test_what_codex_sends_after_an_interruption_trains_the_thinking_that_it_kept(run: Path) -> None:
    """As 0.166 does: whole items are kept, so the thinking is, and the text that was coming is not."""
    engine = allowing([f"<think>\nLet me see.\n</think>\n\n{LONG}", "eight"])
    async with rig(run, engine) as it:
        opened, fields = await it.open(), thinking(Api.RESPONSES)
        await hung_up(it, opened, Api.RESPONSES, 25, **fields)
        allow(engine)
        mark = user("<turn_aborted>\nThe user interrupted the previous turn on purpose.\n</turn_aborted>")
        said = [user("count"), *assistant(Api.RESPONSES, "", "Let me see."), mark, user("go on")]
        assert (await it.ask(opened, said, Api.RESPONSES, **fields)).status == 200
        await it.finish(opened, reward=1.0)
    first, _ = made(it).samples()
    assert engine.text_of(first.ids[first.trained_mask].tolist()).rstrip() == "<think>\nLet me see."


async def test_a_whole_reply_that_comes_back_shorter_is_another_reply(run: Path) -> None:
    async with rig(run, [LONG, "eight"]) as it:
        opened = await it.open()
        assert (await it.ask(opened, "count")).status == 200
        await eventually(lambda: it.turns()[0].facts.delivery is Delivery.DELIVERED)
        await it.ask(opened, [user("count"), *assistant(Api.CHAT, "one two"), user("go on")])
    assert it.turns()[1].facts.extra["prefix_miss"] == "reply_changed"


async def test_a_reply_that_nobody_saw_come_has_no_message(run: Path) -> None:
    engine = allowing([LONG], 4)
    async with rig(run, engine) as it:
        asking = it.asking(await it.open(), "count")
        await it.requested(1)
        asking.cancel()
        await eventually(lambda: len(it.turns()) == 1)
    (turn,) = it.turns()
    assert (turn.facts.finish, turn.reply) == (Finish.ABORT, None)
