"""Samples follow ids: what extends is one sample, whatever the messages say; ids and messages prove arrival."""

from typing import Any

import msgspec
import pytest

from rolltape.records.fork import ForkCause
from rolltape.records.policy import cut_policy
from rolltape.records.sample import Fate, LedgerEntry
from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag
from rolltape.samples import linearize
from rolltape.samples.spelling import show
from rolltape.tree import arrivals_of, forks_of, tree_of
from sessions import Recording, held, rollout_of, says, system, tool, user


def lines(recording: Recording, name: str = "exact", **choices: Any) -> list[str]:
    linearized = linearize(rollout_of(recording.session()), cut_policy(name, **choices))
    return [show(sample, recording.words.word) for sample in linearized.samples()]


def totals(recording: Recording, name: str = "exact", **choices: Any) -> dict[str, int]:
    ledger = linearize(rollout_of(recording.session()), cut_policy(name, **choices)).ledger
    return {fate.value: tokens for fate, tokens in ledger.totals().items()}


def causes(recording: Recording) -> list[ForkCause]:
    return [fork.cause for fork in forks_of(tree_of(recording.session()))]


def after(recording: Recording, turn: Turn, messages: list[Any], reply: Any, /, **given: Any) -> Turn:
    """A turn whose ids extend another's by a user's word, recorded with whatever messages."""
    glue = given.pop("glue", recording.render([user("more")]))
    ids = [*turn.tokens.to_numpy().tolist(), *glue]
    return recording.record(prompt_messages=messages, prompt_ids=ids, **recording.answered(reply, **given))


def resumed(recording: Recording, turn: Turn, reply: str, **given: Any) -> Turn:
    """The same messages again, with what was sampled so far at the end of the prompt."""
    ids = turn.tokens.to_numpy()
    return recording.record(prompt_messages=turn.prompt_messages, prompt_ids=ids, **recording.answered(reply, **given))


def call(call_id: str, name: str = "run") -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


@pytest.mark.parametrize("name", ["exact", "keep-head", "slime"])
def test_an_agent_that_changes_white_space_in_every_echo_makes_one_sample(name: str) -> None:
    recording = Recording()
    messages = [user("go")]
    turn = recording.ask(messages, "step one\n")
    for _ in range(39):
        messages = [*messages, {"role": "assistant", "content": "step one"}, user("more")]
        turn = after(recording, turn, messages, "step one\n")
    made = linearize(rollout_of(recording.session()), name)
    assert [sample.ids.tolist() for sample in made.samples()] == [turn.tokens.to_numpy().tolist()]
    assert made.ledger.totals().keys() == {Fate.TRAINED}
    assert made.forks == []


@pytest.mark.parametrize("partial", [{"role": "assistant", "content": "a b"}, None])
def test_an_aborted_turn_that_is_resumed_trains_with_or_without_its_partial_reply(partial: Any) -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a b", finish=Finish.ABORT, delivery=Delivery.UNDELIVERED, reply=partial)
    resumed(recording, first, "c")
    assert lines(recording) == ["<user> u <eot> <gen> «a» «b» «c» «<eot>»"]
    assert causes(recording) == []


def test_a_reply_cut_by_length_and_continued_trains() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a b", finish=Finish.LENGTH)
    resumed(recording, first, "c")
    assert lines(recording) == ["<user> u <eot> <gen> «a» «b» «c» «<eot>»"]


@pytest.mark.parametrize("reply", ["ok", None])
def test_a_loop_that_records_no_messages_makes_one_sample(reply: str | None) -> None:
    recording = Recording()
    said = None if reply is None else {"role": "assistant", "content": reply}
    turn = recording.ask([], "ok", prompt_ids=recording.render([user("go")]), reply=said)
    for _ in range(4):
        turn = after(recording, turn, [], "ok", reply=said)
    assert lines(recording) == ["<user> go <eot> <gen> «ok» «<eot>»" + " <user> more <eot> <gen> «ok» «<eot>»" * 4]
    assert causes(recording) == []


