"""A reply that was cut short, and of which a later prompt holds a beginning: that much arrived, and trains."""

from typing import Any

import pytest

from rolltape.records.policy import cut_policy
from rolltape.records.turn import Delivery, Finish, Turn
from rolltape.samples import linearize
from rolltape.samples.spelling import show
from rolltape.tree import arrivals_of, tree_of
from sessions import Recording, rollout_of, user

POLICIES = ["exact", "keep-head", "slime"]
CUT = {"finish": Finish.ABORT, "delivery": Delivery.UNDELIVERED}


def lines(recording: Recording, name: str = "exact") -> list[str]:
    made = linearize(rollout_of(recording.session()), cut_policy(name))
    return [show(sample, recording.words.word) for sample in made.samples()]


def totals(recording: Recording, name: str = "exact") -> dict[str, int]:
    ledger = linearize(rollout_of(recording.session()), cut_policy(name)).ledger
    return {fate.value: tokens for fate, tokens in ledger.totals().items()}


def echoes(recording: Recording, turn: Turn, part: str, reply: str, /, **given: Any) -> Turn:
    """The next turn of a client that has seen a part of a reply and says more."""
    messages = [*turn.prompt_messages, {"role": "assistant", "content": part}, user("more")]
    return recording.ask(messages, reply, **given)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("reply", [{"role": "assistant", "content": "one two three"}, None])
def test_a_cut_reply_trains_as_far_as_a_later_prompt_shows_it_and_the_sample_goes_on(name: str, reply: Any) -> None:
    recording = Recording()
    first = recording.ask([user("u")], "hello")
    ids = recording.words.ids("one two three")
    cut = recording.go_on(first, [user("count")], "", sampled_ids=ids, reply=reply, **CUT)
    echoes(recording, cut, "one two", "four")
    assert lines(recording, name) == [
        "<user> u <eot> <gen> «hello» «<eot>» <user> count <eot> <gen> «one» «two» <eot> <user> more <eot> <gen> "
        "«four» «<eot>»"
    ]
    assert totals(recording, name) == {"trained": 6, "masked:aborted": 1}


@pytest.mark.parametrize("name", POLICIES)
def test_a_reply_that_ended_while_its_client_hung_up_trains_as_far_as_it_is_shown(name: str) -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", delivery=Delivery.UNDELIVERED)
    echoes(recording, cut, "one two", "four")
    assert totals(recording, name) == {"trained": 4, "masked:undelivered": 2}


def test_a_delivered_reply_that_comes_back_shorter_trains_whole() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three")
    echoes(recording, cut, "one two", "four")
    assert totals(recording) == {"trained": 6}
    assert len(lines(recording)) == 2


def test_what_goes_on_from_a_part_that_came_back_is_the_same_sample() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", **CUT)
    second = echoes(recording, cut, "one", "two")
    recording.go_on(second, [user("on")], "three")
    assert lines(recording) == [
        "<user> count <eot> <gen> «one» <eot> <user> more <eot> <gen> «two» «<eot>» <user> on <eot> <gen> "
        "«three» «<eot>»"
    ]


def test_of_a_cut_reply_and_the_repetition_that_a_prompt_continues_the_repetition_trains() -> None:
    recording = Recording()
    recording.ask([user("count")], "one five", **CUT)
    again = recording.ask([user("count")], "one two", finish=Finish.LENGTH)
    recording.go_on(again, [user("more")], "three")
    assert totals(recording) == {"trained": 4, "masked:aborted": 2}


def test_of_two_cut_replies_the_one_that_a_prompt_holds_more_of_arrived() -> None:
    recording = Recording()
    longer = recording.ask([user("count")], "one two three", **CUT)
    recording.ask([user("count")], "one five six", **CUT)
    echoes(recording, longer, "one two", "four")
    assert arrivals_of(tree_of(recording.session())).heads == {0: 2}
    assert totals(recording) == {"trained": 4, "masked:aborted": 4}


def test_a_delivered_repetition_that_drifts_explains_as_much_of_a_prompt_as_a_cut_reply() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", **CUT)
    recording.ask([user("count")], "one two five")
    echoes(recording, cut, "one two", "four")
    assert totals(recording) == {"trained": 6, "masked:aborted": 3}


def test_two_prompts_that_hold_parts_of_a_cut_reply_train_each_id_once() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three four", **CUT)
    echoes(recording, cut, "one", "a")
    echoes(recording, cut, "one two three", "b")
    assert lines(recording) == [
        "<user> count <eot> <gen> one <eot> <user> more <eot> <gen> «a» «<eot>»",
        "<user> count <eot> <gen> «one» «two» «three» <eot> <user> more <eot> <gen> «b» «<eot>»",
    ]
    assert totals(recording) == {"trained": 7, "masked:aborted": 1}


