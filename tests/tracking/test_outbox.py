"""A sink between a trainer and a tracker that raises, hangs, is slow or dies: the trainer notices none of it."""

import contextvars
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rolltape.errors import SinkError
from rolltape.tracking import DeliveryReport, Outbox
from rolltape.tracking.summary import ShownStep, StepSummary


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def holds(self, split: str, step: int) -> bool:
        return False

    def put(self, shown: ShownStep) -> None:
        self.steps.append(shown.step)

    def close(self) -> None:
        self.closed = True


class Raising(Kept):
    def __init__(self, error: BaseException, at: tuple[int, ...]) -> None:
        super().__init__()
        self._error, self._at = error, at

    def put(self, shown: ShownStep) -> None:
        if shown.step in self._at:
            raise self._error
        super().put(shown)


class Hanging(Kept):
    """Takes its time over the first step: until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.go = threading.Event(), threading.Event()

    def put(self, shown: ShownStep) -> None:
        self.busy.set()
        self.go.wait()
        super().put(shown)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    tracker = Hanging()
    yield tracker
    tracker.go.set()


def step(number: int) -> ShownStep:
    return ShownStep(split="train", step=number, summary=StepSummary(rollouts=1))


def test_steps_arrive_in_order_and_close_waits_for_them() -> None:
    tracker = Kept()
    outbox = Outbox(tracker)
    assert all(outbox.put(step(number)) for number in range(5))
    assert outbox.close() == DeliveryReport(put=5, delivered=5)
    assert tracker.steps == [0, 1, 2, 3, 4]
    assert tracker.closed


def test_error_of_a_tracker_is_counted_reported_once_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Raising(OSError("disk full"), at=(1, 2))
    with caplog.at_level(logging.WARNING, "rolltape.tracking"):
        outbox = Outbox(tracker)
        for number in range(4):
            outbox.put(step(number))
        delivery = outbox.close()
    assert tracker.steps == [0, 3]
    assert (delivery.delivered, delivery.failed) == (2, 2)
    assert delivery.errors == ("a step could not be shown: OSError: disk full",)
    assert caplog.text.count("could not be shown") == 2  # when it happened, and in the account at the end
    assert not delivery.complete


def test_full_queue_drops_what_comes_and_counts_it(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox(hanging, max_waiting=2)
    assert outbox.put(step(0))
    hanging.busy.wait()
    assert [outbox.put(step(number)) for number in range(1, 6)] == [True, True, False, False, False]
    assert outbox.delivery == DeliveryReport(
        put=6, dropped=3, unsent=3, errors=("the tracker is slow: 2 steps wait, and further ones are dropped",)
    )
    assert caplog.text.count("the tracker is slow") == 1
    hanging.go.set()
    delivery = outbox.close()
    assert hanging.steps == [0, 1, 2]
    assert (delivery.delivered, delivery.dropped, delivery.unsent) == (3, 3, 0)


def test_close_leaves_a_tracker_that_hangs_behind(hanging: Hanging) -> None:
    outbox = Outbox(hanging)
    for number in range(3):
        outbox.put(step(number))
    delivery = outbox.close(timeout_s=0.05)
    assert (delivery.delivered, delivery.unsent) == (0, 3)
    assert delivery.errors == ("the tracker was not done after 0.05 s, so this process stopped waiting",)
    hanging.go.set()
    outbox._thread.join()
    assert hanging.steps == [0], "nothing more is sent after the sink was closed"
    assert not hanging.closed


def test_thread_that_dies_is_reported_and_what_follows_is_dropped() -> None:
    outbox = Outbox(Raising(SystemExit(3), at=(0,)))
    outbox.put(step(0))
    outbox._thread.join()
    assert not outbox.put(step(1))
    assert not outbox.put(step(2))
    delivery = outbox.close()
    assert (delivery.put, delivery.dropped, delivery.unsent) == (3, 2, 1)
    assert delivery.errors == (
        "the tracker ended with SystemExit: 3",
        "the thread that feeds the tracker has died",
    )


def test_a_forked_child_drops_steps_though_the_lock_was_held_when_it_was_forked() -> None:
    tracker = Kept()
    outbox = Outbox(tracker)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with outbox._changed:
            held.set()
            go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends a child that waits for the lock
        taken, report = outbox.put(step(0)), outbox.close()
        os._exit(int(taken or report.dropped != 1 or "make one in each process" not in report.errors[0]))
    go.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert outbox.put(step(1))
    assert outbox.close() == DeliveryReport(put=1, delivered=1)


def test_put_after_close_is_counted() -> None:
    outbox = Outbox(Kept())
    outbox.close()
    assert not outbox.put(step(0))
    assert outbox.close().dropped == 1


def test_tracker_that_did_not_keep_everything_says_so_at_close() -> None:
    class Forgetful(Kept):
        def close(self) -> None:
            raise OSError("3 of 5 are stored")

    delivery = Outbox(Forgetful()).close()
    assert delivery.errors == ("the tracker ended with OSError: 3 of 5 are stored",)
    assert not delivery.complete


def test_step_that_cannot_be_made_is_counted_as_failed() -> None:
    def broken(pick: Any) -> ShownStep:
        raise ValueError("no such rollout")

    outbox = Outbox(Kept())
    outbox.put(broken)
    outbox.put(None)  # type: ignore[arg-type]
    outbox.put(step(1))
    delivery = outbox.close()
    assert (delivery.failed, delivery.delivered) == (2, 1)


def test_deferred_step_is_made_on_the_thread_of_the_sink_in_the_context_of_the_caller() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("set by the caller")
    seen: list[tuple[str, bool]] = []

    def deferred(pick: Any) -> ShownStep:
        seen.append((variable.get(), threading.current_thread() is threading.main_thread()))
        return step(0)

    outbox = Outbox(Kept())
    outbox.put(deferred)
    assert outbox.close().complete
    assert seen == [("set by the caller", False)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"choice": "best"}, "choice is 'best'; give one of first"), ({"max_waiting": 0}, "max_waiting is 0")],
)
def test_settings_that_make_no_sense_are_refused_at_the_start(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SinkError, match=message):
        Outbox(Kept(), **wrong)


def test_what_was_put_is_delivered_when_the_program_ends_without_closing(tmp_path: Any) -> None:
    import subprocess
    import sys

    file = tmp_path / "steps.jsonl"
    code = (
        "import sys; from rolltape.tracking import *\n"
        "sink = jsonl_sink(sys.argv[1])\n"
        "sink.put(ShownStep(split='train', step=7, summary=StepSummary(rollouts=1)))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    assert '"step":7' in file.read_text()