def test_forks_without_messages_are_explained_by_ids() -> None:
    recording = Recording()
    start = recording.render([user("go")])
    first = recording.ask([], "one two", prompt_ids=start)
    recording.ask([], "three", prompt_ids=start)
    after(recording, first, [], "four")
    after(recording, first, [], "five", glue=recording.render([user("other")]))
    recording.ask([], "six", prompt_ids=[*first.tokens.slice(0, len(start) + 1).tolist(), 77, 78])
    recording.ask([], "seven", prompt_ids=[*start, 77, 78])
    recording.ask([], "eight", prompt_ids=[99, 98])
    assert causes(recording) == [
        ForkCause.RETRY,
        ForkCause.HISTORY_EDITED,
        ForkCause.RETOKENIZED,
        ForkCause.ABANDONED_REPLY,
        ForkCause.SUB_AGENT,
    ]
    assert arrivals_of(tree_of(recording.session())).abandoned == {1}


def test_tools_given_on_some_turns_only_make_no_fork_where_ids_extend() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", tools=[{"name": "run"}])
    second = after(recording, first, [*held(first), user("more")], "b")
    after(recording, second, [*held(second), user("more")], "c", tools=[{"name": "run"}, {"name": "ask"}])
    assert len(lines(recording)) == 1
    assert causes(recording) == []


def test_a_turn_given_without_a_reply_message_is_recorded_and_continued() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", reply=None)
    recording.ask([user("u"), {"role": "assistant", "content": "a"}, user("v")], "b")
    assert len(lines(recording)) == 1


def compacted(recording: Recording, call_after: str) -> None:
    """The last exchange is left out of the request for a summary, and comes back after it."""
    task = [system("s"), user("fix it")]
    first = recording.ask(task, call("c0"))
    second = recording.go_on(first, [tool("1 failed", "c0")], call("c1", "edit"))
    summary = recording.ask([*second.prompt_messages, user("sum up")], "tests fail")
    recording.ask([*task, user(says(summary)["content"]), call(call_after, "edit"), tool("edited")], "done")


def test_an_action_that_a_compaction_leaves_out_and_puts_back_trains() -> None:
    recording = Recording()
    compacted(recording, "c1")
    assert totals(recording).keys() == {"trained"}


def test_without_the_call_id_an_action_left_out_of_a_compaction_is_abandoned() -> None:
    recording = Recording()
    compacted(recording, "another")
    assert totals(recording)["masked:abandoned"] == 4, "the call of `edit` and its end"


def test_an_id_that_several_replies_carry_proves_nothing() -> None:
    recording = Recording()
    recording.ask([user("u")], call("c0", "look"))
    recording.ask([user("u")], call("c0"))
    recording.ask([user("v"), call("c0"), tool("ok", "c0")], "done")
    assert totals(recording)["masked:abandoned"] == 4


def test_of_an_aborted_turn_and_its_repetition_the_longer_one_is_continued() -> None:
    recording = Recording()
    recording.ask([user("u")], "r1", finish=Finish.ABORT)
    second = recording.ask([user("u")], "r1 r2")
    recording.go_on(second, [user("more")], "done")
    assert lines(recording) == ["<user> u <eot> <gen> «r1» «r2» «<eot>» <user> more <eot> <gen> «done» «<eot>»"]
    assert totals(recording) == {"trained": 5, "masked:aborted": 1}


def test_another_model_with_the_same_tokenizer_never_joins_a_sample() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "plan")
    scout = recording.go_on(first, [user("find it")], "found", model="scout")
    recording.go_on(scout, [user("fix it")], "fixed")
    assert causes(recording) == [ForkCause.SUB_AGENT]
    for name in ("exact", "keep-head", "slime"):
        assert lines(recording, name) == [
            "<user> u <eot> <gen> plan <eot> <user> find it <eot> <gen> «found» «<eot>»",
            "<user> u <eot> <gen> «plan» «<eot>» <user> find it <eot> <gen> found <eot> <user> fix it <eot> <gen> "
            "«fixed» «<eot>»",
        ]


def test_another_model_that_is_asked_about_a_reply_does_not_abandon_it() -> None:
    recording = Recording()
    first = recording.ask([], "a", prompt_ids=[1, 2], reply=None)
    after(recording, first, [], "good", model="judge")
    recording.ask([], "b", prompt_ids=[1, 2, 3], model="scout", reply=None)
    assert totals(recording).keys() == {"trained"}


