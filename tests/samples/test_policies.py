"""What each policy trains, as one readable line per sample."""

from typing import Any

import pytest

from rolltape.errors import PolicyError
from rolltape.records.policy import cut_policy
from rolltape.records.rollout import EventKind, Rollout, Status
from rolltape.records.sample import Fate
from rolltape.records.turn import Delivery, Finish, TurnFlag
from rolltape.samples import linearize
from rolltape.samples.spelling import show
from rolltape.tree import forks_of, tree_of
from sessions import Recording, event, held, rollout_of, system, tool, user


def lines(recording: Recording, name: str = "exact", **choices: Any) -> list[str]:
    linearized = linearize(rollout_of(recording.session()), cut_policy(name, **choices))
    return [show(sample, recording.words.word) for sample in linearized.samples()]


def totals(recording: Recording, name: str = "exact", **choices: Any) -> dict[str, int]:
    ledger = linearize(rollout_of(recording.session()), cut_policy(name, **choices)).ledger
    return {fate.value: tokens for fate, tokens in ledger.totals().items()}


def echoed(recording: Recording, turn: Any, reply_ids: list[int], more: str, reply: str, **given: Any) -> Any:
    """The next turn by equal messages, with other ids where the last reply stood."""
    ids = [*turn.prompt_ids.tolist(), *reply_ids, *recording.render([user(more)])]
    messages = [*held(turn), user(more)]
    return recording.record(prompt_messages=messages, prompt_ids=ids, **recording.answered(reply, **given))


def test_prompts_that_extend_become_one_sample() -> None:
    recording = Recording()
    first = recording.ask([user("fix it")], "run_tests")
    recording.go_on(first, [tool("ok")], "done")
    expected = ["<user> fix it <eot> <gen> «run_tests» «<eot>» <tool> ok <eot> <gen> «done» «<eot>»"]
    assert lines(recording) == lines(recording, "keep-head") == lines(recording, "slime") == expected


def drifted(reply_tokens: int = 1) -> Recording:
    recording = Recording()
    first = recording.ask([user("hi")], "good day", sampled_ids=recording.words.ids("go od day <eot>"))
    echoed(recording, first, recording.words.ids("go odd <eot>"), "more", " ".join(["so"] * reply_tokens))
    return recording


def test_exact_starts_a_new_sample_where_the_last_reply_is_rewritten() -> None:
    assert lines(drifted()) == [
        "<user> hi <eot> <gen> «go» «od» «day» «<eot>»",
        "<user> hi <eot> <gen> ‹go› odd <eot> <user> more <eot> <gen> «so» «<eot>»",
    ]
    assert totals(drifted()) == {"trained": 6}


def test_keep_head_trains_what_was_sampled_before_the_departure() -> None:
    expected = ["<user> hi <eot> <gen> «go» odd <eot> <user> more <eot> <gen> «so» «<eot>»"]
    assert lines(drifted(), "keep-head") == expected
    assert totals(drifted(), "keep-head") == {"trained": 3, "masked:rewritten_after": 3}


def test_keep_head_gives_up_at_most_so_many_tokens() -> None:
    assert lines(drifted(), "keep-head", max_given_up_tokens=3) == lines(drifted(), "keep-head")
    assert lines(drifted(), "keep-head", max_given_up_tokens=2) == lines(drifted())


def test_slime_wipes_the_whole_reply_because_the_incoming_one_is_short() -> None:
    expected = ["<user> hi <eot> <gen> ‹go› odd <eot> <user> more <eot> <gen> «so» «<eot>»"]
    assert lines(drifted(), "slime") == expected
    assert totals(drifted(), "slime") == {"masked:replaced": 4, "trained": 2}


def test_slime_lets_the_length_of_the_incoming_reply_decide() -> None:
    assert len(lines(drifted(reply_tokens=1022), "slime")) == 1
    assert len(lines(drifted(reply_tokens=1023), "slime")) == 2, "1,023 words and the end are not fewer than 1,024"
    assert len(lines(drifted(), "slime", max_reply_tokens=0)) == 2


