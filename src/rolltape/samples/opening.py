"""Opening a run for recording, with what summarizes its rollouts."""

import os

from rolltape.samples.summary import summarize
from rolltape.tape.journal.writing import Durability
from rolltape.tape.recording.tape import Tape, open_tape


def open_for_recording(
    path: str | os.PathLike[str], name: str | None = None, durability: Durability | str = Durability.PROCESS
) -> Tape:
    """Open the run at `path` for recording. A new run is created if there is none, named after its directory.

    When a rollout has ended, its summary (forks, and where its sampled tokens go) is computed in the background and
    added to the tape, so that whoever lists the run need not compute it.

    Example:

        tape = rolltape.open("runs/exp1")
    """
    return open_tape(path, name, durability, summarize)