def test_of_many_turns_with_equal_ids_the_one_whose_id_is_echoed_is_continued() -> None:
    recording = Recording()
    turns = [recording.ask([user("u")], call(f"minted_{number}")) for number in range(100)]
    recording.go_on(turns[3], [tool("ok")], "done")
    placed = tree_of(recording.session()).turns
    assert placed[-1].continues is placed[-1].message_parent is placed[3]


def test_another_tokenizer_never_joins_a_sample_though_ids_agree() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", fingerprint="one")
    recording.go_on(first, [user("v")], "b", fingerprint="two")
    assert len(lines(recording)) == 2


def test_requests_in_flight_together_are_siblings_and_no_retries() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", started_at=1.0, ended_at=3.0)
    recording.ask([user("u")], "b", started_at=2.0, ended_at=4.0)
    assert causes(recording) == [ForkCause.SIBLING]
    assert totals(recording) == {"trained": 4}
    recording.ask([user("u")], "c", started_at=5.0, ended_at=6.0)
    assert totals(recording) == {"masked:abandoned": 4, "trained": 2}, "the last reply is nobody's loss"


def test_the_sibling_that_is_not_gone_on_from_is_abandoned() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", started_at=1.0, ended_at=3.0)
    second = recording.ask([user("u")], "b", started_at=2.0, ended_at=4.0)
    recording.go_on(second, [user("more")], "c", started_at=5.0, ended_at=6.0)
    assert totals(recording) == {"trained": 4, "masked:abandoned": 2}


def test_siblings_that_go_their_own_ways_are_not_abandoned() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", started_at=1.0, ended_at=2.0)
    recording.go_on(first, [user("more")], "b", started_at=2.0, ended_at=3.0)
    recording.ask([user("u")], "slow", started_at=1.5, ended_at=3.5)
    recording.go_on(recording.turns[1], [user("more")], "c", started_at=4.0, ended_at=5.0)
    assert totals(recording) == {"trained": 8}


def test_a_turn_does_not_continue_one_that_had_not_ended_when_it_was_asked() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", started_at=1.0, ended_at=3.0)
    recording.go_on(first, [user("v")], "b", started_at=2.0, ended_at=4.0)
    assert len(lines(recording)) == 2


def test_a_turn_continues_one_that_ended_at_the_moment_it_was_asked() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", started_at=1.25, ended_at=2.75)
    recording.go_on(first, [user("v")], "b", started_at=2.75, ended_at=4.0)
    assert (len(lines(recording)), causes(recording)) == (1, [])


def test_a_start_that_was_cut_to_the_second_is_no_overlap_with_a_reply_that_the_prompt_holds() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", started_at=1.0, ended_at=2.75)
    second = recording.go_on(first, [user("v")], "b", started_at=2.0, ended_at=3.5)
    recording.go_on(second, [user("w")], "c", started_at=3.0, ended_at=4.5)
    assert (len(lines(recording)), causes(recording)) == (1, [])
    assert totals(recording) == {"trained": 6}


def test_a_start_that_was_cut_to_the_second_makes_no_retry_of_a_request_that_may_have_been_in_flight() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", started_at=1.0, ended_at=2.75)
    recording.ask([user("u")], "b", started_at=2.0, ended_at=3.5)
    assert causes(recording) == [ForkCause.SIBLING]
    assert totals(recording) == {"trained": 4}


def test_of_turns_with_equal_ids_one_is_continued_and_the_others_are_repeats() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", delivery=Delivery.UNDELIVERED)
    recording.ask([user("u")], "a")
    recording.ask([user("u")], "a", delivery=Delivery.UNDELIVERED)
    recording.go_on(first, [user("v")], "b")
    placed = tree_of(recording.session()).turns
    assert placed[3].continues is placed[1], "the delivered one"
    assert totals(recording) == {"trained": 4, "masked:undelivered": 4}


def test_an_echoed_id_decides_between_turns_with_equal_ids() -> None:
    recording = Recording()
    first = recording.ask([user("u")], call("minted_1"))
    recording.ask([user("u")], call("minted_2"))
    recording.go_on(first, [tool("ok")], "done")
    placed = tree_of(recording.session()).turns
    assert placed[2].continues is placed[0]
    assert totals(recording)["masked:abandoned"] == 4