@pytest.mark.parametrize("name", ["exact", "keep-head", "slime"])
def test_rewritten_history_starts_a_new_sample(name: str) -> None:
    recording = Recording()
    first = recording.ask([user("hi")], "a")
    second = recording.go_on(first, [user("on")], "b")
    ids = recording.words.ids("<user> hi <eot> <gen> A <eot> <user> on <eot> <gen> b <eot> <user> end <eot> <gen>")
    messages = [*held(second), user("end")]
    recording.record(prompt_messages=messages, prompt_ids=ids, **recording.answered("c"))
    assert lines(recording, name) == [
        "<user> hi <eot> <gen> «a» «<eot>» <user> on <eot> <gen> «b» «<eot>»",
        "<user> hi <eot> <gen> A <eot> <user> on <eot> <gen> b <eot> <user> end <eot> <gen> «c» «<eot>»",
    ]


@pytest.mark.parametrize("name", ["exact", "keep-head", "slime"])
def test_a_departure_in_the_generation_prompt_rewrites_history(name: str) -> None:
    recording = Recording()
    first = recording.ask([user("hi")], "a", prompt_ids=recording.words.ids("<user> hi <eot> <gen> <think>"))
    ids = recording.words.ids("<user> hi <eot> <gen> a <eot> <user> on <eot> <gen>")
    messages = [*held(first), user("on")]
    recording.record(prompt_messages=messages, prompt_ids=ids, **recording.answered("b"))
    assert lines(recording, name) == [
        "<user> hi <eot> <gen> <think> «a» «<eot>»",
        "<user> hi <eot> <gen> a <eot> <user> on <eot> <gen> «b» «<eot>»",
    ]


def test_a_prompt_short_of_the_last_reply_rewrites_it() -> None:
    recording = Recording()
    first = recording.ask([user("hi")], "a b c")
    recording.record(prompt_messages=held(first), prompt_ids=first.tokens.slice(0, 6), **recording.answered("d"))
    assert lines(recording) == [
        "<user> hi <eot> <gen> «a» «b» «c» «<eot>»",
        "<user> hi <eot> <gen> ‹a› ‹b› «d» «<eot>»",
    ]
    assert lines(recording, "keep-head") == ["<user> hi <eot> <gen> «a» «b» «d» «<eot>»"]


def test_shared_reply_trains_on_one_branch_only() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "plan")
    recording.go_on(first, [user("x")], "left")
    recording.go_on(first, [user("y")], "right")
    assert lines(recording) == [
        "<user> u <eot> <gen> «plan» «<eot>» <user> x <eot> <gen> «left» «<eot>»",
        "<user> u <eot> <gen> ‹plan› ‹<eot>› <user> y <eot> <gen> «right» «<eot>»",
    ]


def shared_then_rewritten() -> Recording:
    """A reply shared by two branches, of which the first rewrites it."""
    recording = Recording()
    first = recording.ask([user("u")], "the plan", sampled_ids=recording.words.ids("the pl an <eot>"))
    echoed(recording, first, recording.words.ids("the plan <eot>"), "x", "left")
    recording.go_on(first, [user("y")], "right")
    return recording


def test_what_one_branch_gives_up_the_other_still_trains() -> None:
    assert lines(shared_then_rewritten(), "keep-head") == [
        "<user> u <eot> <gen> «the» plan <eot> <user> x <eot> <gen> «left» «<eot>»",
        "<user> u <eot> <gen> ‹the› «pl» «an» «<eot>» <user> y <eot> <gen> «right» «<eot>»",
    ]


def test_slime_loses_the_claim_of_a_reply_that_its_first_branch_replaces_and_says_so() -> None:
    assert lines(shared_then_rewritten(), "slime") == [
        "<user> u <eot> <gen> ‹the› plan <eot> <user> x <eot> <gen> «left» «<eot>»",
        "<user> u <eot> <gen> ‹the› ‹pl› ‹an› ‹<eot>› <user> y <eot> <gen> «right» «<eot>»",
    ]
    assert totals(shared_then_rewritten(), "slime") == {"masked:trained_in_other_sample": 4, "trained": 4}


def rewritten_message(words: str = "let me see", echo: str = "let me see !") -> Recording:
    recording = Recording()
    recording.ask([user("u")], words)
    recording.ask([user("u"), {"role": "assistant", "content": echo}, user("more")], "done")
    return recording


def test_a_rewritten_message_is_a_new_branch_under_exact() -> None:
    assert lines(rewritten_message()) == [
        "<user> u <eot> <gen> «let» «me» «see» «<eot>»",
        "<user> u <eot> <gen> let me see ! <eot> <user> more <eot> <gen> «done» «<eot>»",
    ]


