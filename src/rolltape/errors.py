"""Every error that Rolltape raises on purpose, one family for each boundary of the program.

    RolltapeError
    ├── RecordError            recording: the data is not a valid record; nothing was recorded
    │   ├── MisalignedError    per-token arrays of one record differ in length
    │   ├── NotJsonError       a message, tool, or task cannot be written as JSON
    │   └── ClosedError        the rollout, session, or tape has already ended
    │       └── TakenOverError another process took the rollout over
    ├── TapeError              the run on disk: it cannot be read or written
    │   ├── RunNotFound        there is no run at that path or URL
    │   ├── NewerTapeError     a newer major version of the program wrote it
    │   ├── DamagedTapeError   the stored bytes are not those that were written
    │   ├── TapeWriteError     a write failed (disk full, no permission)
    │   └── NoSuchRollout      the run has no such rollout, session, turn, or note
    │       └── AmbiguousId    several rollouts of the run match an id
    ├── PolicyError            samples: a cut policy or an option of one is unknown or contradicts itself
    ├── LedgerError            samples: a token is unaccounted for, or trains twice; please report it
    ├── GroupsError            groups: they cannot be given to a trainer as asked
    ├── ExportError            files: records cannot be written in that format, or a query is wrong
    ├── ImportFileError        files: a file of another program cannot be imported
    ├── SinkError              trackers: one cannot be opened, or did not store everything
    ├── EngineError            inference engines
    │   ├── CheckpointError    a folder has no model that the engine can run
    │   ├── PromptError        a prompt is empty, too long, or has ids outside the vocabulary
    │   ├── SamplingError      sampling parameters are out of range or not supported
    │   ├── EngineStopped      the engine was closed before the reply ended
    │   ├── EngineUnreachable  the engine does not answer; the request did not start
    │   ├── EngineFault        the engine answered with an error or an impossible reply
    │   └── EngineDied         the connection ended in the middle of a reply
    ├── GatewayError           agents' requests: one cannot be served; it carries the HTTP status to answer with
    │   ├── BadRequest         the request is malformed or asks for something unsupported
    │   │   ├── PromptTooLong  the prompt is far longer than the context; it was not even tokenized
    │   │   ├── ReplyNotFound  it names a reply that its session does not have; send the whole conversation
    │   │   └── ThreadUnsupported  it cannot be part of a thread; send the whole conversation
    │   ├── EncodingUnsupported  the request's body is compressed in a way that the gateway cannot read
    │   ├── BodyTimeout        the request's body did not arrive in time
    │   ├── NotAllowed         the key is missing or gives no access
    │   ├── NoSuchSession      there is no session with that id
    │   ├── SessionEnded       the session takes no more turns; do not retry
    │   ├── TurnCapReached     the session has used all its turns
    │   └── EngineFailed       no engine could give the reply; retry
    │       └── RequestRefused a hosted endpoint refuses what the agent asks for; do not retry
    ├── TaskError              task sources: the tasks cannot be used; none has run
    │   ├── SourceError        the source is missing, unreadable, or empty, or lacks the split
    │   ├── BadTasks           some entries are not valid tasks
    │   └── NoSuchFunction     "python:module:function" cannot be imported or called
    ├── AgentError             agents: the name is unknown, or the program is missing
    ├── CollectError           collection: it cannot start or continue as asked
    │   ├── ToolServerError    a tool server cannot be started, has ended, or breaks its protocol
    │   └── UserCodeTimeout    a function of an environment, a checker or a judge has not returned in time
    ├── FilterError            filters: a rule cannot judge a rollout; nothing was filtered
    ├── ViewError              the web page: runs cannot be shown as asked
    │   └── NoAnswer           a request of the page cannot be answered; it carries the HTTP status
    ├── MissingExtra           a package of an extra is not installed
    │   ├── MissingFormat      the package writes a format; an ExportError, too
    │   └── MissingTracker     the package opens a tracker; a SinkError, too
    └── UsageError             the command line: a flag or an argument is wrong

A message states the place, the two facts that disagree, and what to do next:

    turn 01J8…: 412 sampled ids but 411 logprobs; ask the engine for logprobs on every token
"""

from rolltape.renamed import renamed


class RolltapeError(Exception):
    """The root of all errors: catch it to catch everything that Rolltape raises on purpose.

    Example:

        try:
            run = rolltape.read("runs/exp1")
        except rolltape.RolltapeError as error:
            print(error)
    """


class RecordError(RolltapeError):
    """The data is not a valid record. Nothing was recorded."""


class MisalignedError(RecordError):
    """Per-token arrays of one record differ in length."""


class NotJsonError(RecordError):
    """A message, tool list, task, or setting cannot be written as JSON."""


class ClosedError(RecordError):
    """The rollout, session, or tape has already ended."""


class TakenOverError(ClosedError):
    """Another process took the rollout over. This process can no longer record it."""


class TapeError(RolltapeError):
    """A run cannot be read or written."""


class RunNotFound(TapeError):
    """There is no run at that path or URL."""


class NewerTapeError(TapeError):
    """A newer major version of the program wrote the tape."""


class DamagedTapeError(TapeError):
    """The stored bytes are not those that were written."""


class TapeWriteError(TapeError):
    """A write to the tape failed. What was recorded before is untouched."""


class NoSuchRollout(TapeError):
    """The run has no rollout, session, turn, or note with that id."""


