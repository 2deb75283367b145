"""Records → rows: flat dicts in which free-form JSON is `Raw` and per-token columns are numpy arrays."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from rolltape.errors import ExportError
from rolltape.records.jsonable import encode_numbers
from rolltape.records.messages import Message, MessageChain
from rolltape.records.openfields import encode_record
from rolltape.records.rollout import Event, Outcome, Rollout, RolloutHead
from rolltape.records.sample import Sample, SampleSide
from rolltape.records.tokens import TokenChain
from rolltape.records.trace import Trace
from rolltape.records.turn import Logprobs, SideArray, Turn

Row = dict[str, Any]


def sample_row(sample: Sample) -> Row:
    """A sample's row."""
    return {
        "sample": sample.id,
        "rollout": sample.rollout,
        "try_index": sample.try_index,
        "group": sample.group,
        "session": sample.session,
        "policy": sample.policy,
        "step": sample.step,
        "index": sample.index,
        "siblings": sample.siblings,
        "prompt_tokens": sample.prompt_tokens,
        "trained_tokens": sample.trained_tokens,
        "reward": sample.reward,
        "rollout_reward": sample.rollout_reward,
        "advantage": sample.advantage,
        "loss_weight": sample.loss_weight,
        "turn_rewards": sample.turn_rewards,
        "truncated": sample.truncated,
        "uses_tools": sample.uses_tools,
        "ill_formed": sample.ill_formed,
        "ids": sample.ids,
        "trained_mask": sample.trained_mask,
        "sampled_mask": sample.sampled_mask,
        "logprobs": sample.logprobs,
        "logprob_dtype": _dtype(sample.logprobs),
        "logprob_kind": sample.logprob_kind,
        "version_index": sample.version_index,
        "versions": [{"first": first, "last": last} for first, last in sample.versions],
        "spans": [
            {
                "start": span.start,
                "stop": span.stop,
                "origin": span.origin,
                "turn": span.turn,
                "turn_start": span.turn_start,
                "first_message": span.messages[0],
                "end_message": span.messages[1],
                "fate": span.fate,
                "temperature": span.temperature,
                "logprob_kind": span.logprob_kind,
            }
            for span in sample.spans
        ],
        "side": [_sample_side(name, side, sample.id) for name, side in sample.side.items()],
    }


def summary_row(head: RolloutHead, outcome: Outcome, *, sessions: int, turns: int, sampled_tokens: int) -> Row:
    """What a list of rollouts needs: identity, outcome and counts."""
    where = f"rollout {head.id}"
    return {
        "rollout": head.id,
        "try_index": head.try_index,
        "group": head.group,
        "run": head.run,
        "step": head.step,
        "attempt": head.attempt,
        "source": head.source,
        "task_id": head.task_id,
        "task": None if head.task is None else Raw(encode_numbers(head.task, where)),
        "model": head.model,
        "agent": head.agent,
        "launch_tags": list(head.tags),
        "extra": Raw(encode_numbers(head.extra, where)),
        "started_at_ns": head.started_at_ns,
        "status": outcome.status,
        "stop_reason": outcome.stop_reason,
        "reason": outcome.reason,
        "reward": outcome.reward,
        "reward_terms": outcome.reward_terms,
        "rewarded_by": outcome.rewarded_by,
        "filtered": outcome.filtered,
        "tags": list(outcome.tags),
        "sessions": sessions,
        "turns": turns,
        "sampled_tokens": sampled_tokens,
        "unknown": Raw(encode_numbers(head.unknown, where)),
    }


def rollout_row(rollout: Rollout) -> Row:
    """A rollout's row: its summary, its sessions' heads and its events; turns are rows of their own."""
    turns = rollout.turns
    summary = summary_row(
        rollout.head,
        rollout.outcome,
        sessions=len(rollout.sessions),
        turns=len(turns),
        sampled_tokens=sum(len(turn.sampled_ids) for turn in turns),
    )
    heads = [
        {"session": session.id, "head": Raw(encode_record(session.head, f"session {session.id}"))}
        for session in rollout.sessions
    ]
    return {**summary, "session_heads": heads, "events": [_event(event) for event in rollout.events]}


def turn_rows(rollout: Rollout, *, whole_prompts: bool = False) -> Iterator[Row]:
    """A row per turn, holding only what is new after an earlier turn unless whole prompts are asked for."""
    for session in rollout.sessions:
        held = _Held()
        for turn in session.turns:
            yield {**_turn_facts(rollout, turn), **(_whole(turn) if whole_prompts else held.what_is_new(turn))}
            held.add(turn)


def message_rows(rollout: Rollout) -> Iterator[Row]:
    """A row per message, once, at the first turn that holds it in that place; replies among them."""
    for session in rollout.sessions:
        held = _Held()
        for turn in session.turns:
            for index, message in enumerate(*held.new_messages(turn.prompt)):
                yield _message(rollout, turn, index, message, sampled=False)
            if turn.reply is not None:
                yield _message(rollout, turn, len(turn.prompt), turn.reply, sampled=True)
            held.add(turn)


def trace_row(trace: Trace, *, whole_prompts: bool = False) -> Row:
    """A trace's row, absent fields left out; all of it is free-form JSON."""
    where = f"the trace of rollout {trace.rollout}"
    return {
        name: Raw(encode_numbers(value, where)) for name, value in trace.to_dict(whole_prompts=whole_prompts).items()
    }