def test_a_rewritten_message_is_absorbed_under_keep_head() -> None:
    expected = ["<user> u <eot> <gen> «let» «me» «see» ! <eot> <user> more <eot> <gen> «done» «<eot>»"]
    assert lines(rewritten_message(), "keep-head") == expected
    assert totals(rewritten_message(), "keep-head") == {"trained": 5, "masked:rewritten_after": 1}
    assert lines(rewritten_message(), "keep-head", max_given_up_tokens=0) == lines(rewritten_message())


def test_a_rewritten_message_stops_training_its_reply_under_slime() -> None:
    expected = ["<user> u <eot> <gen> let me see ! <eot> <user> more <eot> <gen> «done» «<eot>»"]
    assert lines(rewritten_message(), "slime") == expected
    assert totals(rewritten_message(), "slime") == {"masked:rewritten": 4, "trained": 2}


def test_slime_absorbs_a_rewritten_message_strictly_under_its_threshold() -> None:
    assert len(lines(rewritten_message(), "slime", max_reply_tokens=5)) == 1
    assert len(lines(rewritten_message(), "slime", max_reply_tokens=4)) == 2
    assert len(lines(rewritten_message(), "slime", max_reply_tokens=0)) == 2


def test_after_a_merge_the_rewritten_message_is_replayed_on_the_same_branch() -> None:
    recording = rewritten_message()
    recording.go_on(recording.turns[-1], [user("again")], "yes")
    for name in ("keep-head", "slime"):
        (line,) = lines(recording, name)
        assert line.endswith("«done» «<eot>» <user> again <eot> <gen> «yes» «<eot>»")


def test_two_candidates_for_a_rewritten_message_make_a_branch() -> None:
    recording = Recording()
    recording.ask([user("u")], "let me see")
    recording.ask([user("u")], "let me look")
    recording.ask([user("u"), {"role": "assistant", "content": "let me see !"}, user("more")], "done")
    for name in ("keep-head", "slime"):
        assert "<user> u <eot> <gen> let me see ! <eot> <user> more <eot> <gen> «done» «<eot>»" in lines(
            recording, name
        )
    assert totals(recording, "slime") == {"trained": 10}


def test_a_reply_already_continued_is_not_absorbed() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "let me see")
    recording.go_on(first, [user("x")], "ok")
    recording.ask([user("u"), {"role": "assistant", "content": "let me see !"}, user("more")], "done")
    assert len(lines(recording, "slime")) == 2
    assert totals(recording, "slime") == {"trained": 8}


def test_other_tools_never_share_a_sample() -> None:
    recording = Recording(tools=[{"name": "a"}])
    first = recording.ask([user("u")], "x")
    recording.ask([*held(first), user("v")], "y", tools=[{"name": "b"}])
    assert lines(recording) == [
        "<tools> a() <user> u <eot> <gen> «x» «<eot>»",
        "<tools> b() <user> u <eot> <gen> x <eot> <user> v <eot> <gen> «y» «<eot>»",
    ]


def test_an_abandoned_reply_is_masked_and_trains_on_request() -> None:
    recording = Recording()
    recording.ask([user("u")], "bad")
    second = recording.ask([user("u")], "good")
    recording.go_on(second, [user("more")], "done")
    kept = "<user> u <eot> <gen> «good» «<eot>» <user> more <eot> <gen> «done» «<eot>»"
    assert lines(recording) == [kept]
    assert totals(recording) == {"trained": 4, "masked:abandoned": 2}
    assert lines(recording, train_abandoned=True) == ["<user> u <eot> <gen> «bad» «<eot>»", kept]


def test_an_abandoned_end_does_not_take_the_tokens_before_it() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    recording.go_on(first, [user("v")], "bad")
    recording.go_on(first, [user("v")], "good")
    assert lines(recording) == ["<user> u <eot> <gen> «a» «<eot>» <user> v <eot> <gen> «good» «<eot>»"]


def test_auxiliary_calls_are_left_out() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    recording.ask([system("title"), user("u")], "A title", auxiliary="title")
    recording.go_on(first, [user("v")], "b")
    assert len(lines(recording)) == 1
    assert totals(recording) == {"trained": 4, "dropped:auxiliary": 3}


