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
from taped import assistant, first_turn, next_turn, record_session, spelled_turn, user


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


BAD_TURNS: list[tuple[dict[str, Any], type[RecordError], str]] = [
    ({"logprobs": [-0.5]}, MisalignedError, "2 sampled ids but 1 logprobs; ask the engine for logprobs on every token"),
    ({"sampled_ids": [4, -5]}, RecordError, "sampled_ids[1] is -5; a token id lies in"),
    ({"sampled_ids": [4, 2**31]}, RecordError, "sampled_ids[1] is 2147483648"),
    ({"prompt_ids": [1, 2.5]}, RecordError, "prompt_ids holds 1.0, no integer"),
    ({"prompt_ids": ["a"]}, RecordError, "prompt_ids holds 'a', no integer"),
    ({"prompt_ids": [[1], [2]]}, RecordError, "prompt_ids has 2 dimensions"),
    ({"logprobs": ["a", "b"]}, RecordError, "logprobs holds 'a', no number"),
    ({"prompt_messages": [{"role": "narrator"}]}, RecordError, "prompt message 0 has the role 'narrator'; known are"),
    ({"prompt_messages": [user("a"), "b"]}, RecordError, "prompt message 1 is a str"),
    ({"reply": {"role": "assistant", "content": {1, 2}}}, NotJsonError, "reply cannot be JSON"),
    ({"reply": {"role": "assistant", "content": math.nan}}, NotJsonError, "reply cannot be JSON"),
    ({"reply": user("a")}, RecordError, "the reply has the role user"),
    ({"reply": None}, RecordError, "no reply though it ended by stop"),
    ({"finish": "tired"}, RecordError, "'tired' is no Finish; known are stop,"),
    ({"reward": "good"}, NotJsonError, "reward is 'good', a str; give a number"),
    ({"side_arrays": {"x": [[1], [2], [3]]}}, MisalignedError, "side array 'x': 3 rows but 2 sampled ids"),
    ({"side_arrays": {"x": {"values": [1], "counts": [2, 1]}}}, MisalignedError, "counts add up to 3 but there are 1"),
    ({"after": "nothing.0.0.7", "prompt_messages": None, "prompt_ids": None}, RecordError, "which is no earlier turn"),
    ({"new_messages": []}, RecordError, "need `after`"),
    ({"model": 5}, RecordError, "model is 5, a int; give a text"),
    ({"weight_version": 1.5}, RecordError, "weight_version is 1.5"),
    ({"tools": "x"}, RecordError, "tools must be a list"),
    ({"started_at": "now"}, NotJsonError, "started_at is 'now'"),
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


@pytest.mark.parametrize("reward", ["1.0", None, [1.0, 2.0], {}])
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
        with pytest.raises(NoSuchRollout, match="run exp holds no rollout abc"):
            tape.score("abc", reward=1.0)
        with pytest.raises(RecordError, match="not a turn's id"):
            tape.deliver("abc", Delivery.DELIVERED)
        with tape.rollout(task_id="a") as rollout:
            rollout.finish()
        with pytest.raises(NoSuchRollout, match="with a try 3"):
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
    with pytest.raises(RecordError, match="'often' is no Durability; known are process, power"):
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