class _Held:
    """The chains of a session's turns so far, to name the turn that a later chain continues."""

    def __init__(self) -> None:
        self._turns: dict[int, str] = {}
        self._alive: list[object] = []  # an id() names an object only as long as it lives
        self._root: bytes | None = None

    def add(self, turn: Turn) -> None:
        for link in (turn.prompt_tokens, turn.tokens, turn.prompt, turn.messages):
            self._turns.setdefault(id(link), turn.id)
            self._alive.append(link)
        self._root = turn.root.raw

    def tokens(self, chain: TokenChain) -> tuple[str | None, int]:
        name = self._turns.get(id(chain.parent))
        return (name, chain.keep) if name else (None, 0)

    def messages(self, chain: MessageChain) -> tuple[str | None, int]:
        name = self._turns.get(id(chain.parent))
        return (name, chain.keep) if name else (None, 0)

    def new_messages(self, chain: MessageChain) -> tuple[Sequence[Message], int]:
        """The messages of a chain that no turn so far holds in their places, and the place of the first."""
        name, kept = self.messages(chain)
        return (chain.own, kept) if name else (chain.to_list(), 0)

    def what_is_new(self, turn: Turn) -> Row:
        messages_from, _ = self.messages(turn.prompt)
        messages, kept_messages = self.new_messages(turn.prompt)
        tokens_from, kept_tokens = self.tokens(turn.prompt_tokens)
        return {
            "root": Raw(turn.root.raw) if turn.root.raw != self._root else None,
            "messages_from": messages_from,
            "kept_messages": kept_messages,
            "new_messages": [Raw(message.raw) for message in messages],
            "tokens_from": tokens_from,
            "kept_tokens": kept_tokens,
            "new_prompt_ids": turn.prompt_tokens.slice(kept_tokens),
        }


def _whole(turn: Turn) -> Row:
    return {
        "root": Raw(turn.root.raw),
        "messages_from": None,
        "kept_messages": 0,
        "new_messages": [Raw(message.raw) for message in turn.prompt.to_list()],
        "tokens_from": None,
        "kept_tokens": 0,
        "new_prompt_ids": turn.prompt_ids,
    }


def _turn_facts(rollout: Rollout, turn: Turn) -> Row:
    facts, where = turn.facts, f"turn {turn.id}"
    return {
        "turn": turn.id,
        "rollout": rollout.id,
        "try_index": rollout.head.try_index,
        "session": turn.session,
        "sequence": turn.sequence,
        "prompt_messages": len(turn.prompt),
        "prompt_tokens": len(turn.prompt_tokens),
        "sampled_tokens": len(turn.sampled_ids),
        "finish": facts.finish,
        "delivery": facts.delivery,
        "auxiliary": facts.auxiliary,
        "flags": list(facts.flags),
        "reward": facts.reward,
        "error": facts.error,
        "model": facts.model,
        "renderer": facts.renderer,
        "fingerprint": facts.fingerprint,
        "started_at": facts.started_at,
        "ended_at": facts.ended_at,
        "sampling": Raw(encode_numbers(facts.sampling, where)),
        "sampling_asked": None if facts.sampling_asked is None else Raw(encode_numbers(facts.sampling_asked, where)),
        "reply": None if turn.reply is None else Raw(turn.reply.raw),
        "message_starts": None if facts.message_starts is None else np.array(facts.message_starts, np.int32),
        "sampled_ids": turn.sampled_ids,
        "logprobs": turn.logprobs,
        "logprob_dtype": None if turn.logprobs is None else _dtype(turn.logprobs),
        "logprob_kind": facts.logprob_kind,
        "segments": [msgspec.structs.asdict(segment) for segment in facts.segments],
        "side": [_turn_side(name, side, where) for name, side in turn.side.items()],
        "extra": Raw(encode_numbers(facts.extra, where)),
        "unknown": Raw(encode_numbers(facts.unknown, where)),
    }


def _message(rollout: Rollout, turn: Turn, index: int, message: Message, *, sampled: bool) -> Row:
    calls = message.to_dict().get("tool_calls")
    return {
        "turn": turn.id,
        "rollout": rollout.id,
        "try_index": rollout.head.try_index,
        "session": turn.session,
        "index": index,
        "sampled": sampled,
        "role": message.role,
        "text": message.text,
        "reasoning": message.reasoning,
        "tool_calls": len(calls) if isinstance(calls, list) else 0,
        "message": Raw(message.raw),
    }


def _event(event: Event) -> Row:
    where = f"event {event.writer}/{event.sequence}"
    return {**msgspec.structs.asdict(event), "data": Raw(encode_numbers(event.data, where))}


def _sample_side(name: str, side: SampleSide, where: str) -> Mapping[str, Any]:
    missing = [{"start": start, "stop": stop} for start, stop in side.missing]
    return {**_array(name, side.values, where), "counts": side.counts, "missing": missing}


def _turn_side(name: str, side: SideArray, where: str) -> Mapping[str, Any]:
    return {**_array(name, side.values, where), "counts": side.counts, "start": side.start}


def _array(name: str, values: npt.NDArray[Any], where: str) -> dict[str, Any]:
    if values.dtype.itemsize > 8:
        raise ExportError(f"{where}: side array {name!r} has dtype {values.dtype}, which other machines cannot read")
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return {"name": name, "dtype": values.dtype.name, "shape": list(values.shape), "data": little.tobytes()}


def _dtype(logprobs: Logprobs) -> str:
    return str(logprobs.dtype.name)
