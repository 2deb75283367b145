"""The recording API: what goes in comes out, and what is wrong is refused with its name and the facts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape.errors import (
    ClosedError,
    MisalignedError,
    NoSuchRollout,
    NotJsonError,
    RecordError,
    RunNotFound,
    TapeError,
)
from rolltape.records.rollout import Status, StopReason
from rolltape.records.turn import Delivery, TurnFlag
from taped import assistant, first_turn, next_turn, record_run, record_session, spelled_turn, user


class TensorLike:
    """What a torch tensor offers to one that does not import torch."""

    def __init__(self, values: Any, dtype: str = "torch.float32") -> None:
        self._values = np.asarray(values)
        self.dtype = dtype

    def detach(self) -> "TensorLike":
        return self

    def cpu(self) -> "TensorLike":
        return self

    def float(self) -> "TensorLike":
        return TensorLike(self._values.astype(np.float32))

    def numpy(self) -> Any:
        assert self.dtype != "torch.bfloat16"
        return self._values


def test_a_recorded_rollout_reads_back(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "exp1")
    tools = [{"type": "function", "function": {"name": "run"}}]
    with tape.rollout(task_id="math-17", step=12, attempt=3, source="gsm8k:train", tags=["hard"]) as rollout:
        session = rollout.session(tools=tools, stop_ids=[5], model="m", logprob_kind="raw", tokenizer="qwen")
        turn = first_turn(session, sampling={"temperature": 0.7, "stop": ["x"]}, extra={"n": np.int64(3)})
        next_turn(session, turn, tools=[], reward=0.5)
        rollout.finish(reward=1.0, reward_terms={"correct": 1.0, "length": -0.02})
    read = tape.run().rollout(rollout.id)
    assert (read.head.step, read.head.attempt, read.head.source, read.head.tags) == (12, 3, "gsm8k:train", ("hard",))
    assert (read.status, read.reward, read.outcome.reward_terms) == (
        Status.FINISHED,
        1.0,
        {"correct": 1.0, "length": -0.02},
    )
    first, second = read.turns
    assert first.root.tools == tools
    assert second.root.tools == []
    assert first.facts.sampling == {"temperature": 0.7, "stop": ["x"]}
    assert first.facts.extra == {"n": 3}
    assert second.prompt_ids.tolist() == [1, 2, 3, 4, 5, 10, 11]
    assert second.prompt_messages == [user("hello"), assistant("hi"), user("go on 0")]
    assert second.facts.reward == 0.5
    assert second.logprobs is not None
    assert math.isnan(second.logprobs[2])
    assert [spelled_turn(one) for one in read.turns] == [spelled_turn(one) for one in session.turns]
    assert tape.run().problems() == []


def test_lists_numpy_arrays_and_tensors_record_the_same(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    forms = {
        "list": ([4, 5], [-0.5, -0.25]),
        "numpy": (np.array([4, 5], np.uint16), np.array([-0.5, -0.25])),
        "tensor": (TensorLike([4, 5], "torch.int64"), TensorLike([-0.5, -0.25], "torch.bfloat16")),
    }
    recorded = []
    for name, (ids, logprobs) in forms.items():
        with tape.rollout(task_id=name) as rollout:
            first_turn(rollout.session(), sampled_ids=ids, logprobs=logprobs)
            rollout.finish(reward=TensorLike(0.5).numpy())
        turn = tape.run().rollout(rollout.id).turns[0]
        assert turn.logprobs is not None
        recorded.append((turn.sampled_ids.tolist(), turn.logprobs.tolist(), str(turn.logprobs.dtype)))
    assert recorded == [([4, 5], [-0.5, -0.25], "float32")] * 3


def test_logprobs_that_float32_cannot_hold_stay_float64(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        first_turn(rollout.session(), logprobs=[-0.1, -1e-300])
        rollout.finish()
        turn = tape.run().rollout(rollout.id).turns[0]
    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == [-0.1, -1e-300]


def test_segments_side_arrays_and_a_turn_without_a_reply_read_back(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        turn = first_turn(
            session,
            sampled_ids=None,
            logprobs=None,
            weight_version=None,
            segments=[
                {"sampled_ids": [4], "logprobs": [-0.5], "weight_version": "7"},
                {"sampled_ids": [5, 6], "weight_version": ("7", "8")},
            ],
            side_arrays={
                "experts": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
                "top": {"values": np.array([0.5, 0.25, 0.125], np.float16), "counts": [2, 0, 1], "start": 3},
            },
        )
        session.record_turn(after=turn, new_prompt_ids=[9], sampled_ids=[], finish="abort")
        rollout.finish()
        first, second = tape.run().rollout(rollout.id).turns
        assert tape.run().versions() == ("7", "8")
    assert [(part.start, part.stop, part.first_version, part.last_version) for part in first.facts.segments] == [
        (0, 1, "7", "7"),
        (1, 3, "7", "8"),
    ]
    assert spelled_turn(first) == spelled_turn(turn)
    assert first.side["top"].counts is not None
    assert first.side["top"].counts.tolist() == [2, 0, 1]
    assert second.reply is None


def test_what_is_recorded_does_not_change_with_the_callers_objects(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    ids, logprobs, sampling = np.array([1, 2, 3]), np.array([-0.5, -0.25], np.float32), {"stop": ["a"]}
    task, side = {"q": [1]}, np.zeros((2, 1), np.int16)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task=task) as rollout:
        turn = first_turn(
            rollout.session(),
            prompt_messages=messages,
            prompt_ids=ids,
            logprobs=logprobs,
            sampling=sampling,
            side_arrays={"s": side},
        )
        before = spelled_turn(turn)
        messages[0]["content"][0]["text"] = "changed"
        messages.append(user("more"))
        ids[0], logprobs[0], side[0] = 99, 0.0, 99
        sampling["stop"].append("b")
        task["q"].append(2)
        rollout.finish()
        read = tape.run().rollout(rollout.id)
    assert spelled_turn(turn) == before
    assert spelled_turn(read.turns[0]) == before
    assert read.head.task == {"q": [1]}


def test_rewards_that_are_not_finite_survive(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        first_turn(rollout.session(), reward=-math.inf, sampling={"penalty": math.inf})
        rollout.finish(reward=math.nan, reward_terms={"a": math.inf})
        read = tape.run().rollout(rollout.id)
    assert read.reward is not None
    assert math.isnan(read.reward)
    assert read.outcome.reward_terms == {"a": math.inf}
    assert read.turns[0].facts.reward == -math.inf
    assert read.turns[0].facts.sampling == {"penalty": math.inf}


def test_text_that_is_not_unicode_is_replaced_and_flagged(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        first_turn(rollout.session(), reply=assistant("hi \ud800"), error="odd \udfff")
        rollout.finish(reason="why \ud800")
        read = tape.run().rollout(rollout.id)
    turn = read.turns[0]
    assert turn.reply is not None
    assert turn.reply.text == "hi �"
    assert TurnFlag.REPAIRED_UNICODE in turn.facts.flags
    assert (turn.facts.error, read.outcome.reason) == ("odd �", "why �")


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"x": value}
    return value


IN_SEGMENTS = dict.fromkeys(("sampled_ids", "logprobs", "weight_version"))

BAD_TURNS: list[tuple[dict[str, Any], type[RecordError], str]] = [
    ({"logprobs": [-0.5]}, MisalignedError, "2 sampled ids but 1 logprobs; ask the engine for logprobs on every token"),
    ({"sampled_ids": [4, -5]}, RecordError, "sampled_ids[1] is -5; a token id lies in"),
    ({"sampled_ids": [4, 2**31]}, RecordError, "sampled_ids[1] is 2147483648"),
    ({"prompt_ids": [1, 2.5]}, RecordError, "prompt_ids[1] is 2.5, no integer; a token id is one"),
    ({"prompt_ids": ["a"]}, RecordError, "prompt_ids[0] is 'a', no integer"),
    ({"prompt_ids": [[1], [2]]}, RecordError, "prompt_ids has 2 dimensions"),
    ({"logprobs": ["a", "b"]}, RecordError, "logprobs holds 'a', not a number"),
    ({"prompt_messages": [{"role": "narrator"}]}, RecordError, "prompt message 0 has the role 'narrator'; known are"),
    ({"prompt_messages": [user("a"), "b"]}, RecordError, "prompt message 1 is a str"),
    ({"reply": {"role": "assistant", "content": {1, 2}}}, NotJsonError, "reply cannot be JSON"),
    ({"reply": {"role": "assistant", "content": math.nan}}, NotJsonError, "reply cannot be JSON"),
    ({"reply": user("a")}, RecordError, "the reply has the role user"),
    ({"finish": "tired"}, RecordError, "'tired' is not a Finish; known are stop,"),
    ({"reward": "good"}, NotJsonError, "reward is 'good', a str; give a number"),
    ({"reward": nested(5_000)}, NotJsonError, ", a dict; give a number"),
    ({"side_arrays": {"x": [[1], [2], [3]]}}, MisalignedError, "side array 'x': 3 rows but 2 sampled ids"),
    ({"side_arrays": {"x": {"values": [1], "counts": [2, 1]}}}, MisalignedError, "counts add up to 3 but there are 1"),
    (
        {"after": "nothing.0.0.7", "prompt_messages": None, "prompt_ids": None},
        RecordError,
        "which is not an earlier turn",
    ),
    ({"new_messages": []}, RecordError, "need `after`"),
    ({"model": 5}, RecordError, "model is 5, a int; give a text"),
    ({"weight_version": 1.5}, RecordError, "weight_version is 1.5"),
    ({"tools": "x"}, RecordError, "tools must be a list"),
    ({"started_at": "now"}, NotJsonError, "started_at is 'now'"),
    ({"prompt_messages": 5}, RecordError, "prompt messages are 5, a int; give a list of messages"),
    ({"prompt_messages": user("a")}, RecordError, "prompt messages are {'role': 'user'"),
    ({**IN_SEGMENTS, "segments": 5}, RecordError, "segments are 5, a int; give a list of segments"),
    ({"flags": 5}, RecordError, "flags are 5, a int; give a list of flags"),
    ({"flags": "nan_logprob"}, RecordError, "flags are 'nan_logprob', a str; give a list"),
    ({"after": 5, "prompt_messages": None, "prompt_ids": None}, RecordError, "`after` is 5, a int; give a Turn"),
    ({"side_arrays": [[1, 2]]}, RecordError, "side_arrays are a list; give a mapping from name to array"),
    ({"side_arrays": {5: [1, 2]}}, RecordError, "a side array has the name 5; give a text"),
    ({"side_arrays": {"\ud800": [1, 2]}}, RecordError, "a side array has the name '\\ud800'; give a text"),
    ({"side_arrays": {"x": {"values": [1], "start": True}}}, RecordError, "'x': start is True; give a whole number"),
    ({"side_arrays": {"x": {"values": [1], "start": 1.0}}}, RecordError, "'x': start is 1.0; give a whole number"),
    ({"side_arrays": {"x": {"values": [1], "start": np.int64(5)}}}, MisalignedError, "covers [5, 5+1) of 5 tokens"),
    ({"side_arrays": {"x": {"values": [1, 2], "counts": [1, -1]}}}, RecordError, "counts[1] is -1; a count lies in"),
    ({"side_arrays": {"x": {"values": [1], 5: 1}}}, RecordError, "has the fields ['5', 'values']; known are"),
    ({"message_starts": [-1]}, RecordError, "message_starts[0] is -1; a message's start lies in"),
    ({"logprobs": [10**400, 0]}, RecordError, "logprobs holds a number that is more than a float holds"),
    ({"reward": 10**400}, NotJsonError, "more than a float holds; give a smaller number"),
    ({"reward": 10**5000}, NotJsonError, "reward is a whole number of 16610 bits, more than a float holds"),
    ({"sampling": {"seed": 10**5000}}, NotJsonError, "sampling cannot be JSON: Exceeds the limit"),
    ({"sampling": 5}, RecordError, "sampling is a int; give a mapping"),
    ({"weight_version": 10**5000}, RecordError, "weight_version is a whole number of 16610 bits; give a string"),
    ({"extra": nested(900)}, NotJsonError, "extra cannot be JSON: it is nested more than 200 levels deep"),
    ({"extra": nested(300)}, NotJsonError, "extra cannot be JSON: it is nested more than 200 levels deep"),
    ({"tools": [nested(900)]}, NotJsonError, "it is nested more than 200 levels deep; flatten it"),
    ({"reply": assistant("") | {"x": nested(900)}}, NotJsonError, "reply cannot be JSON: it is nested more than 200"),
    ({"prompt_ids": [2, True]}, RecordError, "prompt_ids[1] is True, no integer; a token id is one"),
    ({"prompt_ids": (0, np.False_)}, RecordError, "prompt_ids[1] is False, no integer; a token id is one"),
    ({"prompt_ids": np.array([1, 2], object)}, RecordError, "prompt_ids is an array of objects; give a list"),
    ({"prompt_ids": [2**70]}, RecordError, f"prompt_ids[0] is {2**70}; a token id lies in"),
    ({"prompt_ids": [2**63, -1]}, RecordError, f"prompt_ids[0] is {2**63}; a token id lies in"),
]


@pytest.mark.parametrize(("fields", "kind", "says"), BAD_TURNS, ids=[says for _, _, says in BAD_TURNS])
def test_a_bad_turn_is_refused_by_name_and_the_session_goes_on(
    tmp_path: Path, fields: dict[str, Any], kind: type[RecordError], says: str
) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        turn = first_turn(session)
        with pytest.raises(kind) as caught:
            first_turn(session, **fields)
        assert says in str(caught.value)
        assert str(caught.value).startswith(f"turn {session.id}.1")
        next_turn(session, turn)
        rollout.finish()
        assert [one.id for one in tape.run().rollout(rollout.id).turns] == [f"{session.id}.0", f"{session.id}.1"]


def test_iterators_numpy_numbers_and_deep_but_sane_values_are_taken(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session(tools=[nested(150)])
        first = first_turn(
            session,
            prompt_messages=(user(text) for text in "ab"),
            prompt_ids=[0, 1, np.int64(1)],
            side_arrays={"x": {"values": [7], "start": np.int64(1)}},
            flags=iter(["malformed_call"]),
            sampling={"seed": 2**80},
            extra=nested(190),
        )
        next_turn(session, first, new_messages=iter([user("c")]), flags=None)
        rollout.finish(reward=np.float32(0.5))
        read = tape.run().rollout(rollout.id)
    assert [spelled_turn(turn) for turn in read.turns] == [spelled_turn(turn) for turn in session.turns]
    assert [message["content"] for message in read.turns[1].prompt_messages] == ["a", "b", "hi", "c"]
    assert (read.turns[0].side["x"].start, read.turns[0].facts.sampling) == (1, {"seed": 2**80})


def test_texts_of_numpy_are_taken(tmp_path: Path) -> None:
    text = np.array(["7"])[0]
    with rolltape.open(tmp_path / "exp") as tape, tape.rollout(task_id=text, model=text, tags=[text]) as rollout:
        first_turn(rollout.session(renderer=text), weight_version=text)
        rollout.finish(reason=text)
    (row,) = rolltape.read(tmp_path / "exp").index()
    assert (row.task_id, row.model, row.outcome.tags, row.outcome.reason) == ("7", "7", ("7",), "7")
    found = rolltape.read(tmp_path / "exp").rollout(np.array([row.id])[0])
    assert found.turns[0].facts.renderer == "7"


@pytest.mark.parametrize("url", ["s3://bucket/x", "memory://x", "file:///tmp/x", "simplecache::s3://bucket/x"])
def test_recording_at_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match=r"recorded on a local disk, not at a URL; .*`rolltape seal --to`"):
        rolltape.open(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["math::hard", "a b#c?d%20", "e:/f"])
def test_a_path_may_look_like_a_url(tmp_path: Path, path: str) -> None:
    record_run(tmp_path / path, rollouts=1)
    rolltape.seal(tmp_path / path, to=tmp_path / "copies" / path)
    assert [len(rolltape.read(place / path).index()) for place in (tmp_path, tmp_path / "copies")] == [1, 1]


def test_a_home_directory_is_found_by_writers_and_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rolltape.open("~/runs/a").close()
    assert (tmp_path / "runs" / "a" / "run.json").exists()
    assert rolltape.read("~/runs/a").name == rolltape.read(Path("~/runs/a")).name == "a"
    assert rolltape.seal("~/runs/a").rollouts == 0


def test_a_name_or_path_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"its name is .* and valid Unicode"):
        rolltape.open(tmp_path / "run", name="a \ud800")
    for path in (tmp_path / "\ud800", tmp_path / "\udc80", f"{tmp_path}/a\0b"):
        with pytest.raises(RecordError, match="not a path in valid Unicode"):
            rolltape.open(path)
        with pytest.raises(RunNotFound, match="not a path or URL in valid Unicode"):
            rolltape.read(path)
    nothing: Any = None
    with pytest.raises(RunNotFound, match="None: no run there; it is not a path or URL"):
        rolltape.read(nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_the_current_folder_is_named_after_it_also_if_that_is_no_unicode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "odd-\udcff"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with rolltape.open(".") as tape:
        tape.rollout(task_id="a").finish(reward=1.0)
    run = rolltape.read(".")
    assert (run.name, [row.outcome.reward for row in run.index()]) == ("odd-\ufffd", [1.0])


def test_the_next_try_of_what_is_no_id_is_refused(tmp_path: Path) -> None:
    wrong: Any = []
    with (
        rolltape.open(tmp_path / "run") as tape,
        pytest.raises(RecordError, match=r"the id of a rollout is .*give a text"),
    ):
        tape.next_try(wrong)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unspeakable(), "Unspeakable, whose text cannot be read (RuntimeError)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_without_words_still_fails_its_rollout(tmp_path: Path, error: BaseException, reason: str) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="a")

        def attempt() -> None:
            with rollout:
                raise error

        with pytest.raises(type(error)):
            attempt()
        read = tape.run().rollout(rollout.id)
    assert (read.status, read.outcome.reason) == (Status.FAILED, reason)


def test_a_bad_rollout_is_refused(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for fields, says in [
            ({}, "a rollout needs a task"),
            ({"task": object()}, "task cannot be JSON"),
            ({"task_id": 5}, "task_id is 5"),
            ({"task_id": "a", "step": -1}, "step is -1; give a whole number"),
            ({"task_id": "a", "attempt": 1.5}, "attempt is 1.5"),
            ({"task_id": "a", "tags": "hard"}, "tags are the text 'hard'"),
            ({"task_id": "a", "extra": {"x": object()}}, "extra cannot be JSON"),
            ({"task_id": "a", "tags": 5}, "tags are 5, a int; give a list of texts"),
            ({"task_id": "a", "step": 10**5000}, "step is a whole number of 16610 bits"),
            ({"task": nested(900)}, "task cannot be JSON: it is nested more than 200 levels deep"),
        ]:
            with pytest.raises(RecordError, match=says):
                tape.rollout(**fields)  # type: ignore[arg-type]
        assert tape.run().index() == []


def test_an_id_is_used_once_unless_it_is_a_new_try(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        with tape.rollout(task_id="a") as rollout:
            record_session(rollout, 1)
            rollout.finish(reward=0.0)
        with pytest.raises(RecordError, match=f"rollout {rollout.id} .* is on the tape already"):
            tape.rollout(task_id="a")
        with tape.rollout(task_id="a", new_try=True) as again:
            record_session(again, 2)
            again.finish(reward=1.0)
        run = tape.run()
        assert (again.id, again.try_index) == (rollout.id, 1)
        assert run.rollout(rollout.id).reward == 1.0
        assert run.rollout(rollout.id, try_index=0).reward == 0.0
        assert [row.key for row in run.index()] == [(rollout.id, 0), (rollout.id, 1)]


def test_an_id_of_another_writer_or_a_shard_is_refused(tmp_path: Path) -> None:
    first, second = rolltape.open(tmp_path / "run"), rolltape.open(tmp_path / "run")
    with first.rollout(task_id="a") as rollout:
        rollout.finish()
    with pytest.raises(RecordError, match="on the tape already"):
        second.rollout(task_id="a")
    first.close()
    rolltape.seal(tmp_path / "run")
    assert list((tmp_path / "run" / "journals").glob(f"{first.directory.name}*")) == []
    with pytest.raises(RecordError, match="on the tape already"):
        second.rollout(task_id="a")
    assert second.rollout(task_id="a", new_try=True).try_index == 1
    second.close()


def test_an_exception_fails_the_rollout_and_goes_on_its_way(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    rollout = tape.rollout(task_id="a")

    def attempt() -> None:
        with rollout:
            record_session(rollout, 2)
            raise ValueError("no sandbox")

    with pytest.raises(ValueError, match="no sandbox"):
        attempt()
    read = tape.run().rollout(rollout.id)
    assert (read.status, read.outcome.reason, read.reward) == (Status.FAILED, "ValueError: no sandbox", None)
    assert len(read.turns) == 2


def test_a_rollout_left_without_a_finish_says_so(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        with tape.rollout(task_id="a") as rollout:
            pass
        assert tape.run().rollout(rollout.id).outcome.reason == "left without a finish"
        open_one = tape.rollout(task_id="b")
    read = rolltape.read(tmp_path / "run").rollout(open_one.id)
    assert (read.status, read.outcome.reason) == (Status.FAILED, "the tape was closed before it finished")


def test_what_has_ended_takes_no_more(tmp_path: Path) -> None:
    tape = rolltape.open(tmp_path / "run")
    with tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        first_turn(session)
        rollout.finish(stop_reason="max_turns")
        for act in (rollout.finish, rollout.session, lambda: rollout.fail("x"), lambda: first_turn(session)):
            with pytest.raises(ClosedError, match=f"rollout {rollout.id} .* is finished already"):
                act()
    assert tape.run().rollout(rollout.id).outcome.stop_reason is StopReason.MAX_TURNS
    late = tape.rollout(task_id="b")
    tape.close()
    tape.close()
    with pytest.raises(ClosedError, match="closed"):
        tape.rollout(task_id="c")
    with pytest.raises(ClosedError, match="failed already"):
        late.finish()


@pytest.mark.parametrize("reward", ["1.0", None, [1.0, 2.0], {}, pytest.param(10**400, id="10**400")])
def test_a_reward_that_is_no_number_is_refused(tmp_path: Path, reward: object) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        if reward is not None:
            with pytest.raises(RecordError, match=f"rollout {rollout.id}: reward"):
                rollout.finish(reward=reward)
        rollout.finish(reward=1.0)
        with pytest.raises(RecordError, match=f"rollout {rollout.id}"):
            tape.score(rollout.id, reward=reward)
        with pytest.raises(RecordError, match="reward term 'x'"):
            tape.score(rollout.id, reward=1.0, terms={"x": "y"})
        assert tape.run().rollout(rollout.id).reward == 1.0


def test_what_is_said_of_an_unknown_rollout_is_refused(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape:
        with pytest.raises(NoSuchRollout, match="run exp holds no rollout 'abc'"):
            tape.score("abc", reward=1.0)
        with pytest.raises(RecordError, match="not a turn's id"):
            tape.mark_delivered("abc", Delivery.DELIVERED)
        with tape.rollout(task_id="a") as rollout:
            rollout.finish()
        for malformed in (5, rollout.id, f"{rollout.id}.0.0", f"{rollout.id}.0.0.٣", f"{rollout.id}.0.0.00"):
            with pytest.raises(RecordError, match="not a turn's id"):
                tape.mark_delivered(malformed)  # type: ignore[arg-type]
        with pytest.raises(RecordError, match="try_index is '0'; give a whole number"):
            tape.score(rollout.id, reward=1.0, try_index="0")  # type: ignore[arg-type]
        with pytest.raises(RecordError, match="reward terms are a int"):
            tape.score(rollout.id, reward=1.0, terms=5)  # type: ignore[arg-type]
        with pytest.raises(RecordError, match="the id of a rollout is 5"):
            tape.tag(5, "x")  # type: ignore[arg-type]
        with pytest.raises(NoSuchRollout, match="has no try 3"):
            tape.filter(rollout.id, "too long", try_index=3)
        with pytest.raises(RecordError, match="belongs to try 0 of rollout other"):
            tape.score(rollout.id, reward=1.0, turn="other.0.0.0")


def test_a_runs_name_is_stored_and_cannot_change(tmp_path: Path) -> None:
    rolltape.open(tmp_path / "exp1").close()
    assert rolltape.read(tmp_path / "exp1").name == "exp1"
    rolltape.open(tmp_path / "exp1", name="exp1").close()
    with pytest.raises(TapeError, match="its name is 'exp1', not 'exp2'"):
        rolltape.open(tmp_path / "exp1", name="exp2")
    with pytest.raises(RunNotFound, match="no run there"):
        rolltape.read(tmp_path / "nothing")
    with pytest.raises(RecordError, match="'often' is not a Durability; known are process, power"):
        rolltape.open(tmp_path / "exp1", durability="often")


def test_a_session_durable_against_power_loss_records_too(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", durability=rolltape.Durability.POWER) as tape:
        with tape.rollout(task_id="a") as rollout:
            record_session(rollout, 3)
            rollout.finish()
        assert len(tape.run().rollout(rollout.id).turns) == 3


def test_messages_are_stored_once(tmp_path: Path) -> None:
    long = user("x" * 100_000)
    with rolltape.open(tmp_path / "run") as tape:
        for index in range(20):
            with tape.rollout(task_id="a", attempt=index) as rollout:
                first_turn(rollout.session(), prompt_messages=[long])
                rollout.finish()
    assert sum(path.stat().st_size for path in (tmp_path / "run" / "journals").iterdir()) < 400_000


def test_a_whole_prompt_is_stored_as_what_is_new(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        messages, ids = [user("u" * 1000)], list(range(1000))
        for index in range(200):
            session.record_turn(
                prompt_messages=messages,
                prompt_ids=ids,
                sampled_ids=[7] * 10,
                logprobs=[-1.0] * 10,
                reply=assistant(f"a {index}"),
                finish="stop",
            )
            messages = [*messages, assistant(f"a {index}"), user(f"u {index}")]
            ids = [*ids, *[7] * 10, 8, 9]
        rollout.finish()
        read = tape.run().rollout(rollout.id)
        assert len(read.turns[-1].prompt_tokens) == 1000 + 199 * 12
        assert [spelled_turn(turn) for turn in read.turns[::50]] == [spelled_turn(turn) for turn in session.turns[::50]]
    assert sum(path.stat().st_size for path in (tmp_path / "run" / "journals").iterdir()) < 300_000
