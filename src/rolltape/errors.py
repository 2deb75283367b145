"""Every error that Rolltape raises on purpose.

    RolltapeError
    ├── RecordError            what a caller wants to record is not a valid record
    │   ├── MisalignedError    per-token arrays of one record differ in length
    │   ├── NotJsonError       a message, tool or task cannot be JSON
    │   └── ClosedError        the rollout, session or tape has ended already
    ├── TapeError              a run directory cannot be read or written
    │   ├── RunNotFound        there is no run at that path
    │   ├── NewerTapeError     written by a newer major version of the program
    │   ├── DamagedTapeError   bytes on the tape are not what was written
    │   ├── TapeWriteError     a write failed (disk full, no permission); nothing of it was kept
    │   └── NoSuchRollout      the run holds no such rollout, session or turn
    ├── LedgerError            a sampled token is unaccounted for, or trained twice
    ├── PolicyError            a policy, or an option of one, does not exist or contradicts itself
    ├── SupplyError            groups cannot be given to a trainer as it asks for them
    ├── ExportError            records cannot be written in the format asked for, or a query is wrong
    ├── SinkError              a tracker cannot be opened, or did not keep what it was given
    ├── EngineError            an inference engine cannot do what it was asked
    │   ├── CheckpointError    a folder holds no model that the engine can run
    │   ├── PromptError        a prompt is empty, too long, or not made of the model's ids
    │   ├── SamplingError      sampling parameters are out of range or cannot be honoured
    │   ├── EngineStopped      the engine was closed, or its thread failed, before the reply ended
    │   ├── EngineUnreachable  the engine does not answer; nothing of the request was begun
    │   ├── EngineFault        the engine answered with an error, or with what cannot be its answer
    │   └── EngineDied         the connection ended in the middle of a reply
    ├── TaskError              tasks cannot be taken; nothing of them has run
    │   ├── SourceError        the source itself: missing, unreadable, empty, or without that split
    │   ├── BadTasks           some of its entries are no tasks, or lack what their environment needs
    │   └── NoSuchFunction     "python:module:function" leads to nothing that can be called
    ├── CollectError           a collection cannot begin, or go on, as it is asked for
    ├── FilterError            a rule cannot judge a rollout; nothing was filtered
    ├── ViewError              runs cannot be shown as asked for
    │   └── NoAnswer           the page asks for what is not there, or cannot be; it has the status to answer with
    ├── AgentError             there is no such agent, or its program is not to be found
    └── CaptureError           a request to the gateway cannot be served; it has the status to answer with
        ├── BadRequest         the request is malformed, or asks what cannot be honoured
        ├── NotAllowed         no key, or one that opens nothing here
        ├── NoSuchSession      there is no session of that id
        ├── SessionEnded       the session takes no more turns; retrying is of no use
        ├── TurnCapReached     the session has had as many turns as it may
        └── EngineFailed       no engine could give the reply; it may be asked for again

A message says where, the two facts that disagree, and what to do next.
"""


class RolltapeError(Exception):
    """The root: catch it to catch everything that Rolltape raises on purpose."""


class RecordError(RolltapeError):
    """What a caller wants to record is not a valid record; nothing of it was recorded."""


class MisalignedError(RecordError):
    """Per-token arrays of one record differ in length."""


class NotJsonError(RecordError):
    """A message, tool list, task or setting cannot be written as JSON."""


class ClosedError(RecordError):
    """The rollout, session or tape that is written to has ended already."""


class TapeError(RolltapeError):
    """A run directory cannot be read or written."""


class RunNotFound(TapeError):
    """There is no run at the path or URL given."""


class NewerTapeError(TapeError):
    """The tape was written by a newer major version of the program."""


class DamagedTapeError(TapeError):
    """Bytes on the tape are not those that were written."""


class TapeWriteError(TapeError):
    """A write to the tape failed; what was recorded before is untouched."""


class NoSuchRollout(TapeError):
    """The run holds no rollout, session or turn of that id."""


class LedgerError(RolltapeError):
    """A sampled token is unaccounted for, or trains more than once."""


class PolicyError(RolltapeError):
    """A policy, or an option of one, does not exist or contradicts itself."""


class SupplyError(RolltapeError):
    """Groups cannot be given to a trainer as it asks for them."""


class ExportError(RolltapeError):
    """Records cannot be written in the format asked for, or a query is wrong."""


class SinkError(RolltapeError):
    """A tracker cannot be opened, or did not keep all that it was given."""


class EngineError(RolltapeError):
    """An inference engine cannot do what it was asked."""


class CheckpointError(EngineError):
    """A folder holds no model that the engine can run, or its files are damaged."""


class PromptError(EngineError):
    """A prompt is empty, longer than the context, or holds ids that the model does not have."""


class SamplingError(EngineError):
    """Sampling parameters are out of range, or the engine cannot honour them."""


class EngineStopped(EngineError):
    """The engine was closed, or its thread failed, before the reply ended."""


class EngineUnreachable(EngineError):
    """The engine does not answer; nothing of the request was begun."""


class EngineFault(EngineError):
    """The engine answered with an error, or with something that cannot be its answer."""


class EngineDied(EngineError):
    """The connection ended in the middle of a reply; `partial` is what had been received of it, or None."""

    def __init__(self, message: str, partial: object = None) -> None:
        super().__init__(message)
        self.partial = partial


class TaskError(RolltapeError):
    """Tasks cannot be taken from a source; nothing of them has run."""


class SourceError(TaskError):
    """A source of tasks is missing, unreadable or empty, or lacks the split that was asked for."""


class BadTasks(TaskError):
    """Entries of a source cannot be used; `problems` says where and why, `count` is how many there are in all."""

    def __init__(self, message: str, problems: tuple[str, ...], count: int) -> None:
        super().__init__(message)
        self.problems = problems
        self.count = count


class NoSuchFunction(TaskError):
    """What "python:module:function" names cannot be imported, or cannot be called."""


class AgentError(RolltapeError):
    """There is no agent of that name, or the program that it runs is not to be found."""


class CollectError(RolltapeError):
    """A collection cannot begin, or go on, as it is asked for."""


class FilterError(RolltapeError):
    """A rule cannot judge a rollout: its function raised, or gave what is no verdict. Nothing was filtered."""


class ViewError(RolltapeError):
    """Runs cannot be shown as asked for."""


class NoAnswer(ViewError):
    """The page asks for what is not there, or cannot be. `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class CaptureError(RolltapeError):
    """A request to the gateway cannot be served. `status` is HTTP's; `final` means that a retry is of no use."""

    status = 500
    final = True


class BadRequest(CaptureError):
    """The request is malformed, or asks for what cannot be honoured."""

    status = 400


class NotAllowed(CaptureError):
    """No key was given, or one that opens nothing here."""

    status = 401


class NoSuchSession(CaptureError):
    """There is no session of that id."""

    status = 404


class SessionEnded(CaptureError):
    """The session takes no more turns."""

    status = 503


class TurnCapReached(CaptureError):
    """The session has had as many turns as it may."""

    status = 429


class EngineFailed(CaptureError):
    """No engine could give the reply; it may be asked for again."""

    status = 502
    final = False
