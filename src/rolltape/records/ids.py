"""Deterministic ids: equal inputs give equal ids, any one of them changed changes the id."""

from hashlib import blake2b

from rolltape.errors import RecordError
from rolltape.records.jsonable import canonical_json


def rollout_id(
    run: str,
    *,
    source: str | None,
    task_id: str | None,
    task: object,
    step: int,
    attempt: int,
    model: str | None,
    agent: str | None,
) -> str:
    """The id of one attempt at one task at one step of one run."""
    return _hashed("rollout", run, source, task_key(task_id, task), str(step), str(attempt), model, agent)


def group_id(
    run: str, *, source: str | None, task_id: str | None, task: object, step: int, model: str | None, agent: str | None
) -> str:
    """The id that all attempts at one task at one step share."""
    return _hashed("group", run, source, task_key(task_id, task), str(step), model, agent)


def session_id(rollout: str, try_index: int, ordinal: int) -> str:
    """The id of a rollout's session, by its place in the rollout."""
    return f"{rollout}.{try_index}.{ordinal}"


def turn_id(session: str, sequence: int) -> str:
    """The id of a session's turn, by its place in the session."""
    return f"{session}.{sequence}"


def sample_id(turn: str, policy_key: str) -> str:
    """The id of a sample: the last turn in it, under the policy that cut it there."""
    return f"{turn}@{policy_key}"


def digest_of(*fields: bytes | str | None) -> bytes:
    """A hash over length-delimited fields, so that no field's content can be taken for a boundary."""
    hasher = blake2b(digest_size=16)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field
        hasher.update(b"-" if data is None else b"%d:" % len(data) + data)
    return hasher.digest()


def task_key(task_id: str | None, task: object) -> bytes:
    """What tells one task of a source from another: its id, else its canonical content."""
    if task_id is not None:
        return b"id:" + task_id.encode("utf-8", "surrogatepass")
    if task is None:
        raise RecordError("a rollout needs a task: give task_id, or task with the content that identifies it")
    return b"content:" + canonical_json(task)


def _hashed(*fields: bytes | str | None) -> str:
    return digest_of(*fields).hex()
