"""Every token of a sample says which turn and which message it came from, and side arrays go with it."""

import numpy as np
import pytest

from rolltape.errors import MisalignedError
from rolltape.records.sample import Sample
from rolltape.samples import linearize
from sessions import Recording, held, rollout_of, tool, user


def only_sample(recording: Recording, policy: str = "exact") -> Sample:
    (sample,) = linearize(rollout_of(recording.session()), policy).samples()
    return sample


def spans(sample: Sample) -> list[tuple[int, int, str, int, tuple[int, int], str | None]]:
    return [
        (span.start, span.stop, span.origin, int(span.turn.rpartition(".")[2]), span.messages, span.fate)
        for span in sample.spans
    ]


def test_spans_name_the_turn_and_the_messages() -> None:
    recording = Recording()
    first = recording.ask([user("a b"), user("c")], "x")
    recording.go_on(first, [tool("ok")], "y")
    assert spans(only_sample(recording)) == [
        (0, 8, "prompt", 0, (0, 2), None),
        (8, 10, "sampled", 0, (2, 3), "trained"),
        (10, 14, "prompt", 1, (3, 4), None),
        (14, 16, "sampled", 1, (4, 5), "trained"),
    ]


def test_message_starts_split_a_prompt_into_its_messages() -> None:
    recording = Recording()
    first = recording.ask([user("a b"), user("c")], "x", message_starts=[0, 4])
    recording.go_on(first, [tool("ok"), user("go")], "y", message_starts=[0, 3])
    assert [(start, stop, messages) for start, stop, _, _, messages, _ in spans(only_sample(recording))] == [
        (0, 4, (0, 1)),
        (4, 8, (1, 2)),
        (8, 10, (2, 3)),
        (10, 13, (3, 4)),
        (13, 17, (4, 5)),
        (17, 19, (5, 6)),
    ]


def test_a_rewritten_reply_is_spelled_by_the_turn_that_rewrote_it() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a b")
    ids = [*first.prompt_ids.tolist(), *recording.words.ids("a B <eot> <user> v <eot> <gen>")]
    recording.record(prompt_messages=[*held(first), user("v")], prompt_ids=ids, **recording.answered("c"))
    assert spans(only_sample(recording, "keep-head")) == [
        (0, 4, "prompt", 0, (0, 1), None),
        (4, 5, "sampled", 0, (1, 2), "trained"),
        (5, 11, "prompt", 1, (1, 3), None),
        (11, 13, "sampled", 1, (3, 4), "trained"),
    ]
    both = list(linearize(rollout_of(recording.session())).samples())
    assert spans(both[1])[1] == (4, 5, "sampled", 0, (1, 2), None), "context that trains in the other sample"


def test_dense_side_arrays_are_joined_and_say_where_they_are_missing() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "x", side_arrays={"experts": np.array([[1, 2], [3, 4]], dtype=np.int16)})
    second = recording.go_on(first, [user("v")], "y")
    third = {"values": np.full((4, 2), 9, dtype=np.int16), "start": len(second.tokens)}
    recording.go_on(second, [user("w")], "z", side_arrays={"experts": third})
    side = only_sample(recording).side["experts"]
    assert side.values.dtype == np.int16
    assert side.values[4:6].tolist() == [[1, 2], [3, 4]]
    assert side.missing == ((0, 4), (6, 12), (16, 18))
    assert side.values[12:16].tolist() == [[9, 9]] * 4


def test_ragged_side_arrays_are_joined_by_their_counts() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "x", side_arrays={"kept": {"values": [7, 8, 9], "counts": [1, 2]}})
    recording.go_on(first, [user("v")], "y", side_arrays={"kept": {"values": [5], "counts": [0, 1]}})
    side = only_sample(recording).side["kept"]
    assert side.counts is not None
    assert side.counts.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1]
    assert side.values.tolist() == [7, 8, 9, 5]
    assert side.missing == ((0, 4), (6, 10))


def test_side_arrays_are_cut_where_the_tokens_are() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "a b", side_arrays={"k": [1, 2, 3]})
    ids = [*first.prompt_ids.tolist(), *recording.words.ids("a B <eot> <gen>")]
    recording.record(prompt_messages=[*held(first), user("v")], prompt_ids=ids, **recording.answered("c"))
    side = only_sample(recording, "keep-head").side["k"]
    assert (side.values[4], side.missing) == (1, ((0, 4), (5, 10)))


def test_a_side_array_of_two_kinds_is_an_error_that_names_both_turns() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "x", side_arrays={"k": [1, 2]})
    recording.go_on(first, [user("v")], "y", side_arrays={"k": [1.5, 2.5]})
    with pytest.raises(MisalignedError, match=r"int64\[\] in turn r\.0\.0\.0 but float64\[\] in turn r\.0\.0\.1"):
        only_sample(recording)


def test_turn_rewards_reach_the_sample_that_trains_the_turn() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "x", reward=0.5)
    recording.go_on(first, [user("v")], "y")
    recording.go_on(first, [user("w")], "z", reward=-1)
    rewards = [sample.turn_rewards for sample in linearize(rollout_of(recording.session())).samples()]
    assert rewards == [{"r.0.0.0": 0.5}, {"r.0.0.2": -1.0}]


def test_side_arrays_of_different_widths_are_joined_in_the_wider_one() -> None:
    recording = Recording()
    first = recording.ask(
        [user("u")], "x", side_arrays={"k": np.array([1, 2], np.int16), "p": np.array([0.1, 0.2], np.float32)}
    )
    second = recording.go_on(first, [user("v")], "y", side_arrays={"k": [2**40, 4], "p": [0.3, 0.4]})
    recording.go_on(second, [user("w")], "z", sampled_ids=[], side_arrays={"k": [], "p": []}, finish="length")
    recording.go_on(second, [user("w")], "z", side_arrays={"k": np.array([5, 6], np.uint8), "p": [0.5, 0.6]})
    side = only_sample(recording).side
    assert side["k"].values[[4, 5, 10, 11, 16, 17]].tolist() == [1, 2, 2**40, 4, 5, 6]
    assert side["p"].values[[4, 5, 10, 11]].tolist() == [*np.array([0.1, 0.2], np.float32).tolist(), 0.3, 0.4]


def test_the_side_array_of_an_empty_reply_has_no_kind() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "", sampled_ids=[], side_arrays={"experts": []}, finish="length", reply=None)
    recording.record(
        prompt_messages=[user("u")],
        prompt_ids=first.prompt_ids,
        **recording.answered("x", side_arrays={"experts": np.array([[1, 2], [3, 4]], np.int32)}),
    )
    side = only_sample(recording).side["experts"]
    assert side.values.dtype == np.int32
    assert side.values[4:].tolist() == [[1, 2], [3, 4]]