def test_what_was_not_delivered_does_not_train_unless_a_later_prompt_holds_it() -> None:
    for delivery in (Delivery.UNDELIVERED, Delivery.UNKNOWN):
        recording = Recording()
        first = recording.ask([user("u")], "a", delivery=delivery)
        assert totals(recording) == {"masked:undelivered": 2}
        recording.go_on(first, [user("v")], "b", delivery=delivery)
        assert totals(recording) == {"trained": 2, "masked:undelivered": 2}


def test_an_aborted_reply_does_not_train_unless_it_is_continued() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "half a", finish=Finish.ABORT)
    assert totals(recording) == {"masked:aborted": 2}
    recording.go_on(first, [user("v")], "b")
    assert totals(recording) == {"trained": 4}


def test_an_engine_error_never_trains() -> None:
    recording = Recording()
    recording.ask([user("u")], "x y", finish=Finish.ERROR)
    assert totals(recording) == {"masked:engine_error": 2}


def test_missing_logprobs_are_told_from_zero_and_do_not_train_by_default() -> None:
    recording = Recording()
    recording.ask([user("u")], "a b", logprobs=[0.0, None, -0.5])
    assert lines(recording) == ["<user> u <eot> <gen> «a» ‹b› «<eot>»"]
    assert totals(recording) == {"trained": 2, "masked:no_logprob": 1}
    assert lines(recording, train_without_logprobs=True) == ["<user> u <eot> <gen> «a» «b» «<eot>»"]
    (sample,) = linearize(rollout_of(recording.session()), "slime").samples()
    assert [str(logprob) for logprob in sample.logprobs] == ["nan"] * 4 + ["0.0", "nan", "-0.5"]


def test_without_logprobs_at_all_nothing_trains_by_default() -> None:
    recording = Recording()
    recording.ask([user("u")], "a b", logprobs=None)
    assert lines(recording) == []
    assert totals(recording) == {"masked:no_logprob": 3}


def test_a_sample_is_cut_to_the_maximum_length() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a b")
    recording.go_on(first, [user("v")], "c d")
    assert lines(recording, max_sample_tokens=6) == ["<user> u <eot> <gen> «a» «b»"]
    assert totals(recording, max_sample_tokens=6) == {"dropped:length": 4, "trained": 2}


@pytest.mark.parametrize("name", ["exact", "keep-head", "slime"])
def test_a_cut_that_leaves_nothing_to_train_leaves_no_sample(name: str) -> None:
    recording = Recording()
    recording.ask([user("a long question with many words")], "a")
    for limit in range(1, 10):
        assert lines(recording, name, max_sample_tokens=limit) == []
    assert totals(recording, name, max_sample_tokens=9) == {"dropped:length": 2}


def test_a_turn_that_one_branch_rewrites_trains_in_the_branch_that_extends_it() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    echoed(recording, first, recording.words.ids("A <eot>"), "x", "left")
    recording.go_on(first, [user("y")], "right")
    assert lines(recording) == [
        "<user> u <eot> <gen> A <eot> <user> x <eot> <gen> «left» «<eot>»",
        "<user> u <eot> <gen> «a» «<eot>» <user> y <eot> <gen> «right» «<eot>»",
    ]


def test_an_undelivered_reply_did_not_arrive_because_another_message_took_its_place() -> None:
    recording = Recording()
    recording.ask([user("u")], "here is my long answer", delivery=Delivery.UNDELIVERED)
    recording.ask([user("u"), {"role": "assistant", "content": "(interrupted)"}, user("more")], "done")
    assert totals(recording) == {"masked:undelivered": 6, "trained": 2}
    trimmed = Recording()
    trimmed.ask([user("u")], "here is my long answer", delivery=Delivery.UNDELIVERED)
    trimmed.ask([user("u"), {"role": "assistant", "content": "my long answer"}, user("more")], "done")
    assert totals(trimmed) == {"masked:undelivered": 6, "trained": 2}
    spaced = Recording()
    spaced.ask([user("u")], "here is my long answer ", delivery=Delivery.UNDELIVERED)
    spaced.ask([user("u"), {"role": "assistant", "content": "here is my long answer"}, user("more")], "done")
    assert totals(spaced) == {"trained": 8}


