"""Twice the turns cost about twice the work, whatever they repeat: calls are counted, time is not looked at."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rolltape.records.policy import cut_policy
from rolltape.samples import linearize
from sessions import Recording, held, rollout_of, user

TURNS = 200


def ask_again_and_get_nothing(recording: Recording, turns: int) -> None:
    for _ in range(turns):
        recording.ask([user("u")], "", sampled_ids=[], finish="length", reply=None)


def ask_again_and_get_the_same_then_continue_each(recording: Recording, turns: int) -> None:
    again = [recording.ask([user("u")], "a") for _ in range(turns // 2)]
    for number, turn in enumerate(again):
        recording.go_on(turn, [user(f"more {number}")], "b")


def go_on_from_one_turn_without_messages(recording: Recording, turns: int) -> None:
    first = recording.ask([], "a", prompt_ids=[1, 2], reply=None)
    for number in range(turns):
        recording.record(
            after=first, new_messages=[], new_prompt_ids=[50 + number], **recording.answered("b", reply=None)
        )


def ask_again_then_depart_without_messages(recording: Recording, turns: int) -> None:
    for number in range(turns // 2):
        recording.ask([], f"a{number}", prompt_ids=[1, 2], reply=None)
    for number in range(turns // 2):
        recording.ask([], "b", prompt_ids=[1, 2, 3, 5000 + number], reply=None)


def leave_every_reply_but_the_first(recording: Recording, turns: int) -> None:
    ids = recording.ask([], "a", prompt_ids=[1, 2], reply=None).tokens.to_numpy().tolist()
    for number in range(turns):
        ids = [*ids, 5000 + number]
        recording.ask([], "b", prompt_ids=ids, reply=None)


def rewrite_every_reply_to_one_prompt(recording: Recording, turns: int) -> None:
    for number in range(turns // 2):
        recording.ask([user("u")], f"reply {number}")
        recording.ask([user("u"), {"role": "assistant", "content": f"no{number}"}, user("more")], f"so {number}")


def ask_two_models_everything(recording: Recording, turns: int) -> None:
    turn = recording.ask([user("u")], "a")
    for number in range(turns // 2):
        recording.go_on(turn, [user(f"more {number}")], "b", model="judge")
        turn = recording.go_on(turn, [user(f"more {number}")], "c")


def let_the_clock_run_backwards(recording: Recording, turns: int) -> None:
    turn = recording.ask([user("u")], "a", started_at=0.0, ended_at=1.0)
    for number in range(1, turns):
        turn = recording.go_on(turn, [user("more")], "b", started_at=-2.0 * number, ended_at=1 - 2.0 * number)


def go_on_after_an_auxiliary_conversation(recording: Recording, turns: int) -> None:
    turn = recording.ask([user("u")], "a")
    for _ in range(turns // 2):
        turn = recording.go_on(turn, [user("more")], "b", auxiliary="memory")
    for number in range(turns // 2):
        recording.go_on(turn, [user(f"now {number}")], "c")


def drift_once_then_fork_at_the_end(recording: Recording, turns: int) -> None:
    first = recording.ask([user("u")], "a b c")
    ids = [*first.tokens.slice(0, len(first.prompt_ids) + 1).tolist(), 99]
    turn = recording.ask([*held(first), user("v")], "d", prompt_ids=ids)
    for _ in range(turns // 2):
        turn = recording.go_on(turn, [user("more")], "e")
    for number in range(turns // 2):
        recording.go_on(turn, [user(f"now {number}")], "f")


def record_the_whole_first(recording: Recording, turns: int) -> None:
    messages: list[Any] = [user("u")]
    for number in range(turns):
        messages += [{"role": "assistant", "content": "a"}, user(f"more {number}")]
    ids = recording.render(messages)
    recording.ask(messages, "a", prompt_ids=ids)
    for number in range(turns):
        recording.ask(messages[: 2 * number + 1], "a", prompt_ids=[7, 5000 + number])


@pytest.mark.parametrize("name", ["exact", "keep-head", "slime"])
@pytest.mark.parametrize(
    "session",
    [
        ask_again_and_get_nothing,
        ask_again_and_get_the_same_then_continue_each,
        go_on_from_one_turn_without_messages,
        ask_again_then_depart_without_messages,
        leave_every_reply_but_the_first,
        rewrite_every_reply_to_one_prompt,
        ask_two_models_everything,
        let_the_clock_run_backwards,
        go_on_after_an_auxiliary_conversation,
        drift_once_then_fork_at_the_end,
        record_the_whole_first,
    ],
)
def test_work_grows_with_the_turns(session: Callable[[Recording, int], None], name: str) -> None:
    some, twice = (_calls(session, turns, name) for turns in (TURNS, 2 * TURNS))
    assert twice < 2.5 * some


def _calls(session: Callable[[Recording, int], None], turns: int, name: str) -> int:
    """How many functions are called to make the tree, the forks and the drafts of a session."""
    recording = Recording()
    session(recording, turns)
    rollout = rollout_of(recording.session())
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        linearize(rollout, name)
    finally:
        sys.setprofile(None)
    return calls


class UnreadVersions(tuple[str, ...]):
    """The versions of a long run, which take as long to read as there are steps."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("they are read")


def test_without_a_staleness_limit_a_rollout_costs_the_same_however_many_versions_the_run_has() -> None:
    recording = Recording()
    recording.ask([user("u")], "a")
    rollout = rollout_of(recording.session())
    made = linearize(rollout, "exact", versions=UnreadVersions(["1", "2"]))
    assert made.ledger.sampled > 0
    with pytest.raises(AssertionError, match="they are read"):
        linearize(rollout, cut_policy("exact", max_staleness=1), versions=UnreadVersions(["1", "2"]))
