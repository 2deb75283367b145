"""Real trackio: what is stored of a tape's steps and of batches, in a run of the sink's own and in the caller's."""

import contextvars
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trackio

import rolltape
from rolltape.errors import SinkError
from rolltape.records.rollout import Status
from rolltape.records.trace import Trace, TraceStep
from rolltape.tracking import show_batch, show_step, trackio_sink
from rolltape.tracking.summary import ShownStep
from rolltape.tracking.trackio import LocalTracker
from tracked import ANSWER, COUNT, COUNTED, GUESS, QUESTION, THANKS, record_steps, stored_metrics, stored_traces


@pytest.fixture
def project(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def run(tmp_path: Path) -> rolltape.Run:
    return rolltape.read(record_steps(tmp_path / "exp"))


def words(ids: Any) -> str:
    return " ".join(f"w{token}" for token in ids)


BATCH = {
    "input_ids": np.array([[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]),
    "attention_mask": np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]),
    "loss_mask": np.array([[0, 1, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0]]),
    "versions": np.array([[-1, 3, -1, 4, -1, -1], [-1, -1, 4, 4, -1, -1]]),
    "rewards": np.array([0.25, 0.75]),
}


def test_step_of_a_tape_is_stored_with_messages_spans_and_metadata(project: str, run: rolltape.Run) -> None:
    with trackio_sink(project=project, name="exp") as sink:
        assert show_step(sink, run, step=1)
    assert sink.close().complete
    first, second = sorted(stored_traces(project), key=lambda one: one["metadata"]["attempt"])
    assert first["key"] == "train/traces"
    assert first["step"] == 1
    assert first["messages"] == [QUESTION, COUNT, COUNTED, ANSWER, THANKS, GUESS]
    about = first["metadata"]
    assert (about["split"], about["step"], about["attempt"], about["reward"]) == ("train", 1, 0, 0.0)
    assert (about["first_version"], about["last_version"]) == ("7", "8")
    assert (about["turns"], about["prompt_tokens"], about["sampled_tokens"], about["tokens"]) == (3, 3, 9, 15)
    assert (about["status"], about["stop_reason"], about["model"]) == ("finished", "max_turns", "tiny")
    assert second["metadata"]["reward"] == 1.0


def test_spans_are_steps_with_their_tools_under_them_and_their_times(project: str, run: rolltape.Run) -> None:
    with trackio_sink(project=project, name="exp", max_traces_per_step=1) as sink:
        show_step(sink, run, step=0)
    (trace,) = stored_traces(project)
    assert [(span["kind"], span["name"], span.get("parent_id")) for span in trace["spans"]] == [
        ("generation", "step 0", None),
        ("tool", "bash", "step-0"),
        ("generation", "step 1", None),
        ("generation", "step 2", None),
    ]
    generation, tool = trace["spans"][:2]
    assert generation["input"] == [QUESTION]
    assert generation["output"] == COUNT
    assert generation["usage"] == {"input_tokens": 3, "output_tokens": 3}
    assert generation["start_time"] == "2023-11-14T22:13:20+00:00"
    assert generation["end_time"] == "2023-11-14T22:13:21.500000+00:00"
    assert tool["input"] == {"command": "wc -l"}
    assert tool["output"] == "212 parser.py"


def test_metrics_of_a_step_cover_all_its_rollouts(project: str, run: rolltape.Run) -> None:
    with trackio_sink(project=project, name="exp", max_traces_per_step=0) as sink:
        show_step(sink, run, step=0)
    assert stored_traces(project) == []
    (entry,) = stored_metrics(project)
    expected = {
        "train/reward/mean": 0.5,
        "train/reward/max": 1.0,
        "train/reward_terms/right": 0.5,
        "train/rollouts/count": 2,
        "train/rollouts/finished": 2,
        "train/rollouts/failed": 0,
        "train/stopped/max_turns": 2,
        "train/turns/mean": 3.0,
        "train/sampled_tokens/mean": 9.0,
        "train/context_tokens/max": 15.0,
        "train/ledger/trained": 1.0,
        "train/ledger/masked": 0.0,
        "train/staleness/max": 1,
        "train/staleness/mean": 5 / 9,
    }
    assert {name: entry[name] for name in expected} == expected