def test_an_aborted_turn_without_a_reply_never_arrived() -> None:
    recording = Recording()
    prompt = {"prompt_messages": [user("u")], "prompt_ids": [2, 9, 0, 3]}
    recording.record(**prompt, sampled_ids=[20, 21], logprobs=[-1.0, -2.0], finish="abort", delivery="undelivered")
    recording.ask([user("u"), {"role": "assistant", "content": "z"}], "c")
    assert totals(recording) == {"masked:aborted": 2, "trained": 2}


def test_a_claim_is_decided_after_the_cut() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    ids = [*first.prompt_ids.tolist(), *recording.words.ids("A <eot> <user> a much longer way to say it <eot> <gen>")]
    recording.record(prompt_messages=[*held(first), user("v")], prompt_ids=ids, **recording.answered("left"))
    recording.go_on(first, [user("w")], "right")
    assert lines(recording, max_sample_tokens=14) == [
        "<user> u <eot> <gen> «a» «<eot>» <user> w <eot> <gen> «right» «<eot>»",
    ]
    assert totals(recording, max_sample_tokens=14) == {"trained": 4, "dropped:length": 2}


def test_staleness_masks_segments_that_are_too_old_or_of_unknown_age() -> None:
    recording = Recording()
    segments = [
        {"sampled_ids": recording.words.ids("a b"), "logprobs": [-1.0, -1.0], "weight_version": "1"},
        {"sampled_ids": recording.words.ids("c"), "logprobs": [-1.0], "weight_version": ("2", "3")},
        {"sampled_ids": recording.words.ids("d"), "logprobs": [-1.0], "weight_version": "3"},
        {"sampled_ids": recording.words.ids("<eot>"), "logprobs": [-1.0], "weight_version": None},
    ]
    recording.ask([user("u")], "a b c d", segments=segments)
    rollout = rollout_of(recording.session())
    for limit, expected in (
        (2, "<user> u <eot> <gen> «a» «b» «c» «d» ‹<eot>›"),
        (1, "<user> u <eot> <gen> ‹a› ‹b› «c» «d» ‹<eot>›"),
        (0, "<user> u <eot> <gen> ‹a› ‹b› ‹c› «d» ‹<eot>›"),
    ):
        linearized = linearize(rollout, cut_policy(max_staleness=limit), versions=["1", "2", "3"])
        assert [show(sample, recording.words.word) for sample in linearized.samples()] == [expected]
    (sample,) = linearize(rollout).samples()
    assert sample.versions == (("1", "1"), ("2", "3"), ("3", "3"))
    assert sample.version_index.tolist() == [-1] * 4 + [0, 0, 1, 2, -1]


def forked() -> Recording:
    recording = Recording()
    first = recording.ask([user("u")], "a")
    recording.go_on(first, [user("v")], "a much longer way")
    recording.go_on(first, [user("w")], "b")
    return recording


def test_only_the_chosen_branches_become_samples() -> None:
    main = "<user> u <eot> <gen> «a» «<eot>» <user> w <eot> <gen> «b» «<eot>»"
    longest = "<user> u <eot> <gen> «a» «<eot>» <user> v <eot> <gen> «a» «much» «longer» «way» «<eot>»"
    assert lines(forked(), branches="main") == [main]
    assert lines(forked(), branches="longest") == [longest]
    assert len(lines(forked(), branches="all")) == 2
    assert totals(forked(), branches="main") == {"dropped:branch": 5, "trained": 4}


def test_the_main_branch_ends_where_the_last_turn_that_may_train_is() -> None:
    recording = forked()
    recording.go_on(recording.turns[1], [user("x")], "cut", finish=Finish.ABORT)
    assert lines(recording, branches="main") == lines(forked(), branches="longest")


def test_a_failed_rollout_trains_nothing() -> None:
    recording = forked()
    for status in (Status.FAILED, None):
        linearized = linearize(rollout_of(recording.session(), status=status))
        assert len(linearized) == 0
        assert linearized.ledger.totals() == {Fate.DROPPED_ROLLOUT_FAILED: 9}


def test_a_rollout_that_still_runs_trains_nothing_unless_it_is_only_looked_at() -> None:
    made = rollout_of(forked().session(), status=None)
    running = Rollout(made.head, made.sessions, made.events, writer_alive=True)
    assert linearize(running).ledger.totals() == {Fate.DROPPED_RUNNING: 9}
    assert len(linearize(running, as_if_finished=True)) == 2


