"""All about a run found out at once, in this process: what a worker tells a server by and by."""

from rolltape.view.following import Follower
from rolltape.view.reading import Reading
from rolltape.view.reports import Looked
from rolltape.view.watching import WatchedRun

_AT_ONCE = 64


def catch_up(run: WatchedRun, *, search: bool) -> None:
    """Bring a run's state up to what is on the tape now, summaries included, and the search index if asked for."""
    state, follower = run.state, Follower(run.location, run.state.marks)
    done = False
    while not done:
        for report in follower.look():
            state.apply(report)
            done = isinstance(report, Looked) and report.done
    reading = Reading(run.location, run.folder.path, run.policy, run.folder.created, search=search)
    try:
        reading.ready()
        if reading.index_made is not None:
            state.take_index(reading.index_made)
        while wanted := state.wanted(_AT_ONCE, search=reading.index_made is not None):
            for derived in reading.read(wanted):
                state.apply(derived)
    finally:
        reading.close()
