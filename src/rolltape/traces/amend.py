"""What is known of a rollout only later: grades, comparisons within its group."""

from collections.abc import Mapping
from typing import Any

from rolltape.errors import RecordError
from rolltape.records.rollout import EventKind
from rolltape.tape.recording.fields import as_count
from rolltape.tape.recording.tape import Tape
from rolltape.traces.values import checked

Object = Mapping[str, Any] | None


def amend(
    tape: Tape,
    rollout_id: str,
    *,
    step: int | None = None,
    reward_data: Object = None,
    env_state: Object = None,
    extra: Object = None,
    metrics: Object = None,
    logs: Object = None,
    by: str | None = None,
    try_index: int | None = None,
) -> None:
    """Say something of a step of a rollout, or (None) of the whole of it, in the place of what was said before.

    The reward itself is given by `Tape.score`. Without `try_index` it is about the try that counts.
    """
    where = f"rollout {rollout_id}, " + ("final" if step is None else f"step {step}")
    given = {"reward_data": reward_data, "env_state": env_state, "extra": extra, "metrics": metrics, "logs": logs}
    fields, unrecorded = checked(given, where)
    if unrecorded:
        raise RecordError("; ".join(unrecorded.values()))
    if not fields:
        raise RecordError(f"{where}: nothing to amend; give {', '.join(given)}")
    index = None if step is None else as_count(step, f"{where}: step")
    tape.say(EventKind.TRACE, rollout_id, {"step": index, "amends": True, **fields}, by=by, try_index=try_index)