def test_a_side_request_that_holds_a_reply_proves_that_it_arrived_and_is_never_continued() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", delivery=Delivery.UNKNOWN)
    title = recording.go_on(first, [user("a title ?")], "A title", auxiliary="title")
    after(recording, title, [*held(title), user("more")], "b")
    placed = tree_of(recording.session()).turns
    assert placed[2].continues is placed[0]
    assert totals(recording)["trained"] == 4


@pytest.mark.parametrize(
    ("given", "fate"),
    [
        ({"finish": Finish.ERROR}, "masked:engine_error"),
        ({"auxiliary": "probe"}, "dropped:auxiliary"),
        ({"logprobs": None}, "masked:no_logprob"),
        ({"flags": [TurnFlag.CONSTRAINED]}, "masked:constrained"),
    ],
)
def test_proof_of_arrival_overrides_no_other_reason(given: dict[str, Any], fate: str) -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", **given)
    after(recording, first, [*held(first), user("more")], "b")
    assert totals(recording) == {fate: len(first.sampled_ids), "trained": 2}


def test_proof_of_arrival_does_not_make_a_token_fresh() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", finish=Finish.ABORT)
    after(recording, first, [*held(first), user("more")], "b", weight_version="2")
    made = linearize(rollout_of(recording.session()), cut_policy(max_staleness=0), versions=["1", "2"])
    assert made.ledger.totals() == {Fate.TRAINED: 2, Fate.MASKED_STALE: 1}


@pytest.mark.parametrize(
    ("sampling", "trains"),
    [
        ({"temperature": 0.7}, True),
        ({"regex": None, "json_schema": ""}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"guided_choice": ["yes", "no"]}, False),
        ({"grammar": "root ::= [0-9]"}, False),
    ],
)
def test_what_was_sampled_under_constrained_decoding_does_not_train_by_default(
    sampling: dict[str, Any], trains: bool
) -> None:
    recording = Recording()
    recording.ask([user("u")], "a", sampling=sampling)
    assert totals(recording) == ({"trained": 2} if trains else {"masked:constrained": 2})
    assert totals(recording, train_constrained=True) == totals(recording, "slime") == {"trained": 2}


def test_a_draft_that_another_one_contains_makes_no_sample_of_its_own() -> None:
    recording = Recording()
    inner = recording.ask([user("u")], "a b", sampled_ids=recording.words.ids("a b <eot>"))
    drifts(recording, inner, "x")
    longer = recording.go_on(inner, [user("y")], "c d", sampled_ids=recording.words.ids("c d <eot>"))
    drifts(recording, longer, "z")
    for name, choices in (("exact", {}), ("keep-head", {"max_given_up_tokens": 1})):
        assert lines(recording, name, **choices) == [
            "<user> u <eot> <gen> ‹a› D <eot> <user> x <eot> <gen> «so» «<eot>»",
            "<user> u <eot> <gen> ‹a› ‹b› ‹<eot>› <user> y <eot> <gen> «c» «d» «<eot>»",
            "<user> u <eot> <gen> «a» «b» «<eot>» <user> y <eot> <gen> ‹c› D <eot> <user> z <eot> <gen> «so» «<eot>»",
        ]


def drifts(recording: Recording, turn: Turn, word: str) -> None:
    """The next turn by equal messages, with another id in the place of the reply's second one."""
    ids = [*turn.tokens.slice(0, len(turn.prompt_ids) + 1).tolist(), *recording.words.ids("D <eot>")]
    recording.record(
        prompt_messages=[*held(turn), user(word)],
        prompt_ids=[*ids, *recording.render([user(word)])],
        **recording.answered("so"),
    )


def test_a_drift_further_on_leaves_the_replies_before_it_in_the_sample_that_goes_on() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    lost = recording.go_on(first, [user("v")], "b c", finish=Finish.ERROR)
    drifts(recording, lost, "w")
    assert lines(recording) == [
        "<user> u <eot> <gen> «a» «<eot>» <user> v <eot> <gen> ‹b› D <eot> <user> w <eot> <gen> «so» «<eot>»"
    ]
    assert totals(recording) == {"trained": 4, "masked:engine_error": 2}