def test_a_rollout_that_broke_before_its_first_turn_is_shown_with_its_reason(project: str, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "broken") as tape:
        tape.rollout(task_id="count").fail("the sandbox did not start")
        with trackio_sink(project=project, name="exp") as sink:
            show_step(sink, tape.run(), step=0)
    assert sink.delivery.complete
    (trace,) = stored_traces(project)
    assert (trace["messages"], trace["metadata"]["reason"]) == ([], "the sandbox did not start")


def test_evaluation_is_kept_under_keys_of_its_own(project: str, run: rolltape.Run) -> None:
    with trackio_sink(project=project, name="exp") as sink:
        show_step(sink, run, step=0)
        show_step(sink, run, step=0, split="test")
    assert sorted(trace["key"] for trace in stored_traces(project)) == ["test/traces", "train/traces", "train/traces"]
    rewards = {
        name: entry[name]
        for entry in stored_metrics(project)
        for name in ("train/reward/mean", "test/reward/mean")
        if name in entry
    }
    assert rewards == {"train/reward/mean": 0.5, "test/reward/mean": 0.5}


def test_batch_is_stored_with_its_turns(project: str) -> None:
    with trackio_sink(project=project, name="exp") as sink:
        assert show_batch(sink, [None, BATCH], words, split="train", step=5)
    assert sink.close().complete
    first, second = sorted(stored_traces(project), key=lambda one: one["metadata"]["rollout"])
    assert [(message["role"], message["content"]) for message in first["messages"]] == [
        ("user", "w1"),
        ("assistant", "w2"),
        ("user", "w3"),
        ("assistant", "w4"),
        ("user", "w5"),
    ]
    assert second["messages"][0]["content"] == "w6 w7"
    about = first["metadata"]
    assert (about["reward"], about["first_version"], about["last_version"]) == (0.25, "3", "4")
    assert about["extra"] == {"entry": 1, "row": 0, "tokens": 5, "trained_tokens": 2}
    (entry,) = stored_metrics(project)
    assert (entry["train/rollouts/count"], entry["train/rollouts/rejected"]) == (2, 1)
    assert entry["train/staleness/mean"] == 0.25


def test_a_batch_that_was_rejected_whole_is_counted(project: str) -> None:
    with trackio_sink(project=project, name="exp") as sink:
        assert show_batch(sink, None, words, split="train", step=5)
    assert sink.close().complete
    (entry,) = stored_metrics(project)
    assert (entry["train/rollouts/count"], entry["train/rollouts/rejected"]) == (0, 1)


def test_batch_that_cannot_be_read_is_counted_and_not_raised(project: str) -> None:
    sink = trackio_sink(project=project, name="exp")
    assert show_batch(sink, {"input_ids": np.zeros((1, 2), int)}, words, split="train", step=0)
    assert show_batch(sink, 7, words, split="train", step=0)  # type: ignore[arg-type]
    delivery = sink.close()
    assert delivery.failed == 2
    assert "has no loss_mask" in delivery.errors[0]


