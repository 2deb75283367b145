"""From a training loop to a sink: a batch, or a step of the tape. Neither raises, and neither is decoded there."""

from typing import Any

from rolltape.records.choice import Pick
from rolltape.records.policy import CutPolicy
from rolltape.records.summary import ShownStep
from rolltape.tape.run import Run
from rolltape.traces.batch import traces_of_held
from rolltape.traces.padded import Batch, held_batch
from rolltape.tracking.sink import Deferred, Sink
from rolltape.tracking.steps import StepKey
from rolltape.tracking.taped import step_of_tape


def show_batch(sink: Sink, batch: Batch, tokenizer: Any, *, split: str, step: int, run: str = "batch") -> bool:
    """Copy a padded batch to the host and let the sink decode what it shows of it; False: it was dropped."""
    try:
        held = held_batch(batch)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a batch, showing it must not stop a training
        return sink.put(_raising(error))
    return sink.put(lambda pick: traces_of_held(held, tokenizer, split=split, step=step, run=run, pick=pick))


def show_step(sink: Sink, run: Run, *, step: int, split: str = "train", policy: CutPolicy | str = "exact") -> bool:
    """Let the sink read a step off the tape, as it is when its turn comes; False: it was dropped."""
    return sink.put(lambda pick: step_of_tape(run, StepKey(step, split), pick, policy))


def _raising(error: Exception) -> Deferred:
    """A step that could not be taken: the sink counts it as failed, with its reason."""

    def fail(pick: Pick) -> ShownStep:
        raise error

    return fail