def test_a_reply_that_is_shown_in_part_and_later_whole_trains_whole() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", **CUT)
    echoes(recording, cut, "one two", "a")
    recording.go_on(cut, [user("more")], "b")
    assert totals(recording) == {"trained": 7}


def test_a_reply_that_was_cut_twice_trains_over_both_turns() -> None:
    recording = Recording()
    first = recording.ask([user("count")], "one two", **CUT)
    resumed = {"prompt_ids": first.tokens.to_numpy(), "sampled_ids": recording.words.ids("three four")}
    recording.ask([user("count")], "one two three four", **resumed, **CUT)
    echoes(recording, first, "one two three", "five")
    assert lines(recording) == [
        "<user> count <eot> <gen> «one» «two» «three» <eot> <user> more <eot> <gen> «five» «<eot>»"
    ]
    assert totals(recording) == {"trained": 5, "masked:aborted": 1}


def test_a_side_request_that_holds_a_part_proves_it_and_is_no_part_of_the_sample() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", **CUT)
    echoes(recording, cut, "one two", "A title", auxiliary="title")
    assert lines(recording) == ["<user> count <eot> <gen> «one» «two» ‹three›"]


@pytest.mark.parametrize(
    ("given", "fates"),
    [
        ({"finish": Finish.ERROR}, {"masked:engine_error": 3, "trained": 2}),
        ({"logprobs": None}, {"masked:no_logprob": 2, "masked:aborted": 1, "trained": 2}),
        ({"sampling": {"regex": "[a-z]"}}, {"masked:constrained": 3, "trained": 2}),
    ],
)
def test_a_part_that_came_back_overrides_no_other_reason(given: dict[str, Any], fates: dict[str, int]) -> None:
    recording = Recording()
    ids = recording.words.ids("one two three")
    cut = recording.ask([user("count")], "one two three", sampled_ids=ids, **(CUT | given))
    echoes(recording, cut, "one two", "four")
    assert totals(recording) == fates


def shown_by_messages(recording: Recording, cut: Turn, ids: int, *, turn: int = 0) -> None:
    """A turn whose template drops what it has of a reply from the prompt, though its messages have it."""
    fact = {"echoed_part": {"turn": turn, "ids": ids}}
    recording.ask([*cut.prompt_messages, user("more")], "four", extra=fact)


@pytest.mark.parametrize("name", POLICIES)
def test_a_part_that_only_messages_show_trains_in_a_sample_of_its_own(name: str) -> None:
    recording = Recording()
    shown_by_messages(recording, recording.ask([user("count")], "one two three", **CUT), 2)
    assert totals(recording, name) == {"trained": 4, "masked:aborted": 1}
    assert lines(recording, name)[0] == "<user> count <eot> <gen> «one» «two» ‹three›"


@pytest.mark.parametrize(("ids", "trained"), [(0, 0), (3, 3), (4, 0)])
def test_what_messages_show_lies_within_the_reply(ids: int, trained: int) -> None:
    recording = Recording()
    shown_by_messages(recording, recording.ask([user("count")], "one two three", **CUT), ids)
    assert totals(recording)["trained"] == trained + 2


def test_messages_show_no_part_of_a_turn_that_comes_later() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", **CUT)
    shown_by_messages(recording, cut, 2, turn=2)
    recording.ask([user("again")], "five six seven", **CUT)
    assert totals(recording) == {"trained": 2, "masked:aborted": 6}


def test_the_id_of_a_cut_reply_proves_no_more_than_the_part_that_carries_it() -> None:
    recording = Recording()
    reply = {"role": "assistant", "content": "one two three", "id": "m0"}
    cut = recording.ask([user("count")], reply, sampled_ids=recording.words.ids("one two three"), **CUT)
    part = {"role": "assistant", "content": "one", "id": "m0"}
    recording.ask([*cut.prompt_messages, part, user("more")], "four")
    assert totals(recording) == {"trained": 3, "masked:aborted": 2}


def test_a_client_that_drops_what_it_has_seen_trains_nothing_of_it() -> None:
    recording = Recording()
    cut = recording.ask([user("count")], "one two three", **CUT)
    recording.ask([*cut.prompt_messages, user("more")], "four")
    assert totals(recording) == {"masked:aborted": 3, "trained": 2}
