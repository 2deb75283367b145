"""Rejecting by a function: it is given each finished rollout with its turns, and says why it is not to train."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rolltape.collect.filters.rules import Verdict
from rolltape.collect.functions import PREFIX, function_named
from rolltape.errors import FilterError, RolltapeError
from rolltape.records.jsonable import plain_scalar, shown
from rolltape.records.rollout import Rollout, Status
from rolltape.samples import counted_tries
from rolltape.tape.recording.fields import as_text
from rolltape.tape.run import RolloutRow, Run

Reject = Callable[[Rollout], object]  # a reason, or True; False or None: it may train


def reject_named(text: str) -> tuple[str, Reject]:
    """The function that "python:module:function" names, and what it is called on the tape."""
    by = text if text.startswith(PREFIX) else f"{PREFIX}{text}"
    try:
        return by, function_named(text)
    except RolltapeError:
        raise
    except Exception as error:
        raise FilterError(f"{by}: its module raised {_raised(error)}; nothing was filtered") from error


def rejected(run: Run, rows: Iterable[RolloutRow], function: Reject, by: str) -> Iterator[Verdict]:
    """What a function says of rollouts, loaded one at a time; `by` names it in reasons and errors.

    A rollout whose turns were pruned is not judged. What the function raises is a FilterError.
    """
    with run.snapshot() as held:
        for row in counted_tries(rows):
            if row.outcome.status is not Status.FINISHED:
                continue
            if "turns" in row.pruned:
                yield Verdict(*row.key, unjudged="its turns were pruned")
                continue
            yield Verdict(*row.key, _reason(function, held.rollout(*row.key), by))


def _reason(function: Reject, rollout: Rollout, by: str) -> str | None:
    try:
        said = function(rollout)
    except Exception as error:
        raise FilterError(
            f"{by}: it raised {_raised(error)}, for rollout {rollout.id}; nothing was filtered"
        ) from error
    if isinstance(said, str) and said.strip():
        return as_text(said, by)
    plain = plain_scalar(said)
    if plain is None or plain is False:
        return None
    if plain is True:
        return f"rejected by {by}"
    raise FilterError(
        f"{by}: it gave {shown(said)} for rollout {rollout.id}; give a reason in words or True to reject it, "
        "None or False to keep it; nothing was filtered"
    )


def _raised(error: Exception) -> str:
    """What somebody's code raised, and where in it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    imports = [place for place, frame in enumerate(frames) if frame.filename.startswith("<frozen")]
    theirs = frames[imports[-1] + 1 :] if imports else frames
    where = f" ({Path(theirs[0].filename).name}, line {theirs[0].lineno})" if theirs else ""
    said = str(error)
    return f"{type(error).__name__}{f': {said}' if said else ''}{where}"