class AmbiguousId(NoSuchRollout):
    """Several rollouts of the run match the id, as a prefix or as a foreign id."""


class PolicyError(RolltapeError):
    """A cut policy, or an option of one, is unknown or contradicts itself."""


class LedgerError(RolltapeError):
    """A sampled token is unaccounted for, or trains more than once."""


class GroupsError(RolltapeError):
    """Groups cannot be given to a trainer as asked."""


class ExportError(RolltapeError):
    """Records cannot be written in that format, or a query is wrong."""


class ImportFileError(RolltapeError):
    """A file of another program cannot be imported."""


class SinkError(RolltapeError):
    """A tracker cannot be opened, or did not store everything."""


class EngineError(RolltapeError):
    """An inference engine cannot do what was asked."""


class CheckpointError(EngineError):
    """A folder has no model that the engine can run, or its files are damaged."""


class PromptError(EngineError):
    """A prompt is empty, longer than the context, or has ids outside the vocabulary."""


class SamplingError(EngineError):
    """Sampling parameters are out of range or not supported."""


class EngineStopped(EngineError):
    """The engine was closed, or its thread failed, before the reply ended."""


class EngineUnreachable(EngineError):
    """The engine does not answer. The request did not start."""


class EngineFault(EngineError):
    """The engine answered with an error or an impossible reply. `status` is the HTTP status, or None.

    `reason` is the message of the engine's error, without addresses and keys, and `code` its code, if it has one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.code = code


class EngineDied(EngineError):
    """The connection ended in the middle of a reply. `partial` is what arrived before, or None."""

    def __init__(self, message: str, partial: object = None) -> None:
        super().__init__(message)
        self.partial = partial


class GatewayError(RolltapeError):
    """A request to the gateway cannot be served. `status` is the HTTP status; if `final`, a retry cannot help."""

    status = 500
    final = True
    code: str | None = None  # the error code of OpenAI's API; None: it has none for this error
    retry_after_s: float | None = None  # None: unknown


class BadRequest(GatewayError):
    """The request is malformed or asks for something unsupported."""

    status = 400


class PromptTooLong(BadRequest):
    """The prompt is far longer than the context. It was not even tokenized."""

    code = "context_length_exceeded"


class ReplyNotFound(BadRequest):
    """The request goes on from a reply that its session does not have."""

    code = "previous_response_not_found"


class ThreadUnsupported(BadRequest):
    """The request cannot be part of a thread; Anthropic's word for that is the code."""

    code = "thread_unsupported_request"


class EncodingUnsupported(GatewayError):
    """The request's body is compressed in a way that the gateway cannot read."""

    status = 415


class BodyTimeout(GatewayError):
    """The request's body did not arrive in time."""

    status = 408
    final = False


class NotAllowed(GatewayError):
    """The key is missing or gives no access."""

    status = 401


class NoSuchSession(GatewayError):
    """There is no session with that id."""

    status = 404


class SessionEnded(GatewayError):
    """The session takes no more turns."""

    status = 503


class TurnCapReached(GatewayError):
    """The session has used all its turns."""

    status = 429


class EngineFailed(GatewayError):
    """No engine could give the reply. A retry may help, unless it is `final`. The agent gets `agent_message`."""

    status = 502
    final = False

    def __init__(
        self,
        message: str,
        *,
        agent_message: str = "no engine gave a reply; ask again, or see the gateway's log",
        status: int = 502,
        final: bool = False,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.agent_message = agent_message
        self.status = status
        self.final = final
        self.code = code
        self.retry_after_s = retry_after_s


class RequestRefused(EngineFailed):
    """A hosted endpoint refuses what the agent sent. The reply to the agent states why."""


class TaskError(RolltapeError):
    """Tasks of a source cannot be used. None has run."""


class SourceError(TaskError):
    """A source of tasks is missing, unreadable, or empty, or lacks the split."""


class BadTasks(TaskError):
    """Entries of a source are not valid tasks. `problems` has place and reason of some; `count` is the total."""

    def __init__(self, message: str, problems: tuple[str, ...], count: int) -> None:
        super().__init__(message)
        self.problems = problems
        self.count = count


class NoSuchFunction(TaskError):
    """A function named as "python:module:function" cannot be imported or called."""


class AgentError(RolltapeError):
    """The agent's name is unknown, or its program is missing."""


class CollectError(RolltapeError):
    """A collection cannot start or continue as asked."""


class ToolServerError(CollectError):
    """A tool server cannot be started, has ended, or breaks its protocol. The attempt has failed."""


class UserCodeTimeout(CollectError):
    """A function of an environment, a checker, or a judge has not returned in time."""


class FilterError(RolltapeError):
    """A rule cannot judge a rollout: its function raised, or returned something else. Nothing was filtered."""


class ViewError(RolltapeError):
    """Runs cannot be shown as asked."""


class NoAnswer(ViewError):
    """A request of the web page cannot be answered. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MissingExtra(RolltapeError):
    """A package of an extra is not installed. The message names both."""


class MissingFormat(MissingExtra, ExportError):
    """The package that writes a format is not installed."""


class MissingTracker(MissingExtra, SinkError):
    """The package of a tracker is not installed."""


class UsageError(RolltapeError):
    """A flag or an argument of a command is wrong. The message names it."""


__getattr__ = renamed(__name__, {"SupplyError": "GroupsError", "CaptureError": "GatewayError"})