def test_tokens_that_were_pruned_stay_in_the_ledger() -> None:
    said = event(5, EventKind.PRUNE, {"pruned": "turns", "turns": 3, "sampled_tokens": 9})
    ledger = linearize(rollout_of(events=[said])).ledger
    assert (ledger.sampled, ledger.totals()) == (9, {Fate.DROPPED_PRUNED: 9})


def test_a_staleness_limit_needs_to_know_the_versions() -> None:
    with pytest.raises(PolicyError, match=r"versions=run\.versions\(\)"):
        linearize(rollout_of(forked().session()), cut_policy(max_staleness=3))


def test_an_interrupted_reply_that_goes_on_in_another_turn_trains_in_both() -> None:
    recording = Recording()
    prompt = {"prompt_messages": [user("u")], "prompt_ids": recording.render([user("u")])}
    first = recording.record(**prompt, sampled_ids=recording.words.ids("a b"), logprobs=[-1, -1], finish="abort")
    recording.record(after=first, new_messages=[], new_prompt_ids=[], **recording.answered("c"))
    assert lines(recording) == ["<user> u <eot> <gen> «a» «b» «c» «<eot>»"]
    assert forks_of(tree_of(recording.session())) == []


def test_a_reply_with_nothing_of_it_left_in_its_place_is_abandoned() -> None:
    recording = Recording()
    recording.ask([user("u")], "where is my call")
    recording.ask([user("u"), {"role": "assistant", "content": "(no reply)"}, user("again")], "done")
    assert totals(recording) == {"masked:abandoned": 5, "trained": 2}


def run_call(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "run", "arguments": arguments}}


@pytest.mark.parametrize(
    "echo",
    [
        {"content": "I look at the tests"},
        {"content": "I look at the tests first"},
        {"content": None, "tool_calls": [run_call("pytest --quiet tests/samples")]},
    ],
    ids=["its text", "its text with one more word", "the first of its calls"],
)
def test_a_reply_that_comes_back_in_part_without_its_thinking_is_not_abandoned(echo: dict[str, Any]) -> None:
    recording = Recording()
    thinking = {"role": "assistant", "reasoning_content": "what is to be done now ?"}
    calls = [run_call("pytest --quiet tests/samples"), run_call("git status")]
    first = recording.ask([user("u")], {**thinking, "content": "I look at the tests", "tool_calls": calls})
    recording.ask([user("u"), {"role": "assistant", **echo}, user("go on")], "done")
    assert totals(recording) == {"trained": len(first.sampled_ids) + 2}


def test_text_only_turns_and_empty_prompts_are_dropped() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", token_faithful=False)
    recording.ask([user("v")], "b", prompt_ids=[])
    assert totals(recording) == {"dropped:not_token_faithful": 2, "dropped:empty_prompt": 2}


def test_sample_says_whether_it_was_truncated_uses_tools_or_is_ill_formed() -> None:
    recording = Recording()
    reply = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    first = recording.ask([user("u")], reply)
    recording.go_on(first, [tool("ok")], "y z", finish=Finish.LENGTH, flags=[TurnFlag.MALFORMED_CALL])
    (sample,) = linearize(rollout_of(recording.session())).samples()
    assert (sample.truncated, sample.uses_tools, sample.ill_formed) == (True, True, True)
    plain = Recording()
    plain.ask([user("u")], "a")
    (sample,) = linearize(rollout_of(plain.session())).samples()
    assert (sample.truncated, sample.uses_tools, sample.ill_formed) == (False, False, False)


def test_plain_ids_are_shown_without_a_tokenizer() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", prompt_ids=[5, 6], sampled_ids=[7, 0])
    (sample,) = linearize(rollout_of(recording.session())).samples()
    assert show(sample) == "5 6 «7» «0»"
    assert show(sample, lambda token: f" t{token}\n") == "␣t5↵ ␣t6↵ «␣t7↵» «␣t0↵»"


def test_a_policy_that_does_not_exist_or_contradicts_itself_is_refused() -> None:
    for wrong in ({"name": "exakt"}, {"name": "exact", "max_sample_tokens": 0}, {"name": "exact", "branches": "some"}):
        with pytest.raises(PolicyError):
            cut_policy(**wrong)