def test_a_conversation_that_ran_out_of_context_is_truncated() -> None:
    recording = Recording()
    first = recording.ask([user("u")], call("c0"))
    recording.go_on(first, [tool("a long result")], "", sampled_ids=[], finish=Finish.LENGTH, reply=None)
    for name in ("exact", "slime"):
        (sample,) = linearize(rollout_of(recording.session()), name).samples()
        assert sample.truncated
        assert len(sample.ids) == len(first.tokens)


def test_slime_gives_a_shared_reply_to_the_branch_of_a_rewritten_reply_that_came_first() -> None:
    recording = Recording()
    shared = recording.ask([user("u")], "plan")
    recording.go_on(shared, [user("x")], "let me see")
    recording.go_on(shared, [user("y")], "right")
    changed = {"role": "assistant", "content": "let me look"}
    recording.ask([*held(shared), user("x"), changed, user("more")], "left")
    assert lines(recording, "slime") == [
        "<user> u <eot> <gen> ‹plan› ‹<eot>› <user> y <eot> <gen> «right» «<eot>»",
        "<user> u <eot> <gen> «plan» «<eot>» <user> x <eot> <gen> let me look <eot> <user> more <eot> <gen> "
        "«left» «<eot>»",
    ]


def test_slime_trains_a_reply_in_the_first_sample_of_its_branch() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    second = recording.go_on(first, [user("v")], "b c")
    drifts(recording, second, "w")
    assert lines(recording, "slime", max_reply_tokens=1) == [
        "<user> u <eot> <gen> «a» «<eot>» <user> v <eot> <gen> «b» «c» «<eot>»",
        "<user> u <eot> <gen> ‹a› ‹<eot>› <user> v <eot> <gen> ‹b› D <eot> <user> w <eot> <gen> «so» «<eot>»",
    ]
    assert lines(recording) == [
        "<user> u <eot> <gen> ‹a› ‹<eot>› <user> v <eot> <gen> «b» «c» «<eot>»",
        "<user> u <eot> <gen> «a» «<eot>» <user> v <eot> <gen> ‹b› D <eot> <user> w <eot> <gen> «so» «<eot>»",
    ]


def test_slime_trains_a_reply_that_a_later_branch_gives_up() -> None:
    recording = Recording()
    drifting = recording.go_on(recording.ask([user("t")], "z"), [user("u")], "a b")
    drifts(recording, drifting, "v")
    given_up = recording.turns[2]
    ids = [*given_up.tokens.slice(0, len(given_up.prompt_ids) + 1).tolist(), *recording.words.ids("E <eot>")]
    for new, reply in (([user("w")], "one two three four"), ([user("w"), user("x")], "y")):
        recording.ask([*held(given_up), *new], reply, prompt_ids=[*ids, *recording.render(new)])
    made = linearize(rollout_of(recording.session()), cut_policy("slime", max_reply_tokens=4))
    assert made.ledger.by_turn()[given_up.id] == {Fate.TRAINED: 2}


def test_of_a_reply_and_an_empty_one_after_it_that_lost_the_tie_the_reply_is_continued() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a", started_at=1.0, ended_at=5.0)
    ids = first.tokens.to_numpy()
    empty = {"sampled_ids": [], "finish": Finish.LENGTH, "delivery": Delivery.UNKNOWN}
    recording.ask([*held(first), user("v")], "b", prompt_ids=ids, started_at=4.0, ended_at=4.5, **empty)
    recording.ask([*held(recording.turns[1]), user("w")], "c", prompt_ids=[*ids, 77], started_at=6.0, ended_at=7.0)
    placed = tree_of(recording.session()).turns
    assert (placed[2].continues, placed[2].message_parent) == (placed[0], placed[1])
    assert len(lines(recording)) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("masked:given_up", Fate.MASKED_REWRITTEN_AFTER),
        ("masked:lost_claim", Fate.MASKED_TRAINED_IN_OTHER_SAMPLE),
    ],
)
def test_fates_that_0_1_0_wrote_are_read_under_their_new_names(old: str, new: Fate) -> None:
    assert Fate(old) is new
    stored = msgspec.json.encode(["r.0.0.0", 0, 2, old])
    as_entry = {"turn": "r.0.0.0", "start": 0, "stop": 2, "fate": old}
    assert msgspec.json.decode(msgspec.json.encode(as_entry), type=LedgerEntry).fate is new
    assert msgspec.convert(msgspec.json.decode(stored)[3], Fate) is new
