"""The options of an import, and a source's rollouts in the form that is recorded."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

from rolltape.errors import ImportFileError
from rolltape.records.rollout import StopReason


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that apply to all rollouts of an import. A field that is None comes from the source, or is unknown."""

    source: str | None = None  # where the tasks come from
    split: str | None = None
    step: int | None = None
    model: str | None = None
    tokenizer: str | None = None  # a folder or name with the text of the ids
    traces: str | None = None  # prime-rl: the verifiers traces that its token exports belong to

    def origin(
        self, *, source: str | None = None, split: str | None = None, step: int | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """Where a rollout comes from, for `ImportedRollout`: the user's option, or else the value of its entry."""
        own_step = step if self.step is None else self.step
        return {
            "source": self.source or source,
            "split": self.split or split,
            "step": 0 if own_step is None else own_step,
            "model": self.model or model,
        }


class ImportedSession(msgspec.Struct, kw_only=True):
    """One session: its turns in order, each as the arguments of `record_turn`.

    A turn with `new_messages` or `new_prompt_ids` continues the one before it.
    """

    turns: list[dict[str, Any]]
    tools: list[Any] | None = None
    tokenizer: str | None = None
    extra: dict[str, Any] = {}
    settings: dict[str, Any] = {}  # further arguments of the recorder's `session`


class ImportedRollout(msgspec.Struct, kw_only=True):
    """One rollout as its source has it. Data that the source does not contain is left out, and named in `absent`."""

    where: str  # its place in the source, for messages: "line 12"
    sessions: list[ImportedSession]
    key: str | None = None  # an id that is unique among all files of this kind; None: its content identifies it
    foreign_ids: tuple[str, ...] = ()
    task_id: str | None = None
    task: Any = None
    source: str | None = None
    split: str | None = None
    step: int = 0
    attempt: int | None = None  # None: the next free number in its group
    model: str | None = None
    agent: str | None = None
    tags: tuple[str, ...] = ()
    extra: dict[str, Any] = {}
    reward: float | None = None
    reward_terms: dict[str, float] = {}
    stop_reason: StopReason = StopReason.COMPLETED
    reason: str | None = None
    failed: str | None = None  # why it failed because of the infrastructure; None: it finished
    filtered: str | None = None  # why it is kept out of training
    absent: tuple[str, ...] = ()  # such as "token ids", "logprobs", "weight versions"


def restored(made: ImportedRollout, own: Mapping[str, Any], options: ImportOptions) -> ImportedRollout:
    """A rollout that Rolltape exported, with its identity and outcome from the fields that it wrote for itself."""
    return msgspec.structs.replace(
        made,
        foreign_ids=(own["rollout"], *own.get("foreign_ids", ())),
        task_id=own.get("task_id"),
        task=own.get("task"),
        **options.origin(source=own.get("source"), step=own["step"], model=own.get("model")),
        attempt=own.get("attempt", made.attempt),
        agent=own.get("agent"),
        tags=tuple(own.get("tags") or ()),
        reward=own.get("reward"),
        reward_terms=own.get("reward_terms") or {},
        stop_reason=StopReason(own.get("stop_reason") or StopReason.COMPLETED),
        reason=own.get("reason"),
        filtered=own.get("filtered"),
    )


def function_call(call_id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of a chat message. Arguments that are no text are written as JSON, and none as an empty object."""
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


class BrokenEntry(NamedTuple):
    """An entry of the source that cannot be read, and why."""

    where: str
    problem: str


Found = Iterator[ImportedRollout | BrokenEntry]
T = TypeVar("T")


def or_broken(where: str, make: Callable[[], T]) -> T | BrokenEntry:
    """What `make` returns for an entry, or the entry's problem: an entry may have any value in any place."""
    try:
        return make()
    except ImportFileError as error:
        return BrokenEntry(where, str(error).removeprefix(f"{where}: "))
    except KeyError as error:
        return BrokenEntry(where, f"it lacks {error}")
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        return BrokenEntry(where, f"a value in it is not of the expected kind: {error}")


def each_rollout(
    entries: Iterable[tuple[str, dict[str, Any]] | BrokenEntry], make: Callable[[dict[str, Any], str], ImportedRollout]
) -> Found:
    """The rollout that `make` returns for each entry and its place, or the entry's problem."""
    for entry in entries:
        if isinstance(entry, BrokenEntry):
            yield entry
        else:
            where, row = entry
            yield or_broken(where, partial(make, row, where))


def conversation_turns(
    messages: Sequence[Mapping[str, Any]], where: str, *, may_be_empty: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Turns of a conversation that has only messages, and the messages after them, for the rollout's `extra`.

    Each assistant message is the reply of a turn. Its tokens are not known, so it does not train.
    """
    turns: list[dict[str, Any]] = []
    since: list[Any] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ImportFileError(f"{where}: message {number} is not an object with a role")
        if message["role"] != "assistant":
            since.append(message)
            continue
        prompt = {"new_messages" if turns else "prompt_messages": since}
        turns.append({**prompt, "reply": message, "finish": "stop", "token_faithful": False})
        since = []
    if not turns and not may_be_empty:
        raise ImportFileError(f"{where}: it has no message of the assistant, so it has no turn")
    return turns, {"messages_after_the_last_reply": since} if since else {}


def token_turns(
    ids: Sequence[int],
    sampled: Sequence[int],
    *,
    where: str,
    logprobs: Sequence[float | None] | None = None,
    finish: str = "stop",
    prompt_messages: Iterable[Any] = (),
    reply: Mapping[str, Any] | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Turns of a sequence of ids: one for each run of ids that `sampled` marks as sampled.

    `sampled` and `logprobs` cover the last ids of the sequence. All turns except the last ended by "stop", since more
    followed. A reply's message is known only if the sequence has one reply.
    """
    if len(sampled) > len(ids):
        raise ImportFileError(f"{where}: {len(ids)} ids but a mask of {len(sampled)}")
    if logprobs is not None and len(logprobs) != len(sampled):
        raise ImportFileError(f"{where}: a mask of {len(sampled)} but {len(logprobs)} logprobs")
    spans = _spans(sampled)
    offset = len(ids) - len(sampled)
    turns: list[dict[str, Any]] = []
    held = 0
    for start, stop in spans:
        new = list(ids[held : offset + start])
        prompt = {"new_prompt_ids": new} if turns else {"prompt_messages": list(prompt_messages), "prompt_ids": new}
        known = None if logprobs is None else list(logprobs[start:stop])
        turns.append(
            {
                **prompt,
                "sampled_ids": list(ids[offset + start : offset + stop]),
                "logprobs": [None] * (stop - start) if known is None else known,
                "finish": "stop",
                **fields,
            }
        )
        held = offset + stop
    if not turns:
        raise ImportFileError(f"{where}: none of its {len(ids)} ids is marked as sampled, so it has no turn")
    if held == len(ids):
        turns[-1]["finish"] = finish
    if reply is not None and len(turns) == 1:
        turns[0]["reply"] = reply
    return turns


def _spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    edges = [at for at in range(1, len(mask)) if bool(mask[at]) != bool(mask[at - 1])]
    bounds = [0, *edges, len(mask)]
    return [(start, stop) for start, stop in pairwise(bounds) if stop > start and mask[start]]