@pytest.fixture
def current_run(project: str) -> Iterator[Any]:
    """A run that the caller has opened, current where the test runs."""
    run = trackio.init(project=project, name="training", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    yield run
    trackio.finish()  # type: ignore[no-untyped-call]


def test_without_a_project_the_run_of_the_caller_is_used_and_left_open(project: str, current_run: Any) -> None:
    with trackio_sink() as sink:
        show_batch(sink, BATCH, words, split="train", step=0)
    trackio.log({"loss": 0.5}, step=0)
    current_run.finish()
    assert len(stored_traces(project, "training")) == 2
    assert {"loss", "train/reward/mean"} <= {name for entry in stored_metrics(project, "training") for name in entry}


def test_run_of_its_own_leaves_the_callers_run_alone(project: str, current_run: Any) -> None:
    with trackio_sink(project=project, name="shown") as sink:
        show_batch(sink, BATCH, words, split="train", step=0)
    trackio.log({"loss": 0.5}, step=0)
    current_run.finish()
    assert [set(entry) - {"step", "timestamp"} for entry in stored_metrics(project, "training")] == [{"loss"}]
    assert len(stored_traces(project, "shown")) == 2


def test_values_that_its_encoder_refuses_cost_no_trace(project: str) -> None:
    odd = TraceStep(
        index=0,
        prompt={"seed": 2**80},
        policy_response={"role": "assistant", "content": "half a \ud83d"},
        env_state={"level": math.inf},
        started_at=1e300,
        ended_at=1e300,
    )
    trace = Trace(
        run="exp",
        rollout="r",
        try_index=0,
        group="g",
        step=0,
        attempt=0,
        status=Status.FINISHED,
        total_reward=math.nan,
        steps=(odd,),
    )
    with trackio_sink(project=project, name="exp") as sink:
        sink.put(ShownStep(split="train", step=0, traces=(trace,)))
    assert sink.close().complete
    (stored,) = stored_traces(project)
    assert stored["messages"][0]["content"] == '{"seed":1208925819614629174706176}'
    assert stored["messages"][1]["content"] == "half a \ufffd"
    assert math.isnan(stored["metadata"]["reward"])


def test_steps_that_go_on_from_elsewhere_are_marked(project: str) -> None:
    def said(text: str, role: str = "user") -> dict[str, str]:
        return {"role": role, "content": text}

    steps = (
        TraceStep(index=0, prompt=[said("one")], policy_response=said("a", "assistant")),
        TraceStep(index=1, prompt=[said("other seat")], policy_response=said("b", "assistant")),
        TraceStep(index=2, messages_from=0, kept_messages=2, prompt=[said("two")], error="engine gone"),
    )
    trace = Trace(run="exp", rollout="r", try_index=0, group="g", step=0, attempt=0, status=Status.FAILED, steps=steps)
    with trackio_sink(project=project, name="exp") as sink:
        sink.put(ShownStep(split="train", step=0, traces=(trace,)))
    (stored,) = stored_traces(project)
    assert [message["content"] for message in stored["messages"]] == [
        "one",
        "a",
        "step 1 starts a conversation of its own",
        "other seat",
        "b",
        "step 2 continues from the first 2 messages up to step 0",
        "two",
    ]
    assert (stored["spans"][2]["status"], stored["spans"][2]["error"]) == ("error", "engine gone")


def test_what_trackio_did_not_store_is_said_at_close(project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    sink = trackio_sink(project=project, name="exp")
    monkeypatch.setattr(SQLiteStorage, "bulk_log", full)
    show_batch(sink, BATCH, words, split="train", step=0)
    with pytest.warns(UserWarning, match="No space left"):
        delivery = sink.close()
    assert not delivery.complete
    assert "1 entries were logged, but 0 are stored" in delivery.errors[0]


@pytest.mark.parametrize("variable", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"])
def test_own_run_is_refused_where_the_environment_would_send_it_away(
    project: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "someone/somewhere")
    with pytest.raises(SinkError, match=f"{variable} is set, but a run that rolltape opens stays"):
        trackio_sink(project=project)


def test_no_run_to_log_into_is_an_error_at_the_start() -> None:
    with pytest.raises(SinkError, match=r"trackio has no current run here; call trackio\.init first"):
        contextvars.Context().run(trackio_sink)


def test_project_that_trackio_does_not_take_is_an_error_at_the_start() -> None:
    with pytest.raises(SinkError, match="registry-"):
        trackio_sink(project="registry-models")


def test_run_opened_again_knows_the_steps_that_it_holds(project: str) -> None:
    with trackio_sink(project=project, name="exp") as sink:
        show_batch(sink, BATCH, words, split="train", step=4)
    tracker = LocalTracker(project, "exp")
    assert tracker.holds("train", 4)
    assert not tracker.holds("test", 4)
    assert not tracker.holds("train", 5)
    tracker.close()
